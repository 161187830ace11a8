"""Follow the weights that examples/trainer.py publishes, in the tensors of a model that is in use.

    python examples/worker.py runs/example

Waits for the first version, syncs to every version that follows, and ends after the trainer's last step with

    version 20 has digest 64ab…

after it has computed that digest from all its weights. It may be killed and restarted at any time.
"""

import argparse

import torch
from torch import nn

from pulsesync import Subscriber


def main() -> None:
    parser = argparse.ArgumentParser(description="Follow the weights of a run in the tensors of a model.")
    parser.add_argument("location", help="where the trainer publishes: a folder, or a URL such as s3://bucket/run")
    parser.add_argument("--steps", type=int, default=20, help="the step after which to end, as given to the trainer")
    given = parser.parse_args()

    model = nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 256)).bfloat16()
    prompt = torch.ones(1, 256, dtype=torch.bfloat16)

    subscriber = Subscriber(given.location)
    for report in subscriber.watch(model, wait_s=60, interval_s=0.1, max_interval_s=1):
        answer = model(prompt).mean().item()  # here a worker would generate
        fetched = f"{report.applied} records, {report.fetched_bytes:,} bytes"
        print(f"version {report.version}: {fetched}, output {answer:.5f}", flush=True)
        if report.step >= given.steps:
            break
    print(f"version {subscriber.version} has digest {subscriber.verify()}")
    subscriber.close()


if __name__ == "__main__":
    main()
