"""Train a small model and publish its weights after every step, for workers that follow.

    python examples/trainer.py runs/example

Start examples/worker.py with the same location, before or after this, here or on another machine. The location is a
folder, or a URL such as s3://bucket/run. Prints what each version sent instead of all weights, and ends with

    version 20 has digest 64ab…

The worker ends with the same digest if its weights are the same, bit for bit.
"""

import argparse
import time

import torch
from torch import nn

from pulsesync import Publisher


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a small model and publish its weights after every step.")
    parser.add_argument("location", help="where to publish: a folder, or a URL such as s3://bucket/run")
    parser.add_argument("--steps", type=int, default=20)
    given = parser.parse_args()

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 256))  # FP32 master weights
    teacher = nn.Linear(256, 256)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-6)

    publisher = Publisher(given.location, cast="BF16")  # workers use BF16
    publisher.publish(model, step=0)
    for step in range(1, given.steps + 1):
        batch = torch.randn(64, 256)
        loss = nn.functional.mse_loss(model(batch), teacher(batch).detach())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

        report = publisher.publish(model, step=step)
        sent = f"{report.density:.1%} changed, {report.payload_bytes:,} of {report.full_bytes:,} bytes"
        print(f"step {step}: loss {loss.item():.4f}, version {report.version}: {sent}", flush=True)
        time.sleep(0.1)  # a step of a larger model takes longer
    print(f"version {report.version} has digest {publisher.digest}")
    publisher.close()


if __name__ == "__main__":
    main()
