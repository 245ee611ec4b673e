"""Cases of ``chunk_kda``, forward and backward: 30 families x 3 dtypes x 3 draws, and error cases.

A family is what a kernel is compiled for (sizes, layout of the state, gate, transforms in the kernel); the draws of a
family vary what it is run on. Each draw comes from the case's own seed and depends on no other case.

usage: python -m tests.atk --write
"""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

if (root := str(Path(__file__).resolve().parents[3])) not in sys.path:  # ATK loads this file by its path
    sys.path.insert(0, root)

from tests.atk.chunk_kda_bwd_wy_dqkg_fused.gen_chunk_kda_bwd_wy_dqkg_fused import lengths_of
from tests.atk.plugin import LAYOUTS, register_generator
from tests.atk.records import Spec

OP = "chunk_kda"
SEED = 20260902
DTYPES = ("fp16", "bf16", "fp32")
DRAWS = 3
P, S, L = "pregated", "softplus", "lower_bound"
#    H  HV   K    V   BT  packed v_first gate  "n" q/k norm, "b" beta sigmoid, "2" neg. eigenvalues, "i" h0, "f" ht
FAMILIES = (
    (1, 1, 1, 1, 16, False, False, P, ""),
    (2, 2, 8, 8, 16, False, False, P, "f"),
    (1, 2, 16, 16, 16, True, False, S, "nb"),
    (2, 2, 17, 15, 16, True, False, P, "if"),
    (1, 3, 32, 32, 16, False, True, L, "nbif"),
    (2, 2, 64, 64, 16, False, False, L, "nb"),
    (1, 1, 64, 64, 16, True, True, P, "nb2if"),
    (1, 1, 128, 128, 16, False, False, P, ""),
    (2, 2, 8, 24, 32, False, False, S, "nb"),
    (2, 4, 16, 16, 32, True, False, L, "nb2"),
    (1, 2, 33, 31, 32, False, False, P, "nif"),
    (2, 2, 64, 32, 32, False, True, S, "nbf"),
    (1, 1, 64, 64, 32, True, False, L, "nbif"),
    (1, 1, 96, 80, 32, False, False, P, "b"),
    (2, 2, 128, 128, 32, False, False, L, "nb"),
    (1, 1, 128, 64, 32, True, False, P, ""),
    (1, 1, 1, 2, 64, False, False, S, "b"),
    (2, 2, 4, 4, 64, True, False, P, "nif"),
    (1, 2, 16, 48, 64, False, False, L, "nb"),
    (1, 1, 40, 24, 64, False, True, P, "i"),
    (2, 4, 64, 64, 64, False, False, S, "nb"),
    (2, 2, 64, 64, 64, True, False, P, ""),
    (1, 2, 65, 63, 64, False, False, L, "nb2f"),
    (1, 1, 100, 100, 64, True, False, S, "nbif"),
    (2, 2, 128, 128, 64, False, False, L, "nb"),
    (2, 2, 128, 128, 64, False, False, P, ""),
    (1, 3, 128, 128, 64, True, False, S, "nb"),
    (1, 1, 128, 128, 64, False, True, L, "nbif"),
    (1, 1, 128, 256, 64, False, False, P, "f"),
    (1, 1, 256, 256, 64, True, False, L, "nb"),
)


