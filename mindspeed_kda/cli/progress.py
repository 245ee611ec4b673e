"""Progress of long work on standard error: a bar where rich and a terminal are, plain lines otherwise."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator

from mindspeed_kda.cli.common import note

Report = Callable[[float, str], None]
"""Takes the share done, 0 to 1, and what to say beside it."""
LINES = 20
"""Plain lines of one piece of work at most."""


@contextlib.contextmanager
def progress(title: str) -> Iterator[Report]:
    """Shows one piece of work; the yielded function reports its progress."""
    try:
        import rich.console
        import rich.progress as bars
    except ImportError:
        yield _lines(title)
        return
    console = rich.console.Console(stderr=True)
    if not sys.stderr.isatty():
        yield _lines(title)
        return
    columns = (
        bars.TextColumn("{task.description}"),
        bars.BarColumn(),
        bars.TaskProgressColumn(),
        bars.TextColumn("{task.fields[said]}"),
        bars.TimeElapsedColumn(),
        bars.TimeRemainingColumn(),
    )
    with bars.Progress(*columns, console=console) as shown:
        task = shown.add_task(title, total=1.0, said="")
        yield lambda share, said: shown.update(task, completed=share, said=said)


def _lines(title: str) -> Report:
    shown = -1

    def report(share: float, said: str) -> None:
        nonlocal shown
        if int(share * LINES) > shown:
            shown = int(share * LINES)
            note(f"{title} {share:4.0%}  {said}")

    return report
