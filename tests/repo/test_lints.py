"""Rules of the house that can be read from the source (CONTRIBUTING.md). Each is shown to bite on a small example."""

from __future__ import annotations

import ast
import re
import subprocess

import pytest
from tree import PRODUCT, ROOT, dotted, files, python_files, syntax, text, walk

MAX_LINES = 450


def id_of(path):
    return str(path)


def environment_reads(tree):
    """Names of the environment variables that the code reads; ``*`` for one that is computed.

    Handing the whole environment to a child process (``{**os.environ}``) is no reading.
    """
    found = []
    for node in ast.walk(tree):
        key = None
        if isinstance(node, ast.Call) and dotted(node.func) in ("os.getenv", "os.environ.get", "os.environ.pop"):
            key = node.args[0]
        elif isinstance(node, ast.Subscript) and dotted(node.value) == "os.environ" and isinstance(node.ctx, ast.Load):
            key = node.slice
        elif isinstance(node, ast.Compare) and any(dotted(c) == "os.environ" for c in node.comparators):
            key = node.left
        if key is not None:
            found.append(key.value if isinstance(key, ast.Constant) else "*")
    return found


def test_environment_is_read_in_config_alone():
    """PATH may be extended for a child process; it steers nothing here."""
    readers = {str(f): environment_reads(syntax(f)) for f in python_files(*PRODUCT, "benchmarks", "ci", "setup.py")}
    assert readers.pop("mindspeed_kda/config.py") == ["*"]
    assert {f: names for f, names in readers.items() if set(names) - {"PATH"}} == {}


def test_tests_and_benchmarks_know_no_ci_mode():
    names = {n for f in python_files("tests", "benchmarks") for n in environment_reads(syntax(f))}
    assert not {n for n in names if re.search(r"\bCI\b|GITHUB|RERUN", n)}
    assert not [
        f for f in python_files("tests") if re.search(r"flaky\(|reruns\s*=", text(f)) and f.name != "test_lints.py"
    ]


@pytest.mark.parametrize(
    ("code", "names"),
    [
        ("import os; os.environ.get('A', 1)", ["A"]),
        ("import os; os.getenv('A')", ["A"]),
        ("import os; x = os.environ['A']", ["A"]),
        ("import os; 'A' in os.environ", ["A"]),
        ("import os; os.environ.get(name)", ["*"]),
        ("import os; env = {**os.environ, 'A': '1'}", []),
        ("import os; os.environ['A'] = '1'", []),
    ],
)
def test_the_environment_rule_bites(code, names):
    assert environment_reads(ast.parse(code)) == names


PUT_OFF = re.compile(r"\b(?:TODO|FIXME|XXX|HACK)\b")
MACHINE_PATH = re.compile(r"""(?<![\w.<>/-])/(?:work|root|home|tmp|Users|mnt|data)/[\w.]""")
HOSTS = re.compile(
    r"pypi\.(?:org|python)|download\.pytorch|files\.pythonhosted|aliyun|tsinghua|huaweicloud|--index-url"
)


def offences(pattern, skip=("tests/repo/test_lints.py",)):
    found = []
    for f in files():
        if str(f) in skip or f.suffix in (".png", ".so", ".json") or f.name in ("LICENSE",):
            continue
        for n, line in enumerate(text(f).splitlines(), 1):
            if pattern.search(line):
                found.append(f"{f}:{n}: {line.strip()[:100]}")
    return found


@pytest.mark.parametrize("pattern", [PUT_OFF, MACHINE_PATH, HOSTS], ids=["work put off", "machine paths", "hosts"])
def test_no_traces_of_one_machine_or_of_work_put_off(pattern):
    assert offences(pattern) == []


@pytest.mark.parametrize(
    ("pattern", "line"),
    [
        (PUT_OFF, "# TO" + "DO later"),
        (MACHINE_PATH, "open('/ho" + "me/me/x')"),
        (HOSTS, "pip install --index-" + "url x"),
    ],
)
def test_the_trace_rules_bite(pattern, line):
    assert pattern.search(line)


