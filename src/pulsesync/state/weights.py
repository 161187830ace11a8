"""The live weights of a worker, or the base of a publisher. All writes of patches go through `WeightState.commit`.

Applying versions is a transaction: everything is read, checked and decoded, and the digest of the result is known,
before the first weight changes; if writing then fails, what was written is rolled back. `state.patches` prepares
patches, `state.anchors` loads anchors, and `WeightState.commit` writes. The memory is that of a `StateBackend`.
"""

import threading
import weakref
from collections.abc import Mapping
from dataclasses import replace
from itertools import chain
from typing import Any

from pulsesync.core import digest
from pulsesync.core.types import Bits, Sum, Tile
from pulsesync.errors import VerificationError
from pulsesync.format.history import History
from pulsesync.format.layout import Layout
from pulsesync.state.attach import MatchedTensors, match_tensors
from pulsesync.state.backend import Flat, StateBackend, Transition
from pulsesync.state.claims import check_claim
from pulsesync.state.slices import Slices
from pulsesync.state.views import SourceMarks


class WeightState:
    """What is known of the weights in a memory: which they are, by their digests, and the history of their epoch.

    One thread at a time changes it; `snapshot` and `Recount` may run concurrently. Nothing else may write the weights
    while it is in use; `Recount` detects it. The digests of the local tiles (`sums`) are counted if they are not given.
    """

    def __init__(self, backend: StateBackend, sums: Mapping[int, Sum] | None = None) -> None:
        self.backend, self.layout, self.places, self.whole = backend, backend.layout, backend.places, backend.whole
        self.flats: dict[str, Flat] = backend.flats
        self.history = backend.load_history(History())
        # Where the weights are in their run, as those who commit say; a commit moves it together with the weights.
        self.position: object | None = None
        self.torn = False  # whether an anchor is written in part: the weights are between two versions
        self.lock = threading.RLock()
        self.superseded = False  # whether another state of this process has claimed some of the memory since
        self._snapshots: weakref.WeakSet[Snapshot] = weakref.WeakSet()
        self._addresses: Mapping[str, int] = {}
        self._marks: SourceMarks | None = None  # of the source, when its addresses were these
        self._digested: tuple[Mapping[int, Sum], str] | None = None  # the last one computed
        self.sums: Mapping[int, Sum] = backend.count() if sums is None else sums
        # A tensor whose tied copy differs: only an anchor repairs it.
        self.differing_tie = backend.find_differing_tie()

    # Tensors

    @classmethod
    def attach(
        cls, kind: type[StateBackend], source: Any, layout: Layout, slices: Slices | None = None, widen: bool = False
    ) -> "WeightState":
        """Attach to the tensors of a module, state dict or mapping, in place.

        widen: BF16 tensors of the run may be FP32.

        Raises: StateError: names, dtypes or shapes differ from the layout, or a tensor cannot be written in place.
        """
        views = kind.views(source)
        found: MatchedTensors[Flat] = match_tensors(views, layout, slices or {}, widen, kind.widens, kind.span)
        state = cls(kind(layout, found.flats, found.copies, found.places))
        state._addresses = {name: view.address for name, view in views.items()}
        state._marks = SourceMarks.of(source)
        return state

    def is_attached_to(self, source: Any) -> bool:
        """Whether a source still has the memory that was attached: a name can be assigned to another tensor."""
        if self._marks is not None and self._marks.fit(source):
            return True
        if self.backend.addresses(source) != self._addresses:
            return False
        self._marks = SourceMarks.of(source)
        return True

    def spans(self) -> list[tuple[int, int]]:
        """The addresses of all weights, sorted."""
        everything = chain(self.flats.values(), *self.backend.copies.values())
        return sorted((begin, end) for begin, end in map(self.backend.span, everything) if begin < end)

    # Reading

    def block(self, tile: Tile, number: int) -> Bits:
        """Read a block of a tile. The result must not be written; it may be a view."""
        return self.backend.block(tile, number)

    def snapshot(self) -> "Snapshot":
        """The weights as they are now, readable while later versions are committed."""
        with self.lock:
            taken = Snapshot(self)
            self._snapshots.add(taken)
        return taken

    @property
    def digest(self) -> str:
        """The digest as last counted or updated: O(tiles). That of a slice cannot be compared with others."""
        return self.digest_of(self.sums)

    def digest_of(self, sums: Mapping[int, Sum]) -> str:
        """The digest of weights whose tiles have these digests."""
        if self._digested is None or self._digested[0] is not sums:  # sums are replaced, never changed
            local = (sums[ordinal] for ordinal in self.places)  # the other tiles of a complete state have no weights
            self._digested = sums, digest.state_digest(self.layout.tables, local)
        return self._digested[1]

    # Changing

    def no_changes(self) -> Transition:
        """The transition that changes nothing."""
        return Transition(self.backend.no_changes(), self.sums, self.history, 0)

    def commit(self, transition: Transition) -> Transition:
        """Write a prepared transition into the weights, or roll everything back if that fails halfway.

        Returns the transition back, which is the undo log: committing it undoes this.

        Raises: SupersededError: another state of this process has claimed the memory, and nothing was written.
        """
        backend = self.backend
        inverse = backend.inverse(transition.changes)
        back = Transition(inverse, self.sums, self.history, transition.changed, self.position)
        with self.lock:
            check_claim(self)
            kept = [(taken, taken.changes) for taken in self._snapshots]
            try:
                with backend.exclusive():
                    backend.write(transition.changes)
                for taken, changes in kept:
                    taken.changes = backend.compose(back.changes, changes)
                self._become(transition)
            except BaseException:
                with backend.exclusive():
                    backend.write(back.changes)  # also where nothing was written yet: these are the same bits
                for taken, changes in kept:
                    taken.changes = changes
                self._become(back)
                raise
        return back

    def _become(self, transition: Transition) -> None:
        self.sums, self.history, self.position = transition.sums, transition.history, transition.position

    def join(self, first: Transition, then: Transition) -> Transition:
        changes = self.backend.compose(first.changes, then.changes)
        return replace(then, changes=changes, changed=self.backend.count_changed(changes))

    def begin_at(self, sums: Mapping[int, Sum]) -> None:
        """All the weights were written, and have these digests: an epoch begins here."""
        self.sums, self.history = dict(sums), self.backend.load_history(History())
        self.differing_tie, self.position, self.torn = None, None, False


