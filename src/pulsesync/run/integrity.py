"""Whether the local weights are still those of their version: recounts on request, at a sync and in the background."""

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from pulsesync.core import arguments
from pulsesync.errors import VerificationError
from pulsesync.run.local import LocalWeights
from pulsesync.run.reporting import SyncEvents
from pulsesync.state.claims import SupersededError, claim
from pulsesync.state.weights import Recount

logger = logging.getLogger(__name__)


class IntegrityMonitor:
    """Finds weights that something other than a sync has written to. The version of damaged weights is forgotten."""

    def __init__(self, local: LocalWeights, events: SyncEvents) -> None:
        self._local, self._events = local, events
        self._damage: str | None = None  # found by a scrub, and not raised yet
        self.to_repair: tuple[str, ...] = ()  # tensors that a recount found damaged, until a sync has repaired them

    def recount(self) -> VerificationError | None:
        """Recount the local weights; if something else wrote to some, forget their version, and return the error."""
        state, version = self._local.state, self._local.version
        if state is None or version is None:
            return None
        began = time.perf_counter()
        was_superseded = state.superseded
        claim(state)  # before the count: from here on no other Subscriber writes
        damaged = Recount(state).find_damaged()
        self._events.recounted(version, not damaged, began)
        if not damaged:
            return None
        text = (
            "%s has written to %d of the tensors of version %d, first %r. All weights are loaded again from an anchor."
        )
        writer = "Another Subscriber of this process" if was_superseded else "Something other than a sync"
        logger.warning(text, writer, len(damaged), version, damaged[0])
        self._local.forget()
        self.to_repair = tuple(sorted({*self.to_repair, *damaged}))
        self._damage = None  # a scrub may have found the same
        kind = SupersededError if was_superseded else VerificationError
        message = written_by_another(version, damaged[0], was_superseded)
        return kind(message, version=version, tensor=damaged[0])

    def verify(self, source: Any | None = None) -> str:
        """Recount the weights and return their digest. Raises: VerificationError, as `Subscriber.verify`."""
        state, version = self._local.state, self._local.version
        if state is None or version is None:
            raise VerificationError("there is nothing to verify, because nothing has been synced yet; call sync first")
        if source is not None and not state.is_attached_to(source):
            raise VerificationError("these are not the tensors that were synced; pass those that sync was called with")
        expected, before = state.digest, state.sums
        began = time.perf_counter()
        try:
            with state.lock:
                actual = Recount(state).digest()
        except VerificationError:
            self._events.recounted(version, False, began)
            self._local.forget()
            raise
        self._events.recounted(version, actual == expected, began)
        if actual != expected:
            tiles, now = state.layout.tiles, state.sums
            first = next(tiles[n].tensor.name for n in sorted(now) if now[n] != before[n])
            self._damage = written_by_another(version, first, state.superseded)
            self.raise_damage(expected, actual)
        return actual

    @contextmanager
    def scrub(self, every_s: float) -> Iterator[None]:
        """Recount the live weights in the background, again and again; the next sync raises if they were damaged."""
        every_s = arguments.seconds("every_s", every_s)
        stop = threading.Event()

        def work() -> None:
            while not stop.wait(every_s):
                self._scrub_once()

        thread = threading.Thread(target=work, name="pulse-scrub", daemon=True)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()

    def _scrub_once(self) -> None:
        state, version, began = self._local.state, self._local.version, time.perf_counter()
        if state is None or state.superseded:  # then the next sync counts
            return
        tile = Recount(state).find_damage()
        if state is not self._local.state or state.superseded:  # a sync has loaded other weights meanwhile
            return
        if version is not None:
            self._events.recounted(version, tile is None, began)
        if tile is not None:
            self._damage = written_by_another(version, tile.tensor.name)
            logger.warning("A recount found that %s.", self._damage)

    def raise_damage(self, expected: str | None = None, actual: str | None = None) -> None:
        """Raise damage that was found, once, and forget the version: the next sync starts from the actual weights."""
        if self._damage:
            damage, self._damage = self._damage, None
            self._local.forget()
            raise VerificationError(damage, expected=expected, actual=actual)


def written_by_another(version: int | None, tensor: str, by_subscriber: bool = False) -> str:
    """Return the message about weights that are not those of their version, and what to do."""
    if by_subscriber:
        return (
            f"another Subscriber of this process has written to {tensor!r}, so these weights are not version {version} "
            "any more; the next sync loads all of them again. Sync the tensors of a model with one Subscriber"
        )
    return (
        f"the weights in memory are not version {version}: something else has written to {tensor!r}. Stop using the "
        "weights, and doubt what they generated since they were last verified. sync(model, verify=True) loads them "
        "again; then find the code or program that writes to them"
    )
