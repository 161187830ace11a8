"""Squashed patches: many versions as one, from epoch start to epoch start, written by a process beyond the trainer.

    Squasher("s3://bucket/run", signing_key=key).run()       # writes every one that is possible now

A squasher follows the run with a state of its own, epoch by epoch. For spans of epochs that are not complete yet it
keeps only what changed, so it needs memory for one state.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from pulsesync.core import arguments
from pulsesync.core.types import Sum
from pulsesync.errors import ConflictError, MissingLinkError
from pulsesync.format import patch, signature
from pulsesync.format.epochs import EPOCH_PATCHES
from pulsesync.format.manifest import BaseRef, Manifest, RecordKind
from pulsesync.format.signature import SigningKey, check_signing_key, trusted
from pulsesync.format.weights import Changes, Overlay, compose, inverse
from pulsesync.run import keys, planner
from pulsesync.run.bodies import check_room, fetch_body, inline_share, keep_body, put_body
from pulsesync.run.follower import RunFollower
from pulsesync.run.planner import Position
from pulsesync.run.reader import CACHE_BYTES, RunReader
from pulsesync.state.backend import Transition
from pulsesync.state.patches import PatchTransaction
from pulsesync.state.views import new_tensors
from pulsesync.state.weights import WeightState
from pulsesync.store import CachedStore, Location, open_store

__all__ = ["SquashReport", "Squasher"]

HIGHEST = 10  # a span of 2^10 epochs is 32,768 versions


@dataclass(frozen=True)
class SquashReport:
    """A squashed patch that was written."""

    level: int
    number: int
    base: int  # the version it is applied to
    version: int
    size_bytes: int
    instead_of_bytes: int  # bytes of the single patches that it replaces


@dataclass(frozen=True)
class _Span:
    """The changes from one epoch start to a later one."""

    number: int
    base: Manifest
    end: Manifest
    before: Mapping[int, Sum]  # digests of the tiles at the base
    changes: Changes
    patch_bytes: int

    def then(self, later: "_Span") -> "_Span":
        blocks = self.changes.keys() | later.changes.keys()
        both = {key: compose(self.changes.get(key), later.changes.get(key)) for key in blocks}
        changes = {key: change for key, change in both.items() if change}
        size = self.patch_bytes + later.patch_bytes
        return _Span(self.number // 2, self.base, later.end, self.before, changes, size)


class Squasher:
    """Follows a run and writes its squashed patches. Several may run concurrently: the first to write one wins.

    Args:
        location: A path or URL of the run, or a store.
        signing_key: The run's key, or one that it delegates to; required if readers verify signatures.
        trust: As for a `Subscriber`.
        cache: A folder in which fetched bodies are kept; none if not given.
    """

    _epoch_patches = EPOCH_PATCHES  # as of `Subscriber`

    def __init__(
        self,
        location: Location,
        *,
        signing_key: SigningKey | None = None,
        trust: str | Collection[str] | None = None,
        cache: str | Path | None = None,
    ) -> None:
        self.signing_key = check_signing_key(signing_key)
        store = open_store(location)
        if cache is not None:
            store = CachedStore(store, arguments.folder("cache", cache), CACHE_BYTES)
        self.store = store
        self.trust = trusted(trust)
        self._state: WeightState | None = None
        self._at: Manifest | None = None  # the epoch start of the state
        self._spans: dict[int, _Span] = {}  # by level: the first half of a longer span
        self.waits_for = ""  # what the next squashed patch waits for, when all that are possible now exist

    def run(self) -> list[SquashReport]:
        """Write every squashed patch that is possible now and does not exist yet.

        Raises:
            FormatError, StoreError, ChainError: the run cannot be read; what was written is valid. RunChangedError:
            the run was replaced, forked or rolled back since the last call; the next call starts over.
        """
        return list(self.steps())

    def steps(self) -> Iterator[SquashReport]:
        """Do the same, and yield after each squashed patch: for a progress bar."""
        try:
            while self._ready(records := RunReader(self.store, self.trust, epoch_patches=self._epoch_patches)):
                assert self._at is not None
                epoch = self._epoch(self._at, records)
                if len(epoch) < self._epoch_patches:
                    self.waits_for = (
                        f"one replaces {self._epoch_patches} patches, and the epoch that begins at version "
                        f"{self._at.version} has {len(epoch)} so far"
                    )
                    return
                yield from self._take(self._at, epoch, records)
            self.waits_for = "the run has no anchor yet, and the first squashed patch begins at one"
        except BaseException:
            self._state, self._at, self._spans = None, None, {}  # what was not written is computed again
            raise

    def _ready(self, records: RunReader) -> bool:
        """Have a state at an epoch start: the one after the last epoch, or that of the newest anchor.

        Raises:
            RunChangedError: the run is not the one that was followed so far; the next call starts over.
        """
        if self._at is not None:
            records.check_run(self._at.run, self._at.version, self._at.digest)
        newest = records.newest()
        if newest is None:
            return False
        if self._at is not None and records.version(self._at.version) is not None and not self._cut_off(records):
            return True
        self._state, self._at, self._spans = None, None, {}
        try:
            anchor = planner.find_path(None, newest, records.look)[0]
        except MissingLinkError:
            return False  # no anchor yet
        layout = records.layout(anchor.layout)
        check_room(self.store, anchor, layout)
        follower = RunFollower(self.store, self.trust, epoch_patches=self._epoch_patches)
        follower.sync(new_tensors(layout.tensors), version=anchor.version)
        self._state, self._at = follower.state, records.version(anchor.version)
        return self._at is not None

    def _cut_off(self, records: RunReader) -> bool:
        """Return whether a root has ended the current epoch, so that no patch continues it."""
        assert self._at is not None
        version = self._at.version
        while (later := records.version(version + 1)) is not None:
            if later.base is None:
                return True
            if later.index == self._epoch_patches:
                return False
            version += 1
        return False

    def _epoch(self, at: Manifest, records: RunReader) -> list[Manifest]:
        """Return the patches of the epoch that begins at a version: as many as there are."""
        found: list[Manifest] = []
        while len(found) < self._epoch_patches:
            record = records.version(at.version + 1 + len(found))
            if record is None:
                break
            planner.accept(Position.of(found[-1] if found else at), record)
            found.append(record)
        return found

    def _take(self, at: Manifest, epoch: list[Manifest], records: RunReader) -> Iterator[SquashReport]:
        """Apply an epoch, and write the spans that end with it."""
        state = self._state
        assert state is not None
        transition: Transition | None = None
        for record in epoch:
            bodies = [fetch_body(self.store, ref, state.layout, None)[0] for ref in record.parts]
            transition = PatchTransaction(state).prepare(record, bodies, after=transition)
        assert transition is not None
        before = state.sums
        state.commit(transition)
        self._at = epoch[-1]
        size = sum(record.size_bytes for record in epoch)
        span = _Span(at.starts, at, epoch[-1], before, transition.changes, size)
        for level in range(HIGHEST + 1):
            if written := self._write(level, span, records):
                yield written
            first = self._spans.pop(level, None)
            if span.number % 2 == 0:
                self._spans[level] = span
                return
            if first is None or first.number != span.number - 1:
                return
            span = first.then(span)

    def _write(self, level: int, span: _Span, records: RunReader) -> SquashReport | None:
        key = keys.squash_key(level, span.number)
        if records.look(key) is not None:
            return None
        state = self._state
        assert state is not None
        old = Overlay(state, {at: inverse(change) for at, change in span.changes.items()})
        diffs = patch.diff_of(state.layout.tiles, old, span.changes, "context")
        part = patch.encode_diff(state.layout, diffs, old, span.before, codec="auto")
        ref = put_body(self.store, part, inline_share())
        base = BaseRef(span.base.version, span.base.digest)
        record = replace(span.end, kind=RecordKind.SQUASH, base=base, history=None, parts=(ref,))
        try:
            self.store.create(key, signature.sign(record.build(), self.signing_key))
        except ConflictError:
            return None
        if ref.data is None:
            keep_body(self.store, part)
        return SquashReport(level, span.number, span.base.version, span.end.version, ref.size, span.patch_bytes)
