"""The weights of a worker, the version that they are, and how to undo the last syncs: the three change together."""

from collections import deque
from dataclasses import replace
from typing import NamedTuple

from pulsesync.core.threads import finish
from pulsesync.core.types import Sum
from pulsesync.format.manifest import Manifest
from pulsesync.run.planner import Position
from pulsesync.run.reporting import SyncMeter
from pulsesync.state.anchors import AnchorLoader
from pulsesync.state.backend import Transition
from pulsesync.state.staging import StagedBlocks
from pulsesync.state.weights import WeightState


class _Undo(NamedTuple):
    """An undo log. It is for the weights of one position, and no others."""

    since: Position
    back: Transition  # to the position before


class LocalWeights:
    """The local weights, and the undo logs that lead back from them, of at most `undo` syncs."""

    def __init__(self, undo: int) -> None:
        self.state: WeightState | None = None
        self.torn = False  # whether an anchor was written in part, and none to the end since
        self._undo: deque[_Undo] = deque(maxlen=undo)

    @property
    def position(self) -> Position | None:
        """The position of the weights in the run; None: they are no version that is known."""
        state = self.state  # read once: another thread may forget it
        position = state.position if state is not None else None
        assert position is None or isinstance(position, Position)
        return position

    @property
    def version(self) -> int | None:
        position = self.position
        return position.version if position is not None else None

    def attach(self, state: WeightState, record: Manifest | None = None) -> None:
        """Begin with other weights, which are the version of a record, or none that is known."""
        self.forget()
        self.state, state.position = state, Position.of(record) if record else None

    def forget(self) -> None:
        self.state = None
        self._undo.clear()

    def commit(self, transition: Transition, record: Manifest, meter: SyncMeter, *, joins: bool = False) -> None:
        """Write a transition to the weights, to the version of a record; joins: it is undone with the one before."""
        assert self.state is not None
        before, position = self.position, Position.of(record)
        with meter.timed("apply"):
            back = self.state.commit(replace(transition, position=position))
        meter.changed += transition.changed
        if joins and self._undo and self._undo[-1].since == before:
            back = self.state.join(back, self._undo.pop().back)
        if back.position is not None:
            self._undo.append(_Undo(position, back))

    def load(self, anchor: Manifest, staged: StagedBlocks, sums: dict[int, Sum], meter: SyncMeter) -> None:
        """Write the blocks of an anchor, in spite of interrupts. If that fails, the weights are forgotten."""
        state = self.state
        assert state is not None

        def write() -> None:
            AnchorLoader(state).load_whole(staged, sums)
            self.attach(state, anchor)

        with meter.timed("apply"):
            self.forget()
            try:
                finish(write)
            finally:
                self.torn = meter.torn = state.torn
        meter.changed += sum(len(flat) for flat in state.flats.values())

    def undo_depth(self, goal: Manifest) -> int:
        """Return how many syncs to undo to be at a version; 0 if none of the undo logs leads there."""
        self._drop_stale()
        began = (entry.back.position for entry in reversed(self._undo))
        return next((n for n, position in enumerate(began, 1) if position == Position.of(goal)), 0)

    def can_undo(self) -> bool:
        self._drop_stale()
        return bool(self._undo)

    def undo(self, meter: SyncMeter, depth: int = 1) -> None:
        """Undo the last syncs, one after the other."""
        assert self.state is not None
        with meter.timed("apply"):
            for _ in range(depth):
                entry = self._undo[-1]
                self.state.commit(entry.back)
                self._undo.pop()
                meter.changed += entry.back.changed
        meter.path.append("undo")

    def _drop_stale(self) -> None:
        """Drop undo logs that are not for these weights: a commit was interrupted before its own was kept."""
        while self._undo and self._undo[-1].since != self.position:
            self._undo.pop()
