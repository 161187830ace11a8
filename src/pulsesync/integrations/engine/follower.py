"""One rank of an engine that follows a run; `update` coordinates the ranks.

An update is prepared in a thread: fetched, checked and decoded while the engine generates. It stops before the first
weight is written, and waits: `commit` lets it write, `abort` ends it with the weights unchanged. `call` takes and
returns plain data, because it is called across processes.
"""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

from pulsesync.core.environment import read_list, read_variable
from pulsesync.core.location import ParsedLocation
from pulsesync.errors import ChainError, GroupError, NothingPublishedError, StateError, VerificationError
from pulsesync.format.layout import Layout
from pulsesync.format.signature import trusted, trusted_for_pointers
from pulsesync.integrations.engine.adapter import EngineAdapter, unknown_request
from pulsesync.integrations.engine.answers import RANK_REPORT
from pulsesync.integrations.engine.weights import EngineWeights, changed_names, find_weights
from pulsesync.run.goals import GoalFinder
from pulsesync.run.reader import RunReader
from pulsesync.run.reporting import SyncReport
from pulsesync.run.subscriber import Subscriber
from pulsesync.store import Store, open_store
from pulsesync.store.local import ServedFolder

PATIENCE_S = 600.0  # wait of a prepared update for its commit: after that, its caller is assumed to have died

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RunOptions:
    """Which run an engine follows, and which keys it trusts; as for a `Subscriber`, where nothing else is said."""

    location: ParsedLocation  # which every rank can reach
    trust: Sequence[str] | None = None
    pointer: str | None = None  # "latest" is then the version that it names; None: the newest version
    follow_replaced: bool = False  # start over if the location has another run, or was restored from a backup
    trust_pointers: Sequence[str] | None = None  # may sign moves of the pointer, and nothing else; it needs `trust`

    @classmethod
    def parse(cls, given: dict[str, Any]) -> "RunOptions":
        """Read a mapping that was received over the network. Raises: ValueError, for unknown names or other types."""
        names = cls.__dataclass_fields__
        if unknown := sorted(given.keys() - names.keys()):
            raise ValueError(f"unknown field {', '.join(unknown)}; the fields are {', '.join(names)}")
        for name in ("location", "pointer"):
            if not isinstance(given.get(name, ""), str | None):
                raise ValueError(f"{name} must be a text; got {type(given[name]).__name__}")
        if not given.get("location"):
            raise ValueError("location is missing: pass the path or URL of the run to follow")
        if not isinstance(given.get("follow_replaced", False), bool):
            raise ValueError(f"follow_replaced must be true or false; got {given['follow_replaced']!r}")
        trust, movers = given.get("trust"), given.get("trust_pointers")
        trusted(trust)  # raises ValueError for a malformed key
        trusted_for_pointers(movers, trust)
        keys = {"trust": _as_tuple(trust), "trust_pointers": _as_tuple(movers)}
        return cls(**{**given, "location": ParsedLocation.parse(given["location"]), **keys})


def _as_tuple(keys: str | Sequence[str] | None) -> tuple[str, ...] | None:
    return tuple([keys] if isinstance(keys, str) else keys) if keys else None


@dataclass(frozen=True)
class EngineLimits:
    """What the operator of an engine allows to the clients that request updates."""

    runs: tuple[ParsedLocation, ...] | None = None  # that may be followed, with all locations below them; None: any
    trust: tuple[str, ...] | None = None  # must have signed the run, whatever a request names; None: as it names
    cache: str | None = None  # a folder for bodies, shared by the ranks of a host: each body is fetched once
    variable: str = ""  # the environment variable that names the runs, for errors
    trust_pointers: tuple[str, ...] | None = None  # may sign moves of pointers; with `trust`, whatever a request names

    @classmethod
    def read(cls, prefix: str) -> "EngineLimits":
        """Read PREFIX_RUNS, _TRUST, _TRUST_POINTERS (with commas) and _CACHE. Raises: ValueError, as for empty ones."""
        runs, keys, movers = (read_list(f"{prefix}_{name}") for name in ("RUNS", "TRUST", "TRUST_POINTERS"))
        try:
            allowed = None if runs is None else tuple(map(ParsedLocation.parse, runs))
        except ValueError as e:
            raise ValueError(f"{prefix}_RUNS: {e}") from e
        try:
            trusted(keys)
            trusted_for_pointers(movers, keys)
        except ValueError as e:
            raise ValueError(f"{prefix}_TRUST, {prefix}_TRUST_POINTERS: {e}") from e
        return cls(allowed, keys, read_variable(f"{prefix}_CACHE"), f"{prefix}_RUNS", movers)

    def applied(self, options: RunOptions) -> RunOptions:
        """Return the options of a request within these limits. Raises: ValueError, if the location is not allowed."""
        if self.runs is not None and not any(options.location.is_under(run) for run in self.runs):
            raise ValueError(
                f"this engine may not follow {options.location}: {self.variable} does not name it; add it there, in "
                "the server's environment, and restart the server"
            )
        if self.trust is None:
            return options
        return replace(options, trust=self.trust, trust_pointers=self.trust_pointers)

    def open(self, options: RunOptions) -> Store:
        """Open the run of a request, if it is allowed; nothing else is read. Raises: ValueError."""
        self.applied(options)
        if self.runs is None or options.location.path is None:
            return open_store(options.location)
        # Links may be swapped after this check: what they lead to is decided here, and compared when a file is opened.
        real, allowed = options.location.resolved().path, [run.resolved().path for run in self.runs]
        assert real is not None
        return ServedFolder(real, [path for path in allowed if path is not None])