class Recount:
    """Counts digests from the weights themselves, to detect what something other than a commit has written."""

    def __init__(self, state: WeightState) -> None:
        self._state, self._backend = state, state.backend

    def digest(self) -> str:
        """Count the digest anew, keep it, and return it. Raises: VerificationError, if a tied tensor differs."""
        state = self._state
        state.differing_tie = self._backend.find_differing_tie()
        if state.differing_tie:
            raise VerificationError(
                f"a tensor tied to {state.differing_tie!r} has other weights than it: something else has written to "
                "one of them. Do not use the weights; sync again to load all of them from an anchor",
                tensor=state.differing_tie,
            )
        state.sums = self._backend.count()
        return state.digest

    def find_damaged(self) -> list[str]:
        """Recount all the weights; return the names of the tensors that something other than a commit has changed.

        Of a bundle, the names of all its tensors: its digest does not distinguish them. The new digests are kept.
        """
        state = self._state
        with state.lock:
            before, state.sums = state.sums, self._backend.count()
            state.differing_tie = self._backend.find_differing_tie()
            damaged = [state.layout.tiles[n] for n, total in state.sums.items() if total != before[n]]
        names = {name for tile in damaged for name in tile.names}
        return sorted(names | {state.differing_tie} if state.differing_tie else names)

    def find_damage(self) -> Tile | None:
        """Recount batch by batch, letting commits in between; return a tile whose weights another program changed."""
        for tiles in self._backend.batches():
            with self._state.lock:
                differing = self._backend.find_differing_tie({name for tile in tiles for name in tile.names})
                counted = self._backend.count_tiles(tiles)
                for tile in tiles:
                    if differing in tile.names or counted[tile.ordinal] != self._state.sums[tile.ordinal]:
                        return tile
        return None


class Snapshot:
    """Weights as they were, readable block by block while later versions are committed. Its memory is O(changed)."""

    def __init__(self, state: WeightState) -> None:
        self.layout, self.sums = state.layout, dict(state.sums)
        self._state = state
        self.changes = state.backend.no_changes()  # from the live weights back to these; commits write them

    @property
    def changed(self) -> int:
        """How many weights have changed since: it keeps as many changes in memory."""
        return self._state.backend.count_changed(self.changes)

    def block(self, tile: Tile, number: int) -> Bits:
        with self._state.lock:
            return self._state.backend.amended_block(tile, number, self.changes)
