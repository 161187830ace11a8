"""Trainers that exchange updates through a store: a folder or a bucket; no open ports, no coordinator.

A round is decided by the trainer that first sees all payloads, or a quorum of them after its deadline, and creates
`decided`; all others read it. The result then follows from the payloads alone. A late trainer keeps its whole update
for the next round, and one that was absent applies the decided rounds, or loads a state. `round_rules` decides, and
`round_objects` knows what lies where.
"""

import hashlib
import logging
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NoReturn

from pulsesync.core import arguments
from pulsesync.errors import (
    BaseMismatchError,
    ChainError,
    FormatError,
    MissingLinkError,
    NotFoundError,
    PulseError,
    RoundError,
    StateError,
    StoreError,
    VerificationError,
)
from pulsesync.format.json_reader import load_json
from pulsesync.loco.exchange import EncodedUpdate
from pulsesync.loco.gate import SentUpdate, SparseVector
from pulsesync.loco.outer_step import aggregate
from pulsesync.loco.payload import Coder
from pulsesync.loco.round_objects import RoundObjects, decision_key
from pulsesync.loco.round_rules import (
    CROWD,
    FORMAT,
    NAME,
    Announced,
    RoundRules,
    build_decision,
    build_record,
    parse_decision,
)
from pulsesync.loco.shared import Outcome, SharedState
from pulsesync.store import Location

TRIES = 3  # at reading a payload
Payload = tuple[str, str]  # the trainer that sent it, and its id

logger = logging.getLogger(__name__)


