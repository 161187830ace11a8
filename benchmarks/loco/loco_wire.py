"""Does a round send as many bytes as it reports? Real gloo processes, checked by the kernel's count of the loopback.

    python -m benchmarks loco_wire [--trainers 4] [--size 4000000] [--rounds 3]

Every trainer has the same vector of weights and moves it by noise of about the size of a few Adam steps at 1e-6. The
bytes that DiLoCo, PULSELoCo and compact PULSELoCo report as sent, summed over trainers, are compared with what
/proc/net/dev counts on lo in the same time (which includes TCP's headers and acknowledgements, and all other traffic of
this machine on the loopback). torch's own all_reduce of the same vector is measured for comparison.
"""

import argparse
import time
from pathlib import Path
from typing import Any

import torch
from torch import distributed, multiprocessing

from benchmarks.harness.report import json_line, provenance, table
from pulsesync.loco import DiLoCo, GroupExchange, PulseLoCo

QUICK = ("--trainers", "2", "--size", "100000", "--rounds", "1")
WAYS: dict[str, Any] = {
    "all_reduce of torch": None,
    "DiLoCo, owner": (DiLoCo, "owner", {}),
    "DiLoCo, gather": (DiLoCo, "gather", {}),
    "PULSELoCo, owner": (PulseLoCo, "owner", {}),
    "PULSELoCo, gather": (PulseLoCo, "gather", {}),
    "compact, owner": (PulseLoCo, "owner", {"compact": 3}),
    "compact, gather": (PulseLoCo, "gather", {"compact": 3}),
}


def passed() -> int:
    """Bytes that the loopback has carried so far."""
    line = next(line for line in Path("/proc/net/dev").read_text().splitlines() if line.strip().startswith("lo:"))
    return int(line.split()[1])


class Noise(torch.optim.Optimizer):
    """Moves weights by noise."""

    def __init__(self, parameters: Any, seed: int) -> None:
        super().__init__(parameters, {})
        self.generator = torch.Generator().manual_seed(seed)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                p.data += 3e-6 * torch.randn(p.shape, generator=self.generator)


def trainer(rank: int, options: argparse.Namespace, address: str, told: Any) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=address, rank=rank, world_size=options.trainers)
    for name, way in WAYS.items():
        torch.manual_seed(0)
        weights = torch.nn.Parameter((0.02 * torch.randn(options.size)).bfloat16().float())
        sent, before = [0], [0]

        def begin(before: list[int] = before) -> None:
            distributed.barrier()
            time.sleep(0.2)
            before[0] = passed()
            distributed.barrier()

        if way is None:
            begin()
            for _ in range(options.rounds):
                distributed.all_reduce(weights.data.clone())
        else:
            kind, reduce, extra = way
            optimizer, exchange = Noise([weights], rank), GroupExchange(reduce=reduce)
            with kind({"weights": weights}, optimizer, exchange=exchange, sync_every=1, **extra) as loco:
                begin()
                for _ in range(options.rounds):
                    optimizer.step()
                    sent[0] += loco.last_report.sent_bytes
        distributed.barrier()
        time.sleep(0.2)
        if rank == 0:
            counted = passed() - before[0]
        everyone = torch.tensor(sent[0])
        distributed.all_reduce(everyone)
        if rank == 0:
            told.put((name, int(everyone), counted))
    distributed.destroy_process_group()


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--trainers", type=int, default=4)
    parser.add_argument("--size", type=int, default=4_000_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--port", type=int, default=29641)


def main(given: argparse.Namespace) -> None:
    told = multiprocessing.get_context("spawn").SimpleQueue()
    multiprocessing.spawn(  # type: ignore[attr-defined, no-untyped-call]
        trainer, (given, f"tcp://127.0.0.1:{given.port}", told), given.trainers
    )
    found = [told.get() for _ in WAYS]
    scale = given.trainers * given.rounds
    ring = 2 * (given.trainers - 1) / given.trainers * 4 * given.size
    cells = []
    for name, reported, counted in found:
        share = f"{counted / reported:.3f}" if reported else f"{counted / scale / ring:.3f} of the ring's formula"
        cells.append([name, f"{reported / scale:,.0f}", f"{counted / scale:,.0f}", share])
    head = [f"{given.trainers} trainers, {given.size:,} weights", "reported, a trainer and round", "on lo", "ratio"]
    print(table(head, cells) + "\n")
    print(json_line({"bench": "loco-wire", **provenance("torch"), "options": vars(given), "found": found}))
