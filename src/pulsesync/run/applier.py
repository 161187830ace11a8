"""Fetch, check and decode the records of a plan, ask the caller, and commit."""

from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path

from pulsesync.errors import PulseError
from pulsesync.format.body import Body
from pulsesync.format.manifest import Manifest, RecordKind
from pulsesync.run.bodies import stream_bodies
from pulsesync.run.fetcher import AHEAD, AHEAD_BYTES, fetch_groups
from pulsesync.run.local import LocalWeights
from pulsesync.run.planner import SyncPlan
from pulsesync.run.reporting import SyncEvents, SyncMeter
from pulsesync.run.spool import AnchorSpool
from pulsesync.state.anchors import AnchorLoader
from pulsesync.state.patches import PatchTransaction, about
from pulsesync.state.staging import StagedBlocks
from pulsesync.store import Store

_Group = list[tuple[Manifest, list[Body]]]  # records with their parts


class NotConfirmed(Exception):  # noqa: N818 - an event of a sync, whose caller sees the cause
    """`confirm` has ended the sync. Whatever it raised, nothing is tried again."""

    def __init__(self, cause: PulseError) -> None:
        super().__init__(cause)
        self.cause = cause


@dataclass(eq=False, repr=False)
class PlanApplier:
    """Applies plans to the local weights. Nothing is written before it is checked."""

    _store: Store  # where bodies are; it may be a cache
    _origin: Store  # the store below the cache: the parts of anchors are kept in a spool of their own
    _folder: Path | None  # for staged blocks and the spool of anchors; None: a temporary one, and no spool
    _local: LocalWeights
    _events: SyncEvents  # transfers that may take long are reported there
    _confirm: Callable[[], None] | None  # called before the first weight is written; what it raises ends the sync

    def apply(self, plan: SyncPlan, meter: SyncMeter) -> None:
        """Undo syncs, or load an anchor and then apply patches, in as few commits as possible. Raises: RecordFailed."""
        if plan.undo:
            self._ask(meter)
            self._local.undo(meter, plan.undo)
            return
        with closing(self._fetched(plan.patches, meter)) as coming:  # which fetches nothing before it is asked
            # `confirm` is called when everything has been fetched, and checked as far as possible.
            groups: Iterable[_Group] = list(coming) if self._confirm is not None else coming
            if plan.anchor:
                self._load(plan.anchor, meter)
            self._apply(plan.patches, groups, meter)

    def _ask(self, meter: SyncMeter) -> None:
        """Ask the caller, once in a sync, whether weights may be written now."""
        if self._confirm is None or meter.confirmed:
            return
        try:
            self._confirm()
        except PulseError as e:
            raise NotConfirmed(e) from e
        meter.confirmed = True

    def _apply(self, patches: Sequence[Manifest], groups: Iterable[_Group], meter: SyncMeter) -> None:
        """Apply patches in one commit, or in one a group, if a state cannot prepare a patch over another."""
        assert self._local.state is not None
        if self._local.state.backend.overlays:
            self._apply_together(patches, groups, meter)
            return
        for n, group in enumerate(groups):
            self._apply_together([record for record, _ in group], [group], meter, joins=n > 0)

    def _apply_together(
        self, patches: Sequence[Manifest], groups: Iterable[_Group], meter: SyncMeter, joins: bool = False
    ) -> None:
        """Apply patches in one commit; joins: it is undone together with the one before it."""
        if not patches:
            return
        assert self._local.state is not None
        with meter.timed("prepare"):
            transition = PatchTransaction(self._local.state).prepare_all(groups)
        self._ask(meter)
        self._local.commit(transition, patches[-1], meter, joins=joins)
        meter.path += ("squash" if record.kind == RecordKind.SQUASH else "patch" for record in patches)

    def _fetched(self, path: Sequence[Manifest], meter: SyncMeter) -> Generator[_Group, None, None]:
        """Yield records with their bodies, in groups that are decoded together."""
        assert self._local.state is not None
        total_bytes = sum(record.size_bytes for record in path)
        is_long = len(path) > AHEAD or total_bytes > AHEAD_BYTES
        transfer = self._events.transfer("patches", total_bytes if is_long else None)
        with closing(fetch_groups(self._store, self._local.state, path)) as groups:
            for group in groups:
                versions = []
                for record, fetching in group:
                    with about(record), meter.timed("fetch"):
                        got = [future.result() for future in fetching]
                    meter.fetched_bytes += sum(size for _, size in got)
                    transfer.add(record.size_bytes)
                    versions.append((record, [body for body, _ in got]))
                yield versions

    def _load(self, anchor: Manifest, meter: SyncMeter) -> None:
        """Load an anchor: each part is fetched, hashed and decoded once, and what differs from the weights is staged.

        They do not change until the entire anchor is checked; then it is written without interruption.
        """
        state = self._local.state
        assert state is not None
        with ExitStack() as stack:
            spool = stack.enter_context(closing(AnchorSpool(self._folder))) if self._folder is not None else None
            if spool is not None and state.whole:
                parts = spool.fetch(anchor, self._origin, state.layout)
            else:
                wanted = None if state.whole else state.places.keys()
                parts = stream_bodies(self._origin, anchor.parts, state.layout, wanted)
            transfer = self._events.transfer("anchor", anchor.size_bytes)
            with about(anchor), meter.timed("prepare"):
                staged = stack.enter_context(StagedBlocks(self._folder))
                sums = AnchorLoader(state).check_whole(anchor, meter.waited_for(anchor, parts, transfer), staged)
            self._ask(meter)
            with about(anchor):
                self._local.load(anchor, staged, sums, meter)
            if spool is not None:
                spool.keep_only(anchor)
        meter.path.append("anchor")
