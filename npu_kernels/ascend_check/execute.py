"""Runs the scalar part of a compiled kernel: its loops, branches, addresses and sizes, on the numbers of a real launch.

Tiles themselves are never computed: every copy, vector operation and matrix product of the final IR is handed to an
observer with the sizes it has at that moment. So what is counted is what the device would be told to do, tails and
in-flight tasks included. Values that no size or branch depends on (floats, vectors, pointers) stay opaque; one that a
branch or a size does depend on is an error, never a guess.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from mindspeed_kda.npu_kernels.ascend_check.hivm import Block, Function, Module, Operation, element_bits

_VALUE = re.compile(r"%[\w$.#-]+")
_TYPE = re.compile(r"memref<([^,<>]*)(?:, .*)?>$")
_MAP = re.compile(r"^#(map\d*) = affine_map<\(([^)]*)\)(?:\[([^\]]*)\])? -> \((.*)\)>$", re.M)
_BRACKETS = re.compile(r"\[([^\[\]]*)\]")
_ARGUMENT = re.compile(r"(%arg\d+): ")


class _Opaque:
    """A value that is not followed."""

    def __repr__(self) -> str:
        return "opaque"


OPAQUE = _Opaque()


class ExecutionError(RuntimeError):
    """The scalar part cannot be followed: an operation or an opaque value stands in the way."""


@dataclass(frozen=True)
class Memory:
    """A memref: whose it is, in which memory, bits of an element, number of elements (None where unknown)."""

    base: str
    space: str
    bits: int
    count: int | None

    @property
    def bytes(self) -> int:
        if self.count is None:
            raise ExecutionError(f"size of a copy of {self.base} is unknown")
        return self.count * self.bits // 8


class Observer(Protocol):
    def call(self, name: str, arguments: list[Any]) -> None:
        """A library call of the IR: a copy, a vector operation or a matrix product."""

    def operation(self, operation: Operation) -> None:
        """An operation without scalar meaning: synchronisation, a vector instruction."""


@dataclass
class _Cell:
    """A counter of the compiler's on the scalar stack."""

    values: dict[tuple[Any, ...], Any] = field(default_factory=dict)


