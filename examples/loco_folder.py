"""Two trainers that learn on their own and exchange updates every eight steps, by PULSELoCo through a folder.

    python examples/loco_folder.py runs/meeting

Each trainer is a process with its own data. In a round, each sends only the updates that change the BF16 value of a
weight, or are about to, and keeps the rest in its own weights until a later round. After every round all trainers have
the same shared weights: publish and evaluate these. The folder may be a URL such as s3://bucket/meeting, and the
trainers on different machines: they need no open ports. docs/loco.md has the details. Ends with

    after 4 rounds both trainers have the same shared weights, bit for bit
"""

import argparse
import hashlib
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context

import torch
from torch import nn

from pulsesync.loco import PulseLoCo, RoundReport, StoreExchange

TRAINERS = ("trainer-0", "trainer-1")
ROUNDS, SYNC_EVERY = 4, 8


def train(location: str, name: str) -> str:
    """One trainer, from the first step to the last round; returns the SHA-256 of the shared weights."""
    torch.manual_seed(0)  # all trainers start from the same weights ...
    model = nn.Sequential(nn.Linear(128, 512), nn.ReLU(), nn.Linear(512, 128))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-6)
    data = torch.Generator().manual_seed(TRAINERS.index(name))  # ... and have their own data

    def show(report: RoundReport) -> None:
        share, dense = report.sent / report.total, 4 * report.total
        print(f"{name}, round {report.round}: sent {share:.1%}, {report.sent_bytes:,} of {dense:,} bytes", flush=True)

    exchange = StoreExchange(location, name, trainers=len(TRAINERS))
    with PulseLoCo(model, optimizer, exchange=exchange, sync_every=SYNC_EVERY, on_round=show) as loco:
        for _ in range(ROUNDS * SYNC_EVERY):
            batch = torch.randn(32, 128, generator=data)
            nn.functional.mse_loss(model(batch), -batch).backward()
            optimizer.step()  # every eighth of these is a round
            optimizer.zero_grad()
    # The model itself also contains updates that this trainer has not sent yet, which no other trainer has.
    shared = loco.shared_weights()
    return hashlib.sha256(b"".join(weight.numpy().tobytes() for weight in shared.values())).hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser(description="Two trainers that exchange updates every few steps, by PULSELoCo.")
    parser.add_argument("location", help="where updates are exchanged: a folder, or a URL such as s3://bucket/meeting")
    given = parser.parse_args()

    with ProcessPoolExecutor(len(TRAINERS), mp_context=get_context("spawn")) as processes:
        digests = set(processes.map(partial(train, given.location), TRAINERS))
    assert len(digests) == 1, f"the trainers' shared weights differ: {digests}"
    print(f"after {ROUNDS} rounds both trainers have the same shared weights, bit for bit")


if __name__ == "__main__":
    main()
