"""Reads the compiler's final IR (``module.hivm.opt.mlir``): functions, blocks, loops, and what the gate counts in them.

The first compiler leaves structured loops (``scf.for``), the second leaves branches between labelled blocks. Both are
read into one tree: function -> blocks -> operations -> regions. One operation stands on one line, which is how MLIR
prints it; a region opens with a brace at the end of the line.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

LOOPS = ("scf.for", "scf.while")
CALLS = ("call", "func.call")

_OPERATION = re.compile(r'^(?:(%[^=]*?) = )?"?([A-Za-z_][\w.]*)"?(.*)$')
_LABEL = re.compile(r"^(\^bb\d+)(?:\((.*)\))?:")
_CALLEE = re.compile(r"@([\w$.]+)")
_SUCCESSOR = re.compile(r"\^bb\d+")
_SPACE = re.compile(r"#hivm\.address_space<(\w+)>>$")
_POINTER_CAST = re.compile(r"\((%[\w-]+)\)(?: \{.*?\})? : memref<([0-9x]+)x(\w+), .*?#hivm\.address_space<(\w+)>>")
_CONSTANT = re.compile(r"(%[\w-]+) = (?:arith\.constant|llvm\.mlir\.constant\()\s*(-?\d+) : (?:i64|index)")
_WORKSPACE = re.compile(r"func\.func @\w+_infer_workspace_shape_function\(.*?\{\n(.*?)\n  \}", re.S)
_NUMBER = re.compile(r"(?:arith\.constant |llvm\.mlir\.constant\()(\d+) : (?:index|i64)")
_CORE = re.compile(r"hivm\.module_core_type = #hivm\.module_core_type<(\w+)>")


@dataclass
class Operation:
    """``results`` as printed (``%a, %b:2``), ``name`` of the operation, ``text`` the rest of its line."""

    results: str
    name: str
    text: str
    regions: list[list[Block]] = field(default_factory=list)

    def callee(self) -> str | None:
        """The called function's name, or None where this is no call."""
        if self.name not in CALLS:
            return None
        found = _CALLEE.search(self.text)
        return found.group(1) if found else None


@dataclass
class Block:
    label: str
    arguments: str
    operations: list[Operation] = field(default_factory=list)

    def successors(self) -> list[str]:
        last = self.operations[-1] if self.operations else None
        return _SUCCESSOR.findall(last.text) if last is not None and last.name.startswith("cf.") else []


@dataclass
class Function:
    name: str
    header: str
    blocks: list[Block]

    def walk(self) -> Iterator[tuple[Operation, int]]:
        """Every operation with the number of loops around it."""
        return _walk(self.blocks, 0)


@dataclass
class Module:
    text: str
    functions: dict[str, Function]


def parse_module(text: str) -> Module:
    """Reads the printed module. Declarations without a body are left out."""
    lines = text.splitlines()
    functions: dict[str, Function] = {}
    i = 0
    while i < len(lines):
        line = lines[i].strip()
        if line.startswith("func.func ") and line.endswith("{"):
            blocks, i, _ = _parse_region(lines, i + 1)
            found = _CALLEE.search(line)
            name = found.group(1) if found else "?"
            functions[name] = Function(name, line, blocks)
        else:
            i += 1
    return Module(text, functions)


def _parse_region(lines: list[str], i: int) -> tuple[list[Block], int, str]:
    """Blocks up to the closing brace; the index after it; the closing line."""
    blocks = [Block("^bb0", "")]
    while True:
        line = lines[i].strip()
        i += 1
        if line.startswith("}"):
            return blocks, i, line
        if not line or line.startswith("//"):
            continue
        label = _LABEL.match(line)
        if label:
            blocks.append(Block(label.group(1), label.group(2) or ""))
            continue
        found = _OPERATION.match(line)
        if not found:
            raise ValueError(f"HIVM: cannot read the line {line!r}")
        operation = Operation(found.group(1) or "", found.group(2), found.group(3))
        blocks[-1].operations.append(operation)
        while line.endswith("{"):
            region, i, line = _parse_region(lines, i)
            operation.regions.append(region)


def block_depths(blocks: list[Block]) -> list[int]:
    """Loops around each block. A branch to an earlier label closes a loop over all blocks in between."""
    index = {b.label: i for i, b in enumerate(blocks)}
    latest: dict[int, int] = {}
    for i, block in enumerate(blocks):
        for label in block.successors():
            header = index[label]
            if header <= i:
                latest[header] = max(latest.get(header, i), i)
    return [sum(header <= i <= latch for header, latch in latest.items()) for i in range(len(blocks))]


def _walk(blocks: list[Block], depth: int) -> Iterator[tuple[Operation, int]]:
    for block, inner in zip(blocks, block_depths(blocks), strict=True):
        for operation in block.operations:
            yield operation, depth + inner
            for region in operation.regions:
                yield from _walk(region, depth + inner + (operation.name in LOOPS))


def matrix_products(module: Module) -> int:
    """Calls of the cube's multiply-accumulate."""
    return sum(
        (operation.callee() or "").startswith("mma") for f in module.functions.values() for operation, _ in f.walk()
    )


def scalar_accesses(module: Module) -> list[str]:
    """Element-indexed loads and stores inside loops, as ``load memref<...>``.

    Left out: the compiler's own counters (no address space), and loads of one integer from global memory, which is how
    a kernel reads the metadata of packed sequences."""
    found = []
    for function in module.functions.values():
        for operation, depth in function.walk():
            if depth == 0 or operation.name not in ("memref.load", "memref.store"):
                continue
            kind = operation.text.rsplit(" : ", 1)[-1]
            space = _SPACE.search(kind)
            if space is None:
                continue
            metadata = space.group(1) == "gm" and operation.name == "memref.load" and kind.startswith("memref<1xi")
            if not metadata:
                found.append(f"{operation.name.removeprefix('memref.')} {kind}")
    return found


def core_type(module: Module) -> str:
    """``cube``, ``vector`` or ``mix``."""
    found = _CORE.search(module.text)
    return {"AIC": "cube", "AIV": "vector", "MIX": "mix"}.get(found.group(1) if found else "", "unknown")


def workspace_bytes(module: Module) -> int:
    """Global scratch memory per block that the kernel asks its launcher for."""
    found = _WORKSPACE.search(module.text)
    numbers = _NUMBER.findall(found.group(1)) if found else []
    return int(numbers[0]) if numbers else 0


def planned_peaks(module: Module) -> dict[str, int]:
    """Highest used byte of each on-chip memory (``ub``, ``cbuf``, ``cc``) by the offsets in the final IR.

    A lower bound where a buffer's shape is dynamic; used where the compiler writes no memory report."""
    peaks: dict[str, int] = {}
    for function in module.functions.values():
        body = [operation for operation, _ in function.walk()]
        constants = dict(_CONSTANT.findall("\n".join(f"{o.results} = {o.name}{o.text}" for o in body if o.results)))
        for operation in body:
            if operation.name != "hivm.hir.pointer_cast":
                continue
            found = _POINTER_CAST.match(operation.text)
            if not found or found.group(1) not in constants:
                continue
            offset, shape, element, space = found.groups()
            size = element_bits(element)
            for extent in shape.split("x"):
                size *= int(extent)
            peaks[space] = max(peaks.get(space, 0), int(constants[offset]) + size // 8)
    return peaks


def element_bits(element: str) -> int:
    """``f16`` -> 16; ``bf16`` -> 16; ``i1`` -> 1; ``index`` -> 64."""
    digits = re.sub(r"\D", "", element)
    return int(digits) if digits else 64
