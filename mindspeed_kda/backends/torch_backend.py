"""Backend ``torch``: the reference, on any device and in any float dtype."""

from __future__ import annotations

from typing import Any

from mindspeed_kda.contracts import chunk_kda, flash_attention, fused_recurrent_kda, wy_dqkg
from mindspeed_kda.registry import ANY_DEVICE, Backend, Registry

NAME = "torch"


def _load_wy_dqkg() -> Any:
    from mindspeed_kda.reference.wy_dqkg import wy_dqkg as run

    return run


def _load_chunk_kda() -> Any:
    from mindspeed_kda.reference import chunk_kda as run

    return run


def _load_fused_recurrent_kda() -> Any:
    from mindspeed_kda.reference.fused_recurrent_kda import fused_recurrent_kda as run

    return run


def _load_flash_attention() -> Any:
    from mindspeed_kda.reference import flash_attention as run

    return run


def register(registry: Registry) -> None:
    for op, load in (
        (wy_dqkg.OP, _load_wy_dqkg),
        (chunk_kda.OP, _load_chunk_kda),
        (fused_recurrent_kda.OP, _load_fused_recurrent_kda),
        (flash_attention.OP, _load_flash_attention),
    ):
        registry.register(Backend(op, NAME, supports=lambda call: None, load=load, priority={ANY_DEVICE: 0}))
