"""What the ranks of a team say to each other while they publish: in step, and all of them fail where one does."""

import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeVar

from pulsesync import errors
from pulsesync.errors import FormatError, GroupError, PulseError, StoreError
from pulsesync.format.manifest import PartRef
from pulsesync.group.collective import Team
from pulsesync.publish.costs import CodecChoice
from pulsesync.publish.ownership import RankReport, read_parts, write_parts

COORDINATOR = 0
MAX_FAULT = 1000  # characters of an error that are sent to the others

_DONE, _FAILED = b"+", b"-"

T = TypeVar("T")


class TeamTalk:
    """Rounds in which every rank does its share of something and hears of the others. A team of one hears itself.

    Attributes:
        step: The trainer's step that this rank publishes. All must be at the same one; None while that is not agreed.
        is_lost: Whether this rank could not reach the others in the last round.
    """

    def __init__(self, team: Team) -> None:
        self.team = team
        self.step: int | None = None
        self.is_lost = False
        self._rounds = 0

    @property
    def coordinates(self) -> bool:
        return self.team.rank == COORDINATOR

    @property
    def is_alone(self) -> bool:
        return self.team.size == 1

    def begin(self) -> None:
        """Begin a version: every rank counts its rounds from here."""
        self._rounds, self.step = 0, None

    def together(self, work: Callable[[], tuple[T, bytes]]) -> tuple[T, list[bytes]]:
        """Do this rank's share of something, and send a message to the others; return what it gave and all messages.

        Raises:
            PulseError: some rank failed: its own error there, one of the same kind or a GroupError elsewhere.
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
            raise GroupError("the ranks are not in the same place of a publish: begin it again", rank=self.team.rank)
        for rank, one in enumerate(sent):
            if one[1:2] != _DONE:
                raise _fault_from(one[2:], rank, self.team.rank)
        if len({one[2 : 2 + len(step)] for one in sent}) > 1:
            steps = tuple(int.from_bytes(one[2:10], "little") for one in sent)
            raise GroupError(f"the ranks publish different steps: {steps}", rank=self.team.rank)
        return value, [one[2 + len(step) :] for one in sent]

    def _gather(self, message: bytes) -> list[bytes]:
        self.is_lost = True
        sent = self.team.gather(message)
        self.is_lost = False
        return sent

    def report(self, work: Callable[[], tuple[T, RankReport]]) -> tuple[T, list[RankReport]]:
        """The same where each message is a report; that of a team of one is not written down."""
        if self.is_alone:
            value, report = work()
            return value, [report]

        def write() -> tuple[T, bytes]:
            value, report = work()
            return value, report.to_bytes()

        value, sent = self.together(write)
        return value, list(RankReport.from_ranks(sent))

    def ask(self, work: "Callable[[], CoordinatorMessage]") -> "CoordinatorMessage":
        """Let the coordinator do something, and return its message."""
        if self.is_alone:
            return work()
        _, sent = self.together(lambda: (None, work().to_bytes() if self.coordinates else b""))
        return CoordinatorMessage.from_bytes(sent[COORDINATOR])


@dataclass(frozen=True)
class CoordinatorMessage:
    """What the coordinator sends to the others."""

    record: bytes = b""  # of the last version, as stored
    anchor: bool = False  # one is to be begun now
    newest: int | None = None  # epoch of the newest anchor in the store
    changed: int = 0  # weights, over all ranks
    written: int = 0  # bytes, by all ranks

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
class Standing:
    """Where a rank stands when the ranks meet to publish a version, or to end."""

    call: int  # of publish, that its version ends with
    calls: int  # that it has made
    version: int | None  # that its base is
    unsure: bool  # whether it does not know what became of the last version
    awaited: bool  # whether its caller waits, so that its source can be read again
    waits: bool  # whether its caller waits in every call (wait=True), so that no other rank is ahead
    unread: bool  # whether a failure is to be raised by publish
    busy: bool  # whether it writes its share of an anchor
    share: AnchorShare | None  # of an anchor that is not recorded
    target: int  # steps that the next version should have, as far as this rank knows
    choice: CodecChoice  # how it would code the version: as the coordinator would, all do

    def to_bytes(self) -> bytes:
        share = [self.share.epoch, write_parts(self.share.parts)] if self.share else None
        facts = [self.call, self.calls, self.version, self.unsure, self.awaited, self.waits, self.unread]
        choice = [self.choice.codec, self.choice.reason]
        return json.dumps([*facts, self.busy, share, self.target, choice]).encode()

    @classmethod
    def from_ranks(cls, messages: Sequence[bytes]) -> "list[Standing]":
        """Raises: FormatError, if a message is not what `to_bytes` wrote."""
        out = []
        for rank, data in enumerate(messages):
            try:
                call, calls, version, unsure, awaited, waits, unread, busy, share, target, choice = json.loads(data)
                found = AnchorShare(share[0], read_parts(share[1])) if share else None
                facts = (call, calls, version, unsure, awaited, waits, unread, busy)
                out.append(cls(*facts, found, target, CodecChoice(*choice)))
            except (ValueError, TypeError, IndexError) as e:
                raise FormatError(f"malformed message from rank {rank}: {e}") from e
        return out


def _fault_to(error: BaseException) -> bytes:
    retryable = isinstance(error, StoreError) and error.retryable
    return json.dumps({"kind": type(error).__name__, "text": str(error)[:MAX_FAULT], "retryable": retryable}).encode()


def _fault_from(data: bytes, failed: int, rank: int) -> PulseError:
    """What stopped another rank, as an error of the same kind where it is one of this library's."""
    fault = json.loads(data)
    kind = getattr(errors, fault["kind"], None)
    if not isinstance(kind, type) or not issubclass(kind, PulseError):
        return GroupError(f"rank {failed} failed: {fault['kind']}: {fault['text']}", rank=rank, failed_rank=failed)
    error = kind(f"rank {failed} failed: {fault['text']}")
    error.failed_rank = failed
    if isinstance(error, StoreError):
        error.retryable = fault["retryable"]
    return error