class StoreExchange:
    """An exchange through a store.

    Args:
        location: Where updates are exchanged: a path, s3://…, or a store. Not the location of a published run.
        trainer: This trainer's name, of letters, digits, - and _; unique among the trainers, and the same after a
            restart.
        trainers: How many trainers the first round waits for. More may join, until there are twice as many: a round
            takes the updates of no more, those of the last round's members first.
        quorum: How many trainers a round needs after the deadline; the smallest majority of `trainers` if not given.
        deadline_s: How long to wait for the trainers that announced themselves, after this one has sent its update.
        patience_s: A round without a quorum after this time raises a RoundError.
        poll_s: Seconds between polls of the store.
        state_every: Rounds between two shared states, with which new trainers begin. Older rounds are deleted.

    Raises:
        ValueError: the trainer's name has other characters, or a number is out of its range.
    """

    def __init__(
        self,
        location: Location,
        trainer: str,
        *,
        trainers: int,
        quorum: int | None = None,
        deadline_s: float = 60.0,
        patience_s: float = 3600.0,
        poll_s: float = 0.2,
        state_every: int = 32,
    ) -> None:
        if not isinstance(trainer, str) or not NAME.fullmatch(trainer):
            raise ValueError(f"a trainer's name must be 1 to 64 letters, digits, '-' or '_'; got {trainer!r}")
        self.trainer = trainer
        trainers = arguments.whole("trainers", trainers, 1, what="a number of trainers")
        quorum = trainers // 2 + 1 if quorum is None else arguments.whole("quorum", quorum, 1, trainers)
        state_every = arguments.whole("state_every", state_every, 1, what="a number of rounds")
        for name, value in (("deadline_s", deadline_s), ("patience_s", patience_s), ("poll_s", poll_s)):
            arguments.seconds(name, value)
        self._objects = RoundObjects(location, trainer)
        self._rules = RoundRules(trainers, quorum, deadline_s, patience_s)
        self._poll_s, self._state_every = poll_s, state_every
        self._clock, self._sleep = time.monotonic, time.sleep  # tests replace them
        self._known: dict[int, set[str]] = {}  # fragment -> members of the last round
        self._lost: dict[int, int] = {}  # fragment -> a round that cannot be applied, though a later state is saved

    @property
    def sent_bytes(self) -> int:
        return self._objects.sent_bytes

    @property
    def received_bytes(self) -> int:
        return self._objects.received_bytes

    # Joining

    def join(self, mine: Sequence[SharedState], about: str) -> list[SharedState]:
        """Resume from this trainer's own states, or from the store's if these are of another run or too old."""
        begun = self._begin(mine, about)
        out = []
        for fragment, state in enumerate(mine):
            if state.round == 0 and state.digest != begun[fragment]:
                state = self._objects.newest_state(fragment, state) or _refuse_start()
            elif self._lost.pop(fragment, 0) > state.round or self._objects.is_gone(fragment, state.round + 1):
                state = self._objects.newest_state(fragment, state) or _refuse_gap(state)
            self._known[fragment] = {name for name, part in state.parts.items() if part.round == state.round}
            self._objects.announce(fragment, state.round + 1)
            out.append(state)
        return out

    def _begin(self, mine: Sequence[SharedState], about: str) -> list[str]:
        """Begin the run, or read its record; return the digests of its first states."""
        begun = {
            "format": FORMAT,
            "about": about,
            "layouts": [state.layout for state in mine],
            "start": [state.digest for state in mine],
        }
        found = load_json(self._objects.begin(build_record(begun), mine), "the record of a run of trainers")
        if found.get("format") != FORMAT:
            raise FormatError(
                f"expected a run of trainers of format {FORMAT}, but found {str(found.get('format'))[:60]!r}: trainers "
                "that meet must run the same version of pulsesync; start at a new location from the model's weights"
            )
        lists = all(isinstance(found.get(key), list) for key in ("layouts", "start"))
        if set(found) != set(begun) or not lists:
            raise FormatError("the record of the trainers' run does not have the expected fields")
        for key, what in (("layouts", "model"), ("about", "settings")):
            if found[key] != begun[key]:
                raise StateError(
                    f"the run at this location has another {what} than this trainer ({found[key]}, not {begun[key]}); "
                    "use the same, or a new location"
                )
        start: list[str] = found["start"]
        if len(start) != len(mine):
            raise FormatError("the record of the trainers' run must have one start for each fragment")
        return start

    # A round

    def prepare(self, coder: Coder, update: SentUpdate) -> EncodedUpdate:
        data = coder.encode(self.trainer, update.sent, update.unit)
        return EncodedUpdate(hashlib.sha256(data).hexdigest(), (data,))

    def propose(self, coder: Coder, encoded: EncodedUpdate, size: int) -> Outcome:
        self._objects.check_alone(coder)
        if self._objects.decision(coder) is None:
            self._check_not_gone(coder)
            self._objects.put_payload(coder, encoded.id, encoded.pieces[0])
        began = self._clock()
        read: dict[Payload, SparseVector] = {
            (self.trainer, encoded.id): coder.decode(encoded.pieces[0], self.trainer, 0, size)[1]
        }
        refused: dict[Payload, list[PulseError]] = {}
        rules = self._rules
        while (members := self._decided(coder, size)) is None:
            found, expected = self._look(coder, size, read, refused)
            waited_s = self._clock() - began
            if rules.is_time(coder.round, found, expected, waited_s):
                updates = {trainer: read[trainer, id_] for trainer, id_ in found.items()}
                kept = rules.without_diverged(coder.round, found, updates)
                self._objects.decide(coder, build_decision(coder.base, kept))
                continue
            others = {name: e for name, e in _at_another_state(refused).items() if name not in found}
            all_here = expected <= found.keys() | others.keys()
            if waited_s > (rules.deadline_s if all_here else rules.patience_s):
                rules.check_same_state(coder.round, coder.base, found, others)
            if waited_s > rules.patience_s:
                self._check_not_gone(coder)
                why = "".join(f"; payload of {name} refused: {e[-1]}" for (name, _), e in refused.items() if e)
                raise RoundError(
                    f"round {coder.round}: {rules.patience_s:g} s passed without a quorum of {rules.quorum} "
                    f"trainers{why}",
                    round=coder.round,
                )
            self._sleep(self._poll_s)
        if self.trainer not in members and len(members) >= rules.most:
            logger.warning(
                "Round %d took the updates of %d trainers, %d times trainers=%d and therefore no more; that of %s "
                "was not among them. If there are that many, start each again with their number as trainers=.",
                coder.round,
                len(members),
                CROWD,
                rules.trainers,
                self.trainer,
            )
        total, taken = self._add_up(coder, members, size, read)
        return Outcome(members, total, taken)

    def decline(self, coder: Coder, size: int, why: str) -> None:
        with suppress(StoreError):
            self._objects.leave(coder.fragment, coder.round)  # so that no trainer waits for it in this round

    def _check_not_gone(self, coder: Coder) -> None:
        if self._objects.is_gone(coder.fragment, coder.round):
            raise MissingLinkError(
                f"the objects of round {coder.round} were deleted, because a later state is saved; join again"
            )

    def _look(
        self, coder: Coder, size: int, read: dict[Payload, SparseVector], refused: dict[Payload, list[PulseError]]
    ) -> tuple[dict[str, str], set[str]]:
        """The trainers that have sent a good payload, with its id; and those that are expected to."""
        announced = Announced.of(self._objects.names(coder))
        if not any(payload in read for payload in announced.sent):  # this trainer's was deleted, and so was the round
            self._check_not_gone(coder)
        expected = self._rules.expected(announced, self._known.get(coder.fragment, set()))
        found: dict[str, str] = {}
        for payload in sorted(announced.sent, key=lambda one: one[0] not in expected):
            trainer, id_ = payload
            if trainer in found or len(found) == self._rules.most:
                continue
            faults = refused.setdefault(payload, [])
            if payload not in read and len(faults) < TRIES:
                try:
                    read[payload] = self._objects.payload(coder, trainer, id_, size)
                except (FormatError, ChainError, NotFoundError) as e:  # stale, of another run, damaged, or not readable
                    faults.append(e)
            if payload in read:
                found[trainer] = id_
        return found, expected

    def _add_up(
        self, coder: Coder, members: dict[str, str], size: int, read: dict[Payload, SparseVector]
    ) -> tuple[Any, SparseVector | None]:
        parts: dict[str, SparseVector] = {}
        for trainer, id_ in members.items():
            if (trainer, id_) not in read:
                read[trainer, id_] = self._fetch_decided(coder, trainer, id_, size)
            parts[trainer] = read[trainer, id_]
        return aggregate(parts.values(), size), parts.get(self.trainer)

    def _fetch_decided(self, coder: Coder, trainer: str, id_: str, size: int) -> SparseVector:
        """Fetch a payload of a decided round. Raises: MissingLinkError: it is lost, with a later state; RoundError."""
        faults: list[PulseError] = []
        while len(faults) < TRIES:
            try:
                return self._objects.payload(coder, trainer, id_, size)
            except (FormatError, ChainError, NotFoundError) as e:
                faults.append(e)
            except StoreError as e:
                raise RoundError(f"round {coder.round} was decided, but cannot be read: {e}", round=coder.round) from e
        lost = f"the payload of {trainer} in round {coder.round} is lost ({faults[-1]})"
        if self._objects.has_state(coder.fragment, coder.round):
            self._lost[coder.fragment] = coder.round
            raise MissingLinkError(f"{lost}; join again, from a later state") from faults[-1]
        raise RoundError(
            f"{lost}, and no shared state of this round or a later one is saved yet. Restore the object, or wait until "
            f"the other trainers have saved a state (every {self._state_every} rounds), which this trainer then loads; "
            f"if no trainer has got past this round, delete {decision_key(coder)}, and it is decided again",
            round=coder.round,
        ) from faults[-1]

    def _decided(self, coder: Coder, size: int) -> dict[str, str] | None:
        data = self._objects.decision(coder)
        if data is None:
            return None
        base, members = parse_decision(data, coder.round)
        if base != coder.base:
            if self._is_unfounded(coder, members, base, size):
                raise FormatError(
                    f"{decision_key(coder)} says that round {coder.round} continues from another state than "
                    "this trainer's, and no update that was sent from that state is there: no trainer decided this. "
                    "Delete the object, and see who else can write to this location"
                )
            raise VerificationError(
                f"round {coder.round} continues from another shared state than this trainer's: restart this trainer "
                "without a saved state",
                expected=base,
                actual=coder.base,
            )
        return members

    def _is_unfounded(self, coder: Coder, members: dict[str, str], base: object, size: int) -> bool:
        """Whether none of the payloads of a decision is of the shared state that it names, though they are not old."""
        for trainer, id_ in members.items():
            try:
                self._objects.payload(coder, trainer, id_, size)
            except BaseMismatchError as e:
                if e.actual == base:
                    return False
            except (FormatError, ChainError, NotFoundError):
                continue
        return not self._objects.is_gone(coder.fragment, coder.round)

    def confirm(self, coder: Coder, outcome: Outcome, after: SharedState | None) -> None:
        """Announce the next round; every `state_every` rounds save the state, and delete those before the last."""
        fragment, round_ = coder.fragment, coder.round
        self._known[fragment] = set(outcome.members)
        self._objects.announce(fragment, round_ + 1)
        if round_ % self._state_every or next(iter(outcome.members)) != self.trainer:
            return
        if after is not None:
            self._objects.put_state(fragment, after)
        self._objects.clear(fragment, round_ - self._state_every)

    def missed(self, coder: Coder, size: int) -> Outcome | None:
        members = self._decided(coder, size)
        if members is None:
            return None
        total, taken = self._add_up(coder, members, size, {})
        self._known[coder.fragment] = set(members)
        self._objects.announce(coder.fragment, coder.round + 1)
        return Outcome(members, total, taken)

    def leave(self, rounds: Sequence[int]) -> None:
        for fragment, round_ in enumerate(rounds):
            self._objects.leave(fragment, round_ + 1)


def _at_another_state(refused: dict[Payload, list[PulseError]]) -> dict[str, BaseMismatchError]:
    """The trainers, in the order of their names, that sent an update of another shared state than this trainer's."""
    last = {trainer: faults[-1] for (trainer, _), faults in sorted(refused.items()) if faults}
    return {name: e for name, e in last.items() if isinstance(e, BaseMismatchError)}


def _refuse_start() -> NoReturn:
    raise StateError(
        "this trainer starts with other weights than the run, and no shared state is saved yet: start with "
        "the same checkpoint, or join after the first state is saved"
    )


def _refuse_gap(state: SharedState) -> NoReturn:
    raise StateError(
        f"the rounds after {state.round} were deleted or lost, and no later state can be read: start at a "
        "new location, from a saved state_dict() or the model's weights"
    )
