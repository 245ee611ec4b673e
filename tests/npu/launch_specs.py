"""Launches as an NPU would get them, recorded, and whether the compile gate lists one."""

from __future__ import annotations

import dataclasses

import torch

from mindspeed_kda.npu_kernels.ascend_check.spec import CONSTEXPR

NAMES = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32", torch.int32: "i32", torch.int64: "i64"}


def same(spec, given):
    constants = dict(spec.constants)
    for name, kind in spec.signature:
        value = given[name]
        if kind == CONSTEXPR:
            same = constants[name] == value
        elif kind.startswith("*"):
            same = value is not None and kind == "*" + NAMES[value.dtype]
        else:
            same = kind == {int: "i32", float: "fp32"}[type(value)]
        if not same:
            return False
    return True


def recorded_on(target, plan, monkeypatch):
    """The list of launches that the plan makes from here on: (kernel name, grid, arguments). Nothing runs."""
    import triton

    from mindspeed_kda.npu_kernels import launch

    seen = []

    def run(self, *args, grid, warmup, **kwargs):
        assert not args
        seen.append((self.fn.__name__, grid, kwargs))

    monkeypatch.setattr(triton.runtime.jit.JITFunction, "run", run)
    cores = launch.Cores(target.cube_cores, target.vector_cores)
    monkeypatch.setattr(launch, "cores", lambda kind, index: cores)
    sizes_of = plan.sizes_of
    monkeypatch.setattr(plan, "sizes_of", lambda call, **kw: dataclasses.replace(sizes_of(call, **kw), target="npu"))
    return seen
