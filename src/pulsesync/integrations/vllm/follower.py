"""One rank of an engine that follows a run, as far as it works alone; `update` has the ranks move together.

An update is prepared in a thread: fetched, checked and decoded while the engine generates. It stops before the first
weight is written, and waits: `commit` lets it write, `abort` ends it with the weights as they were. What `call` takes
and returns is plain data, because it travels between processes.
"""

import logging
import threading
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

from pulsesync.errors import ChainError, GroupError, NothingPublishedError, VerificationError
from pulsesync.format.layout import Layout
from pulsesync.format.signature import trusted
from pulsesync.integrations.vllm import compat
from pulsesync.integrations.vllm.weights import EngineWeights, changed_names, find_weights
from pulsesync.run.pointers import FollowTarget
from pulsesync.run.reader import RunReader
from pulsesync.run.subscriber import Subscriber, SyncReport
from pulsesync.store import open_store

LATEST = "latest"
PATIENCE_S = 600.0  # for which a prepared update waits to be committed: then whatever was to do so has died

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RunOptions:
    """Which run an engine follows, and whom it trusts.

    Args:
        location: A path or URL of the run, which every rank reaches.
        trust: Public keys (64 hexadecimal digits); records that none of them signed are refused. None: signatures are
            not looked at.
        cache: A folder in which bodies are kept, shared by the ranks of a host: each is fetched once.
        pointer: Name of a pointer of the run, which "latest" then means; None: the newest version.
        follow_replaced: If the location holds another run than before, or the same run was restored from a backup,
            start over from what is there now.
    """

    location: str
    trust: Sequence[str] | None = None
    cache: str | None = None
    pointer: str | None = None
    follow_replaced: bool = False

    @classmethod
    def parse(cls, given: dict[str, Any]) -> "RunOptions":
        """Read a mapping that came over the network. Raises: ValueError, for names or types that are not these."""
        if unknown := sorted(given.keys() - cls.__dataclass_fields__.keys()):
            raise ValueError(f"expected {', '.join(cls.__dataclass_fields__)}; got {', '.join(unknown)}")
        for name in ("location", "cache", "pointer"):
            if not isinstance(given.get(name, ""), str | None):
                raise ValueError(f"{name} must be a text; got {given[name]!r}")
        if not given.get("location"):
            raise ValueError("location is missing: the path or URL of the run to follow")
        if not isinstance(given.get("follow_replaced", False), bool):
            raise ValueError(f"follow_replaced must be true or false; got {given['follow_replaced']!r}")
        trust = given.get("trust")
        trusted(trust)  # raises ValueError for what is no key
        return cls(**{**given, "trust": tuple([trust] if isinstance(trust, str) else trust) if trust else None})


class _Preparation:
    """An update on its way: it runs in a thread up to the first write, and further when it may."""

    def __init__(self) -> None:
        self.began = time.perf_counter()
        self.ready = threading.Event()  # to write, or done without anything to write, or failed
        self.decided = threading.Event()
        self.cancelled = False
        self.thread: threading.Thread | None = None
        self.report: SyncReport | None = None
        self.changed: set[str] = set()  # names of tensors
        self.error: Exception | None = None

    def wait_for_decision(self) -> None:
        """Wait until the update is committed. Raises: GroupError, if it is not."""
        self.ready.set()
        if not self.decided.wait(PATIENCE_S):
            raise GroupError(f"nothing committed the update within {PATIENCE_S:.0f} s; the weights are as they were")
        if self.cancelled:
            raise GroupError("the update was aborted; the weights are as they were")

    def decide(self, cancelled: bool) -> None:
        assert self.thread is not None
        self.cancelled = cancelled
        self.decided.set()
        self.thread.join()


