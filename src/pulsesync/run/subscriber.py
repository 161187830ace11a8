"""The worker's end: find the path to a version, fetch and check it, and update the weights in place.

    sub = Subscriber("s3://bucket/run", trust=public_key)
    report = sub.sync(model)                      # to the newest version, once
    for report in sub.watch(model): ...           # to each version as it is published

Everything is checked before it is written: first the records, then the bodies, then all that they decode to, for
several patches together. A path with an anchor has two commits: the whole anchor is one, and then the patches after it.
Only during a commit must the weights not be used.
"""

import logging
import weakref
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any, Never

from pulsesync.core import arguments
from pulsesync.errors import ClosedError, NothingPublishedError, StaleWeightsError, StoreError
from pulsesync.format.epochs import EPOCH_PATCHES
from pulsesync.format.signature import trusted, trusted_for_pointers
from pulsesync.run.follower import RunFollower
from pulsesync.run.gate import INTERVAL_S, MAX_INTERVAL_S, SyncGate, pauses
from pulsesync.run.goals import GoalFinder
from pulsesync.run.planner import Position
from pulsesync.run.reporting import SyncEvents, SyncReport
from pulsesync.state.claims import SupersededError
from pulsesync.state.slices import Slices
from pulsesync.state.weights import WeightState
from pulsesync.store import Location, Store, open_store

REMOVED = {
    "executor": "a Subscriber has threads of its own; leave executor= out",
    "epoch_patches": "the format fixes how many patches make an epoch; leave epoch_patches= out",
}

logger = logging.getLogger(__name__)


