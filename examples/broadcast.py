"""Send a trainer's weights to the other ranks of a process group: what changed, over NCCL or gloo.

    torchrun --standalone --nproc-per-node 2 examples/broadcast.py

Rank 0 trains, the others are rollout workers. If every process has its own GPU, weights are on GPUs and travel over
NCCL; if processes share GPUs, over gloo, through pinned host memory; without a GPU, over gloo from CPUs. With
`--trainers 2` the first two ranks share the model by FSDP2, and each pushes its own shards; they need a GPU each, or
none. After every sync all weights are also sent, only to compare them. Ends with

    sync 5: all ranks have the trainer's weights, bit for bit
"""

import argparse
import os
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from pulsesync import Broadcast


def build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(128, 512), nn.ReLU(), nn.Linear(512, 128))


def join() -> torch.device:
    """Join the group that torchrun has prepared; return the device of this rank's weights."""
    local, gpus = int(os.environ["LOCAL_RANK"]), torch.cuda.device_count()
    device = torch.device("cuda", local % gpus) if gpus else torch.device("cpu")
    if gpus:
        torch.cuda.set_device(device)  # NCCL uses the current device
    dist.init_process_group("nccl" if gpus >= int(os.environ["LOCAL_WORLD_SIZE"]) else "gloo")
    return device


def gathered(model: nn.Module) -> dict[str, Tensor]:
    """All weights as a worker uses them. All trainers must call this."""
    state = model.state_dict()
    return {name: (w.full_tensor() if isinstance(w, DTensor) else w).bfloat16() for name, w in state.items()}


def are_same(weights: dict[str, Tensor]) -> bool:
    """Whether all ranks have the weights of rank 0, bit for bit. All ranks must call this."""
    same = torch.ones((), device=next(iter(weights.values())).device)
    for weight in weights.values():
        wanted = weight.clone()
        dist.broadcast(wanted, 0)
        same *= torch.equal(weight.view(torch.int16), wanted.view(torch.int16))
    dist.all_reduce(same, dist.ReduceOp.MIN)
    return bool(same)


def main() -> None:
    parser = argparse.ArgumentParser(description="Send a trainer's weights to the other ranks of a process group.")
    parser.add_argument("--trainers", type=int, default=1, help="ranks that share the model; the others are workers")
    trainers = list(range(parser.parse_args().trainers))

    device = join()
    training = dist.new_group(trainers)  # all ranks must call this
    syncing = dist.new_group(timeout=timedelta(minutes=10))  # for nothing else; longer than timeout_s below
    rank, model = dist.get_rank(), build().to(device)
    if len(trainers) > 1 and rank in trainers:
        fully_shard(model, mesh=DeviceMesh.from_group(training, device.type))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-6)
    if rank not in trainers:
        model = model.bfloat16()
    torch.manual_seed(rank)  # every trainer has its own data

    if rank == 0:
        backend = {"nccl": "NCCL"}.get(dist.get_backend(), dist.get_backend())
        print(f"{dist.get_world_size()} ranks over {backend}, weights on {device}")
    cast = Broadcast(syncing, src=trainers, cast="BF16", timeout_s=60)
    for step in range(6):
        if rank in trainers:
            batch = torch.randn(32, 128, device=device)
            nn.functional.mse_loss(model(batch), -batch).backward()
            optimizer.step()
            optimizer.zero_grad()
            report = cast.push(model)
        else:
            report = cast.pull_(model)
            cast.verify()
        assert are_same(gathered(model))
        if rank == 0:
            print(f"sync {step}: {report.method}, {report.sent_bytes:,} of {report.full_bytes:,} bytes")
    if rank == 0:
        print(f"sync {step}: all ranks have the trainer's weights, bit for bit")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
