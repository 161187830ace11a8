"""Trainers in one process group of torch.distributed, over gloo or NCCL.

There are two methods to add up updates. "owner": each trainer owns a range of the entries; it receives that part of
every update, adds them up in the order of the trainers and sends the sum to all, so that traffic does not grow with the
number of trainers (for dense updates it is that of a ring all-reduce). "gather": each sends its whole update to all.
Both yield the same bits.

Bytes travel at their exact lengths, sizes first. If one trainer's bytes are bad, it still takes part in every
collective to the end, and all trainers get the error together: none is left waiting, and none commits.
"""

import hashlib
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Literal

from pulsesync.errors import ChainError, FormatError, GroupError, RoundError, StateError, VerificationError
from pulsesync.group.agreement import describe_fault, exchange_notes
from pulsesync.group.collective import Collective
from pulsesync.loco.exchange import EncodedUpdate
from pulsesync.loco.gate import SentUpdate, SparseVector
from pulsesync.loco.outer_step import aggregate
from pulsesync.loco.payload import Coder, summed_unit
from pulsesync.loco.shared import MAX_HEAD_BYTES, Outcome, SharedState
from pulsesync.loco.vectors import Vector

logger = logging.getLogger(__name__)

MAX_TRAINER = 64  # characters of a name
NOTE_BYTES = 256  # size of a note between trainers