@pytest.mark.parametrize("path", [f for f in files() if f.suffix in (".py", ".sh", ".cu", ".cuh", ".h")], ids=id_of)
def test_files_stay_readable(path):
    lines = text(path).splitlines()
    assert len(lines) <= MAX_LINES, f"{path}: {len(lines)} lines; would a reader find the rooms inside?"
    long = [n for n, line in enumerate(lines, 1) if len(line) > 120]
    assert not long or path.suffix == ".sh", f"{path}: over 120 characters in lines {long}"


def device_literals(tree):
    """Places that put tensors on a named accelerator: devices come from the caller's tensors."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = dotted(node.func).rpartition(".")[2]
            values = [k.value for k in node.keywords if k.arg == "device"]
            values += node.args[:1] if name in ("device", "to") else []
            found += [
                node.lineno
                for v in values
                if isinstance(v, ast.Constant)
                and isinstance(v.value, str)
                and v.value.partition(":")[0] in ("cuda", "npu")
            ]
            if isinstance(node.func, ast.Attribute) and node.func.attr in ("cuda", "npu") and not node.args:
                found.append(node.lineno)
    return found


LIBRARY = [
    f
    for f in python_files(*PRODUCT)
    if f.parts[1] not in ("cli", "testing", "ascend_check") and f.parts[:2] != ("cuda_kernels", "build.py")
]


def test_no_device_literals_in_the_library():
    assert {str(f): lines for f in LIBRARY if (lines := device_literals(syntax(f)))} == {}


@pytest.mark.parametrize(
    ("code", "count"),
    [
        ("torch.zeros(3, device='cuda')", 1),
        ("x.to('npu:0')", 1),
        ("torch.device('cuda', 1)", 1),
        ("x.cuda()", 1),
        ("torch.zeros(3, device=x.device)", 0),
        ("kind == 'cuda'", 0),
    ],
)
def test_the_device_rule_bites(code, count):
    assert len(device_literals(ast.parse(code))) == count


def test_nothing_asks_whether_cuda_is_available_to_choose():
    """Dispatch is by the tensors' device type; only reports and tests may ask what the machine has."""
    asking = [
        f"{f}:{node.lineno}"
        for f in LIBRARY
        for node in walk(f)
        if isinstance(node, ast.Attribute) and dotted(node) in ("torch.cuda.is_available", "torch.npu.is_available")
    ]
    assert asking == []


def public_without_docstring(tree):
    """Public module-level functions and classes, and public methods of classes, that explain nothing."""
    found = []
    for node in tree.body:
        if not isinstance(node, (ast.FunctionDef, ast.ClassDef)) or node.name.startswith("_"):
            continue
        if ast.get_docstring(node) is None:
            found.append(node.name)
    return found


PUBLIC_MODULES = [
    f
    for f in python_files("mindspeed_kda")
    if str(f) in {f"mindspeed_kda/{n}.py" for n in ("api", "registry", "config", "chunks", "autograd")}
]


@pytest.mark.parametrize("path", PUBLIC_MODULES, ids=id_of)
def test_public_names_are_documented(path):
    short = {"cdiv", "Rejection"}  # their names say it
    assert set(public_without_docstring(syntax(path))) - short == set()


@pytest.mark.parametrize("path", python_files(*PRODUCT), ids=id_of)
def test_every_module_says_what_it_is(path):
    assert ast.get_docstring(syntax(path)), path


