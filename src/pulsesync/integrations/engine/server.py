"""An engine's HTTP server: how it is called, and how `pulse follow` keeps it at the versions of a run."""

import json
import time
import urllib.error
import urllib.request
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator
from http.client import HTTPException
from typing import Any

from pulsesync.errors import NothingPublishedError, PulseError, StoreError
from pulsesync.format.manifest import Manifest
from pulsesync.format.signature import trusted
from pulsesync.integrations.engine.update import UpdateEvents, UpdateReport
from pulsesync.run.heartbeats import HeartbeatWriter
from pulsesync.run.pointers import FollowTarget
from pulsesync.run.reader import RunReader
from pulsesync.store import Store

TIMEOUT_S = 1800.0  # for an update, which may fetch an anchor
STATUS_TIMEOUT_S = 30.0
AGAIN_S = 0.25  # between attempts, while a version that is waited for is not there


class EngineServer(ABC):
    """A server that is brought to versions of a run; a subclass knows its routes.

    Args:
        url: Its address, such as http://127.0.0.1:8000.
        api_key: The key that it was started with, if any.
        timeout_s: How long an update may take.
    """

    engine: str  # its name, for errors
    key_hint: str  # how to give a key

    def __init__(self, url: str, *, api_key: str | None = None, timeout_s: float = TIMEOUT_S) -> None:
        self.url, self._api_key, self._timeout_s = url.rstrip("/"), api_key, timeout_s

    @abstractmethod
    def status(self) -> dict[str, Any]:
        """Where the server is: location, version, digest, broken, ranks_agree, paused_by_update.

        Raises:
            StoreError: it does not answer; PulseError: it was not started for this.
        """

    def update(
        self,
        location: str,
        version: int | str,
        *,
        trust: Collection[str] | None = None,
        kv_cache: str = "drop",
        follow_replaced: bool = False,
        wait_s: float = 0.0,
    ) -> UpdateReport:
        """Bring the server to a version of a run: pause, update all ranks, name the version, resume.

        Args:
            location: The path or URL of the run, as the server reaches it.
            version: The version, or "latest".
            trust: As for a `Subscriber`.
            kv_cache: What becomes of the KV cache: "drop", or "keep", with what old weights have computed.
            follow_replaced: As for `Subscriber.sync`.
            wait_s: How long to wait for the version, or for the first anchor of the run: a trainer has it written in
                the background, and until then a server that is new to the run has nothing to start from.

        Raises:
            NothingPublishedError: the version cannot be reached, also not within `wait_s`. PulseError: it failed on the
            server, by the name that it has there; the old weights are served. StoreError: the server does not answer:
            whether it was updated is not known, and `status` tells.
        """
        options = {
            "location": location,
            "trust": list(trust) if trust else None,
            "follow_replaced": follow_replaced,
        }
        until, events = time.monotonic() + wait_s, UpdateEvents(location)
        with events.noting_failure():
            while True:
                try:
                    return events.updated(self._update(options, version, kv_cache))
                except NothingPublishedError:
                    if time.monotonic() >= until:
                        raise
                    time.sleep(AGAIN_S)

    @abstractmethod
    def _update(self, options: dict[str, Any], version: int | str, kv_cache: str) -> UpdateReport:
        """Try once. Raises: as `update`."""

    def _step(self, path: str, body: dict[str, Any] | None = None) -> None:
        code, answer = self._call("POST", path, self._timeout_s, body)
        if code != 200:
            raise self._refusal(code, answer, path)

    def _call(
        self, method: str, path: str, timeout_s: float, body: dict[str, Any] | None = None
    ) -> tuple[int, dict[str, Any]]:
        headers = {"Content-Type": "application/json"}
        if self._api_key:
            headers["Authorization"] = f"Bearer {self._api_key}"
        data = json.dumps(body).encode() if body is not None else None
        request = urllib.request.Request(self.url + path, data, headers, method=method)
        try:
            with urllib.request.urlopen(request, timeout=timeout_s) as response:
                return int(response.status), _table(response.read())
        except urllib.error.HTTPError as e:
            with e:
                return e.code, _table(e.read())
        except (OSError, HTTPException, ValueError) as e:  # no connection, or it ended; ValueError: not an address
            self._forget()
            raise StoreError(f"the {self.engine} server at {self.url} does not answer: {e}", retryable=True) from e

    def _forget(self) -> None:  # noqa: B027 - not every server has something to forget
        """Forget what is known of the server: another one may be started at its address."""

    def _refusal(self, code: int, answer: dict[str, Any], path: str = "") -> PulseError:
        if code == 401:
            return PulseError(f"the {self.engine} server asks for an API key: {self.key_hint}")
        reason = answer.get("error") or answer.get("detail") or answer.get("message") or answer
        return PulseError(f"the {self.engine} server answered {code}{f' to {path}' if path else ''}: {reason}")


