"""A launch on NVIDIA reuses a compiled kernel exactly where stock Triton would. No GPU: the kernel is a recorder."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="npu_kernels.launch imports triton")

from mindspeed_kda.npu_kernels import launch as launching
from mindspeed_kda.npu_kernels.tiling import Tile

CUDA = torch.device("cuda", 0)
TILE = Tile(BK=64, BV=64, BDA=64, num_warps=4, num_stages=2)


class Kernel:
    """Stands for a JIT function of three arguments and a constant; a compiled kernel is the list of its launches."""

    arg_names = ("x", "n", "scale", "BK")

    def __init__(self):
        self.bound = []
        self.fn = self.__init__

    def __getitem__(self, grid):
        def bind(**values):
            compiled = Compiled()
            self.bound.append((grid, values, compiled))
            return compiled

        return bind


class Compiled:
    def __init__(self):
        self.launches = []

    def __getitem__(self, grid):
        return lambda *values: self.launches.append((grid, values))


@pytest.fixture
def run(monkeypatch):
    monkeypatch.setattr(launching, "cores", lambda kind, index: launching.Cores(cube=8, vector=8))
    monkeypatch.setattr(launching, "_COMPILED", {})
    kernel = Kernel()

    def run(x, n, scale=1.0, BK=64, tile=TILE, tasks=3):
        launching.launch(kernel, CUDA, tasks, {"x": x, "n": n, "scale": scale}, {"BK": BK}, tile)
        return kernel.bound

    return run


def memory(dtype=torch.float32, offset=0):
    return torch.zeros(64, dtype=dtype)[offset:]


def test_second_launch_goes_to_the_compiled_kernel_with_its_own_values(run):
    run(memory(), 32)
    other = memory()
    bound = run(other, 48, scale=2.0, tasks=100)
    assert len(bound) == 1
    [(grid, values)] = bound[0][2].launches
    assert grid == (8, 1, 1)
    assert values[0] is other
    assert values[1:] == (48, 2.0, 64)


@pytest.mark.parametrize(
    "changed",
    [
        {"x": memory(torch.float16)},
        {"x": memory(offset=1)},
        {"x": None},
        {"n": 33},
        {"n": 1},
        {"n": 2**31},
        {"BK": 32},
        {"tile": Tile(BK=64, BV=64, BDA=64, num_warps=8, num_stages=2)},
    ],
    ids=["dtype", "alignment", "absent", "not by 16", "one", "64 bits", "constant", "warps"],
)
def test_what_triton_compiles_anew_is_bound_anew(run, changed):
    call = {"x": memory(), "n": 32}
    run(**call)
    assert len(run(**call | changed)) == 2
    assert len(run(**call)) == 2
