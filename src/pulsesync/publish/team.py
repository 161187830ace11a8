"""The messages that the ranks of a team exchange while they publish: in rounds, and if one rank fails, all fail."""

import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeVar

from pulsesync import errors
from pulsesync.errors import GroupError, PulseError, StoreError
from pulsesync.format.manifest import PartRef
from pulsesync.group.agreement import read_each
from pulsesync.group.collective import Team
from pulsesync.publish.costs import CodecChoice
from pulsesync.publish.ownership import RankReport, read_parts, write_parts

COORDINATOR = 0
MAX_FAULT = 1000  # characters of an error that are sent to the others

_DONE, _FAILED = b"+", b"-"

T = TypeVar("T")


@dataclass(eq=False, repr=False)
class TeamRounds:
    """Rounds in which every rank does its share of some work and gets a message from each rank, including itself."""

    team: Team
    step: int | None = None  # the trainer's, which must be the same on all ranks; None until that is agreed on
    is_lost: bool = False  # whether this rank could not reach the others in the last round
    _rounds: int = 0

    @property
    def coordinates(self) -> bool:
        return self.team.rank == COORDINATOR

    @property
    def is_alone(self) -> bool:
        return self.team.size == 1

    def begin(self) -> None:
        """Begin a version: every rank counts its rounds from now on."""
        self._rounds, self.step = 0, None

    def run_on_all(self, work: Callable[[], tuple[T, bytes]]) -> tuple[T, list[bytes]]:
        """Do this rank's share of some work, and send a message to the others; return its result and all messages.

        Raises:
            PulseError: a rank failed; on that rank its own error, on the others one of the same class or a GroupError.
        """
        self._rounds += 1
        place = bytes([self._rounds % 256])
        try:
            value, message = work()
        except BaseException as e:
            with suppress(GroupError):
                self._gather(place + _FAILED + _fault_to(e))
            raise
        step = b"" if self.step is None else self.step.to_bytes(8, "little")
        sent = self._gather(place + _DONE + step + message)
        if any(one[:1] != place for one in sent):
            raise GroupError(
                "the ranks are not in the same round of a publish; call publish again on every rank",
                rank=self.team.rank,
            )
        for rank, one in enumerate(sent):
            if one[1:2] != _DONE:
                raise _fault_from(one[2:], rank, self.team.rank)
        if len({one[2 : 2 + len(step)] for one in sent}) > 1:
            steps = tuple(int.from_bytes(one[2:10], "little") for one in sent)
            raise GroupError(
                f"the ranks publish different steps: {steps}; pass the same step on every rank", rank=self.team.rank
            )
        return value, [one[2 + len(step) :] for one in sent]

    def _gather(self, message: bytes) -> list[bytes]:
        self.is_lost = True
        sent = self.team.gather(message)
        self.is_lost = False
        return sent

    def report(self, work: Callable[[], tuple[T, RankReport]]) -> tuple[T, list[RankReport]]:
        """Do the same where each message is a report; that of a team of one is not converted to bytes."""
        if self.is_alone:
            value, report = work()
            return value, [report]

        def write() -> tuple[T, bytes]:
            value, report = work()
            return value, report.to_bytes()

        value, sent = self.run_on_all(write)
        return value, read_each(sent, RankReport.from_bytes)

    def run_on_coordinator(self, work: "Callable[[], CoordinatorMessage]") -> "CoordinatorMessage":
        """Let the coordinator do some work, and return its message."""
        if self.is_alone:
            return work()
        _, sent = self.run_on_all(lambda: (None, work().to_bytes() if self.coordinates else b""))
        return CoordinatorMessage.from_bytes(sent[COORDINATOR])


@dataclass(frozen=True)
class CoordinatorMessage:
    """What the coordinator sends to the others."""

    record: bytes = b""  # the stored record of the last version
    anchor: bool = False  # whether to start an anchor now
    newest: int | None = None  # epoch of the newest anchor in the store
    changed: int = 0  # changed weights of all ranks
    written: int = 0  # bytes that all ranks have written

    def to_bytes(self) -> bytes:
        return json.dumps([self.anchor, self.newest, self.changed, self.written]).encode() + b"\n" + self.record

    @classmethod
    def from_bytes(cls, data: bytes) -> "CoordinatorMessage":
        head, _, record = data.partition(b"\n")
        return cls(record, *json.loads(head))


@dataclass(frozen=True)
class AnchorShare:
    """The parts of an anchor that one rank has uploaded."""

    epoch: int
    parts: tuple[PartRef, ...]


@dataclass(frozen=True)
class RankStatus:
    """The status of a rank, which it sends to the others before they publish a version, or end."""

    call: int  # the call of publish that its version ends with
    calls: int  # the number of calls that it has made
    version: int | None  # the version of its base
    unsure: bool  # whether it does not know if the last version was committed
    awaited: bool  # whether its caller waits, so that its source can be read again
    waits: bool  # whether its caller waits in every call (wait=True), so that no other rank is ahead
    unread: bool  # whether publish must raise a failure
    busy: bool  # whether it is writing its share of an anchor
    share: AnchorShare | None  # its share of an anchor that has no record yet
    target: int  # steps that the next version should have, by what this rank measured
    choice: CodecChoice  # how it would code the version: all ranks use the coordinator's choice

    def to_bytes(self) -> bytes:
        share = [self.share.epoch, write_parts(self.share.parts)] if self.share else None
        facts = [self.call, self.calls, self.version, self.unsure, self.awaited, self.waits, self.unread]
        choice = [self.choice.codec, self.choice.reason]
        return json.dumps([*facts, self.busy, share, self.target, choice]).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> "RankStatus":
        """Read what `to_bytes` wrote; `read_each` has the errors that bad bytes raise."""
        *facts, share, target, choice = json.loads(data)
        found = AnchorShare(share[0], read_parts(share[1])) if share else None
        call, calls, version, unsure, awaited, waits, unread, busy = facts
        return cls(call, calls, version, unsure, awaited, waits, unread, busy, found, target, CodecChoice(*choice))


def _fault_to(error: BaseException) -> bytes:
    retryable = isinstance(error, StoreError) and error.retryable
    return json.dumps({"kind": type(error).__name__, "text": str(error)[:MAX_FAULT], "retryable": retryable}).encode()


def _fault_from(data: bytes, failed: int, rank: int) -> PulseError:
    """Return the error of another rank, as one of the same class if it is one of this library's."""
    fault = json.loads(data)
    kind = getattr(errors, fault["kind"], None)
    if not isinstance(kind, type) or not issubclass(kind, PulseError):
        return GroupError(f"rank {failed} failed: {fault['kind']}: {fault['text']}", rank=rank, failed_rank=failed)
    error = kind(f"rank {failed} failed: {fault['text']}")
    error.failed_rank = failed
    if isinstance(error, StoreError):
        error.retryable = fault["retryable"]
    return error
