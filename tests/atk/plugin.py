"""What the executors and generators share: dtypes by ATK's names, strides, one broken argument, and ATK's own hooks.

ATK (Ascend's tool, not on any public index) loads ``gen_<op>.py`` and ``executor_<op>.py`` by path with ``-p``. Where
it is installed, importing those files registers them with it; elsewhere they are plain modules for ``tests.atk``.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import ModuleType
from typing import Any, Protocol

import torch
from torch import Tensor

from tests.atk.records import Spec, record

DTYPES = {
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp32": torch.float32,
    "fp64": torch.float64,
    "int32": torch.int32,
    "int64": torch.int64,
}
LAYOUTS = ("contiguous", "sliced", "transposed", "expanded")
"""How the tensors lie: dense; columns of a wider buffer; heads before tokens; one head broadcast to all."""


class Executor(Protocol):
    """An ``executor_<op>`` module. ``inputs`` is whatever ``build`` made; outputs are named tensors."""

    OP: str
    FUNCTION: Callable[..., Any]

    @staticmethod
    def build(spec: Spec, device: torch.device) -> dict[str, Any]: ...
    @staticmethod
    def arguments(inputs: dict[str, Any]) -> dict[str, Any]: ...
    @staticmethod
    def golden(inputs: dict[str, Any]) -> dict[str, Tensor]: ...
    @staticmethod
    def control(inputs: dict[str, Any]) -> dict[str, Tensor]: ...
    @staticmethod
    def run(inputs: dict[str, Any], backend: str | None) -> dict[str, Tensor]: ...
    @staticmethod
    def dtypes(inputs: dict[str, Any]) -> dict[str, torch.dtype]: ...
    @staticmethod
    def valid(name: str, golden: Tensor, inputs: dict[str, Any]) -> Tensor | None: ...


def lay_out(x: Tensor, layout: str) -> Tensor:
    """``x`` [B, T, H, ...] with the strides of ``layout``; "expanded" repeats head 0, the others keep the values."""
    if layout == "sliced":
        wide = torch.full((*x.shape[:-1], x.shape[-1] + 3), float("nan"), dtype=x.dtype, device=x.device)
        wide[..., 1:-2] = x
        return wide[..., 1:-2]
    if layout == "transposed":
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    if layout == "expanded":
        return x[:, :, :1].expand(x.shape)
    return x


def break_argument(arguments: dict[str, Any], change: dict[str, Any]) -> dict[str, Any]:
    """The call with one argument made wrong: ``{"argument": name, ...}`` and one of ``dtype`` (cast), ``shape``
    (zeros of that shape), ``drop`` (that axis removed), ``device``, ``ints`` (a 1-D or 2-D int32 tensor), ``value``."""
    name = change["argument"]
    old = arguments.get(name)
    if "dtype" in change:
        new: Any = old.to(DTYPES[change["dtype"]])
    elif "shape" in change:
        new = torch.zeros(change["shape"], dtype=old.dtype, device=old.device)
    elif "drop" in change:
        new = old.select(change["drop"], 0)
    elif "device" in change:
        new = old.to(change["device"])
    elif "ints" in change:
        new = torch.tensor(change["ints"], dtype=torch.int32, device=arguments["q"].device)
    else:
        new = change["value"]
    return {**arguments, name: new}


def _atk(module: str) -> ModuleType | None:
    """A module of ATK, or None where ATK is not installed. A broken ATK is an error."""
    try:
        return importlib.import_module(f"atk.{module}")
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] != "atk":
            raise
        return None


def register_executor(module: ModuleType) -> type | None:
    """Registers ``executor_<op>`` with ATK: the CPU benchmark node gives the golden, another CPU node the control, any
    other node the device under test."""
    register, base = _atk("tasks.api_execute"), _atk("tasks.api_execute.base_api")
    if register is None or base is None:
        return None
    executor: Any = module

    class FunctionApi(base.BaseApi):  # type: ignore[misc, name-defined]
        def __init__(self, task_result: Any) -> None:
            super().__init__(task_result)
            self.benchmark = bool(task_result.is_benchmark_task)

        def __call__(self, input_data: Any, with_output: bool = False) -> tuple[Tensor, ...]:
            spec = spec_from(input_data)
            if self.device == "cpu":
                inputs = executor.build(spec, torch.device("cpu"))
                return tuple((executor.golden if self.benchmark else executor.control)(inputs).values())
            inputs = executor.build(spec, input_data.kwargs["main_marker"].device)
            return tuple(executor.run(inputs, None).values())

    registered: type = register.register(f"executor_{executor.OP}")(FunctionApi)
    return registered


def spec_from(input_data: Any) -> Spec:
    import json

    value = input_data.kwargs["case_spec"]
    spec: Spec = json.loads(value) if isinstance(value, str) else dict(value)
    return spec


def register_generator(op: str, specs: Callable[[], list[Spec]]) -> type | None:
    """Registers ``generator_<op>`` with ATK: the i-th case that it asks for is the i-th frozen one."""
    types, base = _atk("case_generator.generator.generate_types"), _atk("case_generator.generator.base_generator")
    if types is None or base is None:
        return None

    class Generator(base.CaseGenerator):  # type: ignore[misc, name-defined]
        def after_case_config(self, case_config: Any) -> Any:
            cases = specs()
            frozen = record(op, cases[int(case_config.id) % len(cases)])
            case_config.name = frozen["name"]
            for given, wanted in zip(case_config.inputs, frozen["inputs"], strict=True):
                given.dtype, given.shape, given.range_values = wanted["dtype"], wanted["shape"], wanted["range_values"]
            return case_config

    registered: type = types.GENERATOR_REGISTRY.register(f"generator_{op}")(Generator)
    return registered
