"""Frozen cases in ATK's own shape: one record a case, its parameters in the ``case_spec`` attribute.

ATK hands every input of a record to the executor; shapes and values of this op depend on each other, so the tensors
are made by the executor from ``case_spec`` and its seed, and the record carries two one-element markers that name the
dtypes. Records are written one to a line, so that a change of one case is a change of one line.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent
KINDS = {"accuracy": "", "model": "_model", "negative": "_negative"}
"""Which file of an op holds which cases: ``atk_<op><suffix>.json``."""
STANDARD = {"acc": "mixed_tolerance_bm", "perf": "not_key", "mem": 1.1}

Spec = dict[str, Any]


def ops() -> list[str]:
    return sorted(p.stem for p in ROOT.glob("*/*.yaml"))


def path(op: str, kind: str) -> Path:
    return ROOT / op / f"atk_{op}{KINDS[kind]}.json"


def _marker(name: str, dtype: str) -> dict[str, Any]:
    return {"name": name, "type": "tensor", "required": True, "dtype": dtype, "shape": [1], "range_values": [0, 0]}


def record(op: str, spec: Spec) -> dict[str, Any]:
    """The ATK record of a case."""
    return {
        "id": spec["case_id"],
        "default_seed": spec["seed"],
        "name": f"{op}_{spec['case_id']:04d}_{spec['case_key']}",
        "version": "v2.1",
        "api": "pytorch",
        "api_type": f"executor_{op}",
        "aclnn_name": None,
        "expected_error_msg": spec.get("expected_message"),
        "backward": False,
        "standard": STANDARD,
        "outputs": None,
        "inputs": [
            _marker("main_marker", spec["dtype"]),
            _marker("fp32_marker", "fp32"),
            {
                "name": "case_spec",
                "type": "attr",
                "required": True,
                "dtype": "non_param",
                "shape": None,
                "range_values": json.dumps(spec, sort_keys=True, separators=(",", ":")),
            },
        ],
        "save_name": op,
    }


def spec_of(record: dict[str, Any]) -> Spec:
    """The parameters of a record; the inverse of ``record``."""
    spec: Spec = json.loads(next(i["range_values"] for i in record["inputs"] if i["name"] == "case_spec"))
    return spec


def dump(op: str, specs: Iterable[Spec]) -> str:
    return "[\n" + ",\n".join(json.dumps(record(op, s)) for s in specs) + "\n]\n"


def load(op: str, kind: str = "accuracy") -> list[Spec]:
    """The frozen cases of an op; empty where it has no file of that kind."""
    file = path(op, kind)
    return [spec_of(r) for r in json.loads(file.read_text(encoding="utf-8"))] if file.exists() else []