class _Followed:
    """A run that is followed, and its weights in the engine."""

    def __init__(self, options: RunOptions, limits: EngineLimits, confirm: Callable[[], None]) -> None:
        self.options = options
        self._real = options.location.resolved()
        store = limits.open(options)
        self.subscriber = Subscriber(store, trust=options.trust, cache=limits.cache, widen=True, confirm=confirm)
        self.weights: EngineWeights | None = None
        self.layout: Layout | None = None

    def is_of(self, options: RunOptions) -> bool:
        """Return whether these options name this run; the other options are about one update."""
        return (self._real, self.options.trust) == (options.location.resolved(), options.trust)


@dataclass(frozen=True)
class _Served:
    """What an engine had before an update."""

    followed: _Followed | None
    report: dict[str, Any]
    fresh: bool
    writer: _Followed  # the run of the update


class _Preparation:
    """An update that is being prepared: it runs in a thread up to the first write, and continues after `commit`."""

    def __init__(self, token: str, followed: _Followed) -> None:
        self.token, self.followed = token, followed
        self.began = self.seen = time.perf_counter()
        self.ready = threading.Event()  # set when it can write, has nothing to write, or has failed
        self.decided = threading.Event()
        self.cancelled = False
        self.thread: threading.Thread | None = None
        self.report: SyncReport | None = None
        self.changed: set[str] = set()  # names of tensors
        self.error: Exception | None = None

    def wait_for_decision(self) -> None:
        """Wait until the update is committed. Raises: GroupError, if it is not."""
        self.ready.set()
        while not self.decided.wait(min(1.0, PATIENCE_S)):
            if time.perf_counter() - self.seen > PATIENCE_S:
                raise GroupError(
                    f"the prepared update was dropped, because its caller sent no request for {PATIENCE_S:.0f} s; the "
                    "weights are unchanged; update again"
                )
        if self.cancelled:
            raise GroupError("the update was aborted; the weights are unchanged; update again")