def draw(case_id: int, family: tuple[Any, ...], main: str) -> Spec:
    H, HV, K, V, BT, packed, v_first, gate, flags = family
    rng = random.Random(SEED + case_id)
    lengths = lengths_of(rng, BT) if packed else None
    if lengths is None:
        B, T = rng.choice((1, 1, 2)), rng.choice((1, 17, BT - 1, BT, BT + 1, 2 * BT, 3 * BT - 1))
    else:
        B, T = 1, sum(lengths) + rng.choice((0, 0, 5))
    return {
        "case_id": case_id,
        "case_key": f"{main}_h{H}x{HV}_k{K}_v{V}_bt{BT}_{gate}_{flags}_" + ("packed" if packed else f"t{T}"),
        "seed": SEED + case_id,
        "dtype": main,
        "g_dtype": rng.choice((main, "fp32")),
        "beta_dtype": rng.choice((main, main, "fp32")),
        "B": B,
        "T": T,
        "H": H,
        "HV": HV,
        "K": K,
        "V": V,
        "chunk_size": BT,
        "lengths": lengths,
        "cu_dtype": rng.choice(("int32", "int64")),
        "state_v_first": v_first,
        "gate": gate,
        "decay": rng.choice((None, None, -0.05, -1.0, -5.0)),
        "dt_bias": rng.choice((True, True, False)),
        "qk_l2norm": "n" in flags,
        "beta_sigmoid": "b" in flags,
        "allow_neg_eigval": "2" in flags,
        "initial_state": "i" in flags,
        "output_final_state": "f" in flags,
        "scale": rng.choice((None, None, 1.0, 0.05)),
        "layout": rng.choice((*["contiguous"] * 3, *LAYOUTS[1:])),
    }


def accuracy() -> list[Spec]:
    """All shapes; draws of one family and dtype stand together, so that a run compiles for them once."""
    pairs = [(family, main) for family in FAMILIES for main in DTYPES for _ in range(DRAWS)]
    return [draw(i, family, main) for i, (family, main) in enumerate(pairs)]


