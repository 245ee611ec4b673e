"""Whether a recorded launch is one that the compile gate lists."""

from __future__ import annotations

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
