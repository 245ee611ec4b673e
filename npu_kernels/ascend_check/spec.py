"""What the gate compiles: one point of the support matrix, one kernel at that point, and who enumerates them.

A provider is a function ``specs(config, target) -> Iterable[KernelSpec]`` that yields every kernel of its op exactly as
the host wrapper launches it for that configuration: same source, same signature, same constexpr values. Providers are
listed in ``matrix.PROVIDERS``. No triton import here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from mindspeed_kda.npu_kernels.ascend_check.targets import Target

TRITON_TYPES = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32", "int32": "i32", "int64": "i64", "bool": "i1"}
CONSTEXPR = "constexpr"
COST_CHUNKS = 4
"""Full chunks of the launch that the cost report counts: as many as the first compiler keeps in flight at once."""


def pointer(dtype: str) -> str:
    """Triton's name for a pointer to that torch dtype: ``pointer("float16") == "*fp16"``."""
    return "*" + TRITON_TYPES[dtype]


@dataclass(frozen=True)
class Config:
    """One point of the support matrix, in the words of the public function."""

    dtype: str
    K: int
    V: int
    BT: int
    packed: bool
    state_dtype: str
    state_v_first: bool

    def label(self) -> str:
        state = f"{TRITON_TYPES[self.state_dtype]}{' V-first' if self.state_v_first else ''}"
        length = "packed" if self.packed else "fixed"
        return f"{TRITON_TYPES[self.dtype]} K{self.K} V{self.V} BT{self.BT} {length} state {state}"


@dataclass(frozen=True)
class KernelSpec:
    """One compilation: ``kernel`` as ``module:function`` (or ``file.py:function``) and all that shapes its code.

    ``signature`` names every argument in order, ``constexpr`` ones included; a pointer that is None at launch is a
    constexpr whose constant is None. ``stage`` is the row of the report, ``variant`` tells launches of one stage apart.
    ``options`` are Ascend launch options beside the defaults. For the cost report, ``scalars`` are the integers of a
    launch on ``COST_CHUNKS`` full chunks of one sequence, ``per`` its number of (chunk, value head) pairs, and
    ``blocks`` the grid on which all its tasks are walked.
    """

    op: str
    stage: str
    kernel: str
    signature: tuple[tuple[str, str], ...]
    constants: tuple[tuple[str, Any], ...]
    variant: str = ""
    options: tuple[tuple[str, Any], ...] = ()
    scalars: tuple[tuple[str, int], ...] = ()
    per: int = 1
    blocks: int = 1

    @classmethod
    def of(
        cls,
        op: str,
        stage: str,
        kernel: Any,
        signature: Mapping[str, str],
        constants: Mapping[str, Any],
        variant: str = "",
        options: Mapping[str, Any] | None = None,
        scalars: Mapping[str, int] | None = None,
        per: int = 1,
    ) -> KernelSpec:
        """Builds one from mappings; ``kernel`` may also be the jitted function itself.

        Raises ValueError where constexpr arguments and constants do not match."""
        declared = {name for name, kind in signature.items() if kind == CONSTEXPR}
        if declared != set(constants):
            raise ValueError(
                f"{stage}: constexpr arguments {sorted(declared)} do not match constants {sorted(constants)}"
            )
        reference = kernel if isinstance(kernel, str) else function_reference(kernel)
        return cls(
            op, stage, reference, tuple(signature.items()), tuple(constants.items()), variant,
            tuple((options or {}).items()), tuple((scalars or {}).items()), per,
        )  # fmt: skip

    def key(self) -> tuple[Any, ...]:
        """Equal keys compile to the same code on one target."""
        return (self.kernel, self.signature, self.constants, self.options)


def function_reference(function: Any) -> str:
    """``module:name`` of a jitted (or interpreted) kernel."""
    inner = getattr(function, "fn", function)
    return f"{inner.__module__}:{inner.__name__}"


Provider = Callable[[Config, Target], Iterable[KernelSpec]]
