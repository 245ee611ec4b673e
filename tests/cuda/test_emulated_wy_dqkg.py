"""The native kernel's own source, run on this processor by cuda_kernels/emulator, against float64: no GPU needed."""

from __future__ import annotations

import shutil

import pytest
import torch
from sources import KERNELS, build, emulated

from mindspeed_kda.chunks import cdiv
from mindspeed_kda.contracts import wy_dqkg
from mindspeed_kda.testing.covering import pairwise
from mindspeed_kda.testing.inputs import wy_inputs
from mindspeed_kda.testing.wy_check import assert_right


def built(out, **how):
    try:
        return emulated.Emulated(build.build_emulator(out, **how))
    except build.UnavailableError as error:
        pytest.skip(f"the emulator cannot be built: {error}")


@pytest.fixture(scope="session")
def kernels(tmp_path_factory):
    return built(tmp_path_factory.mktemp("emulated") / "kernels.so")


def both_schedules(kernels, kwargs, **how):
    """The outputs, which may not depend on the order in which threads run."""
    call = wy_dqkg.check(**kwargs)
    got = kernels.wy_dqkg(call, emulated.FORWARD, **how)
    for name, a, b in zip(got._fields, got, kernels.wy_dqkg(call, emulated.REVERSE, **how), strict=True):
        assert torch.equal(a, b), f"{name} depends on the order in which threads run"
    return got


AXES = {
    "T": (1, 17, 64, 70),
    "KV": ((64, 64), (128, 128), (128, 60), (100, 128), (1, 3)),
    "dtype": (torch.bfloat16, torch.float16, torch.float32),
    "BT": (16, 32, 64),
    "heads": ((1, 1), (1, 2)),
    "state": ("float32", "main"),
    "state_v_first": (False, True),
    "beta": ("float32", "main"),
    "lengths": (None, [0, 65, 1, 17]),
    "index": (torch.int32, torch.int64),
}
SPARE = 2
"""Tokens after the last packed sequence."""


@pytest.mark.parametrize("case", pairwise(AXES), ids=lambda c: ",".join(str(v).replace(" ", "") for v in c.values()))
def test_against_float64(kernels, case):
    (H, HV), (K, V), main, lengths = case["heads"], case["KV"], case["dtype"], case["lengths"]
    kwargs = wy_inputs(
        B=2 if lengths is None else 1, T=case["T"] if lengths is None else sum(lengths) + SPARE, H=H, HV=HV, K=K, V=V,
        BT=case["BT"], dtype=main, state_dtype=main if case["state"] == "main" else torch.float32,
        beta_dtype=main if case["beta"] == "main" else torch.float32, state_v_first=case["state_v_first"],
        lengths=lengths, cu_dtype=case["index"], seed=case["T"],
    )  # fmt: skip
    if lengths is not None:
        for name in ("q", "k", "v", "v_new", "g", "beta", "A", "do", "dv"):
            kwargs[name][:, -SPARE:] = float("nan")
    assert_right(both_schedules(kernels, kwargs), kwargs)


INSTANCES = [
    (main, state, K)
    for main in (torch.float16, torch.bfloat16, torch.float32)
    for state in dict.fromkeys((main, torch.float32))
    for K in (64, 100, 128)
]


@pytest.mark.parametrize(("main", "state", "K"), INSTANCES, ids=str)
@pytest.mark.parametrize("BT", [16, 64])
def test_every_instance_with_tails_and_given_indices(kernels, main, state, K, BT):
    lengths = [65, 0, 3]
    kwargs = wy_inputs(T=68, H=1, HV=2, K=K, V=K, BT=BT, dtype=main, state_dtype=state, lengths=lengths, seed=K)
    found = both_schedules(kernels, kwargs)
    assert_right(found, kwargs)
    rows = [(n, c) for n, length in enumerate(lengths) for c in range(cdiv(length, BT))]
    kwargs["chunk_indices"] = torch.tensor(rows, dtype=torch.int32)
    given = kernels.wy_dqkg(wy_dqkg.check(**kwargs))
    assert all(torch.equal(a, b) for a, b in zip(found, given, strict=True))