class _Int(int):
    """An integer on which ``@`` divides and rounds up, as ``ceildiv`` does with the precedence of a product."""

    def __matmul__(self, other: int) -> _Int:
        return _Int(-(-int(self) // int(other)))

    def __add__(self, other: int) -> _Int:
        return _Int(int(self) + int(other))

    def __sub__(self, other: int) -> _Int:
        return _Int(int(self) - int(other))

    def __mul__(self, other: int) -> _Int:
        return _Int(int(self) * int(other))

    def __neg__(self) -> _Int:
        return _Int(-int(self))

    def __floordiv__(self, other: int) -> _Int:
        return _Int(int(self) // int(other))

    def __mod__(self, other: int) -> _Int:
        return _Int(int(self) % int(other))


def _truncated(a: int, b: int) -> int:
    quotient = abs(a) // abs(b)
    return quotient if (a >= 0) == (b >= 0) else -quotient


_BINARY: dict[str, Callable[[int, int], int]] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "div": _truncated,
    "rem": lambda a, b: a - b * _truncated(a, b),
    "max": max,
    "min": min,
    "and": lambda a, b: a & b,
    "or": lambda a, b: a | b,
    "xor": lambda a, b: a ^ b,
    "shl": lambda a, b: a << b,
    "shr": lambda a, b: a >> b,
}
_NAMES = {
    **{f"arith.{op}{suffix}": op for op in _BINARY for suffix in ("i", "si", "ui")},
    **{f"llvm.{op}": op for op in _BINARY},
    **{f"llvm.{prefix}{op}": op for op in ("div", "rem") for prefix in "su"},
    **{f"llvm.intr.{prefix}{op}": op for op in ("min", "max") for prefix in "su"},
    **{f"llvm.{prefix}shr": "shr" for prefix in "al"},
}
_COMPARE: dict[str, Callable[[int, int], bool]] = {
    "eq": lambda a, b: a == b,
    "ne": lambda a, b: a != b,
    "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b,
    "ge": lambda a, b: a >= b,
}
_CASTS = ("arith.index_cast", "arith.extsi", "arith.extui", "arith.trunci", "llvm.sext", "llvm.zext", "llvm.trunc",
          "builtin.unrealized_conversion_cast", "memref.cast", "memref.collapse_shape", "memref.expand_shape",
          "memref.memory_space_cast", "memref.transpose")  # fmt: skip

Environment = dict[str, Any]


class Machine:
    """One module, run block by block. ``scalars`` are the launch's integers by the names in ``runtime``, the kernel's
    run-time arguments in order."""

    def __init__(
        self,
        module: Module,
        runtime: list[str],
        scalars: Mapping[str, int],
        grid: tuple[int, int, int],
        watch: Observer,
    ) -> None:
        self.module = module
        self.runtime = runtime
        self.scalars = scalars
        self.grid = grid
        self.watch = watch
        self.maps = {name: _affine(dims, symbols, body) for name, dims, symbols, body in _MAP.findall(module.text)}
        self.block = 0
        self.sub_block = 0

    def run(self, function: Function, block: int, sub_block: int) -> None:
        """Runs an entry function as that block (and, for a vector core beside a cube core, that half of it)."""
        self.block, self.sub_block = block, sub_block
        environment = self._arguments(function)
        self._region(function.blocks, environment)

    def _arguments(self, function: Function) -> Environment:
        inner = function.header[function.header.index("(") + 1 :]
        parts = _ARGUMENT.split(inner[: inner.index(") attributes")])[1:]
        environment: Environment = {}
        plain = []
        for name, text in zip(parts[::2], parts[1::2], strict=True):
            kind = text.split(" {")[0].strip().rstrip(",")
            if "hacc.arg_type" in text:
                special = "workspace" if "<workspace>" in text else "lock"
                environment[name] = _memory(kind, special) if kind.startswith("memref") else OPAQUE
            else:
                plain.append((name, kind))
        names = [*self.runtime, "grid x", "grid y", "grid z"]
        if len(plain) != len(names):
            raise ExecutionError(f"{function.name}: expected arguments {names}, got {len(plain)} of them")
        values = {**self.scalars, **dict(zip(names[-3:], self.grid, strict=True))}
        for (name, kind), argument in zip(plain, names, strict=True):
            environment[name] = _memory(kind, argument) if kind.startswith("memref") else values.get(argument, OPAQUE)
        return environment

    def _region(self, blocks: list[Block], environment: Environment) -> list[Any]:
        """Runs a region to its end; the values that it yields or returns."""
        labels = {block.label: i for i, block in enumerate(blocks)}
        i = 0
        while True:
            jump = None
            for operation in blocks[i].operations:
                if operation.name in ("scf.yield", "return", "func.return"):
                    return [_get(environment, v) for v in _VALUE.findall(operation.text.split(" : ")[0])]
                if operation.name in ("cf.br", "cf.cond_br"):
                    jump = self._branch(operation, environment)
                    break
                self._step(operation, environment)
            if jump is None:
                if i + 1 < len(blocks) and blocks[i].operations:
                    raise ExecutionError(f"block {blocks[i].label} ends without a branch")
                return []
            label, values = jump
            i = labels[label]
            names = _VALUE.findall(blocks[i].arguments)
            environment.update(zip(names, values, strict=True))

    def _branch(self, operation: Operation, environment: Environment) -> tuple[str, list[Any]]:
        text = operation.text.strip()
        if operation.name == "cf.cond_br":
            condition, _, text = text.partition(", ")
            taken, other = _targets(text)
            text = taken if _known(environment, condition, operation) else other
        label = text.split("(")[0].strip()
        inside = text[len(label) :].split(" : ")[0]
        return label, [_get(environment, value) for value in _VALUE.findall(inside)]

    def _step(self, operation: Operation, environment: Environment) -> None:
        name = operation.name
        if name in ("call", "func.call"):
            results = self._call(operation, environment)
        elif name == "scf.for":
            results = self._for(operation, environment)
        elif name == "scf.if":
            condition = _known(environment, _VALUE.findall(operation.text)[0], operation)
            index = 0 if condition else 1
            chosen = operation.regions[index] if index < len(operation.regions) else []
            results = self._region(chosen, environment) if chosen else []
        elif name.startswith("scf."):
            raise ExecutionError(f"{name} is not followed")
        else:
            results = [self._value(operation, environment)]
        _bind(environment, operation.results, results)

    def _for(self, operation: Operation, environment: Environment) -> list[Any]:
        text = operation.text
        head, _, carried = text.partition("iter_args(")
        variable, start, stop, step = _VALUE.findall(head)[:4]
        pairs = _VALUE.findall(carried.split(") ->")[0]) if carried else []
        values = [_get(environment, value) for value in pairs[1::2]]
        i, end, by = (_known(environment, value, operation) for value in (start, stop, step))
        while i < end:
            environment[variable] = i
            environment.update(zip(pairs[::2], values, strict=True))
            values = self._region(operation.regions[0], environment)
            i += by
        return values

    def _call(self, operation: Operation, environment: Environment) -> list[Any]:
        callee = operation.callee() or ""
        inside = operation.text[operation.text.index("(") + 1 :].split(") ")[0].split(") :")[0]
        arguments = [_get(environment, value) for value in _VALUE.findall(inside.split(")")[0])]
        function = self.module.functions.get(callee)
        if function is None:
            self.watch.call(callee, arguments)
            return [OPAQUE]
        inner = dict(zip(_ARGUMENT.findall(function.header), arguments, strict=True))
        return self._region(function.blocks, inner)

    def _value(self, operation: Operation, environment: Environment) -> Any:
        name, text = operation.name, operation.text
        if name in ("arith.constant", "llvm.mlir.constant"):
            return _constant(text)
        values = [_get(environment, value) for value in _VALUE.findall(text.split(" : ")[0])]
        if name in _NAMES:
            integers = len(values) == 2 and all(isinstance(v, int) for v in values)
            return _BINARY[_NAMES[name]](values[0], values[1]) if integers else OPAQUE
        if name in ("arith.cmpi", "llvm.icmp"):
            kind = re.search(r"\b[su]?(eq|ne|lt|le|gt|ge)\b", text)
            integers = len(values) == 2 and all(isinstance(v, int) for v in values)
            return int(_COMPARE[kind.group(1)](values[0], values[1])) if kind and integers else OPAQUE
        if name in ("arith.select", "llvm.select"):
            condition = values[0]
            return OPAQUE if condition is OPAQUE else values[1] if condition else values[2]
        if name in _CASTS:
            to_bit = text.rstrip().endswith((" to i1", "-> i1"))
            return values[0] & 1 if to_bit and isinstance(values[0], int) else values[0]
        if name.startswith("affine."):
            return self._affine(name, text, environment)
        if name.startswith("memref.") or name == "hivm.hir.pointer_cast":
            return _memref(operation, values, environment)
        if name == "hivm.hir.get_block_idx":
            return self.block
        if name == "hivm.hir.get_sub_block_idx":
            return self.sub_block
        self.watch.operation(operation)
        return OPAQUE

    def _affine(self, name: str, text: str, environment: Environment) -> Any:
        found = re.match(r"\s*#(map\d*)", text)
        if found is None:
            raise ExecutionError(f"{name}{text} is not followed")
        inputs = [_get(environment, value) for value in _VALUE.findall(text)]
        if any(not isinstance(value, int) for value in inputs):
            return OPAQUE
        results = self.maps[found.group(1)](inputs)
        if name == "affine.apply":
            return results[0]
        return min(results) if name == "affine.min" else max(results)


def _affine(dims: str, symbols: str, body: str) -> Callable[[list[int]], list[int]]:
    names = [part.strip() for part in f"{dims},{symbols}".split(",") if part.strip()]
    words = body.replace(" floordiv ", " // ").replace(" mod ", " % ").replace(" ceildiv ", " @ ")
    if not re.fullmatch(r"[\sds\d()+*/%@,-]*", words):
        raise ExecutionError(f"affine map {body!r} is not followed")
    code = compile(f"({words},)", "<affine map>", "eval")

    def evaluate(inputs: list[int]) -> list[int]:
        scope = {name: _Int(value) for name, value in zip(names, inputs, strict=True)}
        return [int(value) for value in eval(code, {"__builtins__": {}}, scope)]  # letters, digits and operators only

    return evaluate


def _targets(text: str) -> tuple[str, str]:
    """Splits ``^bb1(%a : i32), ^bb2`` at the second label."""
    at = text.index("^", 1)
    return text[:at].rstrip(", "), text[at:]


def _get(environment: Environment, name: str) -> Any:
    return environment.get(name, OPAQUE)


def _known(environment: Environment, name: str, operation: Operation) -> int:
    value = _get(environment, name)
    if not isinstance(value, int):
        raise ExecutionError(f"{operation.name}{operation.text[:80]} depends on {name}, which is not followed")
    return value


def _bind(environment: Environment, results: str, values: list[Any]) -> None:
    names: list[str] = []
    for part in filter(None, (text.strip() for text in results.split(","))):
        name, _, count = part.partition(":")
        names += [f"{name}#{i}" for i in range(int(count))] if count else [name]
    environment.update(zip(names, [*values, *[OPAQUE] * (len(names) - len(values))], strict=False))


def _constant(text: str) -> Any:
    found = re.match(r"\s*\(?\s*(-?\d+|true|false)\b(?!\.)", text)
    if found is None:
        return OPAQUE
    word = found.group(1)
    return int(word == "true") if word in ("true", "false") else int(word)


def _memory(kind: str, base: str) -> Memory:
    """The memref of that printed type; its element count is None where an extent is dynamic."""
    found = re.match(r"memref<((?:[\d?]+x)*)(\w+)", kind)
    if found is None:
        raise ExecutionError(f"type {kind!r} is not followed")
    space = re.search(r"address_space<(\w+)>", kind)
    extents = [part for part in found.group(1).split("x") if part]
    count: int | None = 1
    for extent in extents:
        count = None if count is None or extent == "?" else count * int(extent)
    return Memory(base, space.group(1) if space else "stack", element_bits(found.group(2)), count)


def _product(text: str, environment: Environment) -> int | None:
    total = 1
    for part in filter(None, (word.strip() for word in text.split(","))):
        value = _get(environment, part) if part.startswith("%") else int(part)
        if not isinstance(value, int):
            return None
        total *= max(value, 0)
    return total


def _memref(operation: Operation, values: list[Any], environment: Environment) -> Any:
    name, text = operation.name, operation.text
    result = text.rsplit(" to ", 1)[-1] if " to " in text else text.rsplit(" : ", 1)[-1]
    source = next((value for value in values if isinstance(value, Memory)), None)
    if name == "memref.alloca":
        return _Cell()
    if name == "hivm.hir.pointer_cast" or name == "memref.alloc":
        return _memory(result.strip(), "on chip")
    if name in ("memref.load", "memref.store"):
        cell = values[1] if name == "memref.store" else values[0]
        at = tuple(values[2:] if name == "memref.store" else values[1:])
        if isinstance(cell, _Cell):
            if name == "memref.load":
                return cell.values.get(at, OPAQUE)
            cell.values[at] = values[0]
        return OPAQUE
    if source is None:
        return OPAQUE
    if name == "memref.view":
        return _memory(result.strip(), source.base)
    if name == "memref.reinterpret_cast":
        sizes = text[text.index("sizes:") :]
        return replace(source, count=_product(_BRACKETS.findall(sizes)[0], environment))
    if name == "memref.subview":
        return replace(source, count=_product(_BRACKETS.findall(text)[1], environment))
    return source  # extract_strided_metadata: the base buffer; its sizes stay opaque, the IR restates them
