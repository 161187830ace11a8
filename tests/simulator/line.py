"""The store of a simulated run, and the connections to it, with lost, late, stale and fatal calls."""

import random
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import TypeVar

from pulsesync.errors import ConflictError, StoreError
from pulsesync.format import manifest as manifests
from pulsesync.format.manifest import Manifest
from pulsesync.run import keys
from pulsesync.store import ObjectEntry, Store, WrappedStore
from tests.simulator.invariants import Fail, Invariant

RECORDS = ("manifests/", "anchors/", "squashes/")
BODIES = ("parts/", "layouts/", "files/")
POINTERS = "pointers/"

T = TypeVar("T")


class Crash(BaseException):
    """The process in which this is raised has died."""


class SimulatedClock:
    """A clock in seconds, which only the simulator advances."""

    def __init__(self) -> None:
        self.now_s = 1_000_000_000.0

    def __call__(self) -> float:
        return self.now_s


class Ledger(WrappedStore):
    """The store without faults. Checks that no immutable object is overwritten, and reports new versions."""

    def __init__(self, store: Store, on_version: Callable[[bytes], None], fail: Fail) -> None:
        super().__init__(store)
        self.heads: list[bytes] = []  # all contents of head so far
        self.moves: list[bytes] = []  # of pointers, as they were created
        # Contents of the hints to the newest moves, since some were last deleted.
        self.hints: dict[str, list[bytes]] = {}
        self.late: list[Callable[[], None]] = []  # writes that have not arrived yet
        self._on_version, self._fail = on_version, fail
        self._bodies: dict[str, bytes] = {}

    def put(self, key: str, data: bytes | memoryview) -> None:
        is_hint = key == keys.HEAD or key.endswith(f"/{keys.HEAD}")
        if key.startswith((*RECORDS, POINTERS)) and not is_hint:
            self._fail(Invariant.IMMUTABLE_OBJECTS, f"{key} is put, which could overwrite an existing record")
        if key.startswith(BODIES) and self._bodies.setdefault(key, bytes(data)) != bytes(data):
            self._fail(Invariant.IMMUTABLE_OBJECTS, f"{key} is put again with other bytes")
        self.store.put(key, data)
        if key == keys.HEAD:
            self.heads.append(bytes(data))
        elif is_hint:
            self.hints.setdefault(key, []).append(bytes(data))

    def create(self, key: str, data: bytes) -> None:
        if key.startswith(POINTERS):
            self.store.create(key, data)
            self.moves.append(data)
            return
        if lacking := [body for body in bodies_of(manifests.parse(data)) if body not in self._bodies]:
            self._fail(Invariant.BODIES_FIRST, f"{key} is created before {lacking[0]} was put")
        self.store.create(key, data)
        if key.startswith("manifests/"):
            self._on_version(data)

    def delete(self, key: str) -> None:
        if key.startswith(POINTERS):
            self.hints.clear()
        self.store.delete(key)

    def arrive(self) -> None:
        """Let delayed writes arrive; a create of an object that exists by now has no effect."""
        late, self.late = self.late, []
        for write in late:
            with suppress(ConflictError):
                write()


def bodies_of(record: Manifest) -> list[str]:
    """The objects that a record needs."""
    parts = [keys.part_key(part.id) for part in record.parts if part.data is None]
    return [keys.layout_key(record.layout), *parts, *(keys.file_key(file.id) for file in record.files)]


class StoreLink:
    """The connection of one process to the store: it goes through `weather` (faults), and ends with the process."""

    is_private = True  # all simulated processes are this one

    def __init__(self, ledger: Ledger, rng: random.Random) -> None:
        self.ledger = ledger
        self.weather: Store = ledger  # for hints and pointers
        self.checked: Store = ledger  # for records and bodies, in which a wrong bit is detected
        self.stale = self.late = self.missed = 0.0
        self.dead = False
        self.calls = 0
        self.faults: Counter[str] = Counter()
        self._rng = rng
        self._alarms: dict[int, tuple[str, Callable[[], None]]] = {}

    def calm(self) -> None:
        """From now on there are no faults."""
        self.weather = self.checked = self.ledger
        self.stale = self.late = self.missed = 0.0
        self._alarms.clear()

    def crash(self, calls: int, when: str) -> None:
        """Make the process die at one of the next calls, "before" or "after" it took effect."""
        self._alarms[self.calls + calls] = when, self._die

    def interrupt(self, calls: int, event: Callable[[], None]) -> None:
        """Run another event just before one of the next calls."""
        self._alarms[self.calls + calls] = "before", event

    def get(self, key: str, begin: int = 0, end: int | None = None) -> bytes:
        said = self.ledger.heads if key == keys.HEAD else self.ledger.hints.get(key)
        if said and self._rng.random() < self.stale:
            self.faults["stale"] += 1
            old = self._rng.choice(said)
            return self.call(lambda: old[begin:end])
        return self.call(lambda: self._by(key).get(key, begin, end))

    def put(self, key: str, data: bytes | memoryview) -> None:
        copy = bytes(data)
        self._write(lambda store: store.put(key, copy), key)

    def create(self, key: str, data: bytes) -> None:
        self._write(lambda store: store.create(key, data), key)

    def list(self, prefix: str) -> Iterator[ObjectEntry]:
        return self.call(lambda: self.weather.list(prefix))

    def delete(self, key: str) -> None:
        self.call(lambda: self.weather.delete(key))

    def _write(self, write: Callable[[Store], None], key: str) -> None:
        if self._rng.random() < self.late and not self.dead:
            self.faults["late"] += 1
            self.ledger.late.append(lambda: write(self.ledger))
            raise StoreError(f"no answer about {key}, on purpose", key=key, retryable=True)
        self.call(lambda: write(self._by(key)))

    def _by(self, key: str) -> Store:
        return self.checked if key.startswith((*RECORDS, *BODIES)) else self.weather

    def misses(self) -> bool:
        """Whether a rank gets no answer from its group."""
        missed = self._rng.random() < self.missed
        self.faults["missed"] += missed
        return missed

    def call(self, call: Callable[[], T]) -> T:
        """Do an action of the process over this line, if it is alive."""
        if self.dead:
            raise Crash
        self.calls += 1
        when, event = self._alarms.pop(self.calls, ("", None))
        if event and when == "before":
            event()
        result = call()
        if event and when == "after":
            event()
        return result

    def _die(self) -> None:
        self.dead = True
        self.faults["crash"] += 1
        raise Crash
