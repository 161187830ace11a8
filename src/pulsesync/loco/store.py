"""Trainers that exchange updates through a store: a folder or a bucket; no open ports, no coordinator.

    run                                     settings that must be equal, and the start; created once
    rounds/<fragment>/<round>/
      present/<trainer>                     takes part in this round: others wait for it, up to their deadline
      left/<trainer>                        does not take part: others do not wait for it
      sent/<trainer>.<id>                   a payload
      decided                               the members of the round, by payload; created once; never deleted
    states/<fragment>/<round>               the shared state after a round, every `state_every` rounds

A round is decided by the trainer that first sees all payloads, or a quorum of them after its deadline, and creates
`decided`; all others read it. The result then follows from the payloads alone. A late trainer keeps its whole update
for the next round, and one that was absent applies the decided rounds, or loads a state.
"""

import hashlib
import json
import logging
import re
import secrets
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NoReturn

from pulsesync.core import arguments
from pulsesync.errors import (
    BaseMismatchError,
    ChainError,
    ChecksumError,
    ConflictError,
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
from pulsesync.loco.outer import LARGEST_UPDATE, aggregate, diverges
from pulsesync.loco.payload import Coder
from pulsesync.loco.shared import MAX_TRAINERS, Outcome, SharedState
from pulsesync.store import Location, forget, open_store

FORMAT = "pulse-loco-round/1"
MAX_RECORD_BYTES = 1 << 20
TRIES = 3  # at reading a payload
CROWD = 2  # the most members of a round, as a multiple of the configured number of trainers
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_ID = re.compile(r"[0-9a-f]{64}")

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
        clock: Returns the time in seconds.
        sleep: Waits for a number of seconds.

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
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        if not isinstance(trainer, str) or not _NAME.fullmatch(trainer):
            raise ValueError(f"a trainer's name must be 1 to 64 letters, digits, '-' or '_'; got {trainer!r}")
        self.trainer = trainer
        trainers = arguments.whole("trainers", trainers, 1, what="a number of trainers")
        quorum = trainers // 2 + 1 if quorum is None else arguments.whole("quorum", quorum, 1, trainers)
        state_every = arguments.whole("state_every", state_every, 1, what="a number of rounds")
        for name, value in (("deadline_s", deadline_s), ("patience_s", patience_s), ("poll_s", poll_s)):
            arguments.seconds(name, value)
        self._store = open_store(location)
        self._trainers, self._quorum, self._most = trainers, quorum, CROWD * trainers
        self._deadline_s, self._patience_s, self._poll_s = deadline_s, patience_s, poll_s
        self._state_every = state_every
        self._clock, self._sleep = clock, sleep
        self._known: dict[int, set[str]] = {}  # fragment -> members of the last round
        self._lost: dict[int, int] = {}  # fragment -> a round that cannot be applied, though a later state is saved
        self._session = secrets.token_hex(16).encode()  # distinguishes this process from another of the same name
        self.sent_bytes = self.received_bytes = 0

    # Joining

    def join(self, mine: Sequence[SharedState], about: str) -> list[SharedState]:
        """Resume from this trainer's own states, or from the store's if these are of another run or too old."""
        begun = self._begin(mine, about)
        out = []
        for fragment, state in enumerate(mine):
            if state.round == 0 and state.digest != begun[fragment]:
                state = self._newest_state(fragment, state) or _refuse_start()
            elif self._lost.pop(fragment, 0) > state.round or self._is_gone(fragment, state.round + 1):
                state = self._newest_state(fragment, state) or _refuse_gap(state)
            self._known[fragment] = {name for name, part in state.parts.items() if part.round == state.round}
            self._announce(fragment, state.round + 1)
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
        if not self._exists("run"):
            for fragment, state in enumerate(mine):
                if state.round:  # trainers that continue at a new location, where others may have fewer rounds
                    self._put(_state_key(fragment, state.round), state.to_bytes())
            with suppress(ConflictError):
                self._store.create("run", _json(begun))
        found = load_json(self._store.get("run", 0, MAX_RECORD_BYTES), "the record of a run of trainers")
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

    def _exists(self, key: str) -> bool:
        try:
            self._store.get(key, 0, 1)
        except NotFoundError:
            return False
        return True

    def _is_gone(self, fragment: int, round_: int) -> bool:
        """Whether the payloads of a round were deleted, because a later state is saved."""
        return self._has_state(fragment, round_) and not any(
            True for _ in self._store.list(f"{_round_key(fragment, round_)}/sent/")
        )

    def _has_state(self, fragment: int, round_: int) -> bool:
        """Whether a shared state of this round or a later one is saved."""
        return any(_number(entry.key) >= round_ for entry in self._store.list(f"states/{fragment:04d}/"))

    def _newest_state(self, fragment: int, like: SharedState) -> SharedState | None:
        """The newest readable state with more rounds than `like`; None if there is none."""
        for key in sorted((entry.key for entry in self._store.list(f"states/{fragment:04d}/")), reverse=True):
            try:
                state = SharedState.from_bytes(self._get(key, 8 * len(like.theta) + (1 << 21)), like)
                if state.round == _number(key) and state.round > like.round:
                    return state
            except (NotFoundError, FormatError):
                forget(self._store, key)
        return None

    # A round

    def prepare(self, coder: Coder, update: SentUpdate) -> EncodedUpdate:
        data = coder.encode(self.trainer, update.sent, update.unit)
        return EncodedUpdate(hashlib.sha256(data).hexdigest(), (data,))

    def propose(self, coder: Coder, letter: EncodedUpdate, size: int) -> Outcome:
        own = _place(coder, f"sent/{self.trainer}.{letter.id}")
        self._check_alone(coder)
        if self._decided_bytes(coder) is None:
            self._check_not_gone(coder)
            self._put(own, letter.pieces[0])
        began = self._clock()
        read = {own: coder.decode(letter.pieces[0], self.trainer, 0, size)[1]}
        refused: dict[str, list[PulseError]] = {}
        while (members := self._decided(coder, size)) is None:
            found, expected = self._look(coder, size, read, refused)
            waited_s = self._clock() - began
            if self._is_time(coder.round, set(found), expected, waited_s):
                self._decide(coder, self._without_diverged(coder, found, read))
                continue
            others = {name: e for name, e in _at_another_state(refused).items() if name not in found}
            all_here = expected <= found.keys() | others.keys()
            if waited_s > (self._deadline_s if all_here else self._patience_s):
                self._check_same_state(coder, set(found), others)
            if waited_s > self._patience_s:
                self._check_not_gone(coder)
                why = "".join(f"; payload of {_sender(key)} refused: {e[-1]}" for key, e in refused.items() if e)
                raise RoundError(
                    f"round {coder.round}: {self._patience_s:g} s passed without a quorum of {self._quorum} "
                    f"trainers{why}",
                    round=coder.round,
                )
            self._sleep(self._poll_s)
        if self.trainer not in members and len(members) >= self._most:
            logger.warning(
                "Round %d took the updates of %d trainers, %d times trainers=%d and therefore no more; that of %s "
                "was not among them. If there are that many, start each again with their number as trainers=.",
                coder.round,
                len(members),
                CROWD,
                self._trainers,
                self.trainer,
            )
        total, taken = self._add_up(coder, members, size, read)
        return Outcome(members, total, taken)

    def decline(self, coder: Coder, size: int, why: str) -> None:
        with suppress(StoreError):
            self._store.put(_place(coder, f"left/{self.trainer}"), b"")  # so that no trainer waits for it in this round

    def _check_alone(self, coder: Coder) -> None:
        """Raises: StateError, if another process has announced itself under this trainer's name."""
        with suppress(NotFoundError):
            if self._get(_place(coder, f"present/{self.trainer}"), 64) != self._session:
                raise StateError(f"another process runs as trainer {self.trainer!r}; give each trainer its own name")

    def _check_not_gone(self, coder: Coder) -> None:
        if self._is_gone(coder.fragment, coder.round):
            raise MissingLinkError(
                f"the objects of round {coder.round} were deleted, because a later state is saved; join again"
            )

    def _check_same_state(self, coder: Coder, found: set[str], others: dict[str, BaseMismatchError]) -> None:
        """Raises: VerificationError, if there is no quorum because some trainers are at another shared state."""
        if others and len(found) + len(others) >= self._quorum:
            raise VerificationError(
                f"replicas have diverged: in round {coder.round}, {', '.join(others)} are at another shared state than "
                f"{', '.join(sorted(found))}, and neither side has a quorum of {self._quorum}. Stop all trainers, and "
                "start them at a new location, the first one from the state_dict() to continue from",
                expected=coder.base,
                actual=next(iter(others.values())).actual,
            )

    def _look(
        self, coder: Coder, size: int, read: dict[str, SparseVector], refused: dict[str, list[PulseError]]
    ) -> tuple[dict[str, str], set[str]]:
        """The trainers that have sent a good payload, with its id; and those that are expected to.

        Neither are more than a round takes: names beyond that are not waited for, and what they sent is not read.
        """
        keys = [entry.key for entry in self._store.list(_place(coder, ""))]
        if not any(key in read for key in keys):  # this trainer's payload was deleted, and so was the round
            self._check_not_gone(coder)
        named: dict[str, set[str]] = {"present": set(), "left": set()}
        sent: list[tuple[str, str, str]] = []  # trainer, id, key
        for key in keys:
            *_, what, name = key.split("/")
            trainer, _, id_ = name.partition(".")
            if what in named and _NAME.fullmatch(name):
                named[what].add(name)
            elif what == "sent" and _NAME.fullmatch(trainer) and _ID.fullmatch(id_):
                sent.append((trainer, id_, key))
        known = self._known.get(coder.fragment, set())
        coming = sorted((known | named["present"]) - named["left"], key=lambda name: (name not in known, name))
        expected = set(coming[: self._most])
        found: dict[str, str] = {}
        for trainer, id_, key in sorted(sent, key=lambda one: one[0] not in expected):
            if trainer in found or len(found) == self._most:
                continue
            faults = refused.setdefault(key, [])
            if key not in read and len(faults) < TRIES:
                try:
                    read[key] = self._fetch(coder, key, trainer, id_, size)
                except (FormatError, ChainError, NotFoundError) as e:  # stale, of another run, damaged, or not readable
                    faults.append(e)
            if key in read:
                found[trainer] = id_
        return found, expected

    def _is_time(self, round_: int, found: set[str], expected: set[str], waited_s: float) -> bool:
        """Whether to decide a round: all expected payloads are there, or a quorum is and the deadline has passed."""
        enough = self._trainers if round_ == 1 else self._quorum
        in_time = len(found) >= enough and expected <= found
        return in_time or (waited_s >= self._deadline_s and len(found) >= self._quorum)

    def _without_diverged(self, coder: Coder, found: dict[str, str], read: dict[str, SparseVector]) -> dict[str, str]:
        """Leave out the trainers whose updates diverge, if the others make a quorum; otherwise return all of them.

        A round with all of them is empty if their mean diverges.
        """
        large = [t for t, id_ in sorted(found.items()) if diverges(read[_place(coder, f"sent/{t}.{id_}")].values)]
        rest = {trainer: id_ for trainer, id_ in found.items() if trainer not in large}
        if not large or len(rest) < self._quorum:
            return found
        logger.warning(
            "Round %d is decided without %s: their updates have values above %g.",
            coder.round,
            ", ".join(large),
            LARGEST_UPDATE,
        )
        return rest

    def _decide(self, coder: Coder, found: dict[str, str]) -> None:
        record = _json({"format": FORMAT, "base": coder.base, "members": dict(sorted(found.items()))})
        with suppress(ConflictError):  # another trainer decided first
            self._store.create(_place(coder, "decided"), record)
            self.sent_bytes += len(record)

    def _fetch(self, coder: Coder, key: str, trainer: str, id_: str, size: int) -> SparseVector:
        data = self._get(key, 5 * size + (1 << 20))  # no payload is longer
        if hashlib.sha256(data).hexdigest() != id_:
            forget(self._store, key)
            raise ChecksumError(
                f"the payload of {trainer} in round {coder.round} is damaged: its bytes do not match its hash",
                expected=id_,
            )
        return coder.decode(data, trainer, 0, size)[1]

    def _add_up(
        self, coder: Coder, members: dict[str, str], size: int, read: dict[str, SparseVector]
    ) -> tuple[Any, SparseVector | None]:
        parts: dict[str, SparseVector] = {}
        for trainer, id_ in members.items():
            key = _place(coder, f"sent/{trainer}.{id_}")
            if key not in read:
                read[key] = self._fetch_decided(coder, key, trainer, id_, size)
            parts[trainer] = read[key]
        return aggregate(parts.values(), size), parts.get(self.trainer)

    def _fetch_decided(self, coder: Coder, key: str, trainer: str, id_: str, size: int) -> SparseVector:
        """Fetch a payload of a decided round. Without it, the trainer needs a later state.

        Raises:
            MissingLinkError: the payload is lost, and there is a later state; RoundError: there is none, or the store
                failed.
        """
        faults: list[PulseError] = []
        while len(faults) < TRIES:
            try:
                return self._fetch(coder, key, trainer, id_, size)
            except (FormatError, ChainError, NotFoundError) as e:
                faults.append(e)
            except StoreError as e:
                raise RoundError(f"round {coder.round} was decided, but cannot be read: {e}", round=coder.round) from e
        lost = f"the payload of {trainer} in round {coder.round} is lost ({faults[-1]})"
        if self._has_state(coder.fragment, coder.round):
            self._lost[coder.fragment] = coder.round
            raise MissingLinkError(f"{lost}; join again, from a later state") from faults[-1]
        raise RoundError(
            f"{lost}, and no shared state of this round or a later one is saved yet. Restore the object, or wait until "
            f"the other trainers have saved a state (every {self._state_every} rounds), which this trainer then loads; "
            f"if no trainer has got past this round, delete {_place(coder, 'decided')}, and it is decided again",
            round=coder.round,
        ) from faults[-1]

    def _decided(self, coder: Coder, size: int) -> dict[str, str] | None:
        data = self._decided_bytes(coder)
        if data is None:
            return None
        record = load_json(data, "the decision of a round")
        members = record.get("members")
        if set(record) != {"format", "base", "members"} or record["format"] != FORMAT or not isinstance(members, dict):
            raise FormatError(f"the decision of round {coder.round} does not have the expected fields")
        if not 1 <= len(members) <= MAX_TRAINERS or list(members) != sorted(members):
            raise FormatError(f"the decision of round {coder.round} must list 1 or more trainers, in order")
        if any(not _NAME.fullmatch(name) or not _is_id(id_) for name, id_ in members.items()):
            raise FormatError(f"the decision of round {coder.round} lists a bad name or payload id")
        if record["base"] != coder.base:
            if self._is_unfounded(coder, members, record["base"], size):
                raise FormatError(
                    f"{_place(coder, 'decided')} says that round {coder.round} continues from another state than "
                    "this trainer's, and no update that was sent from that state is there: no trainer decided this. "
                    "Delete the object, and see who else can write to this location"
                )
            raise VerificationError(
                f"round {coder.round} continues from another shared state than this trainer's: restart this trainer "
                "without a saved state",
                expected=record["base"],
                actual=coder.base,
            )
        return members

    def _is_unfounded(self, coder: Coder, members: dict[str, str], base: object, size: int) -> bool:
        """Whether none of the payloads of a decision is of the shared state that it names, though they are not old."""
        for trainer, id_ in members.items():
            try:
                self._fetch(coder, _place(coder, f"sent/{trainer}.{id_}"), trainer, id_, size)
            except BaseMismatchError as e:
                if e.actual == base:
                    return False
            except (FormatError, ChainError, NotFoundError):
                continue
        return not self._is_gone(coder.fragment, coder.round)

    def _decided_bytes(self, coder: Coder) -> bytes | None:
        try:
            return self._get(_place(coder, "decided"), MAX_RECORD_BYTES)
        except NotFoundError:
            return None

    def confirm(self, coder: Coder, outcome: Outcome, after: SharedState | None) -> None:
        """Announce the next round.

        Every `state_every` rounds save the shared state, and delete rounds before the last saved state.
        """
        fragment, round_ = coder.fragment, coder.round
        self._known[fragment] = set(outcome.members)
        self._announce(fragment, round_ + 1)
        if round_ % self._state_every or next(iter(outcome.members)) != self.trainer:
            return
        if after is not None:
            self._put(_state_key(fragment, round_), after.to_bytes())
        self._clear(fragment, round_ - self._state_every)

    def _clear(self, fragment: int, last: int) -> None:
        """Delete the payloads before a state, and earlier states. Decisions stay: no round is decided twice."""
        for entry in self._store.list(f"rounds/{fragment:04d}/"):
            if 0 <= _number(entry.key) <= last and not entry.key.endswith("/decided"):
                self._store.delete(entry.key)
        for entry in self._store.list(f"states/{fragment:04d}/"):
            if 0 <= _number(entry.key) < last:
                self._store.delete(entry.key)

    def missed(self, coder: Coder, size: int) -> Outcome | None:
        members = self._decided(coder, size)
        if members is None:
            return None
        total, taken = self._add_up(coder, members, size, {})
        self._known[coder.fragment] = set(members)
        self._announce(coder.fragment, coder.round + 1)
        return Outcome(members, total, taken)

    def _get(self, key: str, limit: int) -> bytes:
        data = self._store.get(key, 0, limit)
        self.received_bytes += len(data)
        return data

    def _put(self, key: str, data: bytes) -> None:
        self._store.put(key, data)
        self.sent_bytes += len(data)

    def _announce(self, fragment: int, round_: int) -> None:
        at = _round_key(fragment, round_)
        self._put(f"{at}/present/{self.trainer}", self._session)
        self._store.delete(f"{at}/left/{self.trainer}")

    def leave(self, rounds: Sequence[int]) -> None:
        for fragment, round_ in enumerate(rounds):
            self._store.put(f"{_round_key(fragment, round_ + 1)}/left/{self.trainer}", b"")


def _round_key(fragment: int, round_: int) -> str:
    return f"rounds/{fragment:04d}/{round_:010d}"


def _state_key(fragment: int, round_: int) -> str:
    return f"states/{fragment:04d}/{round_:010d}"


def _place(coder: Coder, name: str) -> str:
    return f"{_round_key(coder.fragment, coder.round)}/{name}"


def _is_id(value: object) -> bool:
    return isinstance(value, str) and _ID.fullmatch(value) is not None


def _at_another_state(refused: dict[str, list[PulseError]]) -> dict[str, BaseMismatchError]:
    """The trainers, in the order of their names, that sent an update of another shared state than this trainer's."""
    last = {_sender(key): faults[-1] for key, faults in sorted(refused.items()) if faults}
    return {name: e for name, e in last.items() if isinstance(e, BaseMismatchError)}


def _sender(key: str) -> str:
    """The trainer that sent the payload with this key."""
    return key.rpartition("/")[2].partition(".")[0]


def _number(key: str) -> int:
    """The round in a key; -1 if it has none."""
    parts = key.split("/")
    return int(parts[2]) if len(parts) > 2 and parts[2].isdecimal() else -1


def _json(record: dict[str, Any]) -> bytes:
    return json.dumps(record, sort_keys=True).encode()


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
