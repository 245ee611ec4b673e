"""The stages as the compile gate sees them: argument types in place of the plan's tensors, all else shared with it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from mindspeed_kda.contracts.chunk_kda import LOWER_BOUND, OP, PREGATED, SOFTPLUS
from mindspeed_kda.npu_kernels.ascend_check.spec import CONSTEXPR, COST_CHUNKS, TRITON_TYPES, Config, KernelSpec
from mindspeed_kda.npu_kernels.ascend_check.targets import Target
from mindspeed_kda.npu_kernels.chunk_kda.specs import (
    BACKWARD_OUTPUTS,
    COMPUTE_NORM,
    FORWARD_OUTPUTS,
    READ_NORM,
    STAGES,
    Sizes,
    constants,
    pair_parts,
    tail_widths,
    types,
)
from mindspeed_kda.npu_kernels.wy_dqkg.gate import HV, INDEX, H
from mindspeed_kda.npu_kernels.wy_dqkg.specs import ZERO_TAIL, Stage

SEQUENCE_CHUNKS = 64
"""Chunks of the sequence on which the cost report counts a scan, whose states are read and written once."""


def raw(config: Config) -> Sizes:
    """A call that asks for everything: grouped heads, norm, softplus gate with bias, sigmoid, both states."""
    main = TRITON_TYPES[config.dtype]
    return Sizes(
        target="npu",
        main=main,
        g=main,
        beta=main,
        index=INDEX if config.packed else None,
        H=H,
        HV=HV,
        K=config.K,
        V=config.V,
        BT=config.BT,
        norm=True,
        gate=SOFTPLUS,
        bias=True,
        sigmoid=True,
        h0=True,
        ht=True,
        v_first=config.state_v_first,
    )


def plain(config: Config) -> Sizes:
    """A call that asks for nothing: equal head counts, q, k, decay and beta ready, no states."""
    return replace(
        raw(config), H=HV, g="fp32", norm=False, gate=PREGATED, bias=False, sigmoid=False, h0=False, ht=False
    )


def specs(config: Config, target: Target) -> Iterator[KernelSpec]:
    """Every kernel that ``plan`` launches for this configuration: all flags on, the other gate, and all flags off.

    The cost report counts one training step with all flags on that recomputes: the first of what follows."""
    full, bare = raw(config), plain(config)
    bounded = replace(full, gate=LOWER_BOUND, bias=False, H=HV)
    yield from step(full)
    yield _spec(bounded, "prepare", "lower bound", NORM=READ_NORM)
    yield _spec(bare, "prepare", "plain", NORM=0)
    yield _spec(bare, "intra", "plain")
    yield _spec(bare, "scan", "plain output", ("h", "v_new"), OUT=True, KEEP=False)
    yield _spec(bare, "scan_bwd", "plain")
    yield from (_spec(bare, "grads", f"plain {_part(f)}", **f) for f in pair_parts(bare))
    yield _spec(full, "scan", "output and states", OUT=True, KEEP=True)
    yield _spec(bounded, "grads", "lower bound columns", **pair_parts(bounded)[-1])
    if full.packed:
        for names in (FORWARD_OUTPUTS, BACKWARD_OUTPUTS):
            runtime = types(full)
            table = {**runtime, **{f"x{i}": runtime[n] for i, n in enumerate(names)}}
            yield _kernel_spec(ZERO_TAIL, table, tail_widths(full, names), f"{OP} {names[0]}")


def step(sizes: Sizes) -> Iterator[KernelSpec]:
    """The launches of one forward and one backward of a call that recomputes, in order, tails of packed calls aside."""
    specs = (
        _spec(sizes, "prepare", "forward", NORM=COMPUTE_NORM),
        _spec(sizes, "intra"),
        _spec(sizes, "scan", "output", ("h", "v_new"), OUT=True, KEEP=False),
        _spec(sizes, "prepare", "backward", NORM=READ_NORM),
        _spec(sizes, "scan", "states", ("o", "ht"), OUT=False, KEEP=True, HAS_HT=False),
        _spec(sizes, "scan_bwd"),
        _spec(sizes, "values"),
        _spec(sizes, "states"),
        *(_spec(sizes, "grads", _part(f), **f) for f in pair_parts(sizes)),
        *(_spec(sizes, stage) for stage in ("betas", "heads", "gate_sums")),
    )
    for spec in specs:
        chunks = SEQUENCE_CHUNKS if spec.stage in ("scan", "scan_bwd") else COST_CHUNKS
        rows = chunks * sizes.BT
        launch = {"T": rows, "NT": chunks, "R": rows, "n_chunks": chunks, "n_seqs": 1, "N": 1}
        yield replace(spec, scalars=tuple(launch.items()), per=chunks * HV)


def _part(flags: dict[str, bool]) -> str:
    return "rows" if flags["ROWS"] else "columns"


def _spec(sizes: Sizes, stage: str, variant: str = "", absent: tuple[str, ...] = (), **flags: int) -> KernelSpec:
    """``absent``: tensors that this launch does without."""
    runtime = types(sizes) | dict.fromkeys(absent)
    return _kernel_spec(STAGES[stage], runtime, constants(sizes, stage, **flags), variant)


def _kernel_spec(stage: Stage, runtime: dict[str, str | None], fixed: dict[str, object], variant: str) -> KernelSpec:
    values = {n: fixed.get(n) for n in stage.arguments if n in fixed or runtime.get(n) is None}
    signature = {n: CONSTEXPR if n in values else str(runtime[n]) for n in stage.arguments}
    return KernelSpec.of(OP, stage.name, f"{stage.module}:{stage.kernel_name}", signature, values, variant)
