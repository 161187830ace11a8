"""What becomes of a worker whose weights something else has written to, and what does the check cost that finds it?

    python -m benchmarks foreign_writes [--weights 40_000_000] [--device cuda]

A worker follows a run; then something else writes to one of its tensors, and the worker syncs over two more versions.
For each kind of write and each codec: whether that sync repaired the tensor and named it (`repaired`), repaired it
without naming it (`not named`), or noticed nothing until a recount repaired it (`recount`), or failed (`FAILED`: the
benchmark fails). Small tensors, four dtypes in host memory, BF16 on a device. Then the times of one larger worker: a
sync with a patch, the count of all weights that precedes the blame, and the sync that finds the damage and loads the
anchor.
"""

import argparse
import logging
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import ml_dtypes
import numpy as np

from benchmarks.harness.report import json_line, provenance, table
from benchmarks.harness.timing import timed
from benchmarks.harness.weights import as_torch
from pulsesync import Publisher, Subscriber
from pulsesync.errors import PulseError
from pulsesync.state.weights import Recount
from pulsesync.store import MemoryStore
from tests.foreign_writes import CODECS, DTYPES, WRITES, Arrays, sync_after, train

QUICK = ("--weights", "1_000_000", "--dtypes", "1")
ToWorker = Callable[[Arrays], Mapping[str, Any]]


def on_device(device: str) -> tuple[ToWorker, Callable[[Any], Any]]:
    """Return how BF16 tensors get to a device, and back as numpy arrays."""
    import torch

    def to_worker(arrays: Arrays) -> dict[str, Any]:
        return {name: one.clone().to(device) for name, one in as_torch(arrays).items()}

    return to_worker, lambda tensor: tensor.cpu().view(torch.int16).numpy().view(ml_dtypes.bfloat16).copy()


def outcome(write: Callable[[Any], None], codec: Any, dtype: Any, *memory: Any) -> str:
    """Return what became of a worker; a sync that repairs without being asked to recount has planned again."""
    try:
        report, equal = sync_after(write, codec, dtype, *memory)
    except PulseError as e:
        return f"FAILED ({type(e).__name__})"
    if not equal:
        return "FAILED (weights)"
    if not report.repaired:
        return "not named"
    return "repaired" if report.replanned else "recount"


def measure(count: int, memory: tuple[Any, ...]) -> dict[str, float]:
    """Time a sync with a patch, a count of all weights, and a sync that repairs, in milliseconds."""
    rng, store, times = np.random.default_rng(0), MemoryStore(), dict[str, float]()
    trained = {
        f"layers.{n}.weight": (0.02 * rng.standard_normal((count // 8192, 1024))).astype(ml_dtypes.bfloat16)
        for n in range(8)
    }
    local = (memory[0] if memory else lambda arrays: {name: one.copy() for name, one in arrays.items()})(trained)

    def sync(what: str) -> None:
        pub.publish(trained)
        report, seconds = timed(lambda: sub.sync(local))
        times[what] = 1e3 * seconds
        assert bool(report.repaired) == (what == "sync that repairs")
        train(trained, rng)

    with Publisher(store) as pub, Subscriber(store) as sub:
        for _ in range(3):
            sync("sync with a patch")
        assert sub.state is not None
        damaged, seconds = timed(Recount(sub.state).find_damaged)
        assert not damaged
        times["count of all weights"] = 1e3 * seconds
        local["layers.3.weight"][:] = 0
        sync("sync that repairs")
        sub.verify(local)
    return times


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--weights", type=int, default=40_000_000, help="of the larger worker, which is also kept in host memory"
    )
    parser.add_argument("--dtypes", type=int, default=len(DTYPES), help="of the small tensors: how many of them")
    parser.add_argument("--device", help="a device of torch, such as cuda; default: host memory")


def main(given: argparse.Namespace) -> None:
    logging.getLogger("pulsesync").setLevel(logging.ERROR)
    memory = on_device(given.device) if given.device else ()
    dtypes = DTYPES[: 1 if given.device else given.dtypes]
    cells = {
        (write, codec): Counter(outcome(WRITES[write], codec, dtype, *memory) for dtype in dtypes)
        for write in WRITES
        for codec in CODECS
    }
    rows = [
        [write, *(", ".join(f"{n} {what}" for what, n in sorted(cells[write, codec].items())) for codec in CODECS)]
        for write in WRITES
    ]
    print(table(["write", *CODECS], rows))
    totals = sum(cells.values(), Counter[str]())
    print(f"\n{totals.total()} cases: {dict(totals)}")
    times = measure(given.weights, memory)
    print(f"\n{given.weights:,} weights:\n" + table(["", "ms"], [[what, f"{ms:.1f}"] for what, ms in times.items()]))
    facts = {"write x codec": {f"{w} x {c}": dict(n) for (w, c), n in cells.items()}, "totals": dict(totals)}
    print(json_line(provenance() | facts | {"weights": given.weights, "ms": times}))
    if failed := [what for what in totals if what.startswith("FAILED")]:
        raise SystemExit(f"workers failed: {failed}")
