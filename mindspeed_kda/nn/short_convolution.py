"""A causal depthwise convolution over a few tokens, then SiLU, in plain torch: dense, packed and step by step."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class ShortConvolution(nn.Conv1d):
    """``silu(sum_j weight_j * x_(t - W + 1 + j) + bias)`` per channel, W taps, from zeros or from a given state.

    Parameters, as in flash-linear-attention's layer of this name: ``weight`` [channels, 1, W], ``bias`` [channels] or
    absent.
    """

    def __init__(self, channels: int, taps: int = 4, bias: bool = False) -> None:
        super().__init__(channels, channels, taps, groups=channels, bias=bias)
        self.taps = taps

    def forward(  # type: ignore[override]
        self, x: Tensor, state: Tensor | None = None, cu_seqlens: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """x [B, T, channels] to the same, and the state after it: the last W - 1 inputs of each sequence.

        ``state`` [N, W - 1, channels], of an earlier call or None (zeros); N sequences: B, or those of ``cu_seqlens``
        [N+1], which packs them into B = 1. Tokens at or beyond ``cu_seqlens[-1]`` give values of no meaning. Nothing is
        read back from the device.
        """
        before = self.taps - 1
        if cu_seqlens is None:
            if state is None:
                state = x.new_zeros(x.shape[0], before, x.shape[2])
            padded = torch.cat((state.to(x.dtype), x), dim=1)
            return self._convolve(padded), padded[:, padded.shape[1] - before :].clone()
        # Packed: W - 1 slots before each sequence hold its state, so that no tap reaches into the one before it. A last
        # set of slots stands before the tokens that belong to no sequence.
        N, T = cu_seqlens.shape[0] - 1, x.shape[1]
        bounds = cu_seqlens.long()
        sequence = torch.searchsorted(bounds[1:].contiguous(), torch.arange(T, device=x.device), right=True)
        at_token = torch.arange(T, device=x.device) + (sequence + 1) * before
        slot = torch.arange(before, device=x.device)
        padded = x.new_zeros(1, T + (N + 1) * before, x.shape[2]).index_copy(1, at_token, x)
        if state is not None:
            at_state = (bounds[:-1] + torch.arange(N, device=x.device) * before).unsqueeze(1) + slot
            padded = padded.index_copy(1, at_state.flatten(), state.to(x.dtype).flatten(0, 1).unsqueeze(0))
        at_end = (bounds[1:] + torch.arange(N, device=x.device) * before).unsqueeze(1) + slot
        after = padded[0].index_select(0, at_end.flatten()).unflatten(0, (N, before))
        return self._convolve(padded).index_select(1, at_token - before), after

    def _convolve(self, padded: Tensor) -> Tensor:
        if padded.shape[1] < self.taps:  # no token
            return padded[:, :0]
        return F.silu(F.conv1d(padded.mT, self.weight, self.bias, groups=self.groups).mT)
