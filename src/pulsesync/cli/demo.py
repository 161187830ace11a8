"""What `pulse demo` runs: a trainer process, a follower process, and a folder between them.

The trainer fine-tunes a small network with AdamW on FP32 master weights and publishes their BF16 values after every
step; the follower syncs a copy in place and checks the digest of each version. Real training, not a simulation of it,
but supervised and tiny: the RL run is to come.
"""

import hashlib
import json
import multiprocessing as mp
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray
from rich.console import Console

from pulsesync.errors import PulseError, StoreError
from pulsesync.publisher import Publisher
from pulsesync.subscriber import Subscriber
from pulsesync.warm import warm_up

BATCH = 64
State = dict[str, NDArray[Any]]


class Network:
    """A network of three layers, learning with AdamW to imitate another one that it starts close to."""

    def __init__(self, width: int, lr: float, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        shapes = [(width, 2 * width), (2 * width, 2 * width), (2 * width, width)]
        self.teacher = [self.rng.normal(0, s[0] ** -0.5, s).astype(np.float32) for s in shapes]
        noisy = [w + self.rng.normal(0, 0.01, w.shape).astype(np.float32) * w.std() for w in self.teacher]
        self.layers = [w.astype(ml_dtypes.bfloat16).astype(np.float32) for w in noisy]  # as loaded from a checkpoint
        self.moments = [(np.zeros_like(w), np.zeros_like(w)) for w in self.layers]
        self.lr, self.steps = lr, 0

    def state(self) -> State:
        """What inference workers use: the BF16 values of the master weights."""
        return {f"layers.{i}.weight": w.astype(ml_dtypes.bfloat16) for i, w in enumerate(self.layers)}

    def step(self) -> float:
        """Take one step on a fresh batch; return the loss."""
        inputs = self.rng.normal(0, 1, (BATCH, self.layers[0].shape[0])).astype(np.float32)
        wanted = _forward(self.teacher, inputs)[-1]
        values = _forward(self.layers, inputs)
        error = values[-1] - wanted
        self.steps += 1
        signal = error * np.float32(2 / error.size)
        for i in reversed(range(len(self.layers))):
            gradient = values[i].T @ signal
            if i:
                signal = (signal @ self.layers[i].T) * (values[i] > 0)
            self._adamw(i, gradient)
        return float(np.mean(error * error))

    def _adamw(self, i: int, gradient: NDArray[np.float32], decay: float = 0.01) -> None:
        mean, square = self.moments[i]
        mean += 0.1 * (gradient - mean)
        square += 0.001 * (gradient * gradient - square)
        unbiased = np.sqrt(square / (1 - 0.999**self.steps)) + 1e-8
        self.layers[i] -= np.float32(self.lr) * (mean / ((1 - 0.9**self.steps) * unbiased) + decay * self.layers[i])


def _forward(layers: list[NDArray[np.float32]], inputs: NDArray[np.float32]) -> list[NDArray[np.float32]]:
    values = [inputs]
    for i, weights in enumerate(layers):
        values.append(values[-1] @ weights)
        if i < len(layers) - 1:
            np.maximum(values[-1], 0, out=values[-1])
    return values


def _hash(state: State) -> str:
    h = hashlib.sha256()
    for name in sorted(state):
        h.update(state[name].tobytes())
    return h.hexdigest()


def train(tell: Connection, folder: str, steps: int, lr: float, width: int, seed: int) -> None:
    """The trainer process: publish the start, then every step."""
    warm_up()
    network, publisher = Network(width, lr, seed), Publisher(folder)
    loss = float("nan")
    for step in range(steps + 1):
        if step:
            loss = network.step()
        report = publisher.publish(network.state(), step=step)
        tell.send({
            "from": "trainer", "version": report.version, "loss": loss, "changed": report.changed,
            "total": report.total, "bytes": report.payload_bytes, "full_bytes": report.full_bytes,
            "publish_s": report.encode_s + report.store_s,
        })  # fmt: skip
    tell.send({"from": "trainer", "sha256": _hash(network.state())})


def follow(tell: Connection, folder: str, steps: int, width: int) -> None:
    """The follower process: knows the folder and the shapes, nothing else."""
    warm_up()
    state: State = {name: np.zeros_like(w) for name, w in Network(width, 0.0, seed=1).state().items()}
    subscriber, version = Subscriber(folder), -1
    while version < steps:
        report = subscriber.sync(state)
        if not report.applied:
            time.sleep(0.02)
            continue
        version = report.version if report.version is not None else -1
        tell.send({
            "from": "follower", "version": version, "fetched": report.fetched_bytes, "digest": report.digest,
            "sync_s": report.fetch_s + report.prepare_s + report.apply_s, "pause_s": report.apply_s,
        })  # fmt: skip
    tell.send({"from": "follower", "recount": subscriber.verify(), "sha256": _hash(state)})


def _play(role: Callable[..., None], tell: Connection, *args: Any) -> None:
    """Run a process's part; what goes wrong is told in a line, as the command line does everywhere."""
    try:
        role(tell, *args)
    except PulseError as e:
        tell.send({"from": role.__name__, "error": f"{type(e).__name__}: {e}"})


def run(*, steps: int, lr: float, width: int, seed: int, out: Path | None, as_json: bool) -> int:
    """Run both processes and print what they tell; return 0 if both ended with the same weights."""
    if out is not None and out.exists() and any(out.iterdir()):
        raise StoreError(f"{out} is not empty: give another folder to --out, or remove this one", key=str(out))
    folder = str(out or Path(tempfile.mkdtemp(prefix="pulse-demo-")) / "run")
    say = _Printer(as_json, lr)
    spawn = mp.get_context("spawn")
    pipes = [spawn.Pipe(duplex=False) for _ in range(2)]
    processes = [
        spawn.Process(target=_play, args=(train, pipes[0][1], folder, steps, lr, width, seed), daemon=True),
        spawn.Process(target=_play, args=(follow, pipes[1][1], folder, steps, width), daemon=True),
    ]
    say.begin(folder)
    try:
        for process in processes:
            process.start()
        for _, end in pipes:
            end.close()
        for event in _events([end for end, _ in pipes]):
            say.event(event)
    finally:
        for process in processes:
            process.terminate()
        if out is None:
            shutil.rmtree(Path(folder).parent, ignore_errors=True)
    return say.end()


def _events(ends: list[Connection]) -> Iterator[dict[str, Any]]:
    """What the processes send, until each has sent its hash; or one has died, for then the other may wait for ever."""
    while ends:
        for end in wait(ends):
            assert isinstance(end, Connection)
            try:
                event = end.recv()
            except EOFError:
                return
            yield event
            if "sha256" in event:
                ends.remove(end)


class _Printer:
    """Turns what the two processes tell into a table, or into JSON lines."""

    def __init__(self, as_json: bool, lr: float) -> None:
        self.as_json, self.lr = as_json, lr
        self.console = Console(highlight=False, soft_wrap=True)
        self.published: dict[int, dict[str, Any]] = {}
        self.waiting: list[dict[str, Any]] = []  # what the follower told and is not shown yet
        self.hashes: dict[str, str] = {}
        self.shown = 0

    def begin(self, folder: str) -> None:
        if self.as_json:
            return
        self.console.print(
            f"A trainer and a follower, two processes, meet in [bold]{folder}[/bold]. AdamW at lr {self.lr:g}, FP32 "
            "masters, BF16 published.\nThe first run on a machine compiles the kernels: about ten seconds.\n"
        )
        self.console.print(
            "version     loss   changed      bytes   × smaller   publish   follower holds    sync   pause"
        )

    def event(self, event: dict[str, Any]) -> None:
        if "error" in event:
            print(f"pulse demo: {event['from']}: {event['error']}", file=sys.stderr)
        elif "sha256" in event:
            self.hashes[event["from"]] = event["sha256"]
        elif event["from"] == "trainer":
            self.published[event["version"]] = event
        else:
            self.waiting.append(event)
        # either may tell first; and a follower that applied several versions at once stands in the last one's row
        while self.waiting and self.shown in self.published:
            self._row(self.published[self.shown], self.waiting[0])
            if self.waiting[0]["version"] == self.shown:
                self.waiting.pop(0)
            self.shown += 1

    def _row(self, sent: dict[str, Any], got: dict[str, Any]) -> None:
        if self.as_json:
            print(json.dumps({**sent, "follower": got}), flush=True)
            return
        version, size = sent["version"], sent["bytes"]
        loss = format(sent["loss"], ".6f") if version else ""
        held = "(with the next)"
        if got["version"] == version:
            pause = f"{1000 * got['pause_s']:>4.0f}ms"
            held = f"{version:>3}, [green]digest equal[/green] {got['sync_s']:>5.2f}s {pause}"
        self.console.print(
            f"{version:7d} {loss:>8} {sent['changed'] / sent['total']:>8.3%} {size:>11,} "
            f"{sent['full_bytes'] / size:>10.1f} {sent['publish_s']:>8.2f}s   {held}"
            f"{'' if version else '   the whole state, once'}"
        )

    def end(self) -> int:
        patches = [sent for version, sent in self.published.items() if version > 0]
        same = len(self.hashes) == 2 and len(set(self.hashes.values())) == 1
        size = sum(sent["bytes"] for sent in patches)
        changed = sum(sent["changed"] for sent in patches)
        full = sum(sent["full_bytes"] for sent in patches)
        summary = {
            "identical": same,
            "versions": len(patches),
            "patch_bytes": size,
            "full_bytes": full,
            "bits_per_change": 8 * size / changed if changed else None,
            "sha256": self.hashes,
        }
        if self.as_json:
            print(json.dumps(summary), flush=True)
        elif same and patches:
            total = sum(sent["total"] for sent in patches)
            self.console.print(
                f"\n{len(patches)} versions, {changed / total:.2%} of the weights changed a step: {size:,} bytes in "
                f"place of {full:,}, {full / size:.0f} times smaller, {8 * size / changed:.2f} bits a change, "
                f"everything counted.\nBoth processes hashed all their weights at the end: [green]identical[/green], "
                f"SHA-256 {self.hashes['trainer'][:16]}…"
            )
        if not same:
            print("pulse demo: the two processes did not end with the same weights", file=sys.stderr)
        return 0 if same else 1
