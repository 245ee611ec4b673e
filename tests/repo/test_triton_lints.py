"""Rules for Triton kernels that can be read from the source. Each is shown to bite on a small kernel."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import pytest
from tree import dotted, python_files, syntax, text

JIT = "triton.jit"


def is_kernel(node):
    return isinstance(node, ast.FunctionDef) and any(
        dotted(d.func if isinstance(d, ast.Call) else d) == JIT for d in node.decorator_list
    )


def kernels_of(tree):
    """Functions under triton.jit, with and without arguments of the decorator."""
    return [n for n in ast.walk(tree) if is_kernel(n)]


KERNEL_FILES = [f for f in python_files("npu_kernels") if kernels_of(syntax(f)) and "ascend_check" not in f.parts]
HELPERS = ("common.py", "gates.py", "pairs.py", "blocks.py")
"""Jit helpers that no plan launches."""
STAGES = [f for f in KERNEL_FILES if f.name not in HELPERS]


def names_in(node: ast.AST) -> set[str]:
    return {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}


def calls(node: ast.AST, *functions: str) -> Iterator[ast.Call]:
    for n in ast.walk(node):
        if isinstance(n, ast.Call) and dotted(n.func) in functions:
            yield n


# Rules: each takes a kernel and answers its offences.


IN_ANY_ORDER = ("_add_dq",)
"""Where a caller has allowed sums in any order: flash_attention with deterministic=False."""


def plain_pointers(kernel):
    """Stock Triton 3.9 has no block pointers; atomics break repeatability."""
    atomics = "" if kernel.name in IN_ANY_ORDER else r"|\.atomic_\w+"
    return [n for n in map(dotted, ast.walk(kernel)) if re.search(rf"(make_block_ptr|\.advance{atomics})$", n)]


def ieee_dots(kernel):
    """tf32 misses the fp32 limit, and Ascend knows neither it nor allow_tf32. A compile-time parameter may choose: the
    lists of stages are held to "ieee" for fp32 and for Ascend in their own tests."""
    found = []
    chosen = [a.arg for a in kernel.args.args if a.annotation and ast.unparse(a.annotation) == "tl.constexpr"]
    for dot in calls(kernel, "tl.dot"):
        given = {k.arg: ast.unparse(k.value) for k in dot.keywords}
        if given.get("input_precision") not in ("'ieee'", *chosen) or "allow_tf32" in given:
            found.append(ast.unparse(dot))
    return found


def fresh_left_operands(kernel):
    """Ascend may overwrite a product's left operand: no tile in it is read again, in the same statement, later, or in
    the next round of a loop that does not load it anew. Casts and transposes of a tile count as the tile."""
    found = []
    statements = list(ordered(kernel.body, ()))
    for i, (statement, loops) in enumerate(statements):
        for dot in calls(statement, "tl.dot"):
            for tile in same_tile(dot.args[0]):
                rest = [n for n in ast.walk(statement) if isinstance(n, ast.Name) and n.id == tile]
                loads = sum(isinstance(n.ctx, ast.Load) for n in rest)
                inside = sum(n.id == tile for n in ast.walk(dot.args[0]) if isinstance(n, ast.Name))
                if loads > inside:
                    found.append(f"{tile}: read beside its own product")
                if any(isinstance(n.ctx, ast.Store) for n in rest):
                    continue
                if loops and not any(stores(s, tile) for s, around in statements if loops[-1] in around):
                    found.append(f"{tile}: read again in the next round of the loop")
                for later, _ in statements[i + 1 :]:
                    if reads(later, tile):
                        found.append(f"{tile}: read again later")
                        break
                    if stores(later, tile):
                        break
    return found


def same_tile(node) -> set[str]:
    """The name whose tile this expression may be: casts and transposes share it, anything computed is a new tile."""
    if isinstance(node, ast.Name):
        return {node.id}
    if isinstance(node, ast.Call):
        if isinstance(node.func, ast.Attribute) and node.func.attr == "to":
            return same_tile(node.func.value)
        if dotted(node.func) in ("tl.trans", "operand"):
            return same_tile(node.args[0])
    return set()


def ordered(body, loops):
    """Statements of a body in order, those of loops and branches too, each with the loops around it."""
    for statement in body:
        if isinstance(statement, (ast.For, ast.While)):
            yield from ordered(statement.body, (*loops, statement))
        elif isinstance(statement, ast.If):
            yield from ordered(statement.body, loops)
            yield from ordered(statement.orelse, loops)
        else:
            yield statement, loops


def stores(statement, name):
    return any(isinstance(n, ast.Name) and n.id == name and isinstance(n.ctx, ast.Store) for n in ast.walk(statement))


def reads(statement, name):
    if isinstance(statement, ast.AugAssign) and dotted(statement.target) == name:
        return True
    return any(isinstance(n, ast.Name) and n.id == name and isinstance(n.ctx, ast.Load) for n in ast.walk(statement))


def one_accumulator_a_loop(kernel):
    """Ascend950's compiler merges two products that accumulate through one loop."""
    found = []
    for loop in ast.walk(kernel):
        if isinstance(loop, ast.For):
            carried = {
                target
                for statement in loop.body
                if isinstance(statement, (ast.Assign, ast.AugAssign))
                for dot in calls(statement, "tl.dot")
                for target in names_in(statement.targets[0] if isinstance(statement, ast.Assign) else statement.target)
                if isinstance(statement, ast.AugAssign) or any(target in names_in(a) for a in dot.args[2:])
            }
            carried -= {
                s.targets[0].id
                for s in loop.body
                if isinstance(s, ast.Assign)
                and isinstance(s.targets[0], ast.Name)
                and s.targets[0].id not in names_in(s.value)
            }
            if len(carried) > 1:
                found.append(f"{', '.join(sorted(carried))} accumulate in one loop")
    return found