class EngineFollower:
    """The weights of one rank of an engine, kept at versions of a run.

    Args:
        config: The engine's VllmConfig.
        model: The model of this rank.
    """

    def __init__(self, config: Any, model: Any) -> None:
        self._config, self._model = config, model
        self._options: RunOptions | None = None
        self._subscriber: Subscriber | None = None
        self._weights: EngineWeights | None = None
        self._layout: Layout | None = None
        self._fresh = True  # whether the engine has the weights that it was started with
        self._pending: _Preparation | None = None
        self._broken: str | None = None  # why the weights are of no version
        self._last: dict[str, Any] = {}  # the report of the last update

    def call(self, request: dict[str, Any]) -> dict[str, Any]:
        """Do what a message asks for, and answer it; an error is an answer, too: {"error": {"type", "message"}}.

        It is not raised, because some versions of vLLM end an engine whose worker raises.
        """
        try:
            return self._do(**request)
        except Exception as e:  # noqa: BLE001 - the process that asked raises it
            return {"error": _describe_error(e)}

    def _do(self, do: str, **given: Any) -> dict[str, Any]:
        if do == "find":
            return {"version": self.find(RunOptions.parse(given["options"]))}
        if do == "prepare":
            self.prepare(RunOptions.parse(given["options"]), int(given["version"]))
        elif do == "abort":
            self.abort()
        elif do == "commit":
            return self.commit()
        elif do == "roll back":
            self.roll_back(given["version"])
        elif do == "close":
            self.close()
        elif do != "status":
            raise ValueError(f"a worker was asked to {do!r}, which this version of pulsesync does not know")
        return self.status()

    # Following

    def follow(self, options: RunOptions) -> Subscriber:
        """Follow a run from now on; nothing is fetched before the first update. Raises: ValueError, StoreError."""
        if self._subscriber is not None and options == self._options:
            return self._subscriber
        self.close()  # whatever happens next, updates no longer go to the run that was followed before
        store = open_store(options.location)
        self._subscriber = Subscriber(
            store, trust=options.trust, cache=options.cache, widen=True, confirm=self._wait_for_decision
        )
        self._options = options
        return self._subscriber

    def close(self) -> None:
        """Stop following. The weights stay as they are."""
        self.abort()
        if self._subscriber is not None:
            self._subscriber.close()
        self._options = self._subscriber = self._weights = self._layout = None
        self._last = {}

    def status(self) -> dict[str, Any]:
        """Where this rank is."""
        position = self._subscriber.position if self._subscriber is not None else None
        known = position if not self._broken else None
        pending = self._pending
        state = None if pending is None else "ready" if pending.ready.is_set() else "preparing"
        return {
            "location": self._options.location if self._options else None,
            "version": known.version if known else None,
            "step": self._last.get("step") if known else None,
            "digest": known.digest if known else None,
            "mode": self._weights.mode if self._weights else None,
            "broken": self._broken,
            "update": state,
            "failure": _describe_error(pending.error) if pending and pending.error else None,
        }

    def find(self, options: RunOptions) -> int:
        """The version that "latest" means. Raises: NothingPublishedError, FormatError, StoreError."""
        subscriber = self.follow(options)
        reader = RunReader(subscriber.store, subscriber.trust)
        found = FollowTarget(options.pointer, None).find(reader, None)
        if found is None:
            raise reader.nothing_published()
        return found.version

    # An update

    def prepare(self, options: RunOptions, version: int) -> None:
        """Begin to fetch, check and decode a version, in a thread; `status` tells when it is ready.

        Raises:
            ValueError, StoreError: the run cannot be opened.
        """
        self.abort()
        self.follow(options)
        self._pending = one = _Preparation()
        one.thread = threading.Thread(target=self._prepare, args=[one, version], name="pulse-update", daemon=True)
        one.thread.start()

    def _prepare(self, one: _Preparation, version: int) -> None:
        try:
            with self._on_device():
                one.report = self._sync(one, version)
        except Exception as e:  # noqa: BLE001 - told to the process that asks
            one.error = e
        finally:
            one.ready.set()

    def _on_device(self) -> Any:
        """Threads begin with the first GPU of a process as their current one."""
        if (device := compat.device_of(self._model)) is None:
            return nullcontext()
        import torch

        return torch.cuda.device(device)

    def _sync(self, one: _Preparation, version: int) -> SyncReport:
        subscriber, options = self._subscriber, self._options
        assert subscriber is not None
        assert options is not None
        weights = self._weights_for(subscriber, version)
        if weights.refresh():
            logger.warning("The engine has loaded other weights since the last update, so all of them are synced.")
        before = subscriber.state.sums if subscriber.state is not None else {}
        in_place = weights.mode == "in place"  # where something else may have written: an engine that slept, a reload
        report = subscriber.sync(weights.tensors, version, verify=in_place, follow_replaced=options.follow_replaced)
        assert subscriber.state is not None
        one.changed = changed_names(subscriber.state.layout, before, subscriber.state.sums)
        return report

    def _weights_for(self, subscriber: Subscriber, version: int) -> EngineWeights:
        reader = RunReader(subscriber.store, subscriber.trust)
        record = reader.version(version)
        if record is None:
            raise NothingPublishedError(f"version {version} is not published, or not any more", version=version)
        if self._weights is None or self._layout is None or self._layout.id != record.layout:
            self._layout = reader.layout(record.layout)
            self._weights = find_weights(self._config, self._model, self._layout, self._fresh)
            subscriber.slices = self._weights.slices
        return self._weights

    def _wait_for_decision(self) -> None:
        if self._pending is not None:
            self._pending.wait_for_decision()

    def commit(self) -> dict[str, Any]:
        """Write what was prepared, and have the engine compute with it. Nothing may generate meanwhile.

        Raises:
            PulseError: it failed; `roll_back` brings the weights back. ChainError: nothing was prepared.
        """
        one = self._pending
        if one is None or not one.ready.is_set():
            raise ChainError("no update is ready to be committed")
        one.decide(cancelled=False)
        self._pending = None
        if one.error is not None:
            raise one.error
        assert one.report is not None
        assert self._weights is not None
        self._weights.load(one.changed)
        compat.synchronize(self._model)
        self._broken, self._fresh = None, False
        self._last = self._describe(one.report, time.perf_counter() - one.began)
        logger.info("The weights are at version %(version)d (%(mode)s, %(fetched_bytes)d bytes fetched).", self._last)
        return self._last

    def abort(self) -> None:
        """End an update that was prepared; the weights stay as they were."""
        if self._pending is not None:
            self._pending.decide(cancelled=True)
            self._pending = None

    def roll_back(self, version: int | None) -> None:
        """Return to the version before an update of which this rank, or another one, has written a part.

        Raises:
            VerificationError: that is not possible: the weights are of no version, and the engine must not generate
                before an update succeeds.
        """
        self.abort()
        subscriber, weights = self._subscriber, self._weights
        try:
            if version is None or subscriber is None or weights is None:
                raise ChainError("there was no version before this one")
            subscriber.sync(weights.tensors, version)  # by the undo log, if it has moved at all
            weights.load(weights.tensors.keys())
            self._broken = None
        except Exception as e:
            self._broken = f"an update failed halfway, and the weights cannot be rolled back: {e}"
            raise VerificationError(f"{self._broken}; do not generate before an update succeeds", torn=True) from e

    def _describe(self, report: SyncReport, seconds: float) -> dict[str, Any]:
        assert self._weights is not None
        return {
            "version": report.version,
            "step": report.step,
            "from_version": report.from_version,
            "path": list(report.path),
            "changed": report.changed,
            "fetched_bytes": report.fetched_bytes,
            "seconds": seconds,
            "digest": report.digest,
            "mode": self._weights.mode,
            "repaired": list(report.repaired),
        }


def _describe_error(error: Exception) -> dict[str, str]:
    return {"type": type(error).__name__, "message": str(error)}
