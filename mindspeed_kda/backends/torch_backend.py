"""Backend ``torch``: the reference, on any device and in any float dtype."""

from __future__ import annotations

from typing import Any

from mindspeed_kda.contracts import wy_dqkg
from mindspeed_kda.registry import ANY_DEVICE, Backend, Registry

NAME = "torch"


def _load_wy_dqkg() -> Any:
    from mindspeed_kda.reference.wy_dqkg import wy_dqkg as run

    return run


def register(registry: Registry) -> None:
    registry.register(
        Backend(wy_dqkg.OP, NAME, supports=lambda call: None, load=_load_wy_dqkg, priority={ANY_DEVICE: 0})
    )
