"""The built-in backends: predicate, lazy import, call. No mathematics; none imports another."""

from mindspeed_kda.backends import cuda_backend, library_backend, torch_backend, triton_backend
from mindspeed_kda.registry import Registry


def register_builtin(registry: Registry) -> None:
    for module in (cuda_backend, library_backend, triton_backend, torch_backend):
        module.register(registry)
