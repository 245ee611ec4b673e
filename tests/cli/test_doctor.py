"""``doctor`` tells what runs and what is wrong, and survives every kind of broken module."""

import base64
import hashlib
import json

import pytest
import torch

from mindspeed_kda.cli import doctor, environment
from mindspeed_kda.cli.main import main
from mindspeed_kda.registry import REGISTRY, Backend


@pytest.fixture
def no_imports(monkeypatch):
    """Leaves the modules of this environment out: importing each in a process of its own takes seconds."""
    monkeypatch.setattr(doctor, "MODULES", ())


def fake_distribution(folder, name, version, files=()):
    """Installs a distribution's metadata: what pip would have written."""
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    lines = []
    for path, content in files:
        digest = base64.urlsafe_b64encode(hashlib.sha256(content.encode()).digest()).rstrip(b"=").decode()
        lines.append(f"{path},sha256={digest},{len(content)}")
    (info / "RECORD").write_text("\n".join(lines) + "\n")


def whats(modules=None):
    return [f.what for f in environment.findings(modules or {})]


def test_lists_every_backend_of_every_op(no_imports, capsys):
    assert main(["doctor", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    listed = {(r["op"], r["backend"]) for r in report["backends"]}
    assert listed == {(op, name) for op in REGISTRY.ops() for name in REGISTRY.of(op)}
    assert all(r["runs"] or r["reason"] for r in report["backends"])
    assert report["versions"]["torch"] == torch.__version__


def test_run_checks_the_result(no_imports, capsys):
    assert main(["doctor", "--run"]) == 0
    assert "yes, checked against float64" in capsys.readouterr().out


def test_run_finds_a_wrong_backend(no_imports, capsys):
    op = "chunk_kda_bwd_wy_dqkg_fused"
    right = REGISTRY.of(op)["torch"].load()

    def wrong(call):
        out = right(call)
        return out._replace(db=out.db * 1.01)

    REGISTRY.register(Backend(op, "wrong", supports=lambda call: None, load=lambda: wrong))
    try:
        assert main(["doctor", "--run"]) == 1
    finally:
        REGISTRY.unregister(op, "wrong")
    assert "WRONG: db: RMS ratio 1.00e-02" in capsys.readouterr().out


@pytest.mark.parametrize("error", [ImportError, OSError, RuntimeError])
@pytest.mark.parametrize("where", ["available", "supports", "load"])
def test_survives_a_backend_that_raises(no_imports, capsys, error, where):
    def fail(*args):
        raise error("libascendcl.so: cannot open shared object file")

    parts = {"supports": lambda call: None, "load": lambda: None, "available": lambda: None, where: fail}
    REGISTRY.register(Backend("chunk_kda_bwd_wy_dqkg_fused", "broken", **parts))
    try:
        assert main(["doctor"]) == 0
    finally:
        REGISTRY.unregister("chunk_kda_bwd_wy_dqkg_fused", "broken")
    assert f"no: {error.__name__}: libascendcl.so" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("raise ImportError('libhccl.so missing')", "ImportError: libhccl.so missing"),
        ("raise OSError('libascendcl.so: cannot open')", "OSError: libascendcl.so: cannot open"),
        ("import os; os.abort()", "crashes with signal 6"),
        ("raise SystemExit(3)", "exit code 3"),
    ],
)
def test_torch_npu_without_cann(monkeypatch, tmp_path, capsys, body, expected):
    (tmp_path / "torch_npu").mkdir()
    (tmp_path / "torch_npu/__init__.py").write_text(body)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(doctor, "MODULES", ("torch_npu",))
    monkeypatch.setattr(environment, "CANN_FOLDERS", ())
    monkeypatch.delenv("ASCEND_HOME_PATH", raising=False)
    monkeypatch.delenv("ASCEND_TOOLKIT_HOME", raising=False)
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert "WRONG: torch_npu is installed but CANN is not found" in out
    assert f"torch_npu is installed but cannot be imported: {expected}" in out.replace(
        "import torch_npu crashes", "crashes"
    )


def test_cann_is_found_with_its_version(monkeypatch, tmp_path):
    (tmp_path / "version.cfg").write_text("runtime_running_version=[8.5.0:8.5.0.1]\n")
    monkeypatch.setenv("ASCEND_HOME_PATH", str(tmp_path))
    assert environment.cann() == (str(tmp_path), "8.5.0.1")


@pytest.mark.parametrize("last", ["triton", "triton-ascend"])
def test_two_owners_of_triton(monkeypatch, tmp_path, last):
    content = {"triton": "__version__ = '3.4.0'\n", "triton-ascend": "__version__ = '3.2.0'\n"}
    (tmp_path / "triton").mkdir()
    (tmp_path / "triton/__init__.py").write_text(content[last])
    fake_distribution(tmp_path, "triton", "3.4.0", [("triton/__init__.py", content["triton"])])
    fake_distribution(tmp_path, "triton-ascend", "3.2.0", [("triton/__init__.py", content["triton-ascend"])])
    monkeypatch.syspath_prepend(str(tmp_path))
    assert environment.triton_owner() == last
    found = [w for w in whats() if "both own the module `triton`" in w]
    assert len(found) == 1
    assert found[0].endswith(f"on disk now: {last}")


def test_a_cuda_shim_is_named(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.version, "hip", None)
    assert any("a shim redirects torch.cuda" in w for w in whats())


def test_broken_triton(monkeypatch):
    assert any(
        "triton is installed but cannot be imported" in w for w in whats({"triton": environment.Imported(None, "x")})
    )


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("MINDSPEED_KDA_BACKEND", "nope", "MINDSPEED_KDA_BACKEND=nope names no backend"),
        ("MINDSPEED_KDA_VALIDATE", "maybe", "MINDSPEED_KDA_VALIDATE: expected 1 or 0, got 'maybe'"),
    ],
)
def test_wrong_settings(monkeypatch, name, value, expected):
    monkeypatch.setenv(name, value)
    assert expected in whats()


def test_works_with_the_core_alone(monkeypatch, no_imports, capsys):
    """Nothing outside torch and numpy may be imported: their absence is played by an import hook."""
    import builtins

    real = builtins.__import__

    def guarded(name, *args, **kwargs):
        if name.split(".")[0] in ("matplotlib", "rich", "triton", "torch_npu", "fla"):
            raise ImportError(f"No module named {name!r}")
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", guarded)
    assert main(["doctor"]) == 0
    assert "torch" in capsys.readouterr().out
