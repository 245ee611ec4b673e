"""The plan of ``chunk_kda``: workspace, order of the stages, and their launches. All that allocates.

Forward: prepare, intra, scan. Backward: prepare and scan again (operands and states), scan_bwd, values, states, grads,
betas, then heads and gate_sums where they are needed. Each stage is one launch, but grads two on Ascend; a packed call
zeroes the rows of no sequence with one more.

Saved: A and Aqk in the main dtype and the rows' norms; with ``disable_recompute`` also what prepare and scan leave.
Nothing waits for the device: a packed call walks the most chunks that its shapes allow (``ChunkKdaCall.NT``), and those
past the last sequence hold no row.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mindspeed_kda import chunks
from mindspeed_kda.contracts.chunk_kda import (
    ChunkKdaCall,
    ChunkKdaGrads,
    ChunkKdaTensors,
    Spec,
    output_specs,
    state_shape,
)
from mindspeed_kda.npu_kernels.chunk_kda.specs import (
    BACKWARD_OUTPUTS,
    COMPUTE_NORM,
    FORWARD_OUTPUTS,
    NO_NORM,
    READ_NORM,
    STAGES,
    Sizes,
    constants,
    k_blocks,
    pair_parts,
    tail_widths,
)
from mindspeed_kda.npu_kernels.launch import launch, on_device
from mindspeed_kda.npu_kernels.wy_dqkg.plan import TRITON_DTYPE
from mindspeed_kda.npu_kernels.wy_dqkg.specs import ZERO_BLOCK, ZERO_TAIL

TORCH_DTYPE = {name: dtype for dtype, name in TRITON_DTYPE.items()}
SAVED = ("A", "Aqk", "rq", "rk")
KEPT = ("a", "g", "qg", "kg", "kr", "first", "decay", "b", "h", "v_new")
"""Saved besides, with disable_recompute."""


def sizes_of(call: ChunkKdaCall, *, final: bool = False) -> Sizes:
    """``final``: whether the final state (forward) or its gradient (backward) takes part."""
    c = call
    return Sizes(
        target=c.device.type,
        main=TRITON_DTYPE[c.dtype],
        g=TRITON_DTYPE[c.g.dtype],
        beta=TRITON_DTYPE[c.beta.dtype],
        index=None if c.cu_seqlens is None else TRITON_DTYPE[c.cu_seqlens.dtype],
        H=c.H,
        HV=c.HV,
        K=c.K,
        V=c.V,
        BT=c.BT,
        norm=c.qk_l2norm,
        gate=c.gate,
        bias=c.dt_bias is not None,
        sigmoid=c.beta_sigmoid,
        h0=c.initial_state is not None,
        ht=final,
        v_first=c.state_v_first,
    )


def _slots(call: ChunkKdaCall) -> int:
    """Chunk states: one a chunk, or for packed sequences the slots of ``common.state_slot``."""
    return call.B * call.NT if call.cu_seqlens is None else call.T // call.BT + call.N


def regions(call: ChunkKdaCall) -> dict[str, Spec]:
    """Name to shape and dtype of everything that stages hand to each other, saved or not."""
    c, R, wide, main = call, call.B * call.T, torch.float32, call.dtype
    z, slots = sizes_of(c, final=False), _slots(call)
    norms, pair = (R if c.qk_l2norm else 0), TORCH_DTYPE[z.pair_type]
    return {
        "A": ((c.HV, R, c.BT), main),
        "Aqk": ((c.HV, R, c.BT), main),
        "rq": ((c.H, norms), wide),
        "rk": ((c.H, norms), wide),
        "a": ((c.HV, 0 if z.gathers else R, c.K), wide),
        "g": ((c.HV, R, c.K), wide),
        "qg": ((c.HV, R, c.K), main),
        "kg": ((c.HV, R, c.K), main),
        "kr": ((c.HV, R, c.K), main),
        "first": ((slots, c.HV, c.K), wide),
        "decay": ((slots, c.HV, c.K), wide),
        "b": ((c.HV, R), wide),
        "h": ((slots, c.HV, c.K, c.V), main),
        "v_new": ((c.HV, R, c.V), main),
        "dh": ((slots, c.HV, c.K, c.V), main),
        "Y": ((c.HV, R, c.V), main),
        "P": ((c.HV, R, c.BT), pair),
        "D": ((c.HV, R, c.BT), pair),
        "db_v": ((c.HV, R), wide),
        "dq_hv": ((c.HV, R, c.K), wide),
        "dk_hv": ((c.HV, R, c.K), wide),
        "da": ((c.HV, R, c.K), wide),
        "db_k": ((k_blocks(z, "states"), c.HV, R), wide),
        "db_p": ((k_blocks(z, "grads"), c.HV, R), wide),
        "log_k": ((c.HV, c.K), wide),
        "sum_log": ((c.B * c.NT, c.HV, c.K), wide),
        "sum_bias": ((c.B * c.NT, c.HV, c.K), wide),
    }


def _rates(A_log: Tensor, K: int) -> Tensor:
    """exp(A_log) for every channel, [HV, K]: a tile row for the kernels, since Ascend reads a lone fp32 scalar element
    by element; and torch's exp, since a GPU's fast one is off by 2e-6 at A_log = 20."""
    return A_log.exp().unsqueeze(1).expand(-1, K).contiguous()


class _Run:
    """One pass over a call: its tensors by the names the kernels use, and the launches on them."""

    def __init__(self, call: ChunkKdaCall, *, final: bool) -> None:
        c, self.call = call, call
        self.sizes = sizes_of(call, final=final)
        self.regions = regions(call)
        self.chunks = c.B * c.NT
        given = {
            n: None if t is None else t.contiguous() for n, t in zip(ChunkKdaTensors._fields, c.tensors, strict=True)
        }
        self.values: dict[str, Any] = {
            **{n: given[n] for n in ("q", "k", "v", "beta", "dt_bias", "cu_seqlens")},
            "rates": None if c.A_log is None else _rates(c.A_log, c.K),
            "x": given["g"], "h0": given["initial_state"], "chunk_indices": None,
            "scale": c.scale, "bound": c.lower_bound or 0.0, "beta_scale": c.beta_scale,
            "T": c.T, "NT": c.NT, "R": c.B * c.T, "n_chunks": self.chunks, "n_seqs": c.N, "N": c.N,
        }  # fmt: skip
        if given["cu_seqlens"] is not None:
            self.values["chunk_indices"] = chunks.chunk_indices(given["cu_seqlens"], c.BT, c.NT).contiguous()

    def make(self, *names: str) -> None:
        """Allocates these regions."""
        for name in names:
            shape, dtype = self.regions[name]
            self.values[name] = torch.empty(shape, dtype=dtype, device=self.call.device)

    def tasks(self, stage: str) -> int:
        c, tile = self.call, self.sizes.tile(stage)
        if stage in ("scan", "scan_bwd"):
            return c.N * c.HV * chunks.cdiv(c.V, tile.BV)
        if stage in ("betas", "heads"):
            return chunks.cdiv(c.B * c.T, tile.BDA) * (c.HV if stage == "betas" else c.H)
        if stage == "gate_sums":
            return c.HV
        return self.chunks * c.HV * (k_blocks(self.sizes, stage) if stage in ("states", "grads") else 1)

    def stage(self, name: str, **flags: Any) -> None:
        stage = STAGES[name]
        fixed = constants(self.sizes, name, **flags)
        args = dict.fromkeys(stage.arguments) | self.values
        if (name in ("intra", "grads") and not self.sizes.gathers) or (name == "states" and self.sizes.sums_decays):
            args["g"] = args["a"]
        args = {n: args[n] for n in stage.arguments if n not in fixed}
        launch(stage.kernel, self.call.device, self.tasks(name), args, fixed, self.sizes.tile(name), cube=stage.cube)

    def prepare(self, norm: int) -> None:
        self.make("a", "g", "qg", "kg", "kr", "first", "decay", "b")
        self.stage("prepare", NORM=norm if self.call.qk_l2norm else NO_NORM)

    def zero_tail(self, names: tuple[str, ...]) -> None:
        """Rows of no sequence of the outputs of these names."""
        c = self.call
        if c.cu_seqlens is None:
            return
        args = dict.fromkeys(ZERO_TAIL.arguments) | self.values | {f"x{i}": self.values[n] for i, n in enumerate(names)}
        fixed = tail_widths(self.sizes, names)
        args = {n: args[n] for n in ZERO_TAIL.arguments if n not in fixed}
        blocks = chunks.cdiv(c.T * c.HV * max(c.K, c.V), ZERO_BLOCK)
        launch(ZERO_TAIL.kernel, c.device, blocks, args, fixed, self.sizes.tile("heads"), cube=False)


def forward(call: ChunkKdaCall) -> tuple[Tensor, Tensor | None, tuple[Tensor, ...]]:
    c = call
    (o_shape, o_dtype), (ht_shape, ht_dtype) = output_specs(c)
    with torch.no_grad(), on_device(c.device):
        run = _Run(c, final=c.output_final_state)
        v = run.values
        v["o"] = torch.empty(o_shape, dtype=o_dtype, device=c.device)
        v["ht"] = torch.empty(ht_shape, dtype=ht_dtype, device=c.device) if c.output_final_state else None
        run.make(*SAVED)
        run.prepare(COMPUTE_NORM)
        run.stage("intra")
        keep = c.needs_grad and c.disable_recompute
        if keep:
            run.make("h", "v_new")
        run.stage("scan", OUT=True, KEEP=keep)
        run.zero_tail(FORWARD_OUTPUTS)
    return v["o"], v["ht"], tuple(v[name] for name in saved_names(c))


def backward(call: ChunkKdaCall, saved: tuple[Tensor, ...], do: Tensor, dht: Tensor | None) -> ChunkKdaGrads:
    c = call
    with torch.no_grad(), on_device(c.device):
        run = _Run(c, final=dht is not None)
        v = run.values
        v.update(zip(saved_names(c), saved, strict=True))
        v["do"], v["dht"] = do.contiguous(), None if dht is None else dht.contiguous()
        if not c.disable_recompute:
            run.prepare(READ_NORM)
            run.make("h", "v_new")
            run.stage("scan", OUT=False, KEEP=True, HAS_HT=False)
        run.make("dh", "Y", "P", "D", "db_v")
        v["dh0"] = None
        if c.initial_state is not None:
            v["dh0"] = torch.empty(state_shape(c), dtype=torch.float32, device=c.device)
        run.stage("scan_bwd")
        for name, like in (("dq", "q"), ("dk", "k"), ("dv", "v"), ("dx", "x"), ("dbeta", "beta")):
            v[name] = torch.empty_like(v[like])
        run.stage("values")
        _gradients(run)
        run.zero_tail(BACKWARD_OUTPUTS)
    return ChunkKdaGrads(v["dq"], v["dk"], v["dv"], v["dx"], v["dbeta"], v.get("dA_log"), v.get("ddt_bias"), v["dh0"])


def _gradients(run: _Run) -> None:
    """Stages 6 to 10."""
    z, v = run.sizes, run.values
    if z.gated:
        run.make("sum_log", "log_k")
    if z.bias:
        run.make("sum_bias")
        v["ddt_bias"] = torch.empty_like(v["dt_bias"])
    run.make("dq_hv", "dk_hv", "da", "db_k", "db_p")
    run.stage("states")
    for flags in pair_parts(z):
        run.stage("grads", **flags)
    run.stage("betas")
    if not z.finishes_in_grads:
        run.stage("heads")
    if z.gated:
        run.stage("gate_sums")
        v["dA_log"] = v["log_k"].sum(-1)


def saved_names(call: ChunkKdaCall) -> tuple[str, ...]:
    if not call.needs_grad:
        return ()
    return SAVED + KEPT if call.disable_recompute else SAVED


def saved_specs(call: ChunkKdaCall) -> tuple[Spec, ...]:
    """Shape and dtype of what forward hands to backward."""
    table = regions(call)
    return tuple(table[name] for name in saved_names(call))
