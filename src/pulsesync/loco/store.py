"""Trainers that meet in a store: any folder, bucket or container, no open ports, nobody in charge.

    run                                     what all must have set alike, and where they began; created once
    rounds/<fragment>/<round>/
      present/<trainer>                     "I work on this round": others wait for it, up to their deadline
      left/<trainer>                        "I do not": nobody does
      sent/<trainer>.<id>                   a payload
      decided                               who is in the round, by payload; created once, which makes the round
    states/<fragment>/<round>               the shared state after a round, every so often, for those who join

A round is decided by whoever first sees everybody's payload, or enough of them once its deadline has passed, and
creates `decided`; all others read it. From then on its result is a matter of arithmetic. A trainer that was late keeps
its whole update for the next round, and one that was away follows the decisions, or takes a state.
"""

import hashlib
import json
import re
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from pulsesync.errors import (
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
from pulsesync.format.layout import load_json
from pulsesync.loco.exchange import Letter
from pulsesync.loco.gate import Sparse, Split
from pulsesync.loco.outer import aggregate
from pulsesync.loco.payload import Coder
from pulsesync.loco.shared import Outcome, Shared
from pulsesync.store import Store, forget, open_store

FORMAT = "pulse-loco-round/1-draft"
MAX_RECORD_BYTES = 1 << 20
MAX_TRAINERS = 1 << 12
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_ID = re.compile(r"[0-9a-f]{64}")


class StoreExchange:
    """An exchange through a store.

    Args:
        location: Where trainers meet: a path, s3://…, or a store. Not where weights are published.
        trainer: This trainer's name, of letters, digits, - and _; another for each, and the same after a restart.
        trainers: How many the first round waits for.
        quorum: How many a round needs once the deadline has passed; the smallest majority of `trainers` if not given.
        deadline_s: How long to wait for those who said they would come, from when this trainer has sent its update.
        patience_s: After which a round without a quorum is given up, with a RoundError.
        poll_s: How often to look.
        state_every: Rounds between two shared states, which joiners begin with. Older rounds are deleted.
    """

    def __init__(
        self, location: str | Store, trainer: str, *, trainers: int, quorum: int | None = None,
        deadline_s: float = 60.0, patience_s: float = 3600.0, poll_s: float = 0.2, state_every: int = 32,
        clock: Callable[[], float] = time.monotonic, sleep: Callable[[float], None] = time.sleep,
    ) -> None:  # fmt: skip
        if not _NAME.fullmatch(trainer):
            raise ValueError(f"{trainer!r} is no name for a trainer: 1 to 64 letters, digits, - or _")
        self.trainer = trainer
        self._store = open_store(location) if isinstance(location, str) else location
        self._trainers, self._quorum = trainers, quorum if quorum is not None else trainers // 2 + 1
        if not 1 <= self._quorum <= trainers or state_every < 1:
            raise ValueError(f"a quorum of {self._quorum} among {trainers} trainers, states every {state_every} rounds")
        self._deadline_s, self._patience_s, self._poll_s = deadline_s, patience_s, poll_s
        self._state_every = state_every
        self._clock, self._sleep = clock, sleep
        self._known: dict[int, set[str]] = {}  # fragment -> who took part in the last round
        self._refused: dict[str, str] = {}  # key -> why
        self.sent_bytes = self.received_bytes = 0

    # Joining

    def join(self, mine: Sequence[Shared], about: str) -> list[Shared]:
        """Take up this trainer's own states, or, where rounds since then are gone or they are others, the store's."""
        begun = self._begin(mine, about)
        out = []
        for fragment, state in enumerate(mine):
            if state.round == 0 and state.digest != begun[fragment]:
                state = self._newest_state(fragment, state) or _refuse_start()
            elif self._is_gone(fragment, state.round + 1):
                state = self._newest_state(fragment, state) or state
            self._known[fragment] = {name for name, part in state.parts.items() if part.round == state.round}
            self._announce(fragment, state.round + 1)
            out.append(state)
        return out

    def _begin(self, mine: Sequence[Shared], about: str) -> list[str]:
        """Begin the run, or read how it was begun; return the digests of its first states."""
        begun = {
            "format": FORMAT, "about": about, "layouts": [state.layout for state in mine],
            "start": [state.digest for state in mine],
        }  # fmt: skip
        if all(state.round == 0 for state in mine):
            with suppress(ConflictError):
                self._store.create("run", _json(begun))
        found = load_json(self._store.get("run", 0, MAX_RECORD_BYTES), "the record of a run of trainers")
        if set(found) != set(begun) or found["format"] != FORMAT:
            raise FormatError("the record of a run of trainers holds something else")
        for key, what in (("layouts", "train another model"), ("about", "train in another way")):
            if found[key] != begun[key]:
                raise StateError(f"the trainers there {what}: {found[key]}, not {begun[key]}")
        start: list[str] = found["start"]
        return start

    def _is_gone(self, fragment: int, round_: int) -> bool:
        """Whether a round that was decided once cannot be followed any more."""
        if self._decided_bytes(fragment, round_) is not None:
            return False
        newest = max((_number(entry.key) for entry in self._store.list(f"states/{fragment:04d}/")), default=-1)
        return newest >= round_

    def _newest_state(self, fragment: int, like: Shared) -> Shared | None:
        keys = sorted(entry.key for entry in self._store.list(f"states/{fragment:04d}/"))
        for key in reversed(keys):
            try:
                return Shared.from_bytes(self._store.get(key, 0, 8 * like.theta.size + (1 << 21)), like)
            except (NotFoundError, FormatError):
                forget(self._store, key)
        return None

    # A round

    def prepare(self, coder: Coder, split: Split) -> Letter:
        data = coder.encode(self.trainer, split.sent, split.unit)
        return Letter(hashlib.sha256(data).hexdigest(), (data,))

    def propose(self, coder: Coder, letter: Letter, size: int) -> Outcome:
        own = _place(coder, f"sent/{self.trainer}.{letter.id}")
        if self._decided_bytes(coder.fragment, coder.round) is None:
            self._check_not_gone(coder)
            self._put(own, letter.pieces[0])
        began = self._clock()
        read = {own: coder.decode(letter.pieces[0], self.trainer, 0, size)[1]}
        while (members := self._decided(coder)) is None:
            self._decide(coder, size, read, self._clock() - began)
            if self._clock() - began > self._patience_s:
                self._check_not_gone(coder)
                raise RoundError(f"round {coder.round}: no quorum of {self._quorum} came together", round=coder.round)
        total, taken = self._add_up(coder, members, size, read)
        return Outcome(members, total, taken)

    def _check_not_gone(self, coder: Coder) -> None:
        if self._is_gone(coder.fragment, coder.round):
            raise MissingLinkError(f"round {coder.round} is long past: join again", round=coder.round)

    def _decide(self, coder: Coder, size: int, read: dict[str, Sparse], waited_s: float) -> None:
        """Look who has sent, and decide the round if it is time; else wait a little."""
        keys = [entry.key for entry in self._store.list(_place(coder, ""))]
        present, left = ({key.rpartition("/")[2] for key in keys if f"/{what}/" in key} for what in ("present", "left"))
        if not any(key in read for key in keys):  # what this trainer has sent is gone: so is the round
            self._check_not_gone(coder)
        found: dict[str, str] = {}
        for key in keys:
            trainer, _, id_ = key.rpartition("/")[2].partition(".")
            if "/sent/" not in key or trainer in found or not _NAME.fullmatch(trainer) or not _ID.fullmatch(id_):
                continue
            if self._readable(coder, key, trainer, id_, size, read):
                found[trainer] = id_
        expected = (self._known.get(coder.fragment, set()) | present) - left
        enough = self._trainers if coder.round == 1 else self._quorum
        if (len(found) >= enough and expected <= set(found)) or (
            waited_s >= self._deadline_s and len(found) >= self._quorum
        ):
            record = {"format": FORMAT, "base": coder.base, "members": dict(sorted(found.items()))}
            with suppress(ConflictError):  # somebody was quicker
                self._store.create(_place(coder, "decided"), _json(record))
                self.sent_bytes += len(_json(record))
        else:
            self._sleep(self._poll_s)

    def decline(self, coder: Coder, size: int, why: str) -> None:
        with suppress(StoreError):
            self._store.put(_place(coder, f"left/{self.trainer}"), b"")  # of this round: nobody waits for it

    def _readable(self, coder: Coder, key: str, trainer: str, id_: str, size: int, read: dict[str, Sparse]) -> bool:
        """Fetch and decode a payload, once; one that is stale, damaged or another's is refused and left out."""
        if key not in read and key not in self._refused:
            try:
                read[key] = self._fetch(coder, key, trainer, id_, size)
            except (FormatError, ChainError, NotFoundError) as e:
                self._refused[key] = f"{type(e).__name__}: {e}"
        return key in read

    def _fetch(self, coder: Coder, key: str, trainer: str, id_: str, size: int) -> Sparse:
        data = self._get(key, 5 * size + (1 << 20))  # no payload is longer
        if hashlib.sha256(data).hexdigest() != id_:
            forget(self._store, key)
            raise ChecksumError(f"the payload of {trainer} in round {coder.round} is damaged", expected=id_)
        return coder.decode(data, trainer, 0, size)[1]

    def _add_up(
        self, coder: Coder, members: dict[str, str], size: int, read: dict[str, Sparse]
    ) -> tuple[Any, Sparse | None]:
        parts: dict[str, Sparse] = {}
        for trainer, id_ in members.items():
            key = _place(coder, f"sent/{trainer}.{id_}")
            if key not in read:
                try:
                    read[key] = self._fetch(coder, key, trainer, id_, size)
                except PulseError as e:
                    raise RoundError(
                        f"round {coder.round} was decided, and cannot be read: {e}", round=coder.round
                    ) from e
            parts[trainer] = read[key]
        return aggregate(parts.values(), size), parts.get(self.trainer)

    def _decided(self, coder: Coder) -> dict[str, str] | None:
        data = self._decided_bytes(coder.fragment, coder.round)
        if data is None:
            return None
        record = load_json(data, "the decision of a round")
        members = record.get("members")
        if set(record) != {"format", "base", "members"} or record["format"] != FORMAT or not isinstance(members, dict):
            raise FormatError(f"the decision of round {coder.round} holds something else")
        if not 1 <= len(members) <= MAX_TRAINERS or list(members) != sorted(members):
            raise FormatError(f"the decision of round {coder.round} has nobody, too many, or is out of order")
        if any(not _NAME.fullmatch(str(name)) or not _ID.fullmatch(str(id_)) for name, id_ in members.items()):
            raise FormatError(f"the decision of round {coder.round} names what is no trainer or no payload")
        if record["base"] != coder.base:
            raise VerificationError(
                f"round {coder.round} goes on from another state than this trainer holds: load none, and join again",
                expected=record["base"], actual=coder.base, round=coder.round,
            )  # fmt: skip
        return members

    def _decided_bytes(self, fragment: int, round_: int) -> bytes | None:
        try:
            return self._get(f"rounds/{fragment:04d}/{round_:010d}/decided", MAX_RECORD_BYTES)
        except NotFoundError:
            return None

    def confirm(self, coder: Coder, outcome: Outcome, after: Shared | None) -> None:
        """Say that this trainer goes on; now and then leave the shared state, and clear what lies before the last."""
        fragment, round_ = coder.fragment, coder.round
        self._known[fragment] = set(outcome.members)
        self._announce(fragment, round_ + 1)
        if round_ % self._state_every or next(iter(outcome.members)) != self.trainer:
            return
        if after is not None:
            self._put(f"states/{fragment:04d}/{round_:010d}", after.to_bytes())
        last = round_ - self._state_every
        for entry in (*self._store.list(f"rounds/{fragment:04d}/"), *self._store.list(f"states/{fragment:04d}/")):
            if (
                0 <= _number(entry.key) < last + entry.key.startswith("rounds/")
            ):  # the state is kept, what led to it is not
                self._store.delete(entry.key)

    def missed(self, coder: Coder, size: int) -> Outcome | None:
        members = self._decided(coder)
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
        at = f"rounds/{fragment:04d}/{round_:010d}"
        self._store.put(f"{at}/present/{self.trainer}", b"")
        self._store.delete(f"{at}/left/{self.trainer}")

    def leave(self, rounds: Sequence[int]) -> None:
        for fragment, round_ in enumerate(rounds):
            self._store.put(f"rounds/{fragment:04d}/{round_ + 1:010d}/left/{self.trainer}", b"")


def _place(coder: Coder, name: str) -> str:
    return f"rounds/{coder.fragment:04d}/{coder.round:010d}/{name}"


def _number(key: str) -> int:
    """The round that a key is of; -1 for what is none of ours."""
    parts = key.split("/")
    return int(parts[2]) if len(parts) > 2 and parts[2].isdecimal() else -1


def _json(record: dict[str, Any]) -> bytes:
    return json.dumps(record, sort_keys=True).encode()


def _refuse_start() -> Shared:
    raise StateError(
        "this trainer begins with other weights than the run did, and nobody has left a shared state yet: begin with "
        "the same checkpoint, or join after the first state"
    )