class ServerFollower:
    """Keeps a server at the versions of a run. A server that was started again is brought there again.

    Args:
        server: The server.
        location: The path or URL of the run, as the server reaches it.
        store: The same run, as this process reaches it, to see what is published.
        trust: As for a `Subscriber`.
        kv_cache: What becomes of the KV cache at an update: "drop", or "keep", with what old weights have computed.
        pointer: Name of a pointer of the run to follow; None: the newest version.
        max_staleness: How many versions the server may be away from the version to follow if it cannot be updated;
            `follow` raises where it is further away. None: that is not checked.
        follow_replaced: As for `Subscriber.sync`.
        heartbeat: As for a `Subscriber`: the name under which the server is shown by `pulse status`.

    Raises:
        ValueError: heartbeat is not the name of a worker, or pointer not that of a pointer.
    """

    def __init__(
        self,
        server: EngineServer,
        location: str,
        store: Store,
        *,
        trust: Collection[str] | None = None,
        kv_cache: str = "drop",
        pointer: str | None = None,
        max_staleness: int | None = None,
        follow_replaced: bool = False,
        heartbeat: str | None = None,
    ) -> None:
        self.server, self.location = server, location
        self._store, self._trust = store, trusted(trust)
        self._options: dict[str, Any] = {
            "trust": trust,
            "kv_cache": kv_cache,
            "follow_replaced": follow_replaced,
        }
        self._target = FollowTarget(pointer, max_staleness)
        self._version: int | None = None  # that the server had when it was last asked
        self._is_torn = False  # what it said then
        self._heartbeat = None if heartbeat is None else HeartbeatWriter(store, heartbeat, follows=pointer)

    def close(self) -> None:
        """End the heartbeat, if there is one. The server stays as it is."""
        if self._heartbeat is not None:
            self._heartbeat.close()
            self._heartbeat.join()

    def update(self, version: int | None = None) -> UpdateReport | None:
        """Bring the server to the version to follow, or to one; return None if it is there already.

        Raises:
            NothingPublishedError: there is no version yet; PulseError: as `EngineServer.update`.
        """
        try:
            report, goal = self._update(version)
        except Exception as e:
            if self._heartbeat is not None:
                self._heartbeat.failed(e, self._version, torn=self._is_torn)
            raise
        if self._heartbeat is not None:
            if report is not None:
                self._heartbeat.synced(
                    report.version,
                    report.step,
                    newest=self._target.version,
                    pause_s=report.pause_s,
                    fetched_bytes=report.fetched_bytes,
                )
            elif goal is not None:
                self._heartbeat.synced(goal.version, goal.step, newest=self._target.version)
        return report

    def _update(self, version: int | None) -> tuple[UpdateReport | None, Manifest | None]:
        """Return what was done, None if the server is there already, and the record that says which version that is."""
        status = self.server.status()
        self._is_torn = bool(status["broken"])
        self._version = status["version"] if status["location"] == self.location else None
        reader = RunReader(self._store, self._trust)
        goal = None
        if version is None:
            goal = self._target.find(reader, None)
            if goal is None:
                raise reader.nothing_published()
            version = goal.version
        whole = status["ranks_agree"] and not status["broken"] and not status.get("paused_by_update")
        if version == self._version and whole:
            return None, goal
        report = self.server.update(self.location, version, **self._options)
        self._version = report.version
        return report, goal

    def follow(
        self, interval_s: float = 1.0, on_error: Callable[[PulseError], None] | None = None
    ) -> Iterator[UpdateReport]:
        """Yield a report for each version that the server was brought to, without end.

        An error that may pass is reported, and tried again; while nothing is published, that is reported once.

        Raises:
            SignatureError, UnsupportedError, StateError, RunChangedError: waiting would not help. StaleWeightsError:
            the server cannot be updated, and is further from the version to follow than `max_staleness`.
        """
        return self._target.follow(self.update, lambda: self._version, interval_s, on_error)


def _table(data: bytes) -> dict[str, Any]:
    try:
        answer = json.loads(data or b"{}")
    except ValueError:
        return {"detail": data[:200].decode(errors="replace")}
    return answer if isinstance(answer, dict) else {"detail": answer}