BASE = {"B": 2, "T": 20, "H": 2, "HV": 2, "K": 8, "V": 8, "chunk_size": 16, "layout": "contiguous", "scale": None}
BASE |= {"dtype": "bf16", "g_dtype": "fp32", "beta_dtype": "bf16", "lengths": None, "cu_dtype": "int32"}
BASE |= {"state_v_first": False, "decay": None, "gate": P, "dt_bias": True, "qk_l2norm": False, "beta_sigmoid": False}
BASE |= {"allow_neg_eigval": False, "initial_state": False, "output_final_state": False}
PACKED, GATED, STATE = {"B": 1, "lengths": [5, 15]}, {"gate": S}, {"initial_state": True}
VE, TE, NI = "ValueError", "TypeError", "NotImplementedError"
#    key, changes of the base, the broken argument, exception, expected message
ERRORS: tuple[tuple[str, Spec, Spec, str, str], ...] = (
    ("q_rank", {}, {"argument": "q", "drop": 0}, VE, "q: expected 4 dimensions [B, T, H, K], got 3"),
    ("q_none", {}, {"argument": "q", "value": None}, TE, "q: expected a torch.Tensor, got NoneType"),
    ("q_integer", {}, {"argument": "q", "dtype": "int32"}, TE, "q: expected dtype float16 or bfloat16 or float32"),
    ("k_shape", {}, {"argument": "k", "shape": [2, 20, 1, 8]}, VE, "k: expected shape [B, T, H, K] = [2, 20, 2, 8]"),
    ("k_dtype", {}, {"argument": "k", "dtype": "fp16"}, TE, "k: expected dtype bfloat16, got float16"),
    ("v_heads", {}, {"argument": "v", "shape": [2, 20, 3, 8]}, VE, "v: expected HV to be a positive multiple of H = 2"),
    ("v_tokens", {}, {"argument": "v", "shape": [2, 21, 2, 8]}, VE, "v: expected shape [B, T, HV, V]"),
    ("g_shape", {}, {"argument": "g", "shape": [2, 20, 2, 4]}, VE, "g: expected shape [B, T, HV, K]"),
    ("g_dtype", {}, {"argument": "g", "dtype": "fp16"}, TE, "g: expected dtype float32 or bfloat16, got float16"),
    ("beta_rank", {}, {"argument": "beta", "drop": 0}, VE, "beta: expected 3 dimensions [B, T, HV], got 2"),
    ("beta_dtype", {}, {"argument": "beta", "dtype": "fp16"}, TE, "beta: expected dtype float32 or bfloat16"),
    ("head_size", {}, {"argument": "v", "shape": [2, 20, 2, 257]}, VE, "v: expected V from 1 to 256, got 257"),
    ("chunk_size_48", {}, {"argument": "chunk_size", "value": 48}, VE, "chunk_size: expected 16, 32, 64, got 48"),
    ("chunk_size_text", {}, {"argument": "chunk_size", "value": "64"}, TE, "chunk_size: expected an int, got str"),
    ("scale_text", {}, {"argument": "scale", "value": "1"}, TE, "scale: expected a float or None, got str"),
    ("flag_number", {}, {"argument": "output_final_state", "value": 1}, TE, "output_final_state: expected True"),
    ("A_log_missing", GATED, {"argument": "A_log", "value": None}, VE, "A_log: expected a tensor [HV]"),
    ("A_log_shape", GATED, {"argument": "A_log", "shape": [3]}, VE, "A_log: expected shape [HV] = [2], got [3]"),
    ("A_log_dtype", GATED, {"argument": "A_log", "dtype": "bf16"}, TE, "A_log: expected dtype float32, got bfloat16"),
    ("dt_bias_shape", GATED, {"argument": "dt_bias", "shape": [15]}, VE, "dt_bias: expected shape [HV, K] or [HV * K]"),
    ("dt_bias_dtype", GATED, {"argument": "dt_bias", "dtype": "bf16"}, TE, "dt_bias: expected dtype float32"),
    ("bound_positive", GATED, {"argument": "lower_bound", "value": 5.0}, VE, "lower_bound: expected a finite number"),
    ("bound_text", GATED, {"argument": "lower_bound", "value": "-5"}, TE, "lower_bound: expected a float or None"),
    ("bound_alone", {}, {"argument": "lower_bound", "value": -5.0}, VE, "lower_bound: expected None without"),
    ("safe_gate_unbounded", GATED, {"argument": "safe_gate", "value": True}, VE,
     "lower_bound: expected a number below 0 with safe_gate"),
    ("state_shape", STATE, {"argument": "initial_state", "shape": [1, 2, 8, 8]}, VE,
     "initial_state: expected shape [N, HV, K, V] = [2, 2, 8, 8]"),
    ("state_dtype", STATE, {"argument": "initial_state", "dtype": "bf16"}, TE,
     "initial_state: expected dtype float32, got bfloat16"),
    ("device", {}, {"argument": "v", "device": "meta"}, VE, "v: expected device"),
    ("packed_batch", {}, {"argument": "cu_seqlens", "ints": [0, 20]}, VE, "cu_seqlens: expected B = 1"),
    ("cu_start", PACKED, {"argument": "cu_seqlens", "ints": [2, 20]}, VE, "cu_seqlens: expected to start at 0"),
    ("cu_order", PACKED, {"argument": "cu_seqlens", "ints": [0, 9, 5]}, VE, "cu_seqlens: expected non-decreasing"),
    ("cu_end", PACKED, {"argument": "cu_seqlens", "ints": [0, 30]}, VE, "cu_seqlens: expected to end within T = 20"),
    ("context_parallel", {}, {"argument": "cp_context", "value": 1}, NI, "cp_context: expected None, got 1"),
    ("intermediate_states", {}, {"argument": "return_intermediate_states", "value": True}, NI,
     "return_intermediate_states: expected False, got True"),
    ("unknown_keyword", {}, {"argument": "head_first", "value": True}, TE, "unexpected keyword argument 'head_first'"),
    ("backend_unknown", {}, {"argument": "backend", "value": "abacus"}, VE, "backend: expected one of"),
)  # fmt: skip


def negative() -> list[Spec]:
    """Wrong calls, with the exception and a part of its message."""
    out = []
    for i, (key, changes, broken, exception, message) in enumerate(ERRORS):
        spec = {**BASE, **changes, "case_id": i, "seed": SEED + 20_000 + i, "case_key": f"negative_{key}"}
        out.append(spec | {"broken": broken, "expected_exception": exception, "expected_message": message})
    return out


register_generator(OP, accuracy)
