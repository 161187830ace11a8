"""The worker's end: read what is published, check it, bring the weights to the newest version in place."""

import time
from dataclasses import dataclass
from typing import Any

from pulsesync import chain
from pulsesync.errors import NotFoundError, VerificationError
from pulsesync.format import layout as layouts
from pulsesync.format import manifest as manifests
from pulsesync.format.manifest import Manifest
from pulsesync.state import State
from pulsesync.store import Store, open_store


@dataclass(frozen=True)
class SyncReport:
    """What a sync did."""

    version: int | None  # now held; None if the run has no version yet
    applied: int  # versions
    changed: int  # weights written
    fetched_bytes: int
    fetch_s: float
    prepare_s: float  # checking and decoding
    apply_s: float  # writing: the only time the weights are not to be used
    digest: str | None


class Subscriber:
    """Follows a run. Give it the location; what both ends must agree on travels in the manifests.

    sub = Subscriber("runs/one")
    report = sub.sync(model)
    """

    def __init__(self, location: str | Store) -> None:
        self.store = open_store(location) if isinstance(location, str) else location
        self._state: State | None = None
        self._held: chain.Held | None = None

    def sync(self, source: Any) -> SyncReport:
        """Bring a module, state dict or mapping of arrays to the newest version, in place.

        Raises:
            StateError: the tensors are not those of the run; FormatError, ChainError, StoreError, VerificationError:
            the weights are then at the last version that was wholly applied, and the same call can be repeated.
        """
        if self._state is not None and not self._state.holds(source):
            self._state, self._held = None, None  # other memory: what was synced is not there
        applied = changed = fetched = 0
        fetch_s = prepare_s = apply_s = 0.0
        while True:
            at = time.perf_counter()
            manifest = self._next()
            if manifest is None:
                break
            parts = [self.store.get(chain.part_key(part.id)) for part in manifest.parts]
            state = self._attach(source, manifest)
            fetch_s, at = fetch_s + time.perf_counter() - at, time.perf_counter()
            transition = state.prepare(manifest, parts)
            prepare_s, at = prepare_s + time.perf_counter() - at, time.perf_counter()
            try:
                state.commit(transition)
            finally:  # whatever interrupts it, what is held is what the weights are
                if state.history is transition.history:
                    self._state, self._held = state, chain.Held.by(manifest)
            apply_s += time.perf_counter() - at
            applied, changed = applied + 1, changed + transition.changed
            fetched += sum(map(len, parts)) + len(manifest.build())
        version = self._held.version if self._held else None
        digest = self._state.digest if self._state else None
        return SyncReport(version, applied, changed, fetched, fetch_s, prepare_s, apply_s, digest)

    def verify(self) -> str:
        """Recount the digest of all the live weights and return it.

        Raises:
            VerificationError: they are not, bit for bit, the version that is held: somebody else wrote them.
        """
        if self._state is None or self._held is None:
            raise VerificationError("nothing has been synced yet")
        actual = self._state.recount()
        if actual != self._held.digest:
            raise VerificationError(
                f"the weights are not version {self._held.version}", expected=self._held.digest, actual=actual
            )
        return actual

    def _next(self) -> Manifest | None:
        """The manifest that leads on from what is held, if it is published."""
        version = self._held.version + 1 if self._held else 0
        try:
            manifest = manifests.parse(self.store.get(chain.manifest_key(version)))
        except NotFoundError:
            return None
        chain.accept(self._held, manifest, version)
        return manifest

    def _attach(self, source: Any, manifest: Manifest) -> State:
        """The state a version is for: the one held, or with an anchor of another layout a new one on the source."""
        if self._state is not None and (manifest.base is not None or self._state.layout.id == manifest.layout):
            return self._state
        layout = layouts.parse(self.store.get(chain.layout_key(manifest.layout)), expected_id=manifest.layout)
        return State.attach(source, layout)
