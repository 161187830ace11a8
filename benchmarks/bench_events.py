"""What do events cost a sync and a publish?

    python benchmarks/bench_events.py                           # 1.2 M weights
    python benchmarks/bench_events.py --weights 135 --rounds 12

A trainer publishes into a folder, and a worker syncs from it, in one process. Each round does so with no listener,
with one that does nothing, and with the one of the Prometheus metrics, in an order that is drawn anew. A publish, a
sync of a new version, and a sync that finds nothing new are timed on their own. Two figures compare a listener with
none: the median of the ratios of neighbours in a round, and the ratio of the 10th percentiles, which other programs
on the machine disturb least. Events that are queued after a round are delivered before the next one, and that is not
timed: a listener has its own thread, and its CPU time per event is shown. The call that makes and emits an event is
also timed alone, with a listener's thread that looks for events by itself, and with one that rests and must be woken.
"""

import argparse
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise

import ml_dtypes
import numpy as np
from bench_codec import Rounds, json_line, provenance, table

import pulsesync as pulse
from pulsesync import Publisher, Subscriber, events
from pulsesync.core.events import Listener
from pulsesync.metrics import PrometheusMetrics
from pulsesync.run.reporting import SyncEvents, SyncReport
from pulsesync.testing import AdamUpdates

CALLS_ALONE = 1000
IDLE = 50  # syncs without a new version, in a row
CALLS = ["publish", "sync", "idle sync"]


class Run:
    """A trainer and a worker, version by version."""

    def __init__(self, folder: str, millions: float) -> None:
        columns = 1000
        self.updates = AdamUpdates({"layer.weight": (round(millions * 1e6 / columns), columns)}, scale=0.15)
        self.weights = {name: bits.view(ml_dtypes.bfloat16) for name, bits in self.updates.state().items()}
        self.held = {name: np.zeros_like(array) for name, array in self.weights.items()}
        self.publisher, self.subscriber = Publisher(folder), Subscriber(folder)
        self.version()

    def version(self) -> dict[str, float]:
        """Publish and sync a version, and find nothing new; return the seconds of each, of which the last is a mean."""
        for name, bits in self.updates.step().items():
            self.weights[name].view(np.uint16)[...] = bits
        times = [time.perf_counter()]
        self.publisher.publish(self.weights)
        times.append(time.perf_counter())
        report = self.subscriber.sync(self.held)
        times.append(time.perf_counter())
        for _ in range(IDLE):
            self.subscriber.sync(self.held)
        times.append(time.perf_counter())
        assert report.version == self.publisher.version
        took = [after - before for before, after in pairwise(times)]
        return dict(zip(CALLS, (*took[:2], took[2] / IDLE), strict=True))

    def check(self) -> None:
        """The worker has the trainer's weights, bit for bit."""
        for name, array in self.weights.items():
            assert np.array_equal(array.view(np.uint16), self.held[name].view(np.uint16))


class CountingListener:
    """Another listener, with the number of its events and the CPU time of its thread."""

    def __init__(self, listener: Listener) -> None:
        self.listener, self.count, self.cpu_s = listener, 0, 0.0

    def __call__(self, event: events.Event) -> None:
        began = time.thread_time()
        self.listener(event)
        self.cpu_s += time.thread_time() - began
        self.count += 1


@contextmanager
def listening(listener: Listener | None) -> Iterator[None]:
    if listener is None:
        yield
        return
    with pulse.listen(listener):
        yield


def interleave(run: Run, listeners: dict[str, CountingListener | None], rounds: int, seed: int) -> list[Rounds]:
    found = {name: Rounds(name) for name in listeners}
    order, rng = list(listeners), random.Random(seed)
    for _ in range(rounds):
        rng.shuffle(order)
        for name in order:
            with listening(listeners[name]):
                for call, seconds in run.version().items():
                    found[name].add(call, seconds)
    run.check()
    return list(found.values())


def percent_more(one: Rounds, plain: Rounds, call: str, rng: np.random.Generator) -> dict[str, list[float]]:
    """How much longer a call takes than without a listener, in percent, by two figures, with intervals of 95 %."""
    some, none = np.array(one.seconds[call]), np.array(plain.seconds[call])
    picks = rng.integers(0, len(none), (2000, len(none)))

    def spread(of: Callable[[np.ndarray, np.ndarray], np.ndarray]) -> list[float]:
        drawn = np.percentile(of(some[picks], none[picks]), (2.5, 97.5))
        return [float(100 * (value - 1)) for value in (of(some[None], none[None])[0], *drawn)]

    return {
        "median ratio": spread(lambda a, b: np.median(a / b, axis=1)),
        "10th percentile": spread(lambda a, b: np.percentile(a, 10, axis=1) / np.percentile(b, 10, axis=1)),
    }


