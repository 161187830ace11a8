"""One rank of an engine that follows a run: its ranks move together to a version, or none of them does.

An update goes through three exchanges between the ranks of a replica: rank 0 names the version; when everything was
fetched, checked and decoded, every rank votes, before the first weight is written; at the end each reports. If one rank
fails after the vote, those that moved go back by their undo logs. The engine computes nothing in the meantime.
"""

import json
import logging
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from pulsesync.errors import ChainError, GroupError, NothingPublishedError, PulseError, VerificationError
from pulsesync.format.layout import Layout
from pulsesync.format.signature import trusted
from pulsesync.group.collective import Team
from pulsesync.integrations.vllm import compat
from pulsesync.integrations.vllm.weights import EngineWeights, changed_names, find_weights
from pulsesync.run.pointers import FollowTarget
from pulsesync.run.reader import RunReader
from pulsesync.run.subscriber import Subscriber, SyncReport
from pulsesync.store import open_store

LATEST = "latest"

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RunOptions:
    """Which run an engine follows, and whom it trusts; what a server is told travels as a mapping of these.

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
    def parse(cls, given: "dict[str, Any]") -> "RunOptions":
        """Read a mapping that came over the network. Raises: ValueError, for names or types that are not these."""
        if unknown := sorted(given.keys() - cls.__dataclass_fields__.keys()):
            raise ValueError(f"expected {', '.join(cls.__dataclass_fields__)}; got {', '.join(unknown)}")
        for name in ("location", "cache", "pointer"):
            if not isinstance(given.get(name, ""), str | None):
                raise ValueError(f"{name} must be a text; got {given[name]!r}")
        if not given.get("location"):
            raise ValueError("location is missing: the path or URL of the run to follow")
        trust = given.get("trust")
        trusted(trust)  # raises ValueError for what is no key
        return cls(**{**given, "trust": tuple([trust] if isinstance(trust, str) else trust) if trust else None})


class EngineFollower:
    """The weights of one rank of an engine, kept at versions of a run.

    Args:
        config: The engine's VllmConfig.
        model: The model of this rank.
    """

    def __init__(self, config: Any, model: Any) -> None:
        self._config, self._model = config, model
        self._team: Team | None = None  # made with the first run: groups do not exist before
        self._options: RunOptions | None = None
        self._subscriber: Subscriber | None = None
        self._weights: EngineWeights | None = None
        self._layout: Layout | None = None
        self._fresh = True  # whether the engine has the weights that it was started with
        self._confirmed = False  # whether the ranks have voted in this update
        self._broken: str | None = None  # why the weights are of no version
        self._last: dict[str, Any] = {}  # the report of the last update

    def follow(self, options: RunOptions) -> None:
        """Follow a run from now on; nothing is fetched before the first update. Raises: ValueError, StoreError."""
        if options == self._options:
            return
        self.close()  # whatever happens next, updates no longer go to the run that was followed before
        self._subscriber = Subscriber(
            open_store(options.location),
            trust=options.trust,
            cache=options.cache,
            widen=True,
            confirm=self._confirm,
        )
        self._options = options

    def close(self) -> None:
        """Stop following. The weights stay as they are."""
        if self._subscriber is not None:
            self._subscriber.close()
        self._options = self._subscriber = self._weights = self._layout = None
        self._last = {}

    def status(self) -> dict[str, Any]:
        """Where this rank is: plain values, for a message."""
        position = self._subscriber.position if self._subscriber is not None else None
        return {
            "location": self._options.location if self._options else None,
            "version": position.version if position and not self._broken else None,
            "step": self._last.get("step"),
            "digest": position.digest if position and not self._broken else None,
            "mode": self._weights.mode if self._weights else None,
            "broken": self._broken,
            "last_update": self._last or None,
        }

    def update(self, version: int | str = LATEST) -> dict[str, Any]:
        """Bring this rank to a version, with all other ranks of the replica, and report what was done.

        Raises:
            PulseError: the update failed on this rank or another; all ranks have the weights that they had. The one
            exception is a VerificationError with `torn=True`: the weights are of no version, and the engine must not
            generate before an update succeeds.
        """
        began = time.perf_counter()
        if self._subscriber is None:
            raise PulseError("this engine follows no run: give it the location of one first")
        if self._team is None:
            self._team = compat.team_of(self._config)
        before = self._subscriber.position
        goal = self._agree_on(version)
        self._confirmed, error, report = False, None, None
        try:
            report = self._sync(goal)
        except Exception as e:  # noqa: BLE001 - whatever it is, the other ranks wait to hear of it
            error = e
        if not self._confirmed:
            self._vote(error)  # raises on every rank if one of them has failed
        self._settle(error, before.version if before else None)
        assert report is not None
        self._broken, self._fresh = None, False
        self._last = self._describe(report, time.perf_counter() - began)
        logger.info("The weights are at version %(version)d (%(mode)s, %(fetched_bytes)d bytes fetched).", self._last)
        return self._last

    # An update, step by step

    def _agree_on(self, version: int | str) -> int:
        """The version to go to, as rank 0 finds it."""
        assert self._team is not None
        assert self._subscriber is not None
        error: PulseError | None = None
        note: dict[str, Any] = {}
        if self._team.rank == 0:
            try:
                note = {"version": self._find(version)}
            except PulseError as e:
                error, note = e, {"error": _text(e)}
        answer = json.loads(self._team.gather(json.dumps(note).encode())[0])
        if error is not None:
            raise error
        if "error" in answer:
            raise GroupError(f"rank 0 could not find the version to go to: {answer['error']}; no rank was updated")
        return int(answer["version"])

    def _find(self, version: int | str) -> int:
        if version != LATEST:
            return int(version)
        assert self._subscriber is not None
        assert self._options is not None
        reader = RunReader(self._subscriber.store, self._subscriber.trust)
        found = FollowTarget(self._options.pointer, None).find(reader, None)
        if found is None:
            raise NothingPublishedError(f"there is no version at {self._options.location} yet")
        return found.version

    def _sync(self, goal: int) -> SyncReport:
        subscriber, weights = self._subscriber, self._weights_for(goal)
        assert subscriber is not None
        if weights.refresh():
            logger.warning("The engine has loaded other weights since the last update, so all of them are synced.")
        state = subscriber.state
        sums = state.sums if state is not None else {}
        report = subscriber.sync(
            weights.tensors,
            goal,
            verify=weights.mode == "in place",  # something else may have written there: an engine that slept, a reload
            follow_replaced=self._options is not None and self._options.follow_replaced,
        )
        if not self._confirmed:
            self._vote(None)  # there was nothing to write, but the engine may still have to load
        assert subscriber.state is not None
        weights.load(changed_names(subscriber.state.layout, sums, subscriber.state.sums))
        return report

    def _weights_for(self, version: int) -> EngineWeights:
        assert self._subscriber is not None
        reader = RunReader(self._subscriber.store, self._subscriber.trust)
        record = reader.version(version)
        if record is None:
            raise NothingPublishedError(f"version {version} is not published, or not any more", version=version)
        if self._weights is None or self._layout is None or self._layout.id != record.layout:
            self._layout = reader.layout(record.layout)
            self._weights = find_weights(self._config, self._model, self._layout, self._fresh)
            self._subscriber.slices = self._weights.slices
        return self._weights

    def _confirm(self) -> None:
        """The subscriber is about to write: go on if all ranks are."""
        if not self._confirmed:
            self._vote(None)

    def _vote(self, error: Exception | None) -> None:
        self._confirmed = True
        failed = self._exchange(error)
        if error is not None:
            raise error
        if failed:
            raise GroupError(f"{failed}; no rank was updated")

    def _settle(self, error: Exception | None, before: int | None) -> None:
        """Compare how the ranks ended; if one has failed after the vote, roll all of them back."""
        failed = self._exchange(error)
        if error is None and not failed:
            return
        if error is not None and isinstance(error, GroupError) and not failed.startswith("rank"):
            raise error
        self._roll_back(before, error)
        if error is not None:
            raise error
        raise GroupError(f"{failed}; this rank was rolled back to version {before}")

    def _exchange(self, error: Exception | None) -> str:
        """Which rank has failed and why, as far as it is another one; empty if none has."""
        assert self._team is not None
        notes = [note.decode() for note in self._team.gather(b"" if error is None else _text(error).encode())]
        return next((f"rank {rank} failed ({note})" for rank, note in enumerate(notes) if note), "")

    def _roll_back(self, before: int | None, error: Exception | None) -> None:
        """Bring this rank back to the version that it had.

        Raises:
            VerificationError: that is not possible: the weights are of no version.
        """
        subscriber, weights = self._subscriber, self._weights
        assert subscriber is not None
        try:
            if before is None or weights is None:
                raise ChainError("there was no version before this one")
            self._confirmed = True  # all ranks know, and each goes back alone
            state = subscriber.state
            sums = state.sums if state is not None else {}
            subscriber.sync(weights.tensors, before)
            assert subscriber.state is not None
            weights.load(changed_names(subscriber.state.layout, sums, subscriber.state.sums) or weights.tensors)
        except Exception as e:
            self._broken = f"an update failed ({_text(error or e)}), and so did the way back ({_text(e)})"
            raise VerificationError(
                f"{self._broken}: the engine must not generate before an update succeeds", torn=True
            ) from e

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
            "apply_s": report.apply_s,
            "digest": report.digest,
            "mode": self._weights.mode,
            "repaired": list(report.repaired),
        }


def merged(reports: Collection[dict[str, Any]]) -> dict[str, Any]:
    """One report of the reports of all ranks, which agree on the version."""
    first = next(iter(reports))
    return {
        **first,
        "changed": sum(report["changed"] for report in reports),
        "fetched_bytes": sum(report["fetched_bytes"] for report in reports),
        "seconds": max(report["seconds"] for report in reports),
        "apply_s": max(report["apply_s"] for report in reports),
        "ranks": len(reports),
    }


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
