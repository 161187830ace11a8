"""A worker's process: request work, sync, generate, score, return. It may die at any moment and be restarted."""

import time
from pathlib import Path
from typing import Any

from pulsesync_lab.demo.channel import Message, WorkerEndpoint
from pulsesync_lab.demo.game import open_game
from pulsesync_lab.demo.settings import DemoSettings
from pulsesync_lab.demo.sync import ReceivedVersion, receiver

PATIENCE_S = 60.0  # for a trainer that is being restarted
TURN_S = 0.1  # pause after all of several trainers without work were asked


class DemoWorker:
    """A policy at some version, and its completions."""

    def __init__(self, folder: Path, number: int) -> None:
        self.settings = DemoSettings.load(folder)
        self.name = f"worker {number}"
        self.game = open_game(self.settings)
        self.policy = self.game.policy()
        self.receiver = receiver(self.settings, str(folder / f"cache-{number}"))
        count, secret = self.settings.trainers, self.settings.secret.encode()
        # A single trainer is waited for; of several, those that do not answer are skipped.
        self.one_trainer = count == 1
        self.desks = {
            trainer: WorkerEndpoint(self.settings.port + trainer, secret, PATIENCE_S if self.one_trainer else 0.0)
            for trainer in ((number + i) % count for i in range(count))
        }
        self.made: dict[int, Message] = {}  # for each trainer, until its next request
        self.got: ReceivedVersion | None = None
        self.counted = -1  # the version of the last recount
        self.synced = 0
        self.seconds = {"generate_s": 0.0, "sync_s": 0.0, "pause_s": 0.0, "wait_s": 0.0}
        self.fetched_bytes = 0

    def run(self) -> None:
        """Work until dismissed. Raises: PulseError, if the weights are ever not those published."""
        heard = time.monotonic()
        while self.desks:
            for trainer in list(self.desks):
                try:
                    self._turn(trainer)
                    heard = time.monotonic()
                except ConnectionError:  # the trainer distributes the lost work again
                    if time.monotonic() - heard > PATIENCE_S:
                        raise
                    time.sleep(TURN_S / len(self.desks))

    def _turn(self, trainer: int) -> None:
        """Send a trainer its completions, and do the work that it returns; several trainers take turns."""
        facts, tensors = self.made.pop(trainer, ({}, {}))
        if not self.one_trainer:
            facts["idle_s"] = TURN_S / len(self.desks)
        asked = time.perf_counter()
        answer = self.desks[trainer].ask({"worker": self.name, "state": self._state(), **facts}, tensors)
        self.seconds["wait_s"] += time.perf_counter() - asked
        if answer["do"] == "stop":
            self._leave(trainer, answer["version"])
        elif answer["do"] == "generate" and self._sync(answer["version"]):
            self.made[trainer] = self._generate(trainer, answer["step"], answer["shard"])

    def _leave(self, trainer: int, version: int) -> None:
        """Sync to the last version, recount all of it, and report that."""
        if self._sync(version):
            assert self.got is not None
            self.receiver.recount()
            self.counted = self.got.version
            last = {"version": self.got.version, "digest": self.got.digest}
            self.desks[trainer].ask({"worker": self.name, "state": self._state(), "goodbye": True, **last})
        del self.desks[trainer]

    def _sync(self, version: int | None) -> bool:
        got = self.receiver.fetch(self.policy, version)
        if got is None:
            time.sleep(0.05)
            return False
        if self.got is None or got.version != self.got.version:
            self.synced += 1
            self.fetched_bytes += got.fetched_bytes
            self.seconds["pause_s"] += got.pause_s
            if self.synced % self.settings.recount_every == 1:
                self.receiver.recount()
                self.counted = got.version
        self.seconds["sync_s"] += got.seconds
        self.got = got
        return True

    def _generate(self, trainer: int, step: int, shard: int) -> Message:
        assert self.got is not None
        began = time.perf_counter()
        seed = (self.settings.seed * 1_000_003 + step) * 1009 + trainer * self.settings.shards + shard
        made = self.game.play(self.policy, max(1, self.settings.prompts // self.settings.shards), seed)
        self.seconds["generate_s"] += time.perf_counter() - began
        facts = {"step": step, "shard": shard, "version": self.got.version, "digest": self.got.digest}
        return facts, {"tokens": made.tokens, "log_probabilities": made.log_probabilities, "rewards": made.rewards}

    def _state(self) -> dict[str, Any]:
        return {
            "version": self.got.version if self.got else None,
            "counted": self.counted,
            "synced": self.synced,
            "fetched_bytes": self.fetched_bytes,
            **self.seconds,
        }
