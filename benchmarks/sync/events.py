"""What do events cost a sync and a publish?

    python -m benchmarks events                           # 1.2 M weights
    python -m benchmarks events --weights 135 --rounds 12

A trainer publishes into a folder, and a worker syncs from it, in one process. Each round does so with no listener, with
one that does nothing, and with the one of the Prometheus metrics, in random order. A publish, a sync of a new version,
and a sync that finds nothing new are timed separately, by the clock and by the CPU time of all threads, which other
programs on the machine disturb less. A listener is compared with none by the median of the ratios within each round.
Each of the three calls starts only after the listener has received all earlier events, because in a real run trainer
and worker are different processes. The listener has its own thread, whose CPU time per event is shown. The call that
makes and emits an event is also timed alone: while the listener's thread is polling for events, and while it sleeps and
must be woken.
"""

import argparse
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np

import pulsesync as pulse
from benchmarks.harness.report import Rounds, json_line, provenance, shown, table
from benchmarks.harness.timing import spent
from benchmarks.harness.weights import as_bf16
from pulsesync import Publisher, Subscriber, events
from pulsesync.core.events import Listener
from pulsesync.metrics import PrometheusMetrics
from pulsesync.run.reporting import SyncEvents, SyncReport
from pulsesync.testing import AdamUpdates

QUICK = ("--weights", "0.1", "--rounds", "5", "--calls", "50")
REST_S = 0.03  # how long the process sleeps before each call that is timed
IDLE = 50  # syncs without a new version, in a row
CALLS = ["publish", "sync", "idle sync"]


class Run:
    """A trainer and a worker, version by version."""

    def __init__(self, folder: str, millions: float) -> None:
        columns = 1000
        self.updates = AdamUpdates({"layer.weight": (round(millions * 1e6 / columns), columns)}, scale=0.15)
        self.weights = as_bf16(self.updates.state())
        self.held = {name: np.zeros_like(array) for name, array in self.weights.items()}
        self.publisher, self.subscriber = Publisher(folder), Subscriber(folder)
        self.version()

    def version(self, settle: Callable[[], object] = lambda: None) -> dict[str, tuple[float, float]]:
        """Publish and sync a version, and find nothing new; return the seconds of each, by the clock and of CPU.

        settle: Called before each of the three, which is not timed.
        """
        for name, bits in self.updates.step().items():
            self.weights[name].view(np.uint16)[...] = bits

        def find_nothing() -> None:
            for _ in range(IDLE):
                self.subscriber.sync(self.held)

        took = {}
        works = (lambda: self.publisher.publish(self.weights), lambda: self.subscriber.sync(self.held), find_nothing)
        for call, work in zip(CALLS, works, strict=True):
            settle()
            time.sleep(REST_S)  # whether there is a listener or not: the system favours a process that has just slept
            found, times = spent(work), IDLE if work is find_nothing else 1
            took[call] = found["wall_s"] / times, found["cpu_s"] / times
        assert self.subscriber.version == self.publisher.version
        return took

    def check(self) -> None:
        """The worker has the trainer's weights, bit for bit."""
        for name, array in self.weights.items():
            assert np.array_equal(array.view(np.uint16), self.held[name].view(np.uint16))


class CountingListener:
    """Wraps a listener; counts its events and the CPU time of its thread."""

    def __init__(self, listener: Listener) -> None:
        self.listener, self.count, self.cpu_s = listener, 0, 0.0

    def __call__(self, event: events.Event) -> None:
        began = time.thread_time()
        self.listener(event)
        self.cpu_s += time.thread_time() - began
        self.count += 1


@contextmanager
def listening(listener: Listener | None) -> Iterator[Callable[[], object]]:
    """Have a listener receive events; the yielded function waits until it has received all events so far."""
    if listener is None:
        yield lambda: None
        return
    with pulse.listen(listener) as one:
        yield one.flush


def interleave(run: Run, listeners: dict[str, CountingListener | None], rounds: int, seed: int) -> list[Rounds]:
    found = {name: Rounds(name) for name in listeners}
    order, rng = list(listeners), random.Random(seed)
    for _ in range(rounds):
        rng.shuffle(order)
        for name in order:
            with listening(listeners[name]) as settle:
                for call, (seconds, cpu_s) in run.version(settle).items():
                    found[name].add(call, seconds)
                    found[name].add(f"{call}, CPU", cpu_s)
    run.check()
    return list(found.values())


