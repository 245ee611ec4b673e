"""One rank of the data-parallel tests: trains a copy of the model on its half of the batch, saves what it found."""

from __future__ import annotations

import os
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from mindspeed_kda.nn import KimiDeltaAttention

RANKS = 2


class Model(nn.Module):
    """Two KDA layers with residuals."""

    def __init__(self) -> None:
        super().__init__()
        sizes = {"hidden_size": 16, "head_dim": 8, "num_heads": 2, "num_v_heads": 4, "chunk_size": 16}
        self.layers = nn.ModuleList(KimiDeltaAttention(**sizes) for _ in range(2))

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)[0]
        return x


def model_and_batch():
    """The same on every rank: a float64 model and a batch of four sequences with targets."""
    torch.manual_seed(0)
    model = Model().double()
    return model, torch.randn(4, 21, 16, dtype=torch.float64), torch.randn(4, 21, 16, dtype=torch.float64)


def loss_of(model, x, target):
    return (model(x) - target).square().mean()


def gradients_of(model):
    """Whole gradients by name, whatever holds them."""
    out = {}
    for name, p in model.named_parameters():
        grad = p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad
        out[name.removeprefix("module.")] = grad.detach().clone()
    return out


def main(rank: int, folder: Path) -> None:
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=RANKS, timeout=timedelta(seconds=120)
    )
    found = {}
    for kind in ("ddp", "fsdp2"):
        model, x, target = model_and_batch()
        mine = slice(rank * 2, rank * 2 + 2)
        if kind == "ddp":
            model = DistributedDataParallel(model)
        else:
            mesh = init_device_mesh("cpu", (RANKS,))
            for layer in model.layers:
                fully_shard(layer, mesh=mesh)
            fully_shard(model, mesh=mesh)
        loss_of(model, x[mine], target[mine]).backward()
        found[kind] = gradients_of(model)
        del model
    torch.save(found, folder / f"{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
    # Not through the interpreter's teardown: gloo's threads can outlive their owner there and abort a process whose
    # results are saved. A failure above has already ended it with its traceback.
    sys.stderr.flush()
    os._exit(0)