class GroupExchange:
    """An exchange in a process group.

    Args:
        group: The group, the default one if not given. With `delay` it must be used for nothing else: rounds are
            exchanged in the background, and ranks would enter collectives in different orders.
        reduce: How updates are added up: "owner", each trainer adds up a range of the entries; "gather", each adds up
            all of them. Both yield the same bits.
        trainer: This trainer's name, made from its rank if not given. Give one if ranks may change when the group is
            created again: a trainer is identified by it.
        timeout_s: How long to wait for the others, at each message; the group's own timeout may be shorter. Over gloo,
            all notice at once if a trainer dies; this is for trainers that hang.

    Raises:
        ValueError: the trainer's name is too long, or has characters other than printable ASCII.
    """

    def __init__(
        self,
        group: Any = None,
        *,
        reduce: Literal["owner", "gather"] = "owner",
        trainer: str | None = None,
        timeout_s: float = 1800.0,
    ) -> None:
        self._team, self._reduce = Collective(group, timeout_s), reduce
        self._rank, self._size = self._team.rank, self._team.size
        self.trainer = trainer or f"{self._rank:05d}"
        if len(self.trainer) > MAX_TRAINER or not self.trainer.isprintable() or not self.trainer.isascii():
            raise ValueError(
                f"a trainer's name must be 1 to {MAX_TRAINER} printable ASCII characters; got {self.trainer!r}"
            )
        self._names: list[str] = []  # by rank, after `join`

    @property
    def sent_bytes(self) -> int:
        return self._team.sent_bytes

    @property
    def received_bytes(self) -> int:
        return self._team.received_bytes

    def join(self, mine: Sequence[SharedState], about: str) -> list[SharedState]:
        """Return the newest state of each fragment among all trainers; before the first round, that of rank 0."""
        alike = f"{about} {self._reduce} {[state.layout for state in mine]}"
        same = hashlib.sha256(alike.encode()).hexdigest()
        notes = self._exchange_notes({"same": same, "trainer": self.trainer})
        if any(note["same"] != same for note in notes):
            raise StateError(
                f"trainers of this group differ in model or settings; this one has: {about}. Pass the same on every "
                "rank"
            )
        self._names = [note["trainer"] for note in notes]
        if len(set(self._names)) != self._size:
            raise StateError(f"trainers of this group must have different names; they have {', '.join(self._names)}")
        return [self._furthest(state) for state in mine]

    def _furthest(self, state: SharedState) -> SharedState:
        notes = self._exchange_notes({"round": state.round, "digest": state.digest})
        newest = max(note["round"] for note in notes)
        digests = [note["digest"] if note["round"] == newest else None for note in notes]
        source = next(rank for rank, digest in enumerate(digests) if digest)
        if newest and len(set(digests) - {None}) > 1:
            raise _diverged(f"their shared states differ after round {newest}")
        if all(digest == digests[source] for digest in digests):
            return state
        data = state.to_bytes() if self._rank == source else b""
        most, faults = 8 * len(state.theta) + MAX_HEAD_BYTES, list[str]()
        got = self._swap([data if digest != digests[source] else b"" for digest in digests], most)[source]
        if got:
            try:
                state = SharedState.from_bytes(got, like=state)
            except FormatError as e:
                faults.append(_short(str(e)))
        notes = self._exchange_notes({"fault": faults[0] if faults else ""})
        self._end_together(notes, state.round, "the shared state could not be read")
        return state

    def prepare(self, coder: Coder, update: SentUpdate) -> EncodedUpdate:
        ranges = self._ranges(update.sent.size) if self._reduce == "owner" else [(0, update.sent.size)]
        pieces = [coder.encode(self.trainer, update.sent.part(a, b), update.unit, a) for a, b in ranges]
        return EncodedUpdate(hashlib.sha256(b"".join(pieces)).hexdigest(), tuple(pieces))

    def propose(self, coder: Coder, encoded: EncodedUpdate, size: int) -> Outcome:
        return self._round(coder, encoded, size, [])

    def decline(self, coder: Coder, size: int, why: str) -> None:
        with suppress(RoundError):
            self._round(coder, EncodedUpdate("", (b"",) * self._size), size, [_short(why)])

    def _round(self, coder: Coder, encoded: EncodedUpdate, size: int, faults: list[str]) -> Outcome:
        """Take part in every collective of a round to its end, even after an error; then all trainers get the error."""
        add_up = self._by_owners if self._reduce == "owner" else self._by_all
        total = add_up(coder, encoded, size, faults)
        notes = self._exchange_notes({"payload": encoded.id, "fault": faults[0] if faults else ""})
        self._end_together(notes, coder.round, f"round {coder.round} failed")
        return Outcome({self._names[rank]: notes[rank]["payload"] for rank in self._in_order()}, total)

    def _end_together(self, notes: list[dict[str, Any]], round_: int, what: str) -> None:
        for name, note in zip(self._names, notes, strict=True):
            if note["fault"]:
                raise RoundError(f"{what} at trainer {name}: {note['fault']}", round=round_)

    def _in_order(self) -> list[int]:
        """The ranks, in the order of the trainers' names: the order in which updates are added up."""
        return sorted(range(self._size), key=self._names.__getitem__)

    def confirm(self, coder: Coder, outcome: Outcome, after: SharedState | None) -> None:
        if after is None:
            return
        notes = self._exchange_notes({"digest": after.digest})
        if any(note["digest"] != after.digest for note in notes):
            raise _diverged(f"they disagree on the digest after round {after.round}")

    def missed(self, coder: Coder, size: int) -> Outcome | None:
        return None  # every trainer of a group takes part in every round

    def leave(self, rounds: Sequence[int]) -> None:
        pass  # the group ends when its processes end it

    def _ranges(self, size: int) -> list[tuple[int, int]]:
        return [(size * i // self._size, size * (i + 1) // self._size) for i in range(self._size)]

    def _by_all(self, coder: Coder, encoded: EncodedUpdate, size: int, faults: list[str]) -> Vector:
        got = self._swap(encoded.pieces[:1] * self._size, _most(size))
        got[self._rank] = encoded.pieces[0]
        totals = list[Vector]()
        with _noting(faults):
            parts = [_read(coder, got[r], self._names[r], (0, size), 1, faults)[0] for r in self._in_order()]
            totals.append(aggregate(parts, size))
        return totals[0] if totals else coder.vectors.zeros(0)  # not used: there is a fault

    def _by_owners(self, coder: Coder, encoded: EncodedUpdate, size: int, faults: list[str]) -> Vector:
        ranges, everyone = self._ranges(size), self._size
        begin, end = ranges[self._rank]
        got = self._swap(encoded.pieces, _most(size))
        got[self._rank] = encoded.pieces[self._rank]
        sums, v = b"", coder.vectors
        with _noting(faults):
            read = [_read(coder, got[r], self._names[r], (begin, end), 1, faults) for r in self._in_order()]
            total = aggregate([part for part, _ in read], end - begin)
            union = SparseVector.whole(total)
            if coder.described is not None:
                positions = v.nonzero(total)
                union = SparseVector(len(total), positions, total[positions])
            sums = coder.encode(self.trainer, union, summed_unit(union, [unit for _, unit in read]), begin, everyone)
        got = self._swap([b"" if faults else sums] * everyone, _most(size))
        got[self._rank] = sums
        whole = v.zeros(0)  # not used if there is a fault
        with _noting(faults):
            whole = v.zeros(size)
            for name, (a, b), data in zip(self._names, ranges, got, strict=True):
                _read(coder, data, name, (a, b), everyone, faults)[0].add_to(whole[a:b])
        return whole

    def _swap(self, outgoing: Sequence[bytes], most: int) -> list[bytes]:
        """As `Collective.swap`: send each trainer but this one its bytes; return what each has sent."""
        try:
            return self._team.swap(outgoing, most)
        except GroupError as e:
            raise RoundError(f"the exchange between the trainers failed: {e}") from e

    def _exchange_notes(self, note: dict[str, Any]) -> list[dict[str, Any]]:
        """Send a short note to all trainers; return the notes of all."""
        try:
            return exchange_notes(self._team, note, NOTE_BYTES)
        except GroupError as e:
            raise RoundError(f"the exchange between the trainers failed: {e}") from e
        except FormatError as e:
            raise RoundError(
                f"the trainers are out of step: {e}; all must take the same steps and use the group for nothing else"
            ) from e


@contextmanager
def _noting(faults: list[str]) -> Iterator[None]:
    """Collect errors, mostly a lack of memory, so that this trainer takes part in the round to its end."""
    try:
        yield
    except Exception as e:  # noqa: BLE001 - a note sends it to all trainers, and each raises it as a RoundError
        logger.warning("This trainer could not compute its part of a round: %s: %s", type(e).__name__, e)
        faults.append(_short(f"{type(e).__name__}: {e}"))


def _read(
    coder: Coder, data: bytes, trainer: str, span: tuple[int, int], terms: int, faults: list[str]
) -> tuple[SparseVector, int | None]:
    """Decode a payload: its entries, and their unit. Errors are collected, and reported when all are done."""
    try:
        head, sent = coder.decode(data, trainer, *span, terms)
        return sent, head.scale if head.mode == "compact" else None
    except (FormatError, ChainError) as e:
        faults.append(_short(f"{type(e).__name__}: {e}"))
        return coder.nothing(span[1] - span[0]), None


def _diverged(how: str) -> VerificationError:
    return VerificationError(f"the trainers have diverged: {how}. Stop them, and resume all from one state_dict()")


def _short(fault: str) -> str:
    return describe_fault(fault, 100)


def _most(size: int) -> int:
    """The longest payload of this number of entries."""
    return 5 * size + (1 << 20)
