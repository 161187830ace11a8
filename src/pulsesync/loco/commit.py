"""What changes when a round is decided: with this trainer (`RoundCommitter`), or without it (`Rejoiner`)."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from pulsesync.core.threads import finish
from pulsesync.errors import MissingLinkError, StateError
from pulsesync.loco.fragments import Commit, Fragment, in_own_streams
from pulsesync.loco.gate import ReadPiece, SparseVector
from pulsesync.loco.outer_step import LARGEST_UPDATE, TrainerUpdate
from pulsesync.loco.round_exchange import RoundExchange
from pulsesync.loco.shared import RoundResult, SharedState
from pulsesync.loco.vectors import Vector

logger = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False, repr=False)
class RoundCommitter:
    """Changes fragments after a round, all at once. Its methods run inside `finish`."""

    fragments: Sequence[Fragment]  # all of a trainer; the list may get others

    def finish(self, work: Callable[[], None]) -> None:
        """Complete work that must not be left half done, even if interrupted: see `core.threads.finish`."""

        def run() -> None:
            with in_own_streams(self.fragments):
                work()

        with in_own_streams(self.fragments):  # so that it also comes after what this thread has launched
            finish(run)

    def complete_pending(self) -> None:
        """Complete decided rounds. If that fails, as a device may, it is tried again at the next step."""
        if all(one.uncommitted is None and one.unwritten is None for one in self.fragments):
            return  # as at most steps
        with in_own_streams(self.fragments):
            for fragment in self.fragments:
                self._complete(fragment)

    def _complete(self, fragment: Fragment) -> None:
        if (commit := fragment.uncommitted) is not None:
            weights = _blended(fragment, commit) if commit.blend else None
            commit.update.commit(commit.taken)
            fragment.new, fragment.uncommitted = False, None
            fragment.begin_round(commit.shared, weights)
        if fragment.unwritten is not None:
            fragment.tensors.write(fragment.unwritten)
            fragment.unwritten = None

    def close(self, fragment: Fragment, commit: Commit) -> None:
        """Continue from a round that contains a part of the trainer's update."""
        fragment.uncommitted = commit
        self.complete_pending()

    def follow(self, fragment: Fragment, shared: SharedState, cleared: SparseVector | None = None) -> None:
        """Continue from shared weights of a round without this trainer; its progress since then is kept.

        Entries that this trainer sent before a restart are cleared: the others have them, and what remained of them is
        not known.
        """
        rule = fragment.rule
        # Values that are not finite are refused when they are proposed.
        with np.errstate(over="ignore", invalid="ignore"):
            moved = rule.start(fragment.shared.theta, fragment.residual) - fragment.tensors.read()
            if cleared is not None:
                for own in (fragment.residual, fragment.momentum, moved):
                    if own is not None:
                        own[slice(None) if cleared.is_whole else cleared.positions] = 0
            fragment.begin_round(shared, (rule.start(shared.theta, fragment.residual) - moved).__getitem__)
        self.complete_pending()

    def restart(self, fragment: Fragment, shared: SharedState) -> None:
        """Continue from shared weights, without this trainer's own state."""
        fragment.clear()
        fragment.begin_round(shared)
        self.complete_pending()

    def drop(self, fragment: Fragment, update: TrainerUpdate, shared: SharedState, trainer: str) -> None:
        """Drop an update that has diverged: if it were kept, later rounds would be empty."""
        at = fragment.first_beyond(update, LARGEST_UPDATE) or 0
        logger.error(
            "Trainer %s has diverged: its update of %r has a value of %g, and at most %g is accepted. The update is "
            "dropped; this trainer resumes from the shared weights.",
            trainer,
            fragment.tensors.name_of(at),
            float(update.read(slice(at, at + 1))[0]),
            LARGEST_UPDATE,
        )
        self.restart(fragment, shared)


