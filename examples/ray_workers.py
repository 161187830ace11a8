"""A trainer and two rollout actors of a Ray cluster, with patches between them in Ray's object store.

    python examples/ray_workers.py

Starts a cluster on this machine, or joins the one at RAY_ADDRESS. One rollout actor is killed meanwhile; Ray restarts
it, and it catches up by itself. docs/integrations/ray.md has trainers that share a model, and RLlib. Ends with

    all 2 rollout actors have the weights of version 10, bit for bit
"""

import ray
import torch
from torch import nn

from pulsesync.integrations.ray import Link

STEPS, ROLLOUTS = 10, 2


def build() -> nn.Sequential:
    return nn.Sequential(nn.Linear(128, 512), nn.ReLU(), nn.Linear(512, 128))


@ray.remote(num_cpus=0.5)
class Trainer:
    """Trains, and publishes every step."""

    def __init__(self, link: Link) -> None:
        self.model = build()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-6)
        self.publisher = link.publisher(cast="BF16")

    def step(self, number: int) -> str | None:
        batch = torch.randn(32, 128)
        nn.functional.mse_loss(self.model(batch), -batch).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.publisher.publish(self.model, step=number)
        return self.publisher.digest


@ray.remote(num_cpus=0.5, max_restarts=-1, max_task_retries=-1)
class Rollout:
    """Follows the trainer's weights, and would generate with them."""

    def __init__(self, link: Link) -> None:
        self.model = build().bfloat16()
        self.subscriber = link.subscriber()

    def sync(self) -> tuple[int, str]:
        """Sync to the newest version; return it with the digest of all weights, computed from them."""
        report = self.subscriber.sync(self.model)
        return report.version, self.subscriber.verify()


def main() -> None:
    ray.init()
    link = Link("ray-workers")  # or Link("ray-workers", at="s3://bucket/run")
    trainer = Trainer.remote(link)
    rollouts = [Rollout.remote(link) for _ in range(ROLLOUTS)]
    for number in range(STEPS + 1):
        published = ray.get(trainer.step.remote(number))
        if number == STEPS // 2:
            ray.kill(rollouts[1], no_restart=False)
        for version, digest in ray.get([rollout.sync.remote() for rollout in rollouts]):
            assert (version, digest) == (number, published)
    print(f"all {ROLLOUTS} rollout actors have the weights of version {STEPS}, bit for bit")
    link.close()
    ray.shutdown()


if __name__ == "__main__":
    main()
