"""The trainer's process: distribute work, learn from the results, publish; restart from its checkpoint.

`rounds` has the other kind of trainer: one of several, which exchange updates every few steps.
"""

import hashlib
import json
import threading
import time
from collections import Counter, deque
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pulsesync.errors import VerificationError
from pulsesync_lab.demo.channel import LARGEST, TrainerEndpoint, pack, unpack
from pulsesync_lab.demo.game import Game, open_game
from pulsesync_lab.demo.grpo import Rollouts
from pulsesync_lab.demo.settings import DemoSettings
from pulsesync_lab.demo.sync import sender, values

POLL_S = 0.5  # for which a worker without work waits
REMEMBERED = 256  # versions whose digests are known
LEASE_S = 300.0  # after which a piece of work is given to another worker
FAREWELL_S = 20.0  # for workers to reach the last version


@dataclass
class _WorkShard:
    """A shard of a step's work: its worker, and the result."""

    step: int
    shard: int
    worker: str | None = None
    since: float = 0.0
    rollouts: Rollouts | None = None
    version: int = -1


@dataclass
class WorkQueue:
    """Open work, its workers and results. Every method may be called by any thread."""

    settings: DemoSettings
    version: int = -1  # the newest that was published
    digests: dict[int, str] = field(default_factory=dict)
    workers: dict[str, dict[str, Any]] = field(default_factory=dict)
    fault: Exception | None = None
    _pieces: deque[_WorkShard] = field(default_factory=deque)
    _changed: threading.Condition = field(default_factory=threading.Condition)
    _ended: bool = False
    _gone: dict[str, dict[str, Any]] = field(default_factory=dict)  # final state of workers that have left

    def published(self, version: int, digest: str) -> None:
        with self._changed:
            self.version = version
            self.digests[version] = digest
            for old in sorted(self.digests)[:-REMEMBERED]:
                del self.digests[old]
            self._changed.notify_all()

    def open(self, step: int) -> None:
        """Let workers begin with a step, and with as many later ones as they may be ahead."""
        with self._changed:
            self._pieces = deque(piece for piece in self._pieces if piece.step >= step)  # others may be further
            known = {(piece.step, piece.shard) for piece in self._pieces}
            span = self.settings.span
            end = min((step // span + 1 + self.settings.delay) * span, self.settings.steps)
            for ahead in range(step, end):
                for shard in range(self.settings.shards):
                    if (ahead, shard) not in known:
                        self._pieces.append(_WorkShard(ahead, shard))
            self._changed.notify_all()

    def collect(self, step: int) -> list[_WorkShard]:
        """Wait for a step's work to be done, and return it."""
        with self._changed:
            while True:
                if self.fault:
                    raise self.fault
                mine = [piece for piece in self._pieces if piece.step == step]
                if mine and all(piece.rollouts is not None for piece in mine):
                    self._pieces = deque(piece for piece in self._pieces if piece.step != step)
                    return sorted(mine, key=lambda piece: piece.shard)
                self._changed.wait(1.0)

    def answer(self, facts: dict[str, Any], tensors: dict[str, Tensor]) -> dict[str, Any]:
        """Accept a worker's result, and give it the next piece of work."""
        with self._changed:
            name = facts["worker"]
            self.workers[name] = {**facts["state"], "seen": time.time()}
            if facts.get("goodbye"):
                self._check(facts)
                return {"do": "go"}
            if tensors:
                self._take(facts, tensors)
            until = time.monotonic() + facts.get("idle_s", POLL_S)
            while not self._ended:
                if piece := self._next():
                    piece.worker, piece.since = name, time.monotonic()
                    exact = self.version if self.settings.delay == 0 else None
                    return {"do": "generate", "step": piece.step, "shard": piece.shard, "version": exact}
                if (left := until - time.monotonic()) <= 0:
                    return {"do": "wait"}
                self._changed.wait(left)
            return {"do": "stop", "version": self.version}

    def _next(self) -> _WorkShard | None:
        if self.version < 0 or self.fault:
            return None
        late = time.monotonic() - LEASE_S
        free = (p for p in self._pieces if p.rollouts is None and (p.worker is None or p.since < late))
        return next(free, None)

    def _take(self, facts: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        self._check(facts)
        for piece in self._pieces:
            if (piece.step, piece.shard) == (facts["step"], facts["shard"]) and piece.rollouts is None:
                piece.rollouts = Rollouts(tensors["tokens"], tensors["log_probabilities"], tensors["rewards"])
                piece.version = facts["version"]
        self._changed.notify_all()

    def _check(self, facts: dict[str, Any]) -> None:
        known = self.digests.get(facts["version"])
        if known is not None and known != facts["digest"]:
            self.fault = VerificationError(
                f"{facts['worker']} reports other weights than those of version {facts['version']}",
                expected=known,
                actual=facts["digest"],
            )

    def dismiss(self, facts: dict[str, Any]) -> None:
        """A worker has received its dismissal: the trainer no longer waits for it."""
        with self._changed:
            self._gone[facts["worker"]] = {"version": facts["version"], "digest": facts["digest"]}
            self._changed.notify_all()

    def left(self, name: str | None) -> None:
        """A worker has left: its unfinished work is for others."""
        with self._changed:
            for piece in self._pieces:
                if piece.worker == name and piece.rollouts is None:
                    piece.worker = None
            self._changed.notify_all()

    def end(self) -> dict[str, dict[str, Any]]:
        """Dismiss all workers, at the last version; return their final states."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()
            until = time.monotonic() + FAREWELL_S
            known = self.workers.keys() | {f"worker {number}" for number in range(self.settings.workers)}
            while known - self._gone.keys() and (left := until - time.monotonic()) > 0:
                self._changed.wait(left)
            if self.fault:
                raise self.fault
            return dict(self._gone)

    def seen(self) -> dict[str, dict[str, Any]]:
        """The states of the workers."""
        with self._changed:
            return {name: dict(state) for name, state in self.workers.items()}


def serve(office: TrainerEndpoint, book: WorkQueue) -> None:
    """Answer every worker that connects, each in its own thread, until the endpoint closes."""

    def talk(connection: Connection) -> None:
        name = None
        with connection, suppress(EOFError, OSError):
            while True:
                facts, tensors = unpack(connection.recv_bytes(LARGEST))
                name = facts["worker"]
                connection.send_bytes(pack(book.answer(facts, tensors)))
                if facts.get("goodbye"):
                    book.dismiss(facts)  # after it was sent: the trainer's process ends with the last dismissal
        book.left(name)

    with suppress(OSError):
        while True:
            threading.Thread(target=talk, args=(office.accept(),), daemon=True).start()


@dataclass(frozen=True)
class TrainedStep:
    """A step that was taken."""

    pieces: list[_WorkShard]
    rollouts: Rollouts
    loss: float
    wait_s: float
    train_s: float


class DemoLearner:
    """What every trainer has: a policy, its optimizer, workers that request work, a checkpoint.

    Args:
        folder: The folder of the run.
        number: Number of this trainer among several; 0 if it is the only one.
    """

    def __init__(self, folder: Path, number: int = 0) -> None:
        self.folder, self.number, self.settings = folder, number, DemoSettings.load(folder)
        self.game: Game = open_game(self.settings)
        self.policy = self.game.policy()
        self.optimizer = torch.optim.AdamW(self.policy.parameters(), lr=self.settings.lr, weight_decay=0.0)
        self.step = 0
        self._then = 0.0
        self.book = WorkQueue(self.settings)
        self.office = TrainerEndpoint(self.settings.secret.encode(), self.settings.port + number)

    def serve(self) -> None:
        threading.Thread(target=serve, args=(self.office, self.book), daemon=True).start()

    @property
    def weights(self) -> dict[str, Tensor]:
        """The weights that are published and rolled out."""
        return dict(self.policy.state_dict())

    def lap(self) -> float:
        """Seconds since this was last called."""
        before, self._then = self._then, time.perf_counter()
        return self._then - before

    def take(self, step: int) -> TrainedStep:
        """Wait for a step's work, and learn from it."""
        self.book.open(step)
        pieces = self.book.collect(step)
        wait_s = self.lap()
        rollouts = Rollouts.join([piece.rollouts for piece in pieces if piece.rollouts])
        loss = self.game.learn(self.policy, self.optimizer, rollouts)
        return TrainedStep(pieces, rollouts, loss, wait_s, self.lap())

    def write_down(self, steps: list[TrainedStep], steps_of: dict[int, int], facts: dict[str, Any]) -> None:
        """Add a line to steps.jsonl. steps_of: after how many steps each version was made."""
        pieces = [piece for taken in steps for piece in taken.pieces]
        rollouts = Rollouts.join([taken.rollouts for taken in steps])
        behind = [piece.step - steps_of.get(piece.version, piece.step) for piece in pieces]
        line = {
            "step": self.step,
            "time": time.time(),
            "reward": float(rollouts.rewards.mean()),
            "loss": sum(taken.loss for taken in steps) / len(steps),
            "behind": sum(behind) / len(behind),
            "versions": dict(Counter(str(piece.version) for piece in pieces)),
            **facts,
            "workers": self.book.seen(),
            "weights_sha256": _hash(values(self.weights)),
            "rollouts_sha256": _hash({"tokens": rollouts.tokens, "rewards": rollouts.rewards}),
        }
        append(self.folder / "steps.jsonl", line)

    def load(self) -> dict[str, Any] | None:
        return torch.load(self._checkpoint, weights_only=True) if self._checkpoint.exists() else None

    def save(self, kept: dict[str, Any]) -> None:
        new = self._checkpoint.with_suffix(".new")
        torch.save(kept, new)
        new.rename(self._checkpoint)

    @property
    def _checkpoint(self) -> Path:
        return self.folder / (f"checkpoint-{self.number}.pt" if self.number else "checkpoint.pt")


class DemoTrainer(DemoLearner):
    """Learns alone, publishes, and logs every step."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        if saved := self.load():
            self.policy.load_state_dict(saved["policy"])
            self.optimizer.load_state_dict(saved["optimizer"])
            self.step = int(saved["step"])
        end_line(folder / "steps.jsonl")
        self.sender = sender(self.settings, str(folder / "spool"))

    def run(self) -> None:
        """Train to the last step. Raises: VerificationError, if a worker's weights were not those published."""
        self.serve()
        sent = self.sender.publish(self.weights, self.step, last=True)
        self.book.published(sent.version, sent.digest)
        steps_of = {sent.version: self.step}
        self.lap()
        while self.step < self.settings.steps:
            taken = self.take(self.step)
            self.step += 1
            sent = self.sender.publish(self.weights, self.step, last=self.step == self.settings.steps)
            self.book.published(sent.version, sent.digest)
            steps_of.setdefault(sent.version, self.step)  # not again for steps that are part of a later version
            seconds = {"wait_s": taken.wait_s, "train_s": taken.train_s, "publish_s": self.lap()}
            self.write_down([taken], steps_of, {**sent.facts(), **seconds})
            if self.step % self.settings.checkpoint_every == 0 or self.step == self.settings.steps:
                kept = {"policy": self.policy.state_dict(), "optimizer": self.optimizer.state_dict()}
                self.save({**kept, "step": self.step})
        final = {"version": sent.version, "digest": sent.digest, "workers": self.book.end()}
        (self.folder / "final.json").write_text(json.dumps(final) + "\n")
        self.sender.close()
        self.office.close()


def append(path: Path, line: dict[str, Any]) -> None:
    with path.open("a") as out:
        out.write(json.dumps(line) + "\n")


def end_line(path: Path) -> None:
    """End a line that was cut off, so that the next one is complete."""
    with path.open("a") as out:
        out.write("\n" if out.tell() else "")


def _hash(tensors: dict[str, Tensor]) -> str:
    h = hashlib.sha256()
    for _, tensor in sorted(tensors.items()):
        h.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return h.hexdigest()