def _blended(fragment: Fragment, commit: Commit) -> ReadPiece:
    """The weights of the next round, blended with this trainer's current weights."""
    update, shared, blend = commit.update, commit.shared, commit.blend
    now = fragment.tensors.read()

    def blended(here: slice) -> Vector:
        start = fragment.rule.start(shared.theta[here], update.residual[here])
        return start + blend * (now[here] - start)

    return blended


class Rejoiner:
    """Continues from the states and rounds of the other trainers, which have the same settings (`about`)."""

    def __init__(self, round_exchange: RoundExchange, committer: RoundCommitter, about: str) -> None:
        self._round_exchange, self._committer, self._about = round_exchange, committer, about
        # Its name in the last round it took part in: ranks change with their group.
        self.known_as = round_exchange.exchange.trainer

    def rejoin(self) -> None:
        """Continue from the states of the trainers with the most rounds, and apply the rounds decided since then."""
        exchange, fragments = self._round_exchange.exchange, self._committer.fragments
        found = exchange.join([fragment.shared for fragment in fragments], self._about)
        for fragment, shared in zip(fragments, found, strict=True):
            self._adopt(fragment, shared)
            try:
                self.catch_up(fragment)
            # A round cannot be applied: the exchange has a later state, or raises an error that says what to do.
            except MissingLinkError:
                self.rejoin()
                return
        self.known_as = exchange.trainer

    def _adopt(self, fragment: Fragment, shared: SharedState) -> None:
        """Continue from a shared state of the other trainers."""
        current, committer = fragment.shared, self._committer
        if shared.digest == current.digest:
            fragment.shared = shared
            return
        since = {part.payload for part in shared.parts.values() if part.round > current.round}
        if taken := since & fragment.pending.by_payload.keys():
            committer.finish(partial(self._close_completed, fragment, shared, taken.pop()))
        elif shared.last_round_of(self.known_as) > current.round:
            # This trainer does not know the payload, so residual and momentum after it are not known.
            committer.finish(partial(committer.restart, fragment, shared))
        else:
            committer.finish(partial(committer.follow, fragment, shared))

    def catch_up(self, fragment: Fragment) -> None:
        """Apply rounds that were decided without this trainer."""
        with in_own_streams([fragment]):
            while (missed := self._round_exchange.missed(fragment)) is not None:
                self._committer.finish(partial(self._apply, fragment, *missed))

    def _apply(self, fragment: Fragment, taken: SparseVector | None, result: RoundResult) -> None:
        """Continue from a round that others have completed.

        A new trainer begins with the momentum of a trainer whose updates have always been this round's step. Without
        it, the momentum of trainers that leave would be lost, and every new one would have to build up its own first.
        """
        payload = result.members.get(self._round_exchange.exchange.trainer)
        if payload in fragment.pending.by_payload:
            self._close_completed(fragment, result.after, payload)
            return
        before = fragment.shared.theta
        self._committer.follow(fragment, result.after, None if payload is None else taken)
        if fragment.new and result.members:
            fragment.momentum = fragment.rule.first_momentum(before, result.after.theta)

    def _close_completed(self, fragment: Fragment, shared: SharedState, payload: str) -> None:
        """Continue from a round that others have completed and that contains a payload of this trainer."""
        update = fragment.update()
        if fragment.first_beyond(update, LARGEST_UPDATE) is None:
            sent = fragment.pending.by_payload[payload].sent
            self._committer.close(fragment, Commit(update, sent, shared, blend=0.0))
        else:
            self._committer.drop(fragment, update, shared, self._round_exchange.exchange.trainer)


class SameRoundRejoiner(Rejoiner):
    """Joins only trainers at the same round: for trainers whose optimizers' states depend on every round."""

    def _adopt(self, fragment: Fragment, shared: SharedState) -> None:
        if shared.round and shared.digest != fragment.shared.digest:
            raise StateError("a run of DDP cannot be joined or resumed: the optimizers' states would differ")
        super()._adopt(fragment, shared)

    def catch_up(self, fragment: Fragment) -> None:
        pass  # a missed step cannot be repeated