class Subscriber:
    """Keeps weights at the newest version of a run, or at the version that a pointer names.

    It is configured with the location and the keys to trust; the rest is read from the run's records.

    What a sync checks: everything that it fetches and writes, relative to the state after the last sync. It does not
    read weights that no patch changes. If another program writes to the weights (an engine's sleep mode, a user's
    edit), only a recount of all weights finds that: `sync(verify=True)`, `verify_every`, `verify` or `scrub`.

    Args:
        location: A path or URL of the run, or a store.
        token: Sent to the server of an http or https location, and to no other. If not given, the token that
            PULSE_SEND_TOKENS has for that server, if it has one.
        trust: Public keys (64 hexadecimal digits); records that none of them signed are refused. None: signatures are
            not checked.
        trust_pointers: Public keys that may sign moves of pointers, and nothing else; it needs `trust`, whose keys may
            sign moves, too.
        cache: A folder in which fetched bytes are kept, shared by the processes of a host; a restarted worker uses it.
        slices: Which part of each tensor is local, by name pattern.
        undo: How many syncs can be undone without fetching anything.
        verify_every: Recount the weights at every N-th sync, as `sync(verify=True)` does; 0: never.
        widen: Accept FP32 tensors for BF16 tensors of the run. Each BF16 value is written as the same FP32 number,
            which is exact. Tensors must be in host memory.
        follow: Name of a pointer of the run: a sync goes to the version that it names, which may be older than the
            local one. None: to the newest version.
        max_staleness: By how many versions the weights may differ from the version to follow; `check_fresh` raises if
            they differ by more. None: this is not checked.
        confirm: Called once in every sync that writes, after all checks that can be made before writing, and before
            the first weight is written. If it raises, the sync ends with the weights unchanged. Several workers that
            must update together vote here.
        heartbeat: The name of this worker, such as "rollout-3": 1 to 64 letters, digits, '.', '_' or '-'. A small
            record at `heartbeats/<name>` in the run, or at the server that serves it, then shows `pulse status` where
            the worker is. It is written in the background, at least every 30 s, and syncs do not depend on it. None:
            no such record is written.
    """

    _epoch_patches = EPOCH_PATCHES  # the format fixes it; tests and measurements have shorter epochs

    def __init__(
        self,
        location: Location,
        *,
        token: str | None = None,
        trust: str | Collection[str] | None = None,
        trust_pointers: str | Collection[str] | None = None,
        cache: str | Path | None = None,
        slices: Slices | None = None,
        undo: int = 1,
        verify_every: int = 0,
        widen: bool = False,
        follow: str | None = None,
        max_staleness: int | None = None,
        confirm: Callable[[], None] | None = None,
        heartbeat: str | None = None,
        **_removed: Never,
    ) -> None:
        arguments.removed("Subscriber", _removed, REMOVED)
        undo = arguments.whole("undo", undo, what="a number of syncs")
        self.verify_every = arguments.whole("verify_every", verify_every, what="a number of syncs")
        arguments.mapping("slices", slices, "names of tensors to a Slice or None")
        arguments.function("confirm", confirm)
        folder = arguments.folder("cache", cache) if cache is not None else None
        store = open_store(location, token=token)
        keys, movers = trusted(trust), trusted_for_pointers(trust_pointers, trust)
        self._goals = GoalFinder(follow, max_staleness)
        self.events = SyncEvents.of(store, heartbeat, follow)
        if self.events.heartbeat is not None:
            weakref.finalize(self, self.events.heartbeat.close)
        self._follower = RunFollower(
            store,
            keys,
            trust_pointers=movers,
            cache=folder,
            slices=slices,
            undo=undo,
            widen=widen,
            goals=self._goals,
            confirm=confirm,
            events=self.events,
            epoch_patches=self._epoch_patches,
        )
        self._syncs = 0
        self._gate = SyncGate("Subscriber", self._follower.local.forget)

    # Closing

    def close(self) -> None:
        """Release the weights and the undo logs, and end calls that wait for a version. The weights are not changed.

        The last heartbeat, if there are any, is written before this returns, unless that takes more than 2 s.

        Any thread and any signal handler may call this. A sync that is running is completed, and the weights are
        released when it is done. In a process that was forked from the one that syncs, this does nothing.
        """
        if self._gate.close():
            self.events.close()

    def __enter__(self) -> "Subscriber":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # The local weights

    @property
    def version(self) -> int | None:
        """The version of the weights; None before the first sync."""
        return self._follower.version

    @property
    def state(self) -> WeightState | None:
        return self._follower.state

    @property
    def position(self) -> Position | None:
        return self._follower.local.position

    @property
    def store(self) -> Store:
        """The store of the run, or a cache of it."""
        return self._follower.store

    @property
    def trust(self) -> Collection[str] | None:
        return self._follower.trust

    @property
    def slices(self) -> Slices | None:
        """Which part of each tensor is local; a change holds from the next time that tensors are attached."""
        return self._follower.slices

    @slices.setter
    def slices(self, slices: Slices | None) -> None:
        self._follower.slices = slices

    # Syncing

    def sync(
        self,
        source: Any,
        version: int | None = None,
        *,
        wait_s: float = 0.0,
        verify: bool = False,
        follow_replaced: bool = False,
    ) -> SyncReport:
        """Update a module, state dict or mapping of arrays to the newest version, or to a given one, in place.

        Args:
            source: The tensors to write to.
            version: The version to update to; None: the newest, or the one that the pointer names.
            wait_s: How long to wait for the first version, if there is none yet or none any more. During that time, a
                store that does not answer is asked again.
            verify: Recount all the weights first. If something else has written to them, the tensors are named in a
                warning and in the report, and all weights are loaded again from an anchor.
            follow_replaced: If the location has another run than before, or the same run was restored from a backup,
                start over from an anchor of the current run. The version may then be lower than before.

        Raises:
            NothingPublishedError: there is no run at the location, or its first anchor is still being written; this is
                a NotFoundError. StateError: the tensors are not those of the run; SignatureError: no trusted key signed
                the run; RunReplacedError, RunForkedError, RunRolledBackError: the run at the location is not the one
                that was followed; MissingLinkError: no published path leads to the version; ClosedError: this was
                closed; FormatError, ChainError, StoreError, VerificationError.
                After an error the weights are those of the version before the call, or of the last version that was
                completely committed, and the same call can be repeated. The exception is a VerificationError with
                `torn=True`: loading an anchor failed halfway, and the weights are between two versions. Do not use them
                until a sync succeeds.
        """
        version = arguments.optional_whole("version", version, what="the number of a version")
        wait_s = arguments.seconds("wait_s", wait_s)
        try:
            self._syncs += 1
            verify = verify or bool(self.verify_every and self._syncs % self.verify_every == 0)
            sync = partial(self._follower.sync, source, version, verify=verify, follow_replaced=follow_replaced)
            location, is_first = self.events.location, lambda: self.version is None
            report = self._gate.sync_in_time(sync, wait_s, is_first, location)
        except ClosedError:
            raise
        except Exception as e:
            self.events.failed(e, self.version, torn=self._follower.local.torn)
            raise
        self.events.synced(report)
        return report

    def watch(
        self,
        source: Any,
        *,
        wait_s: float = 0.0,
        interval_s: float = INTERVAL_S,
        max_interval_s: float = MAX_INTERVAL_S,
        verify: bool = False,
        follow_replaced: bool = False,
    ) -> Iterator[SyncReport]:
        """Update the tensors to each version as it is published; yield a report each time that weights were written.

        It ends when the caller leaves the loop, or when any thread calls `close`. A temporary error of the store is
        logged as a warning, and the store is asked again.

        Args:
            source: The tensors to write to.
            wait_s: How long to wait for the first version, as for `sync`; `math.inf`: for ever.
            interval_s: The pause after a check of the store that found nothing new. It doubles after each such check.
            max_interval_s: The longest pause.
            verify: As for `sync`, at every check.
            follow_replaced: As for `sync`. While the run is being replaced, the location has no version for a time;
                this is logged once and waited for, if there was a version before.

        Raises:
            PulseError: as `sync` does, except for errors of the store that are `retryable`.
        """
        self._gate.guard.claim()
        interval_s = arguments.seconds("interval_s", interval_s)
        max_interval_s = arguments.seconds("max_interval_s", max_interval_s)
        waits = pauses(interval_s, max_interval_s)
        followed, waiting = self.version is not None, False
        while not self._gate.guard.closed.is_set():
            try:
                report = self.sync(source, wait_s=wait_s, verify=verify, follow_replaced=follow_replaced)
            except ClosedError:
                return
            except NothingPublishedError as e:
                if not (follow_replaced and followed):
                    raise
                if not waiting:
                    logger.warning("Waiting for another run: %s.", e)
                waiting = True
            except SupersededError as e:
                logger.warning("%s; trying again.", e)
            except StoreError as e:
                if not e.retryable:
                    raise
                logger.warning("The store did not answer; trying again: %s.", e)
                try:
                    self._goals.check_staleness(self.version)
                except StaleWeightsError as stale:
                    logger.error("The weights are stale and cannot be updated at the moment: %s.", stale)
            else:
                followed, waiting = True, False
                if report.path:
                    yield report
                    waits = pauses(interval_s, max_interval_s)
                    continue
            self._gate.guard.closed.wait(next(waits))

    def check_fresh(self) -> int:
        """Return by how many versions the weights differ from the version to follow, and raise if these are too many.

        Call this before the weights are used, from any thread, also while another one syncs or watches. It reads three
        small objects. If the store does not answer, that is raised too, because weights of unknown age are not fresh.

        Raises:
            StaleWeightsError: by more than `max_staleness`, or nothing was synced yet; StoreError: the store does not
            answer; RunChangedError, FormatError, ChainError: as `sync`. ValueError: there is no `max_staleness`.
        """
        if self._goals.max_staleness is None:
            raise ValueError("check_fresh needs a limit: pass max_staleness= to the Subscriber")
        self._gate.guard.claim()
        self._goals.find(self._follower.records(), self._follower.local.position)
        self.events.newest = self._goals.newest
        return self._goals.check_staleness(self.version)

    def roll_back(self) -> int | None:
        """Undo the last sync that wrote, from memory, without the store. Return the version, None without an undo log.

        Raises:
            VerificationError: something else has written to the weights, so that nothing was undone; or the undo
            failed, and the weights are as they were before the call.
        """
        undone = self.undo_last()
        return undone.version if undone else None

    def undo_last(self) -> SyncReport | None:
        """The same, with a report; None: there is nothing to undo."""
        with self._gate.working():
            report = self._follower.undo()
        if report is not None:
            self.events.synced(report)
        return report

    # Restarts and checks

    def resume(self, source: Any, version: int, history: bytes | None) -> bool:
        """Continue with weights that an earlier process left at a version, and with the history that it saved.

        Returns False, and is as before the first sync, if they are not bit for bit that version, or if it is gone.

        Raises:
            StateError: the tensors are not those of the run; StoreError, SignatureError.
        """
        version = arguments.whole("version", version, what="the number of a version")
        with self._gate.working():
            return self._follower.resume(source, version, history)

    def verify(self, source: Any | None = None) -> str:
        """Recount the digest of all live weights and return it; check that they are the local version, bit for bit.

        It waits for a sync that is running in another thread.

        Raises:
            StateError: `confirm`, or a handler that has interrupted a sync, calls it. VerificationError: something else
            wrote to them, or these are not the tensors that were synced.
        """
        with self._gate.working():
            return self._follower.integrity.verify(source)

    def scrub(self, every_s: float = 60.0) -> AbstractContextManager[None]:
        """Recount the live weights in the background, again and again; the next sync raises if they were damaged."""
        return self._follower.integrity.scrub(every_s)
