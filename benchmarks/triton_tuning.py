"""Triton's tuning of a peer's kernels, in the time that a shared GPU leaves: used by the other scripts here."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

Step = Callable[[], Any]

CONFIGS = Path(__file__).parent / "fla_configs.json"
"""Of flash-linear-attention's kernels, as its own tuning chose them: `chunk_kda_cuda.py --tune` writes it."""


def known() -> dict[str, dict[str, int]]:
    return json.loads(CONFIGS.read_text(encoding="utf-8"))


class Tuning:
    """Triton's tuning of a peer's kernels inside a ``with``: a kernel in ``known`` takes the configuration there; one
    that is not is tuned once, its configurations compiled all at once and timed for 25 ms each instead of 125."""

    def __init__(self, known: dict[str, dict[str, int]]) -> None:
        self.known = known
        self.seen: dict[str, Any] = {}  # by kernel: its tuner
        self.waiting: dict[Any, Any] = {}  # by tuner: configurations that are not compiled yet
        self.undo = contextlib.ExitStack()

    def __enter__(self) -> Tuning:
        import triton
        from triton.runtime.autotuner import Autotuner

        prune, bench, timed = Autotuner.prune_configs, Autotuner._bench, triton.testing.do_bench

        def pruned(tuner: Any, kwargs: dict[str, Any]) -> Any:
            name = tuner.base_fn.__name__
            self.seen[name] = tuner
            if name in self.known:
                known = dict(self.known[name])
                counts = {n: known.pop(n) for n in ("num_warps", "num_stages")}
                return [triton.Config(known, **counts)]
            if tuner.cache:
                return [next(iter(tuner.cache.values()))]
            self.waiting[tuner] = prune(tuner, kwargs)
            return self.waiting[tuner]

        def compiled(tuner: Any, *args: Any, config: Any, **meta: Any) -> Any:
            configs = self.waiting.pop(tuner, ())
            with ThreadPoolExecutor(os.cpu_count()) as pool, triton.AsyncCompileMode(pool, ignore_errors=True):
                for each in configs:
                    tuner.fn.run(*args, **{**meta, **each.all_kwargs(), "warmup": True})
            return bench(tuner, *args, config=config, **meta)

        def short(fn: Any, warmup: int = 25, rep: int = 100, **how: Any) -> Any:
            return timed(fn, warmup=5, rep=20, **how)

        def without_disk(tuner: Any, key: Any, configs: Any, tune: Callable[[], None]) -> bool:
            tune()
            return False

        for owner, name, new in (
            (Autotuner, "prune_configs", pruned),
            (Autotuner, "_bench", compiled),
            (Autotuner, "check_disk_cache", without_disk),
            (triton.testing, "do_bench", short),
        ):
            self.undo.enter_context(mock.patch.object(owner, name, new))
        return self

    def __exit__(self, *_: object) -> None:
        self.undo.close()

    def chosen(self) -> dict[str, dict[str, int]]:
        """Of each kernel that ran: its configuration in its first case."""
        first = {name: next(iter(tuner.cache.values())) for name, tuner in self.seen.items() if tuner.cache}
        return {
            name: {**c.kwargs, "num_warps": c.num_warps, "num_stages": c.num_stages}
            for name, c in sorted(first.items())
        }

    def compile_ahead(self, todo: list[Step]) -> None:
        """Runs the steps with launches that only compile, all kernels at once on all cores; results are garbage."""
        import triton
        from triton.runtime import _async_compile
        from triton.runtime.autotuner import Autotuner
        from triton.runtime.jit import JITFunction

        run = JITFunction.run
        with ThreadPoolExecutor(os.cpu_count()) as pool, triton.AsyncCompileMode(pool, ignore_errors=True) as mode:

            def only_compile(kernel: Any, *args: Any, **kwargs: Any) -> Any:
                token = _async_compile.active_mode.set(mode)  # autograd runs backward in a thread of its own
                try:
                    return run(kernel, *args, **{**kwargs, "warmup": True})
                finally:
                    _async_compile.active_mode.reset(token)

            def untimed(tuner: Any, *args: Any, config: Any, **meta: Any) -> list[float]:
                tuner.fn.run(*args, **{**meta, **config.all_kwargs()})
                return [0.0, 0.0, 0.0]

            with (
                mock.patch.object(JITFunction, "run", only_compile),
                mock.patch.object(Autotuner, "_bench", untimed),
            ):
                for step in todo:
                    step()
        for name, tuner in self.seen.items():
            if name not in self.known:
                tuner.cache.clear()