class EngineFollower:
    """Keeps the weights of one rank of an engine at versions of a run; `limits` are those of what requests ask for."""

    def __init__(self, engine: EngineAdapter, limits: EngineLimits | None = None) -> None:
        self._engine, self._limits = engine, limits or EngineLimits()
        self._followed: _Followed | None = None  # the run of which the engine has a version
        self._pending: _Preparation | None = None
        self._preparing = threading.Lock()  # one preparation runs at a time; one that was aborted may still fetch
        self._fresh = True  # whether the engine has the weights that it was started with
        self._before: _Served | None = None  # the state before the last update that this rank committed
        self._broken: str | None = None  # why the weights are no version
        self._served: dict[str, Any] = {}  # the report of the update to the engine's current version

    # Messages

    def call(self, request: dict[str, Any]) -> dict[str, Any]:
        """Execute a request and return the answer; an error is an answer, too: {"error": {"type", "message"}}.

        It is not raised, because some engines end when a worker raises.
        """
        try:
            return self._do(**request)
        except Exception as e:  # noqa: BLE001 - the process that asked raises it
            return {"error": _describe_error(e)}

    def _do(self, do: str, token: str = "", **given: Any) -> dict[str, Any]:
        if do == "find":
            return {"version": find_version(RunOptions.parse(given["options"]), self._limits)}
        if do == "prepare":
            self.prepare(self._limits.applied(RunOptions.parse(given["options"])), int(given["version"]), token)
        elif do == "abort":
            self.abort(token)
        elif do == "commit":
            return self.commit(token)
        elif do == "roll back":
            self.roll_back(given["version"])
        elif do == "close":
            self.close()
        elif do != "status":
            raise unknown_request(do, "worker")
        return self.status()

    def status(self) -> dict[str, Any]:
        """Return the status of this rank: its current version, and what is being prepared."""
        known, pending = {} if self._broken else self._served, self._pending
        if pending is not None:
            pending.seen = time.perf_counter()
        state = None if pending is None else "ready" if pending.ready.is_set() else "preparing"
        return {
            "location": str(self._followed.options.location) if self._followed else None,
            **{name: known.get(name) for name in ("version", "step", "digest", "mode")},
            "broken": self._broken,
            "update": state,
            "token": pending.token if pending else None,
            "failure": _describe_error(pending.error) if pending and pending.error else None,
        }

    def close(self) -> None:
        """Stop following. The weights are not changed."""
        self.abort()
        if self._followed is not None:
            self._followed.subscriber.close()
        self._retire()
        self._followed, self._served = None, {}

    def _retire(self) -> None:
        """Forget the state before the last update: it will not be rolled back any more."""
        before, self._before = self._before, None
        if before is not None and before.followed is not None and before.followed is not self._followed:
            before.followed.subscriber.close()

    # Preparing

    def prepare(self, options: RunOptions, version: int, token: str = "") -> None:
        """Begin to fetch, check and decode a version, in a thread; `status` reports when it is ready.

        Another update is aborted; one with the same token continues, unless it has failed. The run that is followed
        changes when the update is committed. Raises: StateError, if it cannot be updated; as `EngineLimits.open`.
        """
        self._engine.check()
        if (one := self._pending) and token and one.token == token and one.error is None:
            return
        self.abort()
        self._retire()
        followed = self._followed
        if followed is None or not followed.is_of(options):
            followed = _Followed(options, self._limits, self._wait_for_decision)
        self._pending = one = _Preparation(token, followed)
        given = (one, version, options.follow_replaced)
        one.thread = threading.Thread(target=self._prepare, args=given, name="pulse-update", daemon=True)
        one.thread.start()

    def _prepare(self, one: _Preparation, version: int, follow_replaced: bool) -> None:
        try:
            with self._preparing, self._on_device():
                one.report = self._sync(one, version, follow_replaced)
        except Exception as e:  # noqa: BLE001 - reported to the process that asks
            one.error = e
        finally:
            one.ready.set()

    def _on_device(self) -> Any:
        """Make the model's GPU the current one of this thread: threads begin with the first GPU of a process."""
        if (device := self._engine.device()) is None:
            return nullcontext()
        import torch

        return torch.cuda.device(device)

    def _sync(self, one: _Preparation, version: int, follow_replaced: bool) -> SyncReport:
        subscriber, weights = one.followed.subscriber, self._weights_for(one.followed, version)
        try:
            replaced = weights.refresh()
        except StateError:  # the engine has its weights in another form than before
            one.followed.weights, replaced = None, True
            weights = self._weights_for(one.followed, version)
        if replaced:
            logger.warning("The engine has loaded other weights since the last update, so all weights are synced.")
        before = subscriber.state.sums if subscriber.state is not None else {}
        in_place = weights.mode == "in place"  # where something else may have written: an engine that slept, a reload
        report = subscriber.sync(weights.tensors, version, verify=in_place, follow_replaced=follow_replaced)
        state = subscriber.state
        assert state is not None
        patched = set(report.path) <= {"patch", "squash", "undo"} and not report.repaired and not replaced
        one.changed = changed_names(state.layout, before, state.sums) if patched else set(weights.tensors)
        return report

    def _weights_for(self, followed: _Followed, version: int) -> EngineWeights:
        reader = RunReader(followed.subscriber.store, followed.subscriber.trust)
        record = reader.version(version)
        if record is None:
            raise NothingPublishedError(  # which the server waits for: it may be published within `wait_s`
                f"version {version} is not published, or was pruned; pulse log lists the versions of a run",
                version=version,
            )
        if followed.weights is not None and followed.layout is not None and followed.layout.id == record.layout:
            return followed.weights
        followed.weights = None
        followed.layout = reader.layout(record.layout)
        followed.weights = find_weights(self._engine, followed.layout, self._fresh)
        followed.subscriber.slices = followed.weights.slices
        return followed.weights

    def _wait_for_decision(self) -> None:
        """Wait for the decision in the thread of an update; end one that was replaced. Other threads do not wait."""
        thread, pending = threading.current_thread(), self._pending
        if thread.name != "pulse-update":
            return
        if pending is None or pending.thread is not thread:
            raise GroupError("the update was aborted; the weights are as they were; update again")
        pending.wait_for_decision()

    # Deciding

    def commit(self, token: str = "") -> dict[str, Any]:
        """Write what was prepared, and have the engine compute with it. The engine must not generate meanwhile.

        Raises: ChainError, if nothing was prepared, or another update; PulseError: `roll_back` restores the weights.
        """
        one = self._pending
        if one is None or one.token != token or not one.ready.is_set():
            text = "this update cannot be committed, because another caller has started an update; update again"
            raise ChainError(text)
        assert one.thread is not None
        self._before = _Served(self._followed, self._served, self._fresh, one.followed)
        one.decided.set()
        one.thread.join()
        self._pending = None
        if one.error is not None:
            raise one.error
        assert one.report is not None
        assert one.followed.weights is not None
        one.followed.weights.load(one.changed)
        self._engine.synchronize()
        self._followed = one.followed
        self._broken, self._fresh = None, False
        self._served = _describe(one.report, one.followed.weights.mode, time.perf_counter() - one.began)
        logger.info("The weights are at version %(version)d (%(mode)s, %(fetched_bytes)d bytes fetched).", self._served)
        return self._served

    def abort(self, token: str | None = None) -> None:
        """End a prepared update, if it has this token; the weights are not changed.

        This does not wait for its thread, which may be in a long fetch. The thread writes nothing any more.
        """
        one = self._pending
        if one is not None and token in (None, one.token):
            one.cancelled = True
            one.decided.set()
            self._pending = None

    def roll_back(self, version: int | None) -> None:
        """Return to the version before an update that was written in part; None: to the engine's own checkpoint.

        Raises: VerificationError, if that fails: the engine must not generate before an update succeeds.
        """
        self.abort()
        before = self._before
        if before is None:  # this rank has not begun to write
            return
        try:
            if before.report.get("version") != version:
                raise ChainError(
                    f"cannot roll back to version {version}: this rank had version {before.report.get('version')}"
                )
            if before.followed is not None:
                _return_to(before.followed, before.report["version"], wrote=before.writer)
            elif before.fresh:
                self._engine.load_weights(self._engine.checkpoint())
                self._engine.refresh_packed()
            else:
                raise ChainError("there is no earlier version to roll back to; update to a version instead")
            self._engine.synchronize()
        except Exception as e:
            self._broken = f"an update failed halfway, and the weights cannot be rolled back: {e}"
            raise VerificationError(f"{self._broken}; do not generate before an update succeeds", torn=True) from e
        self._followed, self._served, self._fresh = before.followed, before.report, before.fresh
        self._broken = self._before = None


