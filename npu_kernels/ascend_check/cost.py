"""What a compiled kernel moves and computes, counted by running its scalar part, and the time that no run can beat.

Counted per pipe: bytes from and to the caller's tensors, bytes through global scratch memory (workspace), multiply-
accumulates of the cube, elements of vector work by operation, waits. The bound is the longest of three times, each at
the whole chip's published rate (``RATES``): memory, cube, vector. Latency, issue slots and short copies are not in it.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mindspeed_kda.npu_kernels.ascend_check.execute import Machine, Memory
from mindspeed_kda.npu_kernels.ascend_check.hivm import Module, Operation, core_type, element_bits
from mindspeed_kda.npu_kernels.ascend_check.spec import CONSTEXPR
from mindspeed_kda.npu_kernels.ascend_check.targets import Target

VECTOR_BYTES = 256
"""Bytes that a vector unit takes per cycle (CANN's platform file: vec_calc_size = 128 half-precision lanes)."""
CUBE_MACS = {"half": 16 * 16 * 16, "bfloat16_t": 16 * 16 * 16, "float": 16 * 16 * 4}
"""Multiply-accumulates of a cube unit per cycle (platform file: cube 16 x 16 x 16; float32 at a quarter)."""
_STEM = re.compile(r"_(?:\dd|float|half|bfloat16_t|u?int\d+_t|bool)")
_RESULT = re.compile(r"-> \(?(?:!llvm\.struct<\()?vector<(\d+)x(\w+)>")
_OPERAND = re.compile(r": \(vector<(\d+)x(\w+)>")
_MASKS = ("pge", "plds", "psts", "pstu", "pintlv", "pdintlv", "pand", "por", "pnot", "pxor", "psel", "ppack", "punpack")
_MOVES = ("vlds", "vsts", "vsst", "vsld", "vldus", "vldas", "vstus", "vstas", "vstar", "init")


@dataclass(frozen=True)
class Rates:
    """Published figures of a chip (docs/ascend.md says whose): bytes per second of its memory, clock in Hz."""

    memory: float
    clock: float


# Clock and units: CANN's platform files (Ascend910B2.ini and Ascend910_9382.ini, the same generation). Memory: 1.6 TB/s
# for a die of Atlas A2 and A3; 1.6 TB/s announced for Ascend 950PR, whose clock is not published: that of A2 stands in.
RATES = {
    "Ascend910B3": Rates(1.6e12, 1.8e9),
    "Ascend910_9391": Rates(1.6e12, 1.8e9),
    "Ascend950PR_9589": Rates(1.6e12, 1.8e9),
}


@dataclass
class Cost:
    """Counts of one launch, or of one (chunk, head) of it after ``scaled``."""

    read: Counter[str] = field(default_factory=Counter)
    written: Counter[str] = field(default_factory=Counter)
    workspace: float = 0
    macs: Counter[str] = field(default_factory=Counter)
    vector: Counter[str] = field(default_factory=Counter)
    vector_bytes: float = 0
    waits: Counter[str] = field(default_factory=Counter)
    launches: float = 1

    def scaled(self, by: float) -> Cost:
        """All counts divided, launches left as they are."""

        def divide(counter: Counter[str]) -> Counter[str]:
            return Counter({key: value / by for key, value in counter.items()})

        return Cost(
            divide(self.read), divide(self.written), self.workspace / by, divide(self.macs), divide(self.vector),
            self.vector_bytes / by, divide(self.waits), self.launches,
        )  # fmt: skip

    def plus(self, other: Cost) -> Cost:
        return Cost(
            self.read + other.read, self.written + other.written, self.workspace + other.workspace,
            self.macs + other.macs, self.vector + other.vector, self.vector_bytes + other.vector_bytes,
            self.waits + other.waits, self.launches + other.launches,
        )  # fmt: skip

    @property
    def tensor_bytes(self) -> float:
        return sum(self.read.values()) + sum(self.written.values())

    def times(self, target: Target) -> dict[str, float]:
        """Seconds of each pipe, with all of the chip's cores busy."""
        rates = RATES[target.name]
        cycles = sum(macs / CUBE_MACS[kind] for kind, macs in self.macs.items())
        return {
            "memory": self.tensor_bytes / rates.memory,
            "cube": cycles / (rates.clock * target.cube_cores),
            "vector": self.vector_bytes / (VECTOR_BYTES * rates.clock * target.vector_cores),
        }

    def bound(self, target: Target) -> tuple[str, float]:
        """The pipe that binds, and its seconds."""
        times = self.times(target)
        pipe = max(times, key=lambda name: times[name])
        return pipe, times[pipe]


class _Counter:
    """Turns what the machine meets into counts."""

    def __init__(self) -> None:
        self.cost = Cost()

    def call(self, name: str, arguments: list[Any]) -> None:
        memories = [value for value in arguments if isinstance(value, Memory)]
        if name.startswith("mma"):
            m, k, n = (value for value in arguments[3:6])
            self.cost.macs[name.removeprefix("mma_tile_").split("_to_")[0]] += m * k * n
        elif len(memories) >= 2 and "gm" in (memories[0].space, memories[1].space):
            self._traffic(memories[0], memories[1])
        elif memories and not any(memory.space in ("cbuf", "cc") for memory in memories[:2]):
            grows = name.startswith(("broadcast", "arange"))
            work = max(memories, key=lambda m: m.count or 0) if grows else memories[0]
            widest = max(memory.bits for memory in memories[:2])
            self.cost.vector[_STEM.split(name)[0]] += work.bytes * 8 // work.bits
            self.cost.vector_bytes += work.bytes / work.bits * widest

    def _traffic(self, source: Memory, destination: Memory) -> None:
        outside, counter = (source, self.cost.read) if source.space == "gm" else (destination, self.cost.written)
        if outside.base == "workspace":
            self.cost.workspace += outside.bytes
        else:
            counter[outside.base] += outside.bytes

    def operation(self, operation: Operation) -> None:
        name = operation.name
        if name == "hivm.hir.sync_block_wait":
            self.cost.waits["cores"] += 1
        elif name == "hivm.hir.wait_flag":
            self.cost.waits["pipes"] += 1
        elif name == "hivm.hir.pipe_barrier":
            self.cost.waits["barriers"] += 1
        elif name.startswith("hivm_regbaseintrins.intr.hivm."):
            self._instruction(name.split(".")[3], operation)

    def _instruction(self, stem: str, operation: Operation) -> None:
        """A register instruction of the second compiler's vector code: one vector register of lanes."""
        found = _RESULT.search(operation.text)
        if found is None or stem.startswith((*_MASKS, *_MOVES)):
            return
        lanes, bits = int(found.group(1)), element_bits(found.group(2))
        if bits == 1:  # a compare: as many lanes as its operands
            found = _OPERAND.search(operation.text)
            if found is None:
                return
            lanes, bits = int(found.group(1)), element_bits(found.group(2))
        self.cost.vector[stem] += lanes
        self.cost.vector_bytes += lanes * bits / 8


def count(module: Module, signature: Mapping[str, str], scalars: Mapping[str, int], blocks: int = 1) -> Cost:
    """Counts one launch of a compiled kernel on a grid of ``blocks``.

    ``scalars`` gives the launch's integer arguments by name. Raises ExecutionError where a size or a branch depends on
    something else (the metadata of packed sequences, for one)."""
    runtime = [name for name, kind in signature.items() if kind != CONSTEXPR]
    counter = _Counter()
    machine = Machine(module, runtime, scalars, (blocks, 1, 1), counter)
    halves = 2 if core_type(module) == "mix" else 1
    for function in module.functions.values():
        if "hacc.entry" not in function.header:
            continue
        vector = "func_core_type<AIV>" in function.header
        for block in range(blocks):
            for half in range(halves if vector else 1):
                machine.run(function, block, half)
    return counter.cost
