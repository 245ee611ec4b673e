"""Cases of ``chunk_kda_bwd_wy_dqkg_fused``: 42 shape families x 5 dtype pairs x 3 draws, error cases, the model shape.

A family is what a kernel is compiled for; the draws of a family vary what it is run on: batch, length or packing,
decay, scale, strides, magnitude. Each draw comes from the case's own seed and depends on no other case.

usage: python -m tests.atk --write
"""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

if (root := str(Path(__file__).resolve().parents[3])) not in sys.path:  # ATK loads this file by its path
    sys.path.insert(0, root)

from tests.atk.plugin import LAYOUTS, register_generator
from tests.atk.records import Spec

OP = "chunk_kda_bwd_wy_dqkg_fused"
SEED = 20260901
DTYPE_PAIRS = (("fp16", "fp32"), ("bf16", "fp32"), ("fp32", "fp32"), ("bf16", "bf16"), ("fp16", "fp16"))
"""Main dtype and dtype of h and dh."""
DRAWS = 3
#    H  HV   K    V   BT  packed v_first
FAMILIES = (
    (1, 1, 1, 1, 16, False, False),
    (1, 1, 2, 7, 16, False, False),
    (2, 2, 7, 5, 16, True, False),
    (2, 4, 16, 16, 16, False, True),
    (1, 3, 15, 17, 16, True, False),
    (2, 2, 32, 32, 16, False, False),
    (1, 2, 33, 31, 16, True, True),
    (2, 2, 64, 64, 16, False, False),
    (1, 1, 64, 64, 16, True, False),
    (1, 2, 65, 63, 16, False, False),
    (2, 2, 128, 128, 16, False, False),
    (1, 1, 128, 128, 16, True, True),
    (1, 1, 256, 256, 16, False, False),
    (1, 1, 1, 16, 32, True, False),
    (3, 3, 8, 8, 32, False, False),
    (2, 6, 16, 24, 32, False, False),
    (1, 2, 31, 33, 32, False, True),
    (2, 2, 32, 64, 32, True, False),
    (2, 2, 64, 32, 32, False, False),
    (1, 4, 64, 64, 32, True, True),
    (1, 1, 80, 96, 32, False, False),
    (2, 2, 128, 64, 32, False, False),
    (2, 2, 128, 128, 32, True, False),
    (1, 1, 192, 160, 32, False, True),
    (1, 1, 256, 128, 32, False, False),
    (1, 1, 1, 2, 64, False, False),
    (2, 2, 4, 4, 64, True, False),
    (1, 2, 16, 16, 64, False, False),
    (2, 2, 24, 40, 64, False, True),
    (1, 1, 33, 65, 64, True, False),
    (2, 4, 48, 48, 64, False, False),
    (2, 2, 64, 64, 64, False, False),
    (2, 2, 64, 64, 64, True, False),
    (1, 3, 64, 128, 64, False, True),
    (1, 1, 100, 100, 64, False, False),
    (1, 2, 127, 129, 64, True, False),
    (2, 2, 128, 128, 64, False, False),
    (2, 2, 128, 128, 64, True, False),
    (2, 2, 128, 128, 64, False, True),
    (1, 4, 128, 128, 64, True, True),
    (1, 1, 128, 256, 64, False, False),
    (1, 1, 256, 256, 64, True, False),
)


