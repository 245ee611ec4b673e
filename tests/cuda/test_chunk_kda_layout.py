"""Images and tiles of the native kernels' workspace, against their plain order."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mindspeed_kda.contracts import chunk_kda as contract
from mindspeed_kda.cuda_kernels.chunk_kda import layout
from mindspeed_kda.testing.kda_inputs import kda_inputs


@pytest.mark.parametrize("options", [{"B": 2, "T": 130}, {"T": 200, "lengths": [65, 0, 64, 3, 66]}], ids=str)
def test_there_and_back(options: dict[str, Any]) -> None:
    c = contract.check(**kda_inputs(H=1, HV=2, dtype=torch.float16, **options).arguments)
    v_new = c.v.clone()
    used = v_new.shape[1] if c.cu_seqlens is None else int(c.cu_seqlens[-1])
    v_new[:, used:] = 0
    tiles = layout.tiles(c, v_new)
    assert tiles.shape == (layout.num_chunks(c), c.HV, 64, c.V)
    assert torch.equal(layout.tokens(c, tiles), v_new)
    first = layout.image(tiles)[0]
    assert torch.equal(first.transpose(0, 1), v_new[0, :64])
    h = torch.randn(c.B, c.NT, c.HV, c.K, c.V).half()
    images = layout.state_images(c, h)
    assert images.shape[0] == layout.num_chunks(c)
    assert torch.equal(layout.states(c, images), h)


def test_a_piece_lies_where_shared_memory_has_it() -> None:
    x = torch.arange(2 * 64 * 128).view(2, 64, 128).half()
    got = layout.image(x)
    for row, piece in ((0, 0), (1, 0), (9, 3), (63, 15)):
        at = 8 * (8 * (piece // 8) + (piece % 8 ^ row % 8))
        assert torch.equal(got[1, row, at : at + 8], x[1, row, 8 * piece : 8 * piece + 8])
    assert torch.equal(layout.image(got), x)
