"""The objects of trainers that exchange updates through a store: keys, reads and writes. `store` has the protocol.

run                            settings that must be equal, and the start; created once
rounds/<fragment>/<round>/
present/<trainer>          takes part in this round: others wait for it, up to their deadline
left/<trainer>             does not take part: others do not wait for it
sent/<trainer>.<id>        a payload
decided                    the members of the round, by payload; created once; never deleted
states/<fragment>/<round>      the shared state after a round, every `state_every` rounds
"""

import hashlib
import secrets
from collections.abc import Sequence
from contextlib import suppress

from pulsesync.errors import ChecksumError, ConflictError, FormatError, NotFoundError, StateError
from pulsesync.loco.gate import SparseVector
from pulsesync.loco.payload import Coder
from pulsesync.loco.round_rules import MAX_RECORD_BYTES
from pulsesync.loco.shared import SharedState
from pulsesync.store import Location, forget, open_store

RUN = "run"


class RoundObjects:
    """The objects of all trainers, as the one of this name reads and writes them. Counts the bytes of both."""

    def __init__(self, location: Location, trainer: str) -> None:
        self._store, self._trainer = open_store(location), trainer
        self._session = secrets.token_hex(16).encode()  # distinguishes this process from another of the same name
        self.sent_bytes = self.received_bytes = 0

    def get(self, key: str, limit: int) -> bytes:
        data = self._store.get(key, 0, limit)
        self.received_bytes += len(data)
        return data

    def put(self, key: str, data: bytes) -> None:
        self._store.put(key, data)
        self.sent_bytes += len(data)

    # The run

    def begin(self, record: bytes, mine: Sequence[SharedState]) -> bytes:
        """Return the record of the run; without one, create this one."""
        with suppress(NotFoundError):
            return self._store.get(RUN, 0, MAX_RECORD_BYTES)
        for fragment, state in enumerate(mine):
            if state.round:  # trainers that continue at a new location, where others may have fewer rounds
                self.put_state(fragment, state)
        with suppress(ConflictError):
            self._store.create(RUN, record)
        return self._store.get(RUN, 0, MAX_RECORD_BYTES)

    # States

    def put_state(self, fragment: int, state: SharedState) -> None:
        self.put(f"states/{fragment:04d}/{state.round:010d}", state.to_bytes())

    def has_state(self, fragment: int, round_: int) -> bool:
        """Whether a shared state of this round or a later one is saved."""
        return any(_number(entry.key) >= round_ for entry in self._store.list(f"states/{fragment:04d}/"))

    def newest_state(self, fragment: int, like: SharedState) -> SharedState | None:
        """The newest readable state with more rounds than `like`; None if there is none."""
        for key in sorted((entry.key for entry in self._store.list(f"states/{fragment:04d}/")), reverse=True):
            try:
                state = SharedState.from_bytes(self.get(key, 8 * len(like.theta) + (1 << 21)), like)
                if state.round == _number(key) and state.round > like.round:
                    return state
            except (NotFoundError, FormatError):
                forget(self._store, key)
        return None

    # Rounds

    def is_gone(self, fragment: int, round_: int) -> bool:
        """Whether the payloads of a round were deleted, because a later state is saved."""
        return self.has_state(fragment, round_) and not any(
            True for _ in self._store.list(f"{_round_key(fragment, round_)}/sent/")
        )

    def announce(self, fragment: int, round_: int) -> None:
        """Announce that this trainer takes part in a round."""
        at = _round_key(fragment, round_)
        self.put(f"{at}/present/{self._trainer}", self._session)
        self._store.delete(f"{at}/left/{self._trainer}")

    def leave(self, fragment: int, round_: int) -> None:
        """Announce that this trainer does not take part in a round. Raises: StoreError."""
        self._store.put(f"{_round_key(fragment, round_)}/left/{self._trainer}", b"")

    def check_alone(self, coder: Coder) -> None:
        """Raises: StateError, if another process has announced itself under this trainer's name."""
        with suppress(NotFoundError):
            if self.get(_place(coder, f"present/{self._trainer}"), 64) != self._session:
                raise StateError(f"another process runs as trainer {self._trainer!r}; give each trainer its own name")

    def names(self, coder: Coder) -> list[str]:
        """The names of a round's objects, without the round."""
        prefix = _place(coder, "")
        return [entry.key.removeprefix(prefix) for entry in self._store.list(prefix)]

    def put_payload(self, coder: Coder, id_: str, data: bytes) -> None:
        self.put(_place(coder, payload_name(self._trainer, id_)), data)

    def payload(self, coder: Coder, trainer: str, id_: str, size: int) -> SparseVector:
        """Read the payload of a trainer. Raises: NotFoundError, FormatError; ChainError: it is of another state."""
        key = _place(coder, payload_name(trainer, id_))
        data = self.get(key, 5 * size + (1 << 20))  # no payload is longer
        if hashlib.sha256(data).hexdigest() != id_:
            forget(self._store, key)
            raise ChecksumError(
                f"the payload of {trainer} in round {coder.round} is damaged: its bytes do not match its hash",
                expected=id_,
            )
        return coder.decode(data, trainer, 0, size)[1]

    def decision(self, coder: Coder) -> bytes | None:
        """The record of a round that was decided; None if it was not."""
        try:
            return self.get(decision_key(coder), MAX_RECORD_BYTES)
        except NotFoundError:
            return None

    def decide(self, coder: Coder, record: bytes) -> None:
        """Decide a round, unless another trainer has."""
        with suppress(ConflictError):
            self._store.create(decision_key(coder), record)
            self.sent_bytes += len(record)

    def clear(self, fragment: int, last: int) -> None:
        """Delete the payloads before a state, and earlier states. Decisions stay: no round is decided twice."""
        for entry in self._store.list(f"rounds/{fragment:04d}/"):
            if 0 <= _number(entry.key) <= last and not entry.key.endswith("/decided"):
                self._store.delete(entry.key)
        for entry in self._store.list(f"states/{fragment:04d}/"):
            if 0 <= _number(entry.key) < last:
                self._store.delete(entry.key)


def payload_name(trainer: str, id_: str) -> str:
    """The name of a payload in its round."""
    return f"sent/{trainer}.{id_}"


def decision_key(coder: Coder) -> str:
    return _place(coder, "decided")


def _round_key(fragment: int, round_: int) -> str:
    return f"rounds/{fragment:04d}/{round_:010d}"


def _place(coder: Coder, name: str) -> str:
    return f"{_round_key(coder.fragment, coder.round)}/{name}"


def _number(key: str) -> int:
    """The round in a key; -1 if it has none."""
    parts = key.split("/")
    return int(parts[2]) if len(parts) > 2 and parts[2].isdecimal() else -1