def lengths_of(rng: random.Random, BT: int) -> list[int]:
    """Packed sequences: empty ones, tails of every kind, single tokens."""
    return rng.choice(
        (
            [0, BT + 1, 1, BT - 1],
            [1, 1, 1],
            [2 * BT, 0, 17],
            [BT, BT],
            [3, 0, 0, BT + 5, 2],
            [BT // 2, 2 * BT - 1],
            [0, 15, 16, 17],
        )
    )


def draw(case_id: int, family: tuple[Any, ...], pair: tuple[str, str]) -> Spec:
    H, HV, K, V, BT, packed, v_first = family
    main, state = pair
    rng = random.Random(SEED + case_id)
    lengths = lengths_of(rng, BT) if packed else None
    if lengths is None:
        B, T = rng.choice((1, 1, 2, 3)), rng.choice((1, 15, 17, BT - 1, BT, BT + 1, 2 * BT, 2 * BT + 3, 3 * BT - 1))
    else:
        B, T = 1, sum(lengths) + rng.choice((0, 0, 5))
    decay = rng.choice((None, None, -0.05, -1.0, -5.0, "as given"))
    return {
        "case_id": case_id,
        "case_key": f"{main}_{state}_h{H}x{HV}_k{K}_v{V}_bt{BT}_" + ("packed" if packed else f"t{T}"),
        "seed": SEED + case_id,
        "dtype": main,
        "state_dtype": state,
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
        "chunk_indices": packed and rng.random() < 0.5,
        "state_v_first": v_first,
        "decay": None if decay == "as given" else decay,
        "cumsum": decay != "as given",
        "scale": rng.choice((None, None, None, 1.0, 0.05)),
        "layout": rng.choice((*["contiguous"] * 3, *LAYOUTS[1:])),
        "magnitude": rng.choice((1.0, 1.0, 1.0, 2.0**-6, 4.0)),
    }


def accuracy() -> list[Spec]:
    """All shapes; draws of one family and dtype pair stand together, so that a run compiles for them once."""
    pairs = [(family, pair) for family in FAMILIES for pair in DTYPE_PAIRS for _ in range(DRAWS)]
    return [draw(i, family, pair) for i, (family, pair) in enumerate(pairs)]


def model() -> list[Spec]:
    """The training shape, kept apart: held to the RMS ratio, not to the dual benchmark (docs of the op)."""
    out = []
    for i, (main, state) in enumerate(DTYPE_PAIRS):
        spec = draw(0, (32, 32, 128, 128, 64, False, False), (main, state))
        spec |= {"case_id": i, "seed": SEED + 10_000 + i, "B": 1, "T": 2048, "beta_dtype": main, "layout": "contiguous"}
        spec |= {"decay": None, "cumsum": True, "scale": None, "magnitude": 1.0}
        out.append(spec | {"case_key": f"{main}_{state}_training_shape"})
    return out


BASE = {"B": 2, "T": 20, "H": 2, "HV": 2, "K": 8, "V": 8, "chunk_size": 16, "layout": "contiguous", "magnitude": 1.0}
BASE |= {"dtype": "fp16", "state_dtype": "fp32", "beta_dtype": "fp16", "lengths": None, "cu_dtype": "int32"}
BASE |= {"chunk_indices": False, "state_v_first": False, "decay": None, "cumsum": True, "scale": None}
PACKED = {"B": 1, "lengths": [5, 15]}
VE, TE = "ValueError", "TypeError"
#    key, changes of the base, the broken argument, exception, expected message
ERRORS: tuple[tuple[str, Spec, Spec, str, str], ...] = (
    ("q_rank", {}, {"argument": "q", "drop": 0}, VE, "q: expected 4 dimensions [B, T, H, K], got 3"),
    ("q_none", {}, {"argument": "q", "value": None}, TE, "q: expected a torch.Tensor, got NoneType"),
    ("q_list", {}, {"argument": "q", "value": [1.0]}, TE, "q: expected a torch.Tensor, got list"),
    ("q_integer", {}, {"argument": "q", "dtype": "int32"}, TE, "q: expected dtype float16 or bfloat16 or float32"),
    ("k_shape", {}, {"argument": "k", "shape": [2, 20, 2, 9]}, VE, "k: expected shape [B, T, H, K] = [2, 20, 2, 8]"),
    ("k_dtype", {}, {"argument": "k", "dtype": "bf16"}, TE, "k: expected dtype float16, got bfloat16"),
    ("k_rank", {}, {"argument": "k", "drop": 2}, VE, "k: expected 4 dimensions"),
    ("v_rank", {}, {"argument": "v", "drop": 1}, VE, "v: expected 4 dimensions [B, T, HV, V], got 3"),
    ("v_tokens", {}, {"argument": "v", "shape": [2, 19, 2, 8]}, VE, "v: expected shape [B, T, HV, V] = [2, 20, 2, 8]"),
    ("v_heads", {}, {"argument": "v", "shape": [2, 20, 3, 8]}, VE, "v: expected HV to be a positive multiple of H = 2"),
    ("v_dtype", {}, {"argument": "v", "dtype": "fp32"}, TE, "v: expected dtype float16, got float32"),
    ("v_new_shape", {}, {"argument": "v_new", "shape": [2, 20, 2, 4]}, VE, "v_new: expected shape [B, T, HV, V]"),
    ("v_new_dtype", {}, {"argument": "v_new", "dtype": "fp32"}, TE, "v_new: expected dtype float16, got float32"),
    ("g_half", {}, {"argument": "g", "dtype": "fp16"}, TE, "g: expected dtype float32, got float16"),
    ("g_shape", {}, {"argument": "g", "shape": [2, 20, 1, 8]}, VE, "g: expected shape [B, T, HV, K]"),
    ("g_rank", {}, {"argument": "g", "drop": 3}, VE, "g: expected 4 dimensions [B, T, HV, K], got 3"),
    ("beta_rank", {}, {"argument": "beta", "drop": 2}, VE, "beta: expected 3 dimensions [B, T, HV], got 2"),
    ("beta_shape", {}, {"argument": "beta", "shape": [2, 20, 4]}, VE, "beta: expected shape [B, T, HV]"),
    ("beta_dtype", {}, {"argument": "beta", "dtype": "bf16"}, TE, "beta: expected dtype float32 or float16"),
    ("A_rank", {}, {"argument": "A", "drop": 0}, VE, "A: expected 4 dimensions [B, T, HV, BT], got 3"),
    ("A_shape", {}, {"argument": "A", "shape": [2, 21, 2, 16]}, VE, "A: expected shape [B, T, HV, BT]"),
    ("A_dtype", {}, {"argument": "A", "dtype": "fp32"}, TE, "A: expected dtype float16, got float32"),
    ("A_chunk", {}, {"argument": "A", "shape": [2, 20, 2, 32]}, VE, "chunk_size: expected A.shape[-1] = 32, got 16"),
    ("do_shape", {}, {"argument": "do", "shape": [1, 20, 2, 8]}, VE, "do: expected shape [B, T, HV, V]"),
    ("do_dtype", {}, {"argument": "do", "dtype": "bf16"}, TE, "do: expected dtype float16, got bfloat16"),
    ("dv_shape", {}, {"argument": "dv", "shape": [2, 20, 2, 16]}, VE, "dv: expected shape [B, T, HV, V]"),
    ("dv_dtype", {}, {"argument": "dv", "dtype": "fp32"}, TE, "dv: expected dtype float16, got float32"),
    ("h_rank", {}, {"argument": "h", "drop": 0}, VE, "h: expected 5 dimensions [B, NT, HV, K, V], got 4"),
    ("h_chunks", {}, {"argument": "h", "shape": [2, 1, 2, 8, 8]}, VE, "h: expected shape [B, NT, HV, K, V] = [2, 2, 2"),
    ("h_order", {"V": 4}, {"argument": "h", "shape": [2, 2, 2, 4, 8]}, VE, "h: expected shape [B, NT, HV, K, V]"),
    ("h_order_v_first", {"V": 4, "state_v_first": True}, {"argument": "h", "shape": [2, 2, 2, 8, 4]}, VE,
     "h: expected shape [B, NT, HV, V, K]"),
    ("h_dtype", {}, {"argument": "h", "dtype": "bf16"}, TE, "h: expected dtype float32 or float16, got bfloat16"),
    ("dh_shape", {}, {"argument": "dh", "shape": [2, 2, 2, 8, 9]}, VE, "dh: expected shape [B, NT, HV, K, V]"),
    ("dh_unlike_h", {}, {"argument": "dh", "dtype": "fp16"}, TE, "dh: expected h's dtype float32, got float16"),
    ("scale_text", {}, {"argument": "scale", "value": "1"}, TE, "scale: expected a float or None, got str"),
    ("chunk_size_48", {}, {"argument": "chunk_size", "value": 48}, VE, "chunk_size: expected 16, 32, 64, got 48"),
    ("chunk_size_64", {}, {"argument": "chunk_size", "value": 64}, VE, "chunk_size: expected A.shape[-1] = 16, got 64"),
    ("chunk_size_float", {}, {"argument": "chunk_size", "value": 16.0}, TE, "chunk_size: expected an int, got float"),
    ("v_first_text", {}, {"argument": "state_v_first", "value": "yes"}, TE, "state_v_first: expected True or False"),
    ("head_size", {"K": 8}, {"argument": "q", "shape": [2, 20, 2, 257]}, VE, "q: expected K from 1 to 256, got 257"),
    ("device", {}, {"argument": "k", "device": "meta"}, VE, "k: expected device"),
    ("packed_batch", {}, {"argument": "cu_seqlens", "ints": [0, 20]}, VE,
     "cu_seqlens: expected B = 1 with packed sequences, got B = 2"),
    ("cu_start", PACKED, {"argument": "cu_seqlens", "ints": [1, 5, 20]}, VE, "cu_seqlens: expected to start at 0"),
    ("cu_order", PACKED, {"argument": "cu_seqlens", "ints": [0, 9, 5]}, VE, "cu_seqlens: expected non-decreasing"),
    ("cu_end", PACKED, {"argument": "cu_seqlens", "ints": [0, 5, 21]}, VE,
     "cu_seqlens: expected to end within T = 20, got 21"),
    ("cu_rank", PACKED, {"argument": "cu_seqlens", "ints": [[0, 20]]}, VE, "cu_seqlens: expected 1 dimensions [N+1]"),
    ("cu_float", PACKED, {"argument": "cu_seqlens", "dtype": "fp32"}, TE, "cu_seqlens: expected dtype int32 or int64"),
    ("indices_without_cu", {}, {"argument": "chunk_indices", "ints": [[0, 0]]}, VE,
     "chunk_indices: expected None without cu_seqlens"),
    ("indices_shape", PACKED, {"argument": "chunk_indices", "ints": [[0], [1]]}, VE,
     "chunk_indices: expected shape [NT, 2]"),
    ("indices_stray", PACKED, {"argument": "chunk_indices", "ints": [[0, 0], [1, 3]]}, VE,
     "chunk_indices: expected each (sequence, chunk) of cu_seqlens once, got (1, 3)"),
    ("indices_twice", PACKED, {"argument": "chunk_indices", "ints": [[0, 0], [0, 0]]}, VE,
     "chunk_indices: expected each (sequence, chunk) of cu_seqlens once, got (0, 0) twice"),
    ("backend_unknown", {}, {"argument": "backend", "value": "abacus"}, VE, "backend: expected one of"),
    ("backend_number", {}, {"argument": "backend", "value": 3}, TE, "backend: expected the name of a backend or None"),
)  # fmt: skip


def negative() -> list[Spec]:
    """Wrong calls, with the exception and a part of its message."""
    out = []
    for i, (key, changes, broken, exception, message) in enumerate(ERRORS):
        spec = {**BASE, **changes, "case_id": i, "seed": SEED + 20_000 + i, "case_key": f"negative_{key}"}
        out.append(spec | {"broken": broken, "expected_exception": exception, "expected_message": message})
    return out


register_generator(OP, accuracy)
