"""Every test runs on hostile memory: what a kernel or a plan does not write is NaN. Tests of a device that is not here
are skipped with the reason, unless asked for by their marker (``-m gpu``): then they run and fail."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from mindspeed_kda.testing.memory import hostile_memory


@pytest.fixture(autouse=True)
def _hostile_memory() -> Iterator[None]:
    with hostile_memory():
        yield


def _is_here(device: str) -> bool:
    module = getattr(torch, device, None)
    return module is not None and bool(module.is_available())


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    asked = config.option.markexpr
    for marker, device, name in (("gpu", "cuda", "an NVIDIA GPU"), ("npu", "npu", "an Ascend NPU")):
        if marker in asked or _is_here(device):
            continue
        skip = pytest.mark.skip(reason=f"needs {name}")
        for item in items:
            if item.get_closest_marker(marker) is not None:  # keywords hold parameter ids and folder names too
                item.add_marker(skip)
