"""Publish a model that FSDP2 has sharded: every rank sends its own shards, together they make one version.

    torchrun --standalone --nproc-per-node 2 examples/fsdp2.py runs/fsdp2

Two processes train on CPUs, over gloo; with GPUs, NCCL and more ranks only the first lines change. No rank gathers the
model to publish it. Rank 0 also follows the run like a worker with the full model, and compares: only to show that the
weights are the same, the trained model is gathered here. Ends with

    version 5: the worker has the gathered weights, bit for bit
"""

import argparse

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from pulsesync import Collective, ShardedPublisher, Subscriber


def build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(128, 512), nn.ReLU(), nn.Linear(512, 128))


def gathered(model: nn.Module) -> dict[str, Tensor]:
    """All weights as a worker uses them. Every rank must call this."""
    return {name: weight.full_tensor().bfloat16() for name, weight in model.state_dict().items()}  # of DTensors


def same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.view(torch.int16), b.view(torch.int16))


def main() -> None:
    parser = argparse.ArgumentParser(description="Publish a model that FSDP2 has sharded.")
    parser.add_argument("location", help="where to publish: a folder, or a URL such as s3://bucket/run")
    given = parser.parse_args()

    dist.init_process_group("gloo")
    model = build()
    for layer in (model[0], model[2]):
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-6)
    worker, subscriber = build().bfloat16(), Subscriber(given.location)
    torch.manual_seed(dist.get_rank())  # every rank has its own data

    publisher = ShardedPublisher(given.location, Collective(dist.new_group()), cast="BF16")
    publisher.publish(model, step=0)  # on every rank
    for step in range(1, 6):
        batch = torch.randn(32, 128)
        nn.functional.mse_loss(model(batch), -batch).backward()
        optimizer.step()
        optimizer.zero_grad()

        report = publisher.publish(model, step=step)
        wanted = gathered(model)
        if dist.get_rank() == 0:
            subscriber.sync(worker)
            assert all(same_bits(weight, wanted[name]) for name, weight in worker.state_dict().items())
            print(f"step {step}: {report.density:.1%} changed, {report.payload_bytes:,} of {report.full_bytes:,} bytes")
    if dist.get_rank() == 0:
        print(f"version {report.version}: the worker has the gathered weights, bit for bit")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