CLAMPS = ("tl.minimum", "tl.maximum", "tl.where", "min", "max")


def affine_offsets(kernel):
    """A clamp, a choice or a remainder of lanes inside an offset makes the access discrete on Ascend, a scalar loop.

    Names made from ``tl.arange`` are lanes; scalars may be clamped, which keeps a tile's origin inside its tensor.
    """
    lanes = set()
    found = []
    for statement, _ in ordered(kernel.body, ()):
        vector = bool(names_in(statement) & lanes) or any(calls(statement, "tl.arange"))
        bends = any(calls(statement, *CLAMPS)) or any(
            isinstance(n, ast.BinOp) and isinstance(n.op, (ast.Mod, ast.FloorDiv)) for n in ast.walk(statement)
        )
        for access in calls(statement, "tl.load", "tl.store"):
            pointer = access.args[0]
            if any(calls(pointer, *CLAMPS)) or any(
                isinstance(n, ast.BinOp) and isinstance(n.op, (ast.Mod, ast.FloorDiv)) for n in ast.walk(pointer)
            ):
                found.append(f"bent offset: {ast.unparse(pointer)}")
        if isinstance(statement, ast.Assign) and vector:
            name = dotted(statement.targets[0])
            is_offset = not any(calls(statement, "tl.load", "tl.dot", "tl.exp2", "tl.sum", "tl.zeros"))
            if is_offset and name.startswith(("o_", "p_", "at_")) and bends:
                found.append(f"bent offset: {ast.unparse(statement)}")
            if is_offset:
                lanes.add(name)
    return found


def wide_offsets(kernel):
    """A base offset (``at_*``, ``p_*``) multiplies only what is 64 bits wide already: ``tl.cast(x, tl.int64)`` or a
    name made from one. Products of compile-time sizes, and of tile counters with them, stay small."""
    wide, found = {"row", "slot", "begin"}, []  # what the decoding helpers return
    for statement, _ in ordered(kernel.body, ()):
        if not isinstance(statement, ast.Assign) or not isinstance(statement.targets[0], ast.Name):
            continue
        name, value = statement.targets[0].id, statement.value
        is_wide = "tl.int64" in ast.unparse(value) or bool(names_in(value) & wide)
        products = any(isinstance(n, ast.BinOp) and isinstance(n.op, ast.Mult) for n in ast.walk(value))
        if name.startswith(("at_", "p_")):
            if products and not is_wide:
                found.append(f"{name} may exceed 32 bits: {ast.unparse(value)}")
            wide.add(name)
    return found


RULES = (plain_pointers, ieee_dots, fresh_left_operands, one_accumulator_a_loop, affine_offsets, wide_offsets)


@pytest.mark.parametrize("rule", RULES, ids=lambda r: r.__name__)
@pytest.mark.parametrize("path", KERNEL_FILES, ids=str)
def test_kernels_keep_the_rule(path, rule):
    assert {k.name: r for k in kernels_of(syntax(path)) if (r := rule(k))} == {}


