"""Importing does nothing: no triton, no torch_npu, no CUDA context, on machines where they are absent or broken."""

from __future__ import annotations

import json

import pytest

HEAVY = ("triton", "torch_npu", "torch._dynamo", "torch._inductor", "matplotlib", "rich", "scipy", "pytest", "fla")

BLOCK = """
import sys

class Block:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in BLOCKED:
            raise ModuleNotFoundError(f"No module named {name!r} (blocked)", name=name)

BLOCKED = {"triton", "torch_npu"}
sys.meta_path.insert(0, Block())
"""

NO_CUDA = """
import torch

def _forbidden(*a, **k):
    raise AssertionError("CUDA was touched")

for _name in ("_lazy_init", "init", "is_available", "device_count", "get_device_capability", "get_device_properties"):
    setattr(torch.cuda, _name, _forbidden)
torch._C._cuda_init = torch._C._cuda_getDeviceCount = _forbidden
"""

CALL = """
import torch
import mindspeed_kda
torch.manual_seed(0)
q, k, v, v_new, g, do, dv = torch.randn(7, 1, 20, 1, 8).unbind()
beta, A = torch.rand(1, 20, 1), torch.randn(1, 20, 1, 16)
h, dh = torch.randn(2, 1, 2, 1, 8, 8).unbind()
out = mindspeed_kda.chunk_kda_bwd_wy_dqkg_fused(q, k, v, v_new, -g.abs(), beta, A, h, do, dh, dv, chunk_size=16)
assert all(torch.isfinite(t).all() for t in out)
"""

REPORT = f"""
import json, sys
print(json.dumps({{
    "heavy": [m for m in {HEAVY!r} if m in sys.modules],
    "cuda": torch.cuda.is_initialized(),
}}))
"""

BROKEN = {
    "OSError": "raise OSError('libhccl.so: cannot open shared object file')",
    "crash": "import os; os.abort()",
}


def check(done):
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_import_brings_torch_and_nothing_heavier(fresh):
    before = "import torch, sys; known = set(sys.modules)\n"
    after = "import mindspeed_kda; import json; print(json.dumps(sorted(set(sys.modules) - known - {'json'})))"
    new = check(fresh(before + after))
    strangers = [
        m for m in new if m.partition(".")[0] != "mindspeed_kda" and not m.startswith(("json", "__editable__"))
    ]
    assert strangers == []


def test_the_two_heavy_ones_stay_out_and_cuda_stays_cold(fresh):
    """Even where the modules exist and would work, and where CUDA would answer."""
    stub = "import sys; print('imported', __name__, file=sys.stderr)"
    done = fresh(NO_CUDA + "import mindspeed_kda\n" + REPORT, {"triton": stub, "torch_npu": stub})
    assert check(done) == {"heavy": [], "cuda": False}
    assert "imported" not in done.stderr


def test_absent(fresh):
    done = fresh(BLOCK + CALL + REPORT)
    assert check(done) == {"heavy": [], "cuda": False}


def test_absent_and_asked_for(fresh):
    code = BLOCK.replace("raise ModuleNotFoundError", "return None  #") + (
        "import importlib.util as u; real = u.find_spec\n"
        "u.find_spec = lambda name, *a: None if name in BLOCKED else real(name, *a)\n"
    )
    call = CALL.replace("chunk_size=16", "chunk_size=16, backend='triton'")
    done = fresh(code + call)
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("RuntimeError: ")
    assert "backend 'triton' (asked for by backend=) cannot run this call: the module triton is not installed" in last


@pytest.mark.parametrize("kind", ["OSError", "crash"])
def test_broken(fresh, kind):
    """Import, and a call that needs neither of them, work; the broken modules are not even tried."""
    done = fresh(NO_CUDA + CALL + REPORT, dict.fromkeys(("triton", "torch_npu"), BROKEN[kind]))
    assert check(done) == {"heavy": [], "cuda": False}


def test_the_stubs_bite(fresh):
    """A stub that aborts does abort whoever imports it: the tests above can fail."""
    assert fresh("import triton", {"triton": BROKEN["crash"]}).returncode < 0
    assert "libhccl" in fresh("import torch_npu", {"torch_npu": BROKEN["OSError"]}).stderr


WALK = """
import importlib, json, pkgutil, sys
import mindspeed_kda
names, failed = [], {}

def onerror(name):
    failed[name] = repr(sys.exc_info()[1])

for info in pkgutil.walk_packages(mindspeed_kda.__path__, "mindspeed_kda.", onerror=onerror):
    names.append(info.name)
for top in ("npu_kernels", "cuda_kernels"):
    package = importlib.import_module(f"mindspeed_kda.{top}")
    names.append(package.__name__)
    for info in pkgutil.walk_packages(package.__path__, package.__name__ + ".", onerror=onerror):
        names.append(info.name)
for name in names:
    try:
        importlib.import_module(name)
    except Exception as error:
        failed[name] = f"{type(error).__name__}: {error}"
print(json.dumps({"names": names, "failed": failed}))
"""


def test_every_module_imports_without_a_driver(fresh):
    """triton is installed here and no driver is active: module-level tuning or device queries would raise."""
    pytest.importorskip("triton")
    result = check(fresh(NO_CUDA + WALK))
    assert result["failed"] == {}
    assert len(result["names"]) > 40
    assert {"mindspeed_kda.npu_kernels.wy_dqkg.plan", "mindspeed_kda.npu_kernels.wy_dqkg.main"} <= set(result["names"])


def test_without_triton_only_kernel_files_are_missing(fresh):
    """Whatever fails then is a file of Triton kernels, and fails because triton is not there."""
    result = check(fresh(BLOCK + WALK))
    strangers = {n: e for n, e in result["failed"].items() if not n.startswith("mindspeed_kda.npu_kernels.")}
    assert strangers == {}
    assert all("triton" in e and "ModuleNotFoundError" in e for e in result["failed"].values()), result["failed"]
    for needed in ("tiling", "wy_dqkg.specs"):
        assert f"mindspeed_kda.npu_kernels.{needed}" not in result["failed"]


DOCTOR = """
import sys
from mindspeed_kda.cli.main import main
sys.exit(main(["doctor", "--json"]))
"""


@pytest.mark.parametrize("kind", ["OSError", "crash"])
def test_doctor_reports_a_broken_torch_npu(fresh, kind):
    """With the reason, where the process that tried it lived to give one."""
    done = fresh(DOCTOR, {"torch_npu": BROKEN[kind]})
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)
    if kind == "OSError":
        assert "libhccl.so: cannot open shared object file" in done.stdout
