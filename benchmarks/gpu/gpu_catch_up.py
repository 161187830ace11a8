"""What does a worker on a GPU pay for committing k patches one by one, and what would one commit of them cost instead?

    python -m benchmarks gpu_catch_up                                  # 7.6 B weights, 8 patches of 1 %
    python -m benchmarks gpu_catch_up --weights 1e9 --patches 4

A patch is decoded against the weights that the previous patch produces. On a GPU, kernels read these from memory, so
the previous patch is committed first. To commit all patches at once, the weights in between would have to be kept in
separate memory: a shadow, which is a copy of every block that an earlier patch has changed. Measured here:

- one by one: each pause, and the whole sync;
- one commit: composing the changes of all patches, and the pause of writing them;
- a shadow: which share of the weights' blocks and chunks one patch changes, and the time and memory of a copy;
- groups: one patch decoded in groups of tiles, which a smaller shadow would require.

Times are wall-clock times from a call to the end of all work it launched; memory is torch's peak above what was
allocated before. The weights are checked, bit for bit, after the sync, after the undo and after the single commit.
"""

import argparse
import functools
import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
import torch

from benchmarks.harness.device import (
    allocated,
    as_device,
    chances,
    equal,
    make,
    name_of,
    need_gpu,
    peak_since,
    reset_peak,
    shapes,
    timed_ms,
    train_,
)
from benchmarks.harness.report import json_line, provenance
from benchmarks.harness.timing import T
from pulsesync import Publisher, Subscriber
from pulsesync.device import decode
from pulsesync.device.changes import Changes
from pulsesync.device.state import DeviceBackend, backend_of
from pulsesync.device.tracked import DeviceHistory
from pulsesync.format.body import Body
from pulsesync.kernels.spec import GPU_CHUNK
from pulsesync.state.backend import Transition
from pulsesync.state.weights import WeightState
from pulsesync.store import MemoryStore

QUICK = ("--weights", "1100", "--patches", "2", "--groups", "1", "2")


def timed(work: Callable[[], T]) -> tuple[T, float, float]:
    """The result of a call, its milliseconds, and its peak memory in gigabytes."""
    before = allocated()
    reset_peak()
    out, took_ms = timed_ms(work)
    return out, took_ms, peak_since(before)