def percent_more(one: Rounds, plain: Rounds, call: str, rng: np.random.Generator) -> list[float]:
    """How much longer a call takes than without a listener, in percent: the median, and its interval of 95 %."""
    ratios = 100 * (np.divide(one.seconds[call], plain.seconds[call]) - 1)
    medians = np.median(rng.choice(ratios, (2000, len(ratios))), axis=1)
    return [float(np.median(ratios)), *(float(one) for one in np.percentile(medians, (2.5, 97.5)))]


def emit_alone(listener: Listener | None, calls: int, rests: bool) -> dict[str, float]:
    """Microseconds that the caller of a sync spends to make and emit its event: the median of many calls.

    rests: The listener's thread must be woken each time.
    """
    kinds = {
        "new version": SyncReport(version=5, step=50, path=("patch",), changed=10, fetched_bytes=10, digest="0" * 64),
        "nothing new": SyncReport(version=5, step=50, digest="0" * 64),
    }
    made, took = SyncEvents("runs/one"), {kind: list[float]() for kind in kinds}
    usual_s, events.REST_S = events.REST_S, 0.0 if rests else events.REST_S
    with listening(listener):
        for _ in range(calls):
            for kind, report in kinds.items():
                began = time.perf_counter()
                made.synced(report)
                took[kind].append(time.perf_counter() - began)
                time.sleep(0.001)
    events.REST_S = usual_s
    return {kind: 1e6 * statistics.median(seconds) for kind, seconds in took.items()}


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--weights", type=float, default=1.2, help="millions")
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--calls", type=int, default=1000, help="that are timed alone")


def main(given: argparse.Namespace) -> None:
    listeners: dict[str, CountingListener | None] = {
        "no listener": None,
        "does nothing": CountingListener(lambda event: None),
        "metrics": CountingListener(PrometheusMetrics()),
    }
    with tempfile.TemporaryDirectory() as folder:
        run = Run(folder, given.weights)
        for _ in range(3):
            run.version()  # kernels are compiled, and files are in memory
        for listener in listeners.values():
            with listening(listener):
                run.version()  # labels of metrics are made
        cpu = {name: (one.count, one.cpu_s) for name, one in listeners.items() if one}
        found = interleave(run, listeners, given.rounds, given.seed)
        run.publisher.close()
    plain, *others = found
    rng = np.random.default_rng(given.seed)
    measures = [f"{call}{what}" for call in CALLS for what in ("", ", CPU")]
    more = {one.name: {call: percent_more(one, plain, call, rng) for call in measures} for one in others}
    cpu_us = {
        name: 1e6 * (one.cpu_s - cpu[name][1]) / (one.count - cpu[name][0]) for name, one in listeners.items() if one
    }
    emit_us = {name: emit_alone(one, given.calls, rests=False) for name, one in listeners.items()}
    emit_us["does nothing, was resting"] = emit_alone(listeners["does nothing"], given.calls, rests=True)
    print(f"{given.weights:g} M weights, {given.rounds} rounds; a folder on the local disk.\n")
    print("Milliseconds without a listener: median (20th–80th percentile). With a listener: by how many percent the")
    print("call takes longer, as the median of the ratios within each round (its 95 % interval).\n")
    rows = []
    for call in measures:
        found_more = [more[one.name][call] for one in others]
        cells = [f"{value:+.2f} ({low:+.2f} to {high:+.2f})" for value, low, high in found_more]
        rows.append([call, shown(plain.seconds[call], 1e3), *cells])
    print(table(["", "ms", *(one.name for one in others)], rows) + "\n")
    print("Microseconds: to make and emit the event of a sync, in the thread that syncs (median of")
    print(f"{given.calls:,}); and CPU time in the listener's own thread, for each event.\n")
    rows = [
        [name, *(f"{us:.2f}" for us in emit.values()), f"{cpu_us[name]:.0f}" if name in cpu_us else "–"]
        for name, emit in emit_us.items()
    ]
    print(table(["", *(f"emit, {kind}" for kind in emit_us["no listener"]), "listener's CPU"], rows) + "\n")
    fields = {"weights": given.weights * 1e6, "rounds": given.rounds, "seed": given.seed, "percent_more": more}
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
