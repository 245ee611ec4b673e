"""Compilations in processes of their own: Triton may abort on an assertion, and must not run in its interpreter.

``run_all`` hands tasks to worker processes and yields their reports as they come; a worker that dies costs the one
compilation it was at. ``python -m mindspeed_kda.npu_kernels.ascend_check.worker`` is the worker: pickled tasks on
standard input, pickled reports on standard output.
"""

from __future__ import annotations

import os
import pickle
import queue
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from mindspeed_kda import config
from mindspeed_kda.npu_kernels.ascend_check.compile import CompileReport, compile_kernel, load_kernel
from mindspeed_kda.npu_kernels.ascend_check.spec import KernelSpec
from mindspeed_kda.npu_kernels.ascend_check.targets import Target


@dataclass(frozen=True)
class Task:
    """One compilation; ``keep`` is a folder for its intermediate files, ``cache`` one of earlier reports."""

    spec: KernelSpec
    target: Target
    keep: Path | None = None
    cache: Path | None = None


def compile_task(task: Task) -> CompileReport:
    """Compiles in this process."""
    spec = task.spec
    try:
        fn = load_kernel(spec.kernel)
    except Exception as error:  # a kernel file that cannot be imported is a result, as in compile_kernel
        return CompileReport("triton", 1, 0.0, f"{spec.kernel}: {type(error).__name__}: {error}")
    return compile_kernel(
        fn, dict(spec.signature), dict(spec.constants), task.target, task.keep, dict(spec.options), task.cache
    )


def run_all(tasks: Sequence[Task], jobs: int) -> Iterator[tuple[int, CompileReport]]:
    """Index and report of every task, in the order of completion."""
    todo: queue.SimpleQueue[int] = queue.SimpleQueue()
    done: queue.SimpleQueue[tuple[int, CompileReport]] = queue.SimpleQueue()
    stop = threading.Event()
    for index in range(len(tasks)):
        todo.put(index)

    def serve() -> None:
        worker: subprocess.Popen[bytes] | None = None
        while not stop.is_set():
            try:
                index = todo.get_nowait()
            except queue.Empty:
                break
            worker = worker or _start()
            report = _ask(worker, tasks[index])
            if report is None:
                code = worker.wait()
                report = CompileReport("triton", code, 0.0, f"Triton itself died (exit code {code})")
                worker = None
            done.put((index, report))
        if worker is not None and worker.stdin is not None:
            worker.stdin.close()
            worker.wait()

    threads = [threading.Thread(target=serve, daemon=True) for _ in range(min(jobs, len(tasks)))]
    for thread in threads:
        thread.start()
    try:
        for _ in tasks:
            yield done.get()
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def _start() -> subprocess.Popen[bytes]:
    environment = config.child_environment(**{config.TRITON_INTERPRET.name: "0"})
    command = [sys.executable, "-m", "mindspeed_kda.npu_kernels.ascend_check.worker"]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)


def _ask(worker: subprocess.Popen[bytes], task: Task) -> CompileReport | None:
    """The worker's report, or None where it died."""
    assert worker.stdin is not None
    assert worker.stdout is not None
    try:
        pickle.dump(task, worker.stdin)
        worker.stdin.flush()
        report = pickle.load(worker.stdout)
    except (EOFError, BrokenPipeError, pickle.UnpicklingError):
        return None
    assert isinstance(report, CompileReport)
    return report


def _main() -> None:
    answers: BinaryIO = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever Triton prints goes to standard error, so that answers stay clean
    while True:
        try:
            task = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        pickle.dump(compile_task(task), answers)
        answers.flush()


if __name__ == "__main__":
    _main()
