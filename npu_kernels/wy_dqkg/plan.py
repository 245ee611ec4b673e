"""One call of the op: outputs, one workspace, six stages in order. The only place here that allocates.

Inputs with other strides are copied to contiguous ones first. A copy reads and writes its tensor once, where each
stage reads it one to three times; strided rows would cost more on Ascend, and compile every stage once more.

The scalars per token, beta and db, pass through [HV, B*T] workspace: a chunk's scalars are contiguous there, where in
[B, T, HV] they lie HV apart, which Ascend loads 10 to 35 times slower.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from mindspeed_kda import chunks
from mindspeed_kda.contracts import wy_dqkg
from mindspeed_kda.contracts.wy_dqkg import WyDqkgCall, WyDqkgGrads
from mindspeed_kda.npu_kernels.launch import launch, on_device
from mindspeed_kda.npu_kernels.wy_dqkg.specs import ZERO_BLOCK, ZERO_TAIL, Sizes, Stage, constants, stages

TRITON_DTYPE = {
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float32: "fp32",
    torch.int32: "i32",
    torch.int64: "i64",
}
ALIGN = 512
"""Bytes at whose multiples each region of the workspace starts: Ascend's largest transfer alignment."""


def sizes_of(call: WyDqkgCall) -> Sizes:
    return Sizes(
        target=call.device.type,
        main=TRITON_DTYPE[call.dtype],
        state=TRITON_DTYPE[call.h.dtype],
        index=None if call.cu_seqlens is None else TRITON_DTYPE[call.cu_seqlens.dtype],
        H=call.H,
        HV=call.HV,
        K=call.K,
        V=call.V,
        BT=call.BT,
        v_first=call.state_v_first,
    )


def regions(call: WyDqkgCall) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Name to shape and dtype of each region of the workspace."""
    rows = call.B * call.T
    return {
        "dw": ((call.HV, rows, call.K), call.dtype),
        "M": ((call.HV, rows, call.BT), call.dtype),
        "P": ((call.HV, rows, call.BT), call.dtype),
        "beta_t": ((call.HV, rows), torch.float32),
        "db_t": ((call.HV, rows), torch.float32),
    }


def workspace(call: WyDqkgCall) -> dict[str, Tensor]:
    """One allocation, uninitialised, cut into the regions."""
    table = regions(call)
    sizes = {name: math.prod(shape) * dtype.itemsize for name, (shape, dtype) in table.items()}
    buffer = torch.empty(sum(-(-n // ALIGN) * ALIGN for n in sizes.values()), dtype=torch.uint8, device=call.device)
    out, offset = {}, 0
    for name, (shape, dtype) in table.items():
        out[name] = buffer[offset : offset + sizes[name]].view(dtype).view(shape)
        offset += -(-sizes[name] // ALIGN) * ALIGN
    return out


def run(call: WyDqkgCall) -> WyDqkgGrads:
    """The op on Triton. The call is checked (contracts.wy_dqkg.check) and its device is npu, cuda or cpu."""
    out = wy_dqkg.empty_outputs(call)
    sequences = None if call.cu_seqlens is None else call.cu_seqlens.shape[0] - 1
    if call.B * call.NT == 0 or sequences == 0:
        for t in out:
            t.zero_()
        return out
    with torch.no_grad(), on_device(call.device):
        _run_stages(call, out)
    return out


def _run_stages(call: WyDqkgCall, out: WyDqkgGrads) -> None:
    sizes, rows = sizes_of(call), call.B * call.T
    values: dict[str, object] = dict(workspace(call))
    for name in ("q", "k", "v", "v_new", "g", "A", "h", "do", "dh", "dv"):
        values[name] = getattr(call, name).contiguous()
    values |= {"dq": out.dq, "dk": out.dk, "dv_out": out.dv, "dg": out.dg, "dA": out.dA}
    values |= {"scale": call.scale, "T": call.T, "NT": call.NT, "R": rows, "n_chunks": call.B * call.NT}
    values |= {"cu_seqlens": None, "chunk_indices": None}
    if call.cu_seqlens is not None:
        cu, indices = call.cu_seqlens.contiguous(), call.chunk_indices
        if indices is None:
            indices = chunks.chunk_indices(cu, call.BT, call.NT)
        values |= {"cu_seqlens": cu, "chunk_indices": indices.to(cu.dtype).contiguous()}

    def run_stage(stage: Stage, tasks: int) -> None:
        args, fixed = stage.pick(values), stage.pick(constants(sizes, stage))
        launch(stage.kernel, call.device, tasks, args, fixed, sizes.tile(stage.name), cube=stage.cube)

    beta_t, db_t = values["beta_t"], values["db_t"]
    assert isinstance(beta_t, Tensor)
    assert isinstance(db_t, Tensor)
    beta_t.copy_(call.beta.reshape(rows, call.HV).t())
    for stage in stages(sizes):
        run_stage(stage, stage.tasks * call.B * call.NT * call.HV)
    out.db.view(rows, call.HV).copy_(db_t.t())
    if call.cu_seqlens is not None:
        values |= {f"x{i}": t for i, t in enumerate(out)} | {"N": call.cu_seqlens.shape[0] - 1}
        blocks = chunks.cdiv(call.T * call.HV * max(call.K, call.V, call.BT), ZERO_BLOCK)
        run_stage(ZERO_TAIL, blocks)
