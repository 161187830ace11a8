"""The worker's side for quantised weights: follow a run of plain weights with FP8 or INT8 tensors.

    sub = QuantizedSubscriber("s3://bucket/run", "vllm-fp8-block")
    report = sub.sync(weights)      # FP8 matrices, their scales, and everything else as in the run

A mirror of the run's own weights is synced first, as by `Subscriber`. Its changes since the worker's tensors were
derived are then quantised, and committed to them in one transaction. So a worker that fails between the two still has
its complete old weights, and the next sync continues from there.
"""

import logging
import time
import weakref
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from pulsesync import device
from pulsesync.core import arguments
from pulsesync.errors import ClosedError, StateError, VerificationError
from pulsesync.format.signature import trusted, trusted_for_pointers
from pulsesync.quantized.derived import DerivedWeights, PreparedWeights
from pulsesync.quantized.recipes import Recipe, find_recipe
from pulsesync.quantized.targets import Targets
from pulsesync.run.follower import RunFollower
from pulsesync.run.gate import SyncGate
from pulsesync.run.goals import GoalFinder
from pulsesync.run.reporting import SyncEvents, SyncReport
from pulsesync.state.views import torch_dtype
from pulsesync.state.weights import Recount
from pulsesync.store import Location, open_store

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class QuantizedReport:
    """What a sync of quantised weights did."""

    version: int  # of the run, from which the weights were quantised
    plain: SyncReport  # the sync of the mirror of the run's weights
    changed: int  # quantised weights, scales and copied weights written; all of them if everything was quantised
    requantized: int  # weights that were quantised
    rescaled: int  # groups whose scale changed
    whole: bool  # whether everything was quantised: at the first sync, and after an anchor
    quantize_s: float  # finding the changes; weights can be used meanwhile
    apply_s: float  # writing: the only time in which the weights must not be used
    digest: str  # of the worker's tensors

    @property
    def as_plain(self) -> SyncReport:
        """The same as the report of a plain sync: what was written to the worker's tensors, and how long that took."""
        return replace(
            self.plain,
            changed=self.changed,
            prepare_s=self.plain.prepare_s + self.plain.apply_s + self.quantize_s,
            apply_s=self.apply_s,
            digest=self.digest,
        )