@pytest.mark.parametrize("main", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_the_general_instance_gives_the_same_bits(kernels, main):
    kwargs = wy_inputs(T=70, H=1, K=128, V=128, dtype=main)
    kwargs["A"][:, 64:, :, 6:] = float("nan")  # columns past a tail chunk may hold anything
    call = wy_dqkg.check(**kwargs)
    general = kernels.wy_dqkg(call, aligned=False)
    assert all(torch.equal(a, b) for a, b in zip(kernels.wy_dqkg(call), general, strict=True))


@pytest.mark.parametrize("lengths", [[(7 * i) % 3 for i in range(60)], [0] * 290 + [1, 0, 17]], ids=len)
def test_many_short_sequences_are_found_without_indices(kernels, lengths):
    """More than a warp, and more than a CTA has threads."""
    kwargs = wy_inputs(T=sum(lengths) + 3, H=1, K=64, V=64, BT=16, dtype=torch.float16, lengths=lengths)
    assert_right(both_schedules(kernels, kwargs), kwargs)


def test_no_sequence_has_a_token(kernels):
    kwargs = wy_inputs(T=5, H=1, K=64, V=64, dtype=torch.float16, lengths=[0, 0])
    assert all((x == 0).all() for x in both_schedules(kernels, kwargs))


HOPPER_AXES = {
    "T": (1, 64, 130),
    "dtype": (torch.bfloat16, torch.float16),
    "BT": (16, 32, 64),
    "heads": ((1, 1), (1, 2)),
    "state": ("float32", "main"),
    "beta": ("float32", "main"),
    "lengths": (None, [0, 65, 1, 17]),
    "index": (torch.int32, torch.int64),
}


@pytest.mark.parametrize(
    "case", pairwise(HOPPER_AXES), ids=lambda c: ",".join(str(v).replace(" ", "") for v in c.values())
)
def test_the_hopper_kernel_against_float64(kernels, case):
    """On two multiprocessors, so that most CTAs go on to another task."""
    (H, HV), main, lengths = case["heads"], case["dtype"], case["lengths"]
    kwargs = wy_inputs(
        B=2 if lengths is None else 1, T=case["T"] if lengths is None else sum(lengths) + SPARE, H=H, HV=HV,
        K=128, V=128, BT=case["BT"], dtype=main, state_dtype=main if case["state"] == "main" else torch.float32,
        beta_dtype=main if case["beta"] == "main" else torch.float32, lengths=lengths, cu_dtype=case["index"],
        seed=case["T"],
    )  # fmt: skip
    if lengths is not None:
        for name in ("q", "k", "v", "v_new", "g", "beta", "A", "do", "dv"):
            kwargs[name][:, -SPARE:] = float("nan")
    got = both_schedules(kernels, kwargs, hopper=2)
    assert_right(got, kwargs)
    assert not torch.equal(got.db, kernels.wy_dqkg(wy_dqkg.check(**kwargs)).db), "it sums db in an order of its own"


@pytest.mark.parametrize("state", [torch.float16, torch.float32], ids=str)
def test_the_hopper_kernel_with_indices_and_anything_past_a_tail(kernels, state):
    lengths, BT = [65, 0, 3, 20], 64
    kwargs = wy_inputs(T=90, H=2, K=128, V=128, dtype=torch.float16, state_dtype=state, lengths=lengths)
    found = both_schedules(kernels, kwargs, hopper=2)
    rows = [(n, c) for n, length in enumerate(lengths) for c in range(cdiv(length, BT))]
    kwargs["chunk_indices"] = torch.tensor(rows, dtype=torch.int32)
    kwargs["A"][:, 64, :, 1:] = float("nan")
    given = kernels.wy_dqkg(wy_dqkg.check(**kwargs), hopper=3)
    assert all(torch.equal(a, b) for a, b in zip(found, given, strict=True))


@pytest.mark.parametrize("lengths", [[(7 * i) % 3 for i in range(60)], [0] * 600 + [1, 0, 17], [0, 0]], ids=len)
def test_the_hopper_kernel_finds_short_sequences(kernels, lengths):
    kwargs = wy_inputs(T=sum(lengths) + 3, H=1, K=128, V=128, BT=16, dtype=torch.float16, lengths=lengths)
    assert_right(both_schedules(kernels, kwargs, hopper=5), kwargs)


def judge_changed(tmp_path, file, change, launch, kwargs, error, message, **how):
    """Whether a kernel of ``file`` with a ``change``, launched by the statement ``launch`` alone, fails as it must."""
    old, new = change
    root = tmp_path / "cuda_kernels"
    shutil.copytree(KERNELS, root, ignore=shutil.ignore_patterns("*.so", "*.py", "__pycache__"))
    kernel = root / "wy_dqkg" / file
    text = kernel.read_text(encoding="utf-8")
    assert old in text, f"{file}: expected {old!r}, to be changed by this test"
    kernel.write_text(text.replace(old, new, 1), encoding="utf-8")
    one = root / "wy_dqkg/f16.cu"  # one instance, which compiles in a moment
    one.write_text(
        '#include "launch.cuh"\nnamespace kda {\n'
        f"cudaError_t launch_f16(const WyParams& p, bool, cudaStream_t stream) {{\n    {launch}\n}}\n}}\n",
        encoding="utf-8",
    )
    kernels = built(tmp_path / "mutant.so", sources=("wy_dqkg/f16.cu",), root=root)

    def judge():
        assert_right(both_schedules(kernels, kwargs, **how), kwargs)

    if error is None:
        judge()
    else:
        with pytest.raises(error, match=message):
            judge()


HOPPER_MUTANTS = {
    "none": ("", "", None, None),
    "a sign": ("pack2<T>(-dw[", "pack2<T>(dw[", AssertionError, None),
    "key columns in order": ("return (k & ~15) | (k >> 1 & 1) << 3 | (k >> 2 & 3) << 1 | (k & 1);", "return k;",
                             AssertionError, None),
    "dw not fenced": ("fence_async_proxy();\n        __syncthreads();  // dw", "__syncthreads();  // dw",
                      emulated.EmulationError, "without fence_async_proxy"),
    "no barrier before refills": ("__syncthreads();  // kg is whole; dv, v, q and g are read", "",
                                  emulated.EmulationError, "race"),
    "no barrier within a warp": ("__syncwarp();", "", emulated.EmulationError, "race"),
    "no wait for k and v": ("copy_wait<0>();  // A", "//", emulated.EmulationError, None),
    "a product not waited for": ("wgmma_wait();\n        wgmma_done(X)", "wgmma_done(X)", AssertionError, None),
}  # fmt: skip
"""What is changed in hopper.cuh or hopper_tile.cuh, and how that must show."""


@pytest.mark.parametrize("name", HOPPER_MUTANTS)
def test_a_changed_hopper_kernel_is_noticed(name, tmp_path):
    old, new, error, message = HOPPER_MUTANTS[name]
    one = (
        "return launch_kernel<wy_dqkg_hopper_kernel<half, half>>(2, HopperTile::kThreads, HopperTile::kBytesTotal, "
        "stream, p);"
    )
    kwargs = wy_inputs(T=150, H=1, K=128, V=128, dtype=torch.float16, state_dtype=torch.float16)
    in_tile = old in (KERNELS / "wy_dqkg/hopper_tile.cuh").read_text(encoding="utf-8") and name != "none"
    file = "hopper_tile.cuh" if in_tile else "hopper.cuh"
    judge_changed(tmp_path, file, (old, new), one, kwargs, error, message, hopper=2)


MUTANTS = {
    "none": ("", "", None, None),
    "a sign": ("-dw[m][n][2 * i],", "dw[m][n][2 * i],", AssertionError, "dk"),
    "a constant": ("p.scale * dq", "1.01f * p.scale * dq", AssertionError, "dq"),
    "no wait for the first copies": ("copy_wait<1>();", "", (AssertionError, emulated.EmulationError), None),
    "no wait for the last copies": ("    copy_wait<0>();\n    __syncthreads();", "    __syncthreads();",
                                    emulated.EmulationError, "cp.async still on its way"),
    "no barrier before tiles are read": ("__syncthreads();  // do, dv", "//", emulated.EmulationError, "race"),
    "no barrier within a warp": ("__syncwarp();", "", emulated.EmulationError, "race"),
    "a lane leaves early": ("const int hv =", "if (threadIdx.x == 5) return;\n    const int hv =",
                            emulated.EmulationError, "wait for ever"),
    "rows past the end, read": ("if (r < C) load_run", "load_run", emulated.EmulationError, "outside of the tensors"),
    "rows past the end, written": ("if (r < C) {\n                    store_run", "{\n                    store_run",
                                      emulated.EmulationError, "outside of the tensors"),
}  # fmt: skip
"""What is changed in kernel.cuh, and how that must show."""


@pytest.mark.parametrize("name", MUTANTS)
def test_a_changed_kernel_is_noticed(name, tmp_path):
    old, new, error, message = MUTANTS[name]
    one = "return launch_instance<half, float, 64, 64, true>(p, stream);"
    kwargs = wy_inputs(T=70, H=1, K=64, V=64, dtype=torch.float16, state_dtype=torch.float32)
    judge_changed(tmp_path, "kernel.cuh", (old, new), one, kwargs, error, message)