def imports(path):
    """Modules that a file imports, wherever in it."""
    found = set()
    for node in walk(path):
        if isinstance(node, ast.Import):
            found |= {a.name for a in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            found |= {node.module} | {f"{node.module}.{a.name}" for a in node.names}
    return found


def under(modules, *roots):
    return sorted(m for m in modules if any(m == r or m.startswith(r + ".") for r in roots))


class TestLayers:
    """api -> contracts, registry -> backends -> plan -> kernels; reference, contracts and tiling are leaves."""

    def rule(self, folder, *forbidden, but=()):
        bad = {}
        for f in files():
            if (
                f.suffix == ".py"
                and str(f).startswith(folder)
                and str(f) not in but
                and (m := under(imports(f), *forbidden))
            ):
                bad[str(f)] = m
        assert bad == {}

    def test_contracts_know_no_backend(self):
        self.rule(
            "mindspeed_kda/contracts/",
            *(
                f"mindspeed_kda.{m}"
                for m in ("backends", "registry", "reference", "npu_kernels", "cuda_kernels", "cli")
            ),
        )

    def test_registry_knows_no_op(self):
        self.rule("mindspeed_kda/registry.py", "mindspeed_kda.contracts", "mindspeed_kda.backends", "torch")

    def test_reference_knows_no_kernel(self):
        self.rule(
            "mindspeed_kda/reference/",
            *(f"mindspeed_kda.{m}" for m in ("backends", "registry", "npu_kernels", "cuda_kernels", "cli", "testing")),
        )

    def test_kernels_know_neither_reference_nor_backends(self):
        for folder in ("npu_kernels/", "cuda_kernels/"):
            self.rule(
                folder, *(f"mindspeed_kda.{m}" for m in ("backends", "registry", "reference", "api", "cli", "testing"))
            )

    def test_backends_do_not_import_each_other(self):
        names = [f.stem for f in python_files("mindspeed_kda") if f.parts[1] == "backends" and f.stem != "__init__"]
        assert len(names) >= 2
        for name in names:
            others = [f"mindspeed_kda.backends.{n}" for n in names if n != name]
            self.rule(f"mindspeed_kda/backends/{name}.py", *others)

    def test_tiling_is_plain_python(self):
        self.rule("npu_kernels/tiling.py", "triton", "torch", "torch_npu")

    def test_kernels_are_imported_by_their_installed_name(self):
        """The bare names also resolve from the root of the tree and would make a second copy."""
        for f in python_files():
            assert under(imports(f), "npu_kernels", "cuda_kernels") == [], f

    def test_heavy_modules_only_inside_functions(self):
        """At module level triton stands in kernel files alone, torch_npu nowhere."""
        bad = []
        for f in python_files(*PRODUCT):
            for node in syntax(f).body:
                names = (
                    [a.name for a in node.names]
                    if isinstance(node, ast.Import)
                    else [node.module or ""]
                    if isinstance(node, ast.ImportFrom)
                    else []
                )
                for heavy in under(names, "triton", "torch_npu", "matplotlib", "rich", "scipy", "fla"):
                    if not (heavy.startswith("triton") and f.parts[0] == "npu_kernels"):
                        bad.append(f"{f}:{node.lineno}: {heavy}")
        assert bad == []


ALLOCATES = {
    "empty",
    "empty_like",
    "empty_strided",
    "zeros",
    "zeros_like",
    "ones",
    "full",
    "new_empty",
    "new_zeros",
    "clone",
}


def test_kernel_files_allocate_nothing():
    """Outputs and workspace are made in plan.py (Triton) or in the binding (CUDA)."""
    bad = []
    for f in python_files("npu_kernels"):
        if f.name == "plan.py" or "ascend_check" in f.parts:
            continue
        bad += [
            f"{f}:{node.lineno}"
            for node in walk(f)
            if isinstance(node, ast.Call)
            and (name := dotted(node.func)).rpartition(".")[2] in ALLOCATES
            and not name.startswith("tl.")
        ]
    assert bad == []


def test_scripts_are_executable_and_parse():
    for f in files():
        if f.suffix == ".sh" or str(f) == ".ci/run":
            assert subprocess.run(["bash", "-n", ROOT / f], check=False).returncode == 0, f
            if f.name != "lib.sh":
                assert (ROOT / f).stat().st_mode & 0o111, f"{f} is not executable"


def test_no_build_products_are_tracked():
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True).stdout.split()
    assert [f for f in tracked if re.search(r"\.(so|pyc|o|whl|egg)$|egg-info|__pycache__", f)] == []
