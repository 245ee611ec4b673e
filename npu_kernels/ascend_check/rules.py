"""When a compilation does not pass. Each rule answers None or a sentence that says what is wrong and by how much."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from mindspeed_kda.npu_kernels.ascend_check.compile import CompileReport

KIB = 1024


def compiles(report: CompileReport) -> str | None:
    """The whole pipeline exits 0."""
    if report.stopped_in is None:
        return None
    tool = "Triton" if report.stopped_in == "triton" else f"the BiSheng compiler (exit code {report.exit_code})"
    return f"does not compile: {tool}: {' '.join(report.error.split()) or 'no message'}"


def fits(report: CompileReport) -> str | None:
    """The default configuration fits every on-chip memory; a retry with a weaker one does not count."""
    if report.overflows:
        over = (
            f"{o.memory} needs {o.required / KIB:.1f} KiB of {o.available / KIB:.0f} KiB "
            f"({(o.required - o.available) / KIB:.1f} KiB too much)"
            for o in report.overflows
        )
        return "overflows: " + ", ".join(over)
    return None


def keeps_defaults(report: CompileReport) -> str | None:
    """The compiler did not weaken its configuration (multi-buffering, code motion) to get through."""
    weakened = [note for note in report.notes if "overflow" in note.lower()]
    return f"default configuration weakened: {weakened[-1]}" if weakened else None


def no_discrete_access(report: CompileReport) -> str | None:
    """Every load and store of a tile is one copy; none is broken into single elements or rows."""
    marked = [f"{count} x {mark}" for mark, count in (report.marks or {}).items() if count]
    return f"discrete memory access: {', '.join(marked)}" if marked else None


def no_scalar_code(report: CompileReport) -> str | None:
    """No loop reads or writes a tile element by element."""
    if not report.scalar:
        return None
    kinds = ", ".join(f"{count} x {kind}" for kind, count in Counter(report.scalar).most_common(3))
    return f"element-indexed access in a loop: {kinds}"


def keeps_products(report: CompileReport) -> str | None:
    """As many matrix products in the final HIVM as ``tt.dot`` in the source."""
    if report.stopped_in is None and report.dots != report.products:
        return f"matrix products: {report.dots} in the source, {report.products} in the final HIVM"
    return None


RULES: tuple[Callable[[CompileReport], str | None], ...] = (
    compiles,
    fits,
    keeps_defaults,
    no_discrete_access,
    no_scalar_code,
    keeps_products,
)


def findings(report: CompileReport) -> dict[str, str]:
    """The rules that fail, by name, each with its sentence."""
    answers = {rule.__name__: rule(report) for rule in RULES}
    return {name: sentence for name, sentence in answers.items() if sentence is not None}