def emit_alone(listener: Listener | None, rests: bool) -> dict[str, float]:
    """Microseconds that the caller of a sync spends to make and emit its event: the median of many calls.

    rests: The listener's thread must be woken each time.
    """
    kinds = {
        "new version": SyncReport(5, 50, ("patch",), 10, 10, 0, 0.1, 0.1, 0.1, "0" * 64),
        "nothing new": SyncReport(5, 50, (), 0, 0, 0, 0.1, 0.1, 0.1, "0" * 64),
    }
    made, took = SyncEvents("runs/one"), {kind: list[float]() for kind in kinds}
    usual_s, events.REST_S = events.REST_S, 0.0 if rests else events.REST_S
    with listening(listener):
        for _ in range(CALLS_ALONE):
            for kind, report in kinds.items():
                began = time.perf_counter()
                made.synced(report)
                took[kind].append(time.perf_counter() - began)
                time.sleep(0.001)
    events.REST_S = usual_s
    return {kind: 1e6 * statistics.median(seconds) for kind, seconds in took.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", type=float, default=1.2, help="millions")
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    wanted = parser.parse_args()
    listeners: dict[str, CountingListener | None] = {
        "no listener": None,
        "does nothing": CountingListener(lambda event: None),
        "metrics": CountingListener(PrometheusMetrics()),
    }
    with tempfile.TemporaryDirectory() as folder:
        run = Run(folder, wanted.weights)
        for _ in range(3):
            run.version()  # kernels are compiled, and files are in memory
        for listener in listeners.values():
            with listening(listener):
                run.version()  # labels of metrics are made
        cpu = {name: (one.count, one.cpu_s) for name, one in listeners.items() if one}
        found = interleave(run, listeners, wanted.rounds, wanted.seed)
        run.publisher.close()
    plain, *others = found
    rng = np.random.default_rng(wanted.seed)
    more = {one.name: {call: percent_more(one, plain, call, rng) for call in CALLS} for one in others}
    cpu_us = {
        name: 1e6 * (one.cpu_s - cpu[name][1]) / (one.count - cpu[name][0]) for name, one in listeners.items() if one
    }
    emit_us = {name: emit_alone(one, rests=False) for name, one in listeners.items()}
    emit_us["does nothing, was resting"] = emit_alone(listeners["does nothing"], rests=True)
    print(f"{wanted.weights:g} M weights, {wanted.rounds} rounds; a folder on the local disk.\n")
    print("Milliseconds without a listener: median (10th–90th percentile); and with one so many percent more, by two")
    print("figures, each with its interval of 95 %.\n")
    rows = []
    for call in CALLS:
        p10, p50, p90 = 1e3 * np.percentile(plain.seconds[call], (10, 50, 90))
        cells = [
            f"{value:+.2f} ({low:+.2f} to {high:+.2f})"
            for one in others
            for value, low, high in more[one.name][call].values()
        ]
        rows.append([call, f"{p50:.3f} ({p10:.3f}–{p90:.3f})", *cells])
    print(table(["", "ms", *(f"{one.name}: {figure}" for one in others for figure in more[one.name][CALLS[0]])], rows))
    print(
        "\nMicroseconds: to make and emit the event of a sync, in the thread that syncs (median of 1,000); and CPU time"
    )
    print("in the listener's own thread, for each event.\n")
    rows = [
        [name, *(f"{us:.2f}" for us in emit.values()), f"{cpu_us[name]:.0f}" if name in cpu_us else "–"]
        for name, emit in emit_us.items()
    ]
    print(table(["", *(f"emit, {kind}" for kind in emit_us["no listener"]), "listener's CPU"], rows) + "\n")
    fields = {"weights": wanted.weights * 1e6, "rounds": wanted.rounds, "seed": wanted.seed, "percent_more": more}
    seconds = {one.name: one.seconds for one in found}
    print(
        json_line(
            {
                "bench": "events",
                **provenance("prometheus_client"),
                **fields,
                "emit_us": emit_us,
                "listener_cpu_us": cpu_us,
                "seconds": seconds,
            }
        )
    )


if __name__ == "__main__":
    main()
