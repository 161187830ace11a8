"""The process of one of several trainers: train, exchange updates every few steps, continue from the shared weights.

Each has its own completions, optimizer and checkpoint, and exchanges updates with the others by PULSELoCo, in a
separate store. The first trainer publishes the shared weights after each round; its own policy also contains updates
that were not sent yet, which are not published. versions.jsonl lists, for the others on the same machine, the version
of the shared weights of each round, and their digest.
"""

import json
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch import Tensor

from pulsesync.errors import VerificationError
from pulsesync.loco import DiLoCo, PulseLoCo, StoreExchange
from pulsesync_lab.demo.sync import sender
from pulsesync_lab.demo.trainer import DemoLearner, TrainedStep, append, end_line

POLL_S = 0.05
DEADLINE_S = 20.0  # for a trainer that is being restarted; then a majority continues without it
PATIENCE_S = 3600.0  # in lock-step, which promises the same weights every time: all trainers are waited for

Line = dict[str, Any]  # of versions.jsonl


class Peer(DemoLearner):
    """One of several trainers. Number 0 publishes, and logs every round."""

    def __init__(self, folder: Path, number: int) -> None:
        super().__init__(folder, number)
        self.loco = self._open_meeting()
        if saved := self.load():
            self.loco.load_state_dict(saved["loco"])
            self.optimizer.load_state_dict(saved["optimizer"])
        self.sender = None
        if number == 0:
            for name in ("steps.jsonl", "versions.jsonl"):
                end_line(folder / name)
            self.sender = sender(self.settings, str(folder / "spool"))

    def _open_meeting(self) -> DiLoCo | PulseLoCo:
        settings, every = self.settings, self.settings.sync_every
        exchange = StoreExchange(
            settings.meeting(self.folder),
            f"trainer-{self.number}" if self.number else "trainer",
            trainers=settings.trainers,
            deadline_s=DEADLINE_S if settings.delay else PATIENCE_S,
            patience_s=2 * PATIENCE_S,
            poll_s=POLL_S,
        )
        if settings.loco == "dense":
            return DiLoCo(self.policy, self.optimizer, exchange=exchange, sync_every=every)
        options: dict[str, Any] = {"compact": None} if settings.loco == "exact" else {}
        return PulseLoCo(self.policy, self.optimizer, exchange=exchange, sync_every=every, **options)

    @property
    def weights(self) -> dict[str, Tensor]:
        """The weights that all trainers share, not this trainer's own policy."""
        return self.loco.shared_weights(self.policy)

    @property
    def round(self) -> int:
        return self.loco.rounds[0]

    def run(self) -> None:
        """Train to the last round. Raises: VerificationError, if trainers or workers have the wrong weights."""
        self.serve()
        rounds = self.settings.steps // self.settings.sync_every
        with self.loco:
            versions = self._settle()
            saved = self.step
            self.lap()
            while self.round < rounds:
                steps = self._take_round()
                versions = self._settle()
                if self.sender:
                    self._tell(steps, versions)
                if self.step - saved >= self.settings.checkpoint_every or self.round == rounds:
                    self.save({"loco": self.loco.state_dict(), "optimizer": self.optimizer.state_dict()})
                    saved = self.step
        last, workers = versions[-1], self.book.end()
        if self.sender:
            final = {"version": last["version"], "digest": last["digest"], "workers": workers, "shared": last["shared"]}
            (self.folder / "final.json").write_text(json.dumps(final) + "\n")
            self.sender.close()
        self.office.close()

    def _take_round(self) -> list[TrainedStep]:
        """Train until the round is done: it is exchanged inside the optimizer's last step of the round."""
        begun, steps = self.round, list[TrainedStep]()
        while self.round == begun:
            steps.append(self.take(self.step + min(len(steps), self.settings.sync_every - 1)))
        return steps

    def _settle(self) -> list[Line]:
        """Ensure that this trainer's shared weights are a version, and let its workers use it; return all versions.

        Raises:
            VerificationError: the trainer that published it had other shared weights.
        """
        self.step = self.round * self.settings.sync_every
        if self.sender and self._newest(self._versions()) < self.round:
            sent = self.sender.publish(self.weights, self.step, last=True)
            entry = {"round": self.round, "shared": self.loco.digests[0], **sent.facts()}
            append(self.folder / "versions.jsonl", entry)
        while self._newest(versions := self._versions()) < self.round:
            if self.book.fault:
                raise self.book.fault
            time.sleep(POLL_S)
        mine = self.loco.digests[0]
        for line in versions:
            if line["round"] == self.round and line["shared"] != mine:
                raise VerificationError(
                    f"after round {self.round}, trainer {self.number} has other shared weights than the first trainer",
                    expected=line["shared"],
                    actual=mine,
                )
            if line["version"] > self.book.version:
                self.book.published(line["version"], line["digest"])
        return versions

    def _versions(self) -> list[Line]:
        path, found = self.folder / "versions.jsonl", []
        for line in path.read_text().splitlines() if path.exists() else ():
            with suppress(ValueError):  # a line that a kill cut off, or that is being written
                found.append(json.loads(line))
        return found

    @staticmethod
    def _newest(versions: list[Line]) -> int:
        return versions[-1]["round"] if versions else -1

    def _tell(self, steps: list[TrainedStep], versions: list[Line]) -> None:
        report = self.loco.last_report
        assert report is not None
        seconds = {
            "wait_s": sum(taken.wait_s for taken in steps),
            # The round is exchanged inside the last step.
            "train_s": sum(taken.train_s for taken in steps) - report.seconds,
            "meet_s": report.seconds,
            "publish_s": self.lap(),
        }
        met = {
            "round": report.round,
            "trainers": report.members,
            "fired": report.sent / report.total,
            "sent_bytes": report.sent_bytes,
            "received_bytes": report.received_bytes,
            "dense_bytes": 4 * report.total,
            "digest": report.digest,
        }
        sent = {key: value for key, value in versions[-1].items() if key not in ("round", "shared")}
        steps_of = {line["version"]: line["round"] * self.settings.sync_every for line in versions}
        self.write_down(steps, steps_of, {**sent, **seconds, "loco": met})
