"""Entry point: finds the command, imports that command's module only, and turns known errors into one line.

A command's module has ``add_parser(subparsers)`` and ``run(args) -> int``. Its module-level imports are the core's, so
that ``--help`` and ``doctor`` work where nothing but torch and numpy does.

Exit codes: 0 done, 1 the command ran and found a miss, 2 wrong usage or input, 130 interrupted.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

import mindspeed_kda
from mindspeed_kda.cli.common import UsageError

PROG = "mindspeed-kda"
COMMANDS = {
    "doctor": "what runs on this machine, and why the rest does not",
    "demo": "train a small byte-level language model on real text, then check every backend on its layers",
    "verify": "every backend and dtype against float64, on inputs captured from real text",
    "bench": "time the op over shapes and backends, beside copy speed and PyTorch eager",
    "ascend-check": "compile every Triton stage for Ascend NPUs, without an NPU",
}
EPILOG = """\
Start here:
  mindspeed-kda doctor                     which backends run here
  mindspeed-kda demo                       a model trained in minutes on a plain CPU
  mindspeed-kda verify --backend torch     errors of one backend on real inputs
  mindspeed-kda bench --shapes 1x2048x32x128x128 --out bench_out
  mindspeed-kda COMMAND --help             options and examples of one command

`python -m mindspeed_kda` is the same program. Figures go to standard output, progress to standard error.
Exit codes: 0 done, 1 a result missed its limit, 2 wrong usage or input.
"""


def _parser(command: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=PROG,
        description="KDA (Kimi Delta Attention) on Ascend NPUs, NVIDIA GPUs and CPUs: checks, figures and a demo.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"{PROG} {mindspeed_kda.__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, text in COMMANDS.items():
        if name == command:
            _module(name).add_parser(subparsers)
        else:
            subparsers.add_parser(name, help=text)
    return parser


def _module(command: str):  # type: ignore[no-untyped-def]
    return importlib.import_module(f"mindspeed_kda.cli.{command.replace('-', '_')}")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command line and returns its exit code; ``argv`` defaults to the process's arguments."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    command = next((a for a in arguments if not a.startswith("-")), None)
    try:
        args = _parser(command).parse_args(arguments)
        return int(_module(args.command).run(args))
    except SystemExit as stop:  # argparse: 0 after --help and --version, 2 on wrong usage
        return stop.code if isinstance(stop.code, int) else 2
    except UsageError as error:
        print(f"{PROG}: error: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # the reader of our output has left, as in `| head`
        sys.stderr.close()
        return 0
    except KeyboardInterrupt:
        print(f"{PROG}: interrupted", file=sys.stderr)
        return 130
