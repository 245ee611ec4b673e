"""Which rounding to bfloat16 costs dbeta of the Triton step how much: its stages in float64 with chosen roundings.

    python benchmarks/dbeta_roundings.py                        # under a minute on one core
    python benchmarks/dbeta_roundings.py --cases "T 64" --heads 8 --seeds 3

Per accuracy case (``testing/kda_cases.py``) the RMS ratio of dbeta against the float64 reference with every operand
rounded that the kernels round: for db as the sum of its parts (npu_kernels/chunk_kda/betas.py), for db = Y . v_new / b,
and for the sum of parts with one rounding only. CPU only.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import sys
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from mindspeed_kda.testing.kda_cases import CASES, judged
from mindspeed_kda.testing.kda_inputs import KdaInputs
from mindspeed_kda.testing.metrics import measure

ROUNDED = ("A", "Aqk", "qg", "kg", "kr", "h", "c", "v_new", "dh", "dv", "Y", "D")
"""Operands that the kernels keep in the main dtype; c is b * (v - kg h) before A, dv the gradient of v_new."""
DEFAULT = ("T 15", "T 63", "T 64", "gate -0.05", "gate -1", "gate -5", "gate softplus", "size 256", "chunk 16")


class Chunk(NamedTuple):
    """One chunk and value head: rows, inputs in float64 and what forward leaves."""

    k: Tensor
    v: Tensor
    b: Tensor
    do: Tensor
    g: Tensor
    kk: Tensor
    A: Tensor
    Aqk: Tensor
    qg: Tensor
    kg: Tensor
    kr: Tensor
    h: Tensor
    v_new: Tensor


def heads(inputs: KdaInputs) -> Iterator[tuple[tuple[int, int], list[Tensor]]]:
    """Per batch and value head: q, k (normalised), v, log2 decay, b, do, h0 and dht, in float64. Dense calls only."""
    x = {n: t.double() if torch.is_tensor(t) else t for n, t in inputs.arguments.items()}
    q, k, v = x["q"], x["k"], x["v"]
    if x["use_qk_l2norm_in_kernel"]:
        q, k = (t * torch.rsqrt(t.square().sum(-1, keepdim=True) + 1e-6) for t in (q, k))
    a = x["g"]
    if x["use_gate_in_kernel"]:
        z = a + x["dt_bias"].view(a.shape[2:]) if "dt_bias" in x else a
        rate = x["A_log"].exp()[:, None]
        bound = x["lower_bound"]
        a = -rate * torch.nn.functional.softplus(z) if bound is None else bound * torch.sigmoid(rate * z)
    b = strength(inputs)
    group = v.shape[2] // q.shape[2]
    for n in range(q.shape[0]):
        for i in range(v.shape[2]):
            zero = torch.zeros(q.shape[3], v.shape[3], dtype=torch.float64)
            h0 = x["initial_state"][n, i] if "initial_state" in x else zero
            dht = zero if inputs.dht is None else inputs.dht[n, i].double()
            yield (n, i), [
                q[n, :, i // group], k[n, :, i // group], v[n, :, i], a[n, :, i] / math.log(2), b[n, :, i, None],
                inputs.do[n, :, i].double(), *(s.T if x["state_v_first"] else s for s in (h0, dht)),
            ]  # fmt: skip


def strength(inputs: KdaInputs) -> Tensor:
    """b of every token, in float64."""
    beta = inputs.arguments["beta"].double()
    if not inputs.arguments["use_beta_sigmoid_in_kernel"]:
        return beta
    return beta.sigmoid() * (2.0 if inputs.arguments["allow_neg_eigval"] else 1.0)


def forward(x: list[Tensor], BT: int, store: Callable[[str, Tensor], Tensor], scale: float) -> list[Chunk]:
    q, k, v, a, b, do, S, _ = x
    chunks = []
    for rows in torch.arange(len(q)).split(BT):
        qc, kc, bc, g = q[rows], k[rows], b[rows], a[rows].cumsum(0)
        E = torch.exp2((g[:, None] - g[None]).clamp(max=0.0))
        qk, kk = (torch.einsum("ik,jk,ijk->ij", y, kc, E) for y in (qc, kc))
        eye = torch.eye(len(rows), dtype=torch.float64)
        A = store("A", torch.linalg.solve_triangular(eye + (bc * kk).tril(-1), eye, upper=False, unitriangular=True))
        qg, kg = (store(n, t * torch.exp2(g - g[0])) for n, t in (("qg", scale * qc), ("kg", kc)))
        kr = store("kr", kc * torch.exp2(g[-1] - g))
        c = store("c", bc * (v[rows] - kg @ store("h", torch.exp2(g[0])[:, None] * S)))
        v_new = store("v_new", A @ c)
        Aqk, h = store("Aqk", scale * qk.tril()), store("h", S)
        chunks.append(Chunk(kc, v[rows], bc, do[rows], g, kk, A, Aqk, qg, kg, kr, h, v_new))
        S = torch.exp2(g[-1])[:, None] * S + kr.T @ v_new
    return chunks


def db(x: list[Tensor], BT: int, store: Callable[[str, Tensor], Tensor], scale: float, *, divide: bool) -> Tensor:
    """db of one head, [T]: as Y . v_new / b with ``divide``, else as the sum of its parts."""
    dS, out = x[-1], []
    for c in reversed(forward(x, BT, store, scale)):
        dv = store("dv", c.Aqk.T @ c.do + c.kr @ store("dh", dS))
        wide = c.A.T @ dv
        Y = store("Y", wide)
        if divide:
            out.append((Y * c.v_new).sum(1) / c.b[:, 0])
        else:
            X, D = -torch.exp2(c.g) * (Y @ c.h.T), store("D", -(Y @ c.v_new.T).tril(-1))
            out.append((Y * c.v).sum(1) + (X * c.k).sum(1) + (D * c.kk).sum(1))
        write = c.qg.T @ c.do - c.kg.T @ store("Y", c.b * wide)
        dS = torch.exp2(c.g[-1])[:, None] * dS + torch.exp2(c.g[0])[:, None] * write
    return torch.cat(out[::-1])


def error(inputs: KdaInputs, expected: Tensor, rounded: tuple[str, ...], *, divide: bool = False) -> float:
    """RMS ratio of dbeta with these operands rounded to bfloat16."""

    def store(name: str, t: Tensor) -> Tensor:
        return t.bfloat16().double() if name in rounded else t

    scale = inputs.arguments.get("scale") or inputs.arguments["q"].shape[-1] ** -0.5
    out = torch.zeros_like(expected)
    for (n, i), x in heads(inputs):
        out[n, :, i] = db(x, inputs.arguments["chunk_size"], store, scale, divide=divide)
    if inputs.arguments["use_beta_sigmoid_in_kernel"]:
        b = strength(inputs)
        out *= b * (1 - b / (2.0 if inputs.arguments["allow_neg_eigval"] else 1.0))
    return measure(out, expected, torch.bfloat16).rms_ratio


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default=",".join(DEFAULT), help="of kda_cases, comma separated, dense ones")
    parser.add_argument("--heads", type=int, help="H; default: the case's own")
    parser.add_argument("--seeds", type=int, default=1, help="draws of each case (default: %(default)s)")
    parser.add_argument("--each", action="store_true", help="every rounding alone too")
    args = parser.parse_args(argv)
    for name in args.cases.split(","):
        case = CASES[name]
        for seed in range(args.seeds):
            more = {"seed": seed} | ({} if args.heads is None else {"H": args.heads})
            inputs = dataclasses.replace(case, options=case.options | more).inputs(torch.bfloat16, "cpu")
            expected = judged(inputs)["dbeta"]
            found = {
                "parts": error(inputs, expected, ROUNDED),
                "Y.v_new/b": error(inputs, expected, ROUNDED, divide=True),
            }
            if args.each:
                found |= {f"only {n}": error(inputs, expected, (n,)) for n in ROUNDED}
            figures = "  ".join(f"{n} {e:.1e}" for n, e in found.items())
            print(f"{name}, H {inputs.arguments['q'].shape[2]}, seed {seed}: {figures}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
