"""The measured figures of docs/kda_math.md, sections 8, 9 and 11: prints each table that stands there.

    python benchmarks/math_facts.py            # about a minute on one core
    python benchmarks/math_facts.py --json

CPU only, fixed seeds; the last digit may differ from one BLAS to another.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mindspeed_kda import chunk_kda
from mindspeed_kda.reference.chunk_space import GROUPINGS, LOG2E, chunk_space_backward
from mindspeed_kda.reference.intra import decayed_products
from mindspeed_kda.testing.kda_inputs import kda_inputs
from mindspeed_kda.testing.metrics import measure
from mindspeed_kda.testing.oracle import gradients, judge

DECAYS = (-0.05, -1.0, -5.0)


def to_bfloat16(x: Tensor) -> Tensor:
    return x.bfloat16().float()


def groupings() -> list[dict[str, Any]]:
    """Section 8: RMS ratio of da, K = V = 128, T = 128, float32 arithmetic."""

    def exact(x: Tensor) -> Tensor:
        return x

    rows: list[tuple[str, str, Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = [
        *((grouping, "float32", exact, exact) for grouping in GROUPINGS),
        *((grouping, "bfloat16", to_bfloat16, exact) for grouping in GROUPINGS),
        ("stable", "bfloat16, and between K2 and K1", to_bfloat16, to_bfloat16),
    ]
    table: list[dict[str, Any]] = [{"grouping": grouping, "operands": operands} for grouping, operands, _, _ in rows]
    for decay in DECAYS:
        inputs = kda_inputs(T=128, H=1, K=128, V=128, BT=16, decay=decay, raw=False)
        x, dht = inputs.arguments, inputs.dht
        assert dht is not None
        args = [*(x[n][0, :, 0] for n in ("q", "k", "v", "g")), x["beta"][0], x["initial_state"][0, 0]]
        expected = judge(*inputs)["dg"]
        for (grouping, _, store, between), line in zip(rows, table, strict=True):
            da = chunk_space_backward(
                *args, inputs.do[0, :, 0], dht[0, 0], 128**-0.5,
                grouping=grouping, store=store, store_between=between,
            ).da  # fmt: skip
            line[f"a = {decay}"] = measure(da.view(expected.shape), expected, torch.bfloat16).rms_ratio
    return table


def hazards() -> dict[str, float]:
    """Section 9: one head, 64 rows at a = -5 a token, K = 128, float32."""
    gen = torch.Generator().manual_seed(0)
    q, k = (F.normalize(torch.randn(64, 128, generator=gen), dim=-1) for _ in range(2))
    a = torch.full((64, 128), -5.0 * LOG2E)
    g = a.cumsum(0)
    one_anchor = ((q * torch.exp2(g)) @ (k * torch.exp2(-g)).T).tril()
    pairs = g[:, None] - g[None, :]
    lower = torch.ones(64, 64).tril()
    masked_late = (torch.exp2(pairs) * lower[..., None] * q[:, None] * k[None]).sum(-1)
    g64 = a.double().cumsum(0)
    E = torch.exp2(torch.where(lower.bool()[..., None], g64[:, None] - g64[None, :], -torch.inf))
    exact = torch.einsum("ik,jk,ijk->ij", q.double(), k.double(), E).tril(-1)
    (halved,) = decayed_products([q], k, a)
    from_cumsum = torch.einsum(
        "ik,jk,ijk->ij", q, k, torch.exp2(torch.where(lower.bool()[..., None], pairs, -torch.inf))
    )
    h, dh = (torch.randn(64, 128, generator=gen).bfloat16() for _ in range(2))
    product = (h.double() * dh.double()).sum(-1)
    running = torch.zeros(64, dtype=torch.bfloat16)
    for column in (h * dh).unbind(-1):
        running = running + column
    wide = (h.float() * dh.float()).sum(-1)

    def ratio(got: Tensor, reference: Tensor) -> float:
        return measure(got, reference, torch.float32).rms_ratio

    return {
        "one anchor: entries of 4096 that are not finite": int((~torch.isfinite(one_anchor)).sum()),
        "masked after exp2: entries that are NaN": int(torch.isnan(masked_late).sum()),
        "halving, sums of decays: RMS ratio": ratio(halved, exact),
        "differences of a float32 cumsum: RMS ratio": ratio(from_cumsum.tril(-1), exact),
        "sum of h * dh, bfloat16 in, float32 sum: RMS ratio": ratio(wide, product),
        "sum of h * dh, bfloat16 in, bfloat16 running sum: RMS ratio": ratio(running, product),
    }


def agreement() -> dict[str, float]:
    """Section 11: largest RMS ratio of each quantity against the token recurrence, float64."""
    largest: dict[str, float] = {}
    small: dict[str, Any] = {"T": 75, "H": 1, "HV": 2, "K": 8, "V": 12, "dtype": torch.float64}
    packed: dict[str, Any] = {"T": 133, "lengths": [0, 65, 1, 0, 63]}
    for strength, gates in (
        ("moderate", ({}, {"gate": "softplus"}, {"gate": "lower_bound", "neg_eigval": True})),
        ("strong", ({"decay": -5.0}, {"decay": -10.0}, {"gate": "lower_bound", "decay": -5.0})),
    ):
        for gate in gates:
            for lengths in ({}, packed):
                inputs = kda_inputs(**{**small, **gate, **lengths})
                expected = judge(*inputs)
                for BT in (16, 32, 64):
                    got = gradients(chunk_kda, {**inputs.arguments, "chunk_size": BT}, inputs.do, inputs.dht)
                    for name, reference in expected.items():
                        key = name if name in ("o", "final_state") else f"gradients, {strength} decay"
                        error = measure(got[name], reference, torch.float64).rms_ratio
                        largest[key] = max(largest.get(key, 0.0), error)
    return largest


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    facts = {"section 8": groupings(), "section 9": hazards(), "section 11": agreement()}
    if args.json:
        print(json.dumps(facts))
        return 0
    print("section 8: RMS ratio of da by grouping")
    for line in facts["section 8"]:
        figures = "  ".join(f"{line[f'a = {d}']:.1e}" for d in DECAYS)
        print(f"  {line['grouping']:<11} {line['operands']:<32} {figures}")
    for section in ("section 9", "section 11"):
        print(section)
        for name, value in facts[section].items():
            print(f"  {name}: {value if isinstance(value, int) else format(value, '.1e')}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
