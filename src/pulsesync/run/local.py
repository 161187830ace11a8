"""The weights of a worker, the version that they are, and how to undo the last syncs: the three change together."""

from collections import deque
from typing import NamedTuple

from pulsesync.core.threads import finish
from pulsesync.core.types import Sum
from pulsesync.format.manifest import Manifest
from pulsesync.run.planner import Position
from pulsesync.run.reporting import SyncMeter
from pulsesync.state.live import AnyState, AnyTransition
from pulsesync.state.staging import StagedBlocks


class _Undo(NamedTuple):
    position: Position  # before the sync
    step: int
    back: AnyTransition


class LocalWeights:
    """The local weights, with their version and the undo logs.

    Args:
        undo: How many syncs can be undone.
    """

    def __init__(self, undo: int) -> None:
        self.state: AnyState | None = None
        self.position: Position | None = None  # None: the weights are no version that is known
        self.step: int | None = None  # the trainer's, of that version
        self._undo: deque[_Undo] = deque(maxlen=undo)

    @property
    def version(self) -> int | None:
        return self.position.version if self.position else None

    def attach(self, state: AnyState) -> None:
        """Begin with other weights, whose version is not known."""
        self.forget()
        self.state = state

    def forget(self) -> None:
        """Release the weights, their version and the undo logs."""
        self.state, self.position, self.step = None, None, None
        self._undo.clear()

    def set_version(self, record: Manifest) -> None:
        """Note that the weights are the version of a record."""
        self.position, self.step = Position.of(record), record.step

    def commit(self, transition: AnyTransition, record: Manifest, meter: SyncMeter, *, joins: bool = False) -> None:
        """Write a transition to the weights, which are then the version of a record.

        joins: it is undone together with the commit before it.
        """
        assert self.state is not None
        before, kept = (self.position, self.step), list(self._undo)
        self._undo.clear()  # if this is interrupted, no undo log may be applied to weights that it does not fit
        with meter.timed("apply"):
            try:
                back = self.state.commit(transition)
            finally:  # the position must be that of the weights, also after an error
                if self.state.history is transition.history:
                    self.set_version(record)
                else:
                    self._undo.extend(kept)
        meter.changed += transition.changed
        if joins and kept:
            last = kept.pop()
            kept.append(last._replace(back=self.state.join(back, last.back)))
        elif before[0] is not None:
            kept.append(_Undo(before[0], before[1] or 0, back))
        self._undo.extend(kept)

    def load(self, anchor: Manifest, staged: StagedBlocks, sums: dict[int, Sum], meter: SyncMeter) -> None:
        """Write the staged blocks of an anchor that was checked; an interrupt of the caller waits for the end.

        If writing fails, the weights are forgotten.
        """
        state = self.state
        assert state is not None
        with meter.timed("apply"):
            self.forget()
            try:
                finish(lambda: state.load_whole(staged, sums))
            finally:
                meter.torn = state.torn
        self.state = state
        self.set_version(anchor)
        meter.changed += sum(len(flat) for flat in state.flats.values())

    def undo_depth(self, goal: Manifest) -> int:
        """Return how many syncs to undo to be at a version; 0 if none of the undo logs began there."""
        began = (entry.position for entry in reversed(self._undo))
        return next((n for n, position in enumerate(began, 1) if position == Position.of(goal)), 0)

    @property
    def can_undo(self) -> bool:
        return self.state is not None and bool(self._undo)

    def undo(self, meter: SyncMeter, depth: int = 1) -> None:
        """Undo the last syncs, one after the other."""
        assert self.state is not None
        with meter.timed("apply"):
            for _ in range(depth):
                entry = self._undo.pop()
                try:
                    self.state.commit(entry.back)
                finally:
                    if self.state.history is entry.back.history:
                        self.position, self.step = entry.position, entry.step
                meter.changed += entry.back.changed
        meter.path.append("undo")