class CatchUp:
    """A worker at the first version of a run, and the patches that it lacks."""

    def __init__(self, weights: float, patches: int, density: float) -> None:
        self.model, self.store = make(dict(shapes(weights))), MemoryStore()
        self.start = {name: tensor.clone() for name, tensor in self.model.items()}
        self.worker = {name: torch.zeros_like(tensor) for name, tensor in self.model.items()}
        self.subscriber = Subscriber(self.store)
        chance = chances(density)
        with Publisher(self.store) as publisher:
            publisher.publish(self.model)
            for _ in range(patches):
                train_(self.model, chance)
                publisher.publish(self.model)
        self.subscriber.sync(self.worker, version=0)

    @property
    def state(self) -> WeightState:
        assert self.subscriber.state is not None
        return self.subscriber.state

    @property
    def backend(self) -> DeviceBackend:
        return backend_of(self.state)

    def one_by_one(self) -> tuple[dict[str, Any], list[Transition], list[Body]]:
        """Sync to the newest version; return the figures, the transitions that were committed, and the first patch."""
        state, backend, pauses_ms = self.state, self.backend, list[float]()
        done, bodies = list[Transition](), list[Body]()
        commit, read = state.commit, backend.decode

        def timed_commit(transition: Any) -> Any:
            back, took_ms, _ = timed(lambda: commit(transition))
            pauses_ms.append(took_ms)
            done.append(transition)
            return back

        def seen(versions: Any, *rest: Any) -> Any:
            bodies.extend(versions[0] if not bodies else ())
            return read(versions, *rest)

        with mock.patch.object(state, "commit", timed_commit), mock.patch.object(backend, "decode", seen):
            report, took_ms, peak = timed(lambda: self.subscriber.sync(self.worker))
        assert equal(self.worker, self.model)
        row = {
            "patches": len(report.path),
            "pauses_ms": [round(ms, 2) for ms in pauses_ms],
            "pauses_sum_ms": round(sum(pauses_ms), 2),
            "prepare_ms": round(1e3 * report.prepare_s, 1),
            "sync_ms": round(took_ms, 1),
            "peak_gb": round(peak, 2),
        }
        return row, done, bodies

    def one_commit(self, done: list[Transition]) -> dict[str, Any]:
        """Undo the sync, and commit all its changes at once."""
        state = self.state
        self.subscriber.sync(self.worker, version=0)
        assert equal(self.worker, self.start)
        changes, compose_ms, peak = timed(lambda: functools.reduce(self.backend.compose, [one.changes for one in done]))
        all_at_once = replace(done[-1], changes=changes, changed=self.backend.count_changed(changes))
        back, pause_ms, _ = timed(lambda: state.commit(all_at_once))
        assert equal(self.worker, self.model)
        state.commit(back)
        return {
            "changes_of_sum": round(all_at_once.changed / sum(one.changed for one in done), 3),
            "compose_ms": round(compose_ms, 1),
            "compose_peak_gb": round(peak, 2),
            "pause_ms": round(pause_ms, 2),
        }

    def shadow(self, first: Transition) -> dict[str, Any]:
        """A copy of the weights with the changes of the first patch in it."""
        here = self.backend
        there = DeviceBackend(here.layout, {name: torch.zeros_like(flat) for name, flat in here.flats.items()})

        def copy() -> None:
            for name, flat in there.flats.items():
                flat.copy_(here.flats[name])
            there.write(first.changes)

        _, copy_ms, _ = timed(copy)
        copy_bytes = sum(flat.numel() * flat.element_size() for flat in there.flats.values())
        return {
            "blocks_changed": round(_touched(first.changes, 1 << 20), 4),
            "chunks_changed": round(_touched(first.changes, GPU_CHUNK), 4),
            "copy_ms": round(copy_ms, 2),
            "copy_gb": round(copy_bytes / 1e9, 2),
        }

    def groups(self, bodies: list[Body], counts: list[int]) -> dict[str, float]:
        """Milliseconds to decode those tiles of the first patch that depend on the old weights, by number of groups."""
        here, history = self.backend, self.state.history

        def decode_in(count: int) -> None:
            for body in bodies:
                opened = decode.open_part(body.index, body.sections, here.tiles, history)
                for number, coded in opened.coded.items():
                    pile = here.piles.of(coded.tiles[0].ordinal)
                    tiles = np.arange(len(coded.tiles))
                    for some in np.array_split(tiles, min(count, len(tiles))):
                        weights = pile.locate(here.tensors)
                        decode.decode_coded(pile, coded.part(some), opened.tables[number], weights, DeviceHistory())

        out = {}
        for count in counts:
            decode_in(count)  # the first call compiles kernels and builds the tables of each group
            out[str(count)] = round(min(timed(functools.partial(decode_in, count))[1] for _ in range(3)), 1)
        return out


def _touched(changes: Changes, size: int) -> float:
    """Cut blocks into pieces of `size` weights; return the share of the pieces in which a weight changes."""
    touched = pieces = 0
    for run in changes:
        touched += int(torch.unique(run.flat_keys() // size).numel())
        pieces += int((-(-run.pile.host_sizes // size)).sum())
    return touched / pieces


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--weights", type=float, default=7.6e9)
    parser.add_argument("--patches", type=int, default=8)
    parser.add_argument("--density", type=float, default=1.0, help="percent of the weights that a patch changes")
    parser.add_argument("--groups", type=int, nargs="+", default=[1, 2, 4, 8, 16])


def main(given: argparse.Namespace) -> None:
    need_gpu(given.weights)
    print(name_of())
    with as_device():
        for warm in (True, False):  # the first time compiles
            bench = CatchUp(given.weights, given.patches, given.density / 100)
            one_by_one, done, bodies = bench.one_by_one()
            rows = {"one by one": one_by_one, "one commit": bench.one_commit(done), "shadow": bench.shadow(done[0])}
            rows["groups"] = bench.groups(bodies, given.groups)
            if not warm:
                for name, row in rows.items():
                    print(f"{name}: {json.dumps(row)}", flush=True)
                print(json_line({"bench": "gpu_catch_up", **provenance("torch", "triton"), "gpu": name_of(), **rows}))
            del bench, done, bodies