def _return_to(followed: _Followed, version: int, wrote: _Followed) -> None:
    """Restore weights to a version that they had, after an update failed."""
    subscriber, weights = followed.subscriber, followed.weights
    assert weights is not None
    if wrote is not followed:  # what this subscriber knows of the weights may not be true any more
        subscriber.sync(weights.tensors, version, verify=True)
    elif subscriber.version != version and subscriber.roll_back() != version:
        subscriber.sync(weights.tensors, version)
    weights.load(set(weights.tensors))


def find_version(options: RunOptions, limits: EngineLimits | None = None) -> int:
    """Return the version of "latest". Raises: NothingPublishedError, FormatError, SignatureError, StoreError."""
    limits = limits or EngineLimits()
    options = limits.applied(options)
    movers = trusted_for_pointers(options.trust_pointers, options.trust)
    reader = RunReader(limits.open(options), trusted(options.trust), trust_pointers=movers)
    found = GoalFinder(options.pointer).find(reader, None)
    assert found is not None  # without a local version, finding none is an error
    return found.version


def _describe(report: SyncReport, mode: str, seconds: float) -> dict[str, Any]:
    own = {"path": list(report.path), "repaired": list(report.repaired), "seconds": seconds, "mode": mode}
    return {name: own[name] if name in own else getattr(report, name) for name in RANK_REPORT}


def _describe_error(error: Exception) -> dict[str, str]:
    return {"type": type(error).__name__, "message": str(error)}