@pytest.mark.parametrize(
    ("rule", "code", "clean"),
    [
        (plain_pointers, "p = tl.make_block_ptr(x, (4,), (1,), (0,), (4,), (0,))", False),
        (plain_pointers, "tl.atomic_add(p, a)", False),
        (plain_pointers, "tl.store(p + tl.arange(0, 4), a)", True),
        (ieee_dots, "b = tl.dot(a, c)", False),
        (ieee_dots, "b = tl.dot(a, c, input_precision='tf32')", False),
        (ieee_dots, "b = tl.dot(a, c, b, input_precision='ieee')", True),
        (fresh_left_operands, "a = tl.load(p)\nb = tl.dot(a, c)\nd = b + a", False),
        (fresh_left_operands, "a = tl.load(p)\nb = tl.dot(tl.trans(a), c)\nd = b + a", False),
        (fresh_left_operands, "a = tl.load(p)\nb = tl.dot(a, a)", False),
        (fresh_left_operands, "a = tl.load(p)\nfor i in range(3):\n    b = tl.dot(a, c, b)", False),
        (fresh_left_operands, "a = tl.load(p)\nb = tl.dot(a, c)\na = tl.load(p)\nd = b + a", True),
        (fresh_left_operands, "a = tl.load(p)\nd = a + 1\nb = tl.dot(a, c)", True),
        (fresh_left_operands, "for i in range(3):\n    a = tl.load(p)\n    b = tl.dot(a, c, b)", True),
        (fresh_left_operands, "a = tl.dot(a, c)\nd = a", True),
        (fresh_left_operands, "a = tl.load(p)\nb = tl.dot(a.to(tl.float16), c)\nd = b + a", False),
        (fresh_left_operands, "a = tl.load(p)\nb = tl.dot(operand(a, XT, PREC), c)\nd = b + a", False),
        (fresh_left_operands, "a = tl.load(p)\nb = tl.dot(operand(a * f, XT, PREC), c)\nd = b + a", True),
        (one_accumulator_a_loop, "for i in range(3):\n    x = tl.dot(a, c, x)\n    y += tl.dot(d, c)", False),
        (one_accumulator_a_loop, "for i in range(3):\n    x = tl.dot(a, c, x)\n    y = tl.dot(d, c)", True),
        (one_accumulator_a_loop, "for i in r:\n    x = tl.dot(a)\n    x = tl.dot(d, c, x)\n    y += tl.dot(e)", True),
        (one_accumulator_a_loop, "for i in r:\n    x = tl.dot(a, c, x)\nfor i in r:\n    y += tl.dot(d, c)", True),
        (affine_offsets, "o = tl.arange(0, 4)\na = tl.load(p + tl.minimum(o, n - 1))", False),
        (affine_offsets, "o = tl.arange(0, 4)\na = tl.load(p + o % n)", False),
        (affine_offsets, "o_t = tl.arange(0, 4)\no_c = tl.where(o_t < n, o_t, 0)\na = tl.load(p + o_c)", False),
        (affine_offsets, "o = tl.arange(0, 4)\nrow = tl.minimum(i, n - 1)\na = tl.load(p + row + o, mask=o < n)", True),
        (wide_offsets, "at_k = (i_t * HV + i_h) * K", False),
        (wide_offsets, "at_k = (tl.cast(i_t, tl.int64) * HV + i_h) * K", True),
        (wide_offsets, "at_k = (row * HV + i_h) * K\np_k = k + at_k + i_k * BK", True),
    ],
)  # fmt: skip
def test_the_rule_bites(rule, code, clean):
    kernel = ast.parse("def f():\n" + "\n".join("    " + line for line in code.splitlines())).body[0]
    assert (rule(kernel) == []) is clean


def test_decorators_with_arguments_count():
    source = "@triton.jit\ndef a(): pass\n@triton.jit(do_not_specialize=['T'])\ndef b(): pass\ndef c(): pass"
    assert [k.name for k in kernels_of(ast.parse(source))] == ["a", "b"]


@pytest.mark.parametrize("path", STAGES, ids=str)
def test_kernel_files_open_with_their_card(path):
    """Formula, grid and what a program owns, tile, bytes, what must hold: the words that a reader looks for."""
    card = ast.get_docstring(syntax(path)).lower()
    for word in ("grid", "tile", "bytes", "must hold"):
        assert word in card, f"{path}: the card has no word on {word!r}"
    assert "=" in card, f"{path}: the card has no formula"


def test_no_module_level_autotune():
    """It asks for a driver at import."""
    assert [str(f) for f in KERNEL_FILES if re.search(r"@triton\.(autotune|heuristics)", text(f))] == []
