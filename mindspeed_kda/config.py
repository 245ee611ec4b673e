"""Every environment variable that this package reads, in one place.

The table below is the source of ``docs/environment.md``; a test compares the two. Standard library only: ``setup.py``
reads this file by path before the package is installed.
"""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass


@dataclass(frozen=True)
class Variable:
    """One environment variable: its name, the value that stands for "unset", and what it does."""

    name: str
    default: str
    meaning: str

    def read(self) -> str:
        """The current value; an empty variable counts as unset."""
        return os.environ.get(self.name) or self.default

    def given(self) -> bool:
        """Whether the variable is set: a tenth of the price of reading it, which every call pays. It may be empty."""
        table = getattr(os.environ, "_data", None)  # CPython's own table; os.environ decodes a value on every look
        return bool(self.read()) if table is None else self._key in table

    @functools.cached_property
    def _key(self) -> object:
        return os.environ.encodekey(self.name)

    def set(self, value: str) -> None:
        """Sets the variable for this process and those that it starts."""
        os.environ[self.name] = value

    def flag(self) -> bool | None:
        """The value as yes / no, or None where it is unset. Raises ValueError on anything else."""
        if not self.default and not self.given():
            return None
        text = self.read().strip().lower()
        if text == "":
            return None
        if text in ("1", "true", "yes", "on"):
            return True
        if text in ("0", "false", "no", "off"):
            return False
        raise ValueError(f"{self.name}: expected 1 or 0, got {self.read()!r}")


BACKEND = Variable(
    "MINDSPEED_KDA_BACKEND",
    "",
    "Backend of every call that names none (`torch`, `triton`, `cuda`); unset: the best that can run the call.",
)
VALIDATE = Variable(
    "MINDSPEED_KDA_VALIDATE",
    "",
    "`1`: look at the values of `cu_seqlens` and `chunk_indices` on the device too, at the price of a synchronisation.",
)
BUILD_CUDA = Variable(
    "MINDSPEED_KDA_BUILD_CUDA",
    "",
    "At install time. `1`: build the native CUDA library or fail; `0`: do not; unset: build it where a compiler is.",
)
CUDA_LIBRARY = Variable(
    "MINDSPEED_KDA_CUDA_LIBRARY",
    "",
    "Path of the native CUDA library to load; unset: the one installed with the package.",
)
CUDA_HOME = Variable(
    "CUDA_HOME", "", "CUDA's own. At install time, the toolkit whose `bin/nvcc` builds the native library."
)
TRITON_INTERPRET = Variable(
    "TRITON_INTERPRET",
    "",
    "Triton's own. `1`: Triton kernels run in its interpreter, which is how the `triton` backend serves CPU tensors.",
)
ASCEND_HOME_PATH = Variable("ASCEND_HOME_PATH", "", "CANN's own: its folder, which `doctor` reports.")
ASCEND_TOOLKIT_HOME = Variable("ASCEND_TOOLKIT_HOME", "", "CANN's own, the older name of the same.")
TORCH_AUTOLOAD = Variable(
    "TORCH_DEVICE_BACKEND_AUTOLOAD",
    "",
    "PyTorch's own. `0`: `import torch` leaves torch_npu alone, which helps where it is installed without CANN.",
)

TABLE: tuple[Variable, ...] = (
    BACKEND,
    VALIDATE,
    BUILD_CUDA,
    CUDA_LIBRARY,
    CUDA_HOME,
    TRITON_INTERPRET,
    ASCEND_HOME_PATH,
    ASCEND_TOOLKIT_HOME,
    TORCH_AUTOLOAD,
)


def child_environment(**changes: str) -> dict[str, str]:
    """This process's environment with changes, for a process that it starts."""
    return {**os.environ, **changes}
