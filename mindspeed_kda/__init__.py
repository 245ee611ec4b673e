"""KDA (Kimi Delta Attention) that trains on Ascend NPUs, NVIDIA GPUs and CPUs behind one API.

Importing this package imports torch and nothing heavier.
"""

from mindspeed_kda.api import (
    chunk_kda,
    chunk_kda_bwd_wy_dqkg_fused,
    flash_attention,
    flash_attention_bwd,
    fused_recurrent_kda,
)
from mindspeed_kda.backends import register_builtin
from mindspeed_kda.contracts.flash_attention import FlashAttentionGrads
from mindspeed_kda.contracts.wy_dqkg import WyDqkgGrads
from mindspeed_kda.registry import REGISTRY, Backend, register_backend, use_backend

__version__ = "0.1.0"

__all__ = [
    "Backend",
    "FlashAttentionGrads",
    "WyDqkgGrads",
    "__version__",
    "chunk_kda",
    "chunk_kda_bwd_wy_dqkg_fused",
    "flash_attention",
    "flash_attention_bwd",
    "fused_recurrent_kda",
    "register_backend",
    "use_backend",
]

register_builtin(REGISTRY)
