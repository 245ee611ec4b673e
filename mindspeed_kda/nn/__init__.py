"""Layers on the public functions, for those who import them: ``from mindspeed_kda.nn import KimiDeltaAttention``."""

from mindspeed_kda.nn.kimi_delta_attention import KdaState, KimiDeltaAttention
from mindspeed_kda.nn.norm import GatedRMSNorm
from mindspeed_kda.nn.short_convolution import ShortConvolution

__all__ = ["GatedRMSNorm", "KdaState", "KimiDeltaAttention", "ShortConvolution"]