class QuantizedSubscriber:
    """Follows a run of plain weights with quantised ones, bit for bit those that the engine would compute.

    Args:
        location: A path or URL of the run, or a store.
        recipe: How weights are quantised: a `Recipe`, or the name of one in `RECIPES`.
        plain: Where the mirror of the run's weights is kept: "device", on the device of the worker's tensors, or
            "host".
        trust: As for `Subscriber`.
        trust_pointers: As for `Subscriber`.
        cache: As for `Subscriber`.
        undo: How many syncs can be rolled back without fetching anything.
        verify_every: Recount mirror and tensors at every N-th sync, as `sync(verify=True)` does; 0: at none.
        follow: Name of a pointer of the run to follow; None: the newest version.
        confirm: Called in every sync that writes, before the first of the worker's tensors is written. What it raises
            ends the sync with the tensors unchanged.
        heartbeat: As for `Subscriber`: the name under which `pulse status` shows this worker.
    """

    def __init__(
        self,
        location: Location,
        recipe: str | Recipe,
        *,
        plain: str = "device",
        trust: str | Collection[str] | None = None,
        trust_pointers: str | Collection[str] | None = None,
        cache: str | Path | None = None,
        undo: int = 1,
        verify_every: int = 0,
        follow: str | None = None,
        confirm: Callable[[], None] | None = None,
        heartbeat: str | None = None,
    ) -> None:
        arguments.one_of("plain", plain, ("device", "host"))
        undo = arguments.whole("undo", undo, what="a number of syncs")
        self.verify_every = arguments.whole("verify_every", verify_every, what="a number of syncs")
        arguments.function("confirm", confirm)
        self.recipe = find_recipe(recipe)
        self._plain, self._confirm = plain, confirm
        store, keys = open_store(location), trusted(trust)
        folder = arguments.folder("cache", cache) if cache is not None else None
        movers, goals = trusted_for_pointers(trust_pointers, trust), GoalFinder(follow)
        self.events = SyncEvents.of(store, heartbeat, follow)
        if self.events.heartbeat is not None:
            weakref.finalize(self, self.events.heartbeat.close)
        # The mirror can be one sync ahead of the tensors: if the caller did not confirm, or if writing failed.
        kept = undo + 1 if undo else 0
        self._follower = RunFollower(
            store, keys, trust_pointers=movers, cache=folder, undo=kept, goals=goals, events=self.events
        )
        self._mirror: dict[str, torch.Tensor] = {}
        self._derived: DerivedWeights | None = None
        self._version: int | None = None
        # Earlier versions of the tensors, to which they can be rolled back.
        self._before: deque[int] = deque(maxlen=undo)
        self._syncs = 0
        alive = weakref.ref(self)  # the gate must not keep this alive, and with it the mirror
        self._gate = SyncGate("QuantizedSubscriber", lambda: QuantizedSubscriber._release(alive()))

    @property
    def version(self) -> int | None:
        """The version from which the worker's tensors were quantised; None before the first sync."""
        return self._version

    @property
    def digest(self) -> str | None:
        """The digest of the worker's tensors, computed from what was written; None before the first sync."""
        return self._derived.state.digest if self._derived and self._version is not None else None

    def sync(
        self,
        weights: Any,
        version: int | None = None,
        *,
        wait_s: float = 0.0,
        verify: bool = False,
        follow_replaced: bool = False,
    ) -> QuantizedReport:
        """Update a module's or mapping's tensors to the newest version, or to a given one, in place.

        Args:
            weights: The worker's tensors: matrices in the recipe's dtype are quantised, and have scale tensors; others
                have the same dtype as in the run.
            version: The version to sync to; None: the newest.
            wait_s: How long to wait for the first version, if there is none yet.
            verify: Recount the mirror and the worker's tensors first; tensors that something else has written to are
                quantised again.
            follow_replaced: As for `Subscriber.sync`.

        Raises:
            StateError: the tensors are not those of the run, or their scales are not those of the recipe;
            PulseError: as `Subscriber.sync`. The worker's tensors are then unchanged; after a VerificationError with
            `torn=True` they are between two versions: do not use them until a sync succeeds.
        """
        version = arguments.optional_whole("version", version, what="the number of a version")
        wait_s = arguments.seconds("wait_s", wait_s)
        try:
            self._syncs += 1
            verify = verify or bool(self.verify_every and self._syncs % self.verify_every == 0)
            sync = partial(self._sync, weights, version, verify, follow_replaced)
            location, is_first = self.events.location, lambda: self._follower.version is None
            report = self._gate.sync_in_time(sync, wait_s, is_first, location)
        except ClosedError:
            raise
        except Exception as e:
            self.events.failed(e, self._version)
            raise
        self.events.synced(report.as_plain)
        return report

    def _sync(self, weights: Any, version: int | None, verify: bool, follow_replaced: bool) -> QuantizedReport:
        plain = self._sync_plain(weights, version, verify, follow_replaced)
        derived = self._attach(weights)
        if plain.repaired:
            derived.forget()  # they may have been quantised from weights that something else wrote
        elif verify and derived.is_made and (damaged := self._find_damaged(derived)):
            logger.warning(
                "Something other than a sync has written to %d of the tensors, first to %r; all weights are "
                "quantised again.",
                len(damaged),
                damaged[0],
            )
            derived.forget()
        return self._sync_tensors(derived, plain)

    def _find_damaged(self, derived: DerivedWeights) -> list[str]:
        """Recount the worker's tensors; return the names of those to which something else has written."""
        began = time.perf_counter()
        damaged = Recount(derived.state).find_damaged()
        if self._version is not None:
            self.events.recounted(self._version, not damaged, began)
        return damaged

    def _sync_tensors(self, derived: DerivedWeights, plain: SyncReport) -> QuantizedReport:
        before = self._version
        prepared, quantize_s, apply_s = self._update_tensors(derived, self._confirm)
        if prepared.transition is None:
            self._before.clear()
        elif before is not None and before != self._version:
            self._before.append(before)
        return QuantizedReport(
            version=plain.version,
            plain=plain,
            changed=prepared.changed,
            requantized=prepared.requantized,
            rescaled=prepared.rescaled,
            whole=prepared.transition is None,
            quantize_s=quantize_s,
            apply_s=apply_s,
            digest=derived.state.digest,
        )

    def roll_back(self) -> int | None:
        """Undo the last sync that wrote, from memory, without access to the store. Return the version, or None.

        The mirror is rolled back, and the changes are quantised and committed as by a sync.
        """
        with self._gate.working():
            if self._derived is None or not self._before:
                return None
            before, version, undone = self._version, self._before.pop(), None
            while self._follower.version != version:
                undone = self._follower.undo()
                if undone is None:
                    return None  # the mirror has loaded an anchor, which cannot be undone: the next sync updates it
            prepared, quantize_s, apply_s = self._update_tensors(self._derived, None)
        if undone is not None:
            changed = prepared.changed
            self.events.synced(
                replace(undone, from_version=before, changed=changed, prepare_s=quantize_s, apply_s=apply_s)
            )
        return version

    def verify(self) -> str:
        """Recount the mirror and the worker's tensors; return the digest of the latter.

        Raises:
            VerificationError: something other than a sync has written to them. The next sync quantises all weights.
        """
        with self._gate.working():
            if self._derived is None:
                raise VerificationError("there are no synced weights to verify: call sync first")
            try:
                self._follower.integrity.verify()
            except VerificationError:
                self._derived.forget()  # they may have been quantised from weights that something else wrote
                raise
            if damaged := self._find_damaged(self._derived):
                self._derived.forget()
                raise VerificationError(
                    f"something other than a sync has written to {damaged[0]!r} ({len(damaged)} such tensors); sync "
                    "again to quantise all weights",
                    tensor=damaged[0],
                )
            return self._derived.state.digest

    def close(self) -> None:
        """Release the weights and the mirror. The worker's tensors are unchanged.

        Any thread and any signal handler may call this; a running sync releases them when it ends.
        """
        if self._gate.close():
            self.events.close()

    def _release(self: "QuantizedSubscriber | None") -> None:
        if self is not None:
            self._follower.local.forget()
            self._derived, self._version, self._mirror = None, None, {}

    def __enter__(self) -> "QuantizedSubscriber":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # The mirror

    def _sync_plain(self, weights: Any, version: int | None, verify: bool, follow_replaced: bool) -> SyncReport:
        if not self._mirror:
            self._make_mirror(weights)
        sync = partial(self._follower.sync, verify=verify, follow_replaced=follow_replaced)
        try:
            try:
                return sync(self._mirror, version)
            except StateError:
                if not follow_replaced:
                    raise
                self._make_mirror(weights)  # another run may have other tensors
                return sync(self._mirror, version)
        except VerificationError as e:
            if not e.torn:
                raise
            raise VerificationError(
                f"loading an anchor into the mirror failed halfway ({e.__cause__}); the worker's tensors are "
                "unchanged: sync again"
            ) from e

    def _make_mirror(self, weights: Any) -> None:
        """Allocate the mirror for the current run, after checking that the worker's tensors match it."""
        records = self._follower.records()
        layout = records.layout(records.required_newest().layout)
        Targets.match(weights, layout, self.recipe)
        where = device.find(weights) if self._plain == "device" else None
        self._derived = None
        self._mirror = {
            spec.name: torch.zeros(spec.shape, dtype=torch_dtype(spec.dtype), device=where or "cpu")
            for spec in layout.tensors
        }

    # The worker's tensors

    def _attach(self, weights: Any) -> DerivedWeights:
        state = self._follower.state
        assert state is not None  # it was synced
        if self._derived is None or self._derived.plain is not state or not self._derived.state.is_attached_to(weights):
            self._version, self._derived = None, None
            self._derived = DerivedWeights(weights, state, self._mirror, self.recipe)
        return self._derived

    def _update_tensors(
        self, derived: DerivedWeights, confirm: Callable[[], None] | None
    ) -> tuple[PreparedWeights, float, float]:
        """Update the worker's tensors to the version of the mirror; return how, and the seconds of both steps."""
        began = time.perf_counter()
        prepared = derived.prepare()
        found_at = time.perf_counter()
        if confirm is not None and prepared.changed:
            confirm()
        asked_at = time.perf_counter()
        try:
            derived.commit(prepared)
        finally:
            if not derived.is_made:
                self._version = None
        self._version = self._follower.version
        return prepared, found_at - began, time.perf_counter() - asked_at
