"""A client of an engine's HTTP server, with which `pulse follow` keeps it at the versions of a run."""

import http.client
import json
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

from pulsesync.core.arguments import number, one_of
from pulsesync.core.location import ParsedLocation, without_credentials
from pulsesync.core.text import printable
from pulsesync.errors import NothingPublishedError, PulseError, StoreError
from pulsesync.format.manifest import Manifest
from pulsesync.format.signature import trusted, trusted_for_pointers
from pulsesync.integrations.engine.answers import has_error, parse_answer
from pulsesync.integrations.engine.update import UpdateEvents, UpdateReport, raise_error
from pulsesync.run.goals import GoalFinder
from pulsesync.run.heartbeats import HeartbeatWriter
from pulsesync.run.reader import RunReader
from pulsesync.run.reporting import SyncEvents
from pulsesync.store import Store
from pulsesync.store.transport import HttpTransport, clean_token, is_in_clear, parse_server, read

TIMEOUT_S = 1800.0  # limit for an update, which may fetch an anchor
STATUS_TIMEOUT_S = 30.0
AGAIN_S = 0.25  # between attempts, while the version does not exist yet
_MAX_ANSWER = 1 << 22  # bytes: the answers of thousands of ranks
_MIN_BYTES_PER_S = 1 << 14
_REASON_CHARACTERS = 500  # of a text that the server has written, in an error


class EngineServer(ABC):
    """A server that is updated to versions of a run; a subclass implements its routes.

    Redirects are not followed, so that the API key goes to this address and nowhere else.

    Its arguments are described where they are public: at the subclasses.

    Raises:
        ValueError: url is not an http or https address; api_key is empty, is not plain ASCII, or would be sent
            unencrypted.
    """

    engine: str  # its name, for errors
    key_hint: str  # how to pass an API key, for errors

    def __init__(
        self, url: str, *, api_key: str | None = None, timeout_s: float = TIMEOUT_S, api_key_in_clear: bool = False
    ) -> None:
        at = parse_server(url)
        timeout_s = number("timeout_s", timeout_s, what="a number of seconds", above=0)
        if api_key is not None:
            api_key = clean_token(api_key, "key")
            if is_in_clear(at) and not api_key_in_clear:
                raise ValueError(
                    f"{at} is not https, so the API key would be sent unencrypted to another machine; use https, or "
                    "permit it with api_key_in_clear=True (on the command line PULSE_TOKEN_IN_CLEAR=1)"
                )
        self.url, self._timeout_s = str(at).rstrip("/"), timeout_s
        self._transports = {
            limit_s: HttpTransport(at, api_key, limit_s, None, _MIN_BYTES_PER_S)
            for limit_s in {timeout_s, STATUS_TIMEOUT_S}
        }

    @abstractmethod
    def status(self) -> dict[str, Any]:
        """Return the server's status: location, version, digest, broken, ranks_agree, and paused_by_update if known.

        Raises:
            StoreError: it does not answer; PulseError: it was not started with the options that updates need.
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
        """Update the server to a version of a run: pause, update all ranks, set the version, resume.

        Args:
            location: The path or URL of the run, as the server can reach it.
            version: The version, or "latest".
            trust: As for a `Subscriber`.
            kv_cache: What happens to the KV cache: "drop" it, or "keep" it, although old weights have computed it.
            follow_replaced: As for `Subscriber.sync`.
            wait_s: How long to wait for the version, or for the first anchor of the run: the trainer writes it in the
                background, and until then a server that is new to the run has nothing to start from.

        Raises:
            NothingPublishedError: the version cannot be reached within `wait_s`. PulseError: the update failed on the
            server, with the class of the error there; the old weights are served. StoreError: the server does not
            answer; it is not known whether it was updated: call `status`.
        """
        keys = trusted(trust)  # raises for none: an empty one must not turn the check off
        signers = None if keys is None else sorted(keys)
        options = {"location": location, "trust": signers, "follow_replaced": follow_replaced}
        until, events = time.monotonic() + wait_s, UpdateEvents(location)
        with events.noting_failure():
            while True:
                try:
                    report = self._update(options, version, kv_cache)
                    if isinstance(version, int) and report.version != version:
                        raise StoreError(
                            f"the {self.engine} server at {self.url} answers that it is at version {report.version} "
                            f"after an update to version {version}: check that nothing else updates it, and that it "
                            "is not behind a proxy that answers from a cache",
                            retryable=True,
                        )
                    return events.updated(report)
                except NothingPublishedError:
                    if time.monotonic() >= until:
                        raise
                    time.sleep(AGAIN_S)

    @abstractmethod
    def _update(self, options: dict[str, Any], version: int | str, kv_cache: str) -> UpdateReport:
        """Try once. Raises: as `update`."""

    def _step(self, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        code, answer = self._call("POST", path, self._timeout_s, body)
        if code != 200:
            raise self._refusal(code, answer, path)
        return answer

    def _call(
        self, method: str, path: str, timeout_s: float, body: dict[str, Any] | None = None
    ) -> tuple[int, dict[str, Any]]:
        data = json.dumps(body).encode() if body is not None else None
        transport = self._transports[timeout_s]
        try:
            with (
                self._named_in_errors(),
                transport.ask(method, path, {"Content-Type": "application/json"}, data) as response,
            ):
                response.clock.limit(timeout_s)
                content = read(response, _MAX_ANSWER + 1, f"the answer to {path}")
                if len(content) > _MAX_ANSWER:
                    raise StoreError(f"the answer to {path} has more than {_MAX_ANSWER} bytes", retryable=True)
                return response.status, parse_answer(content)
        except (OSError, http.client.HTTPException) as e:  # no connection, or it ended
            self._forget()
            cause = printable(str(e), _REASON_CHARACTERS) or type(e).__name__
            raise StoreError(f"the {self.engine} server at {self.url} does not answer: {cause}", retryable=True) from e

    @contextmanager
    def _named_in_errors(self) -> Iterator[None]:
        """Name this server in an error about what it has answered."""
        try:
            yield
        except StoreError as e:
            e.place = e.place or f"the {self.engine} server at {self.url}"
            raise

    def _raise_error(self, answer: Any) -> None:
        """Raise the error of a rank, if the answer is one, with its class. Raises: PulseError."""
        with self._named_in_errors():
            is_error = has_error(answer)
        if is_error:
            raise_error([answer])

    def _forget(self) -> None:  # noqa: B027 - not every server has something to forget
        """Forget what is known about the server: another one may be started at its address."""

    def _refusal(self, code: int, answer: dict[str, Any], path: str = "") -> PulseError:
        if code == 401:
            return PulseError(f"the {self.engine} server requires an API key: {self.key_hint}")
        answered = f"answered {code}{f' to {path}' if path else ''}"
        if 300 <= code < 400:
            return PulseError(
                f"{self.url} {answered}, which points to another address: give the address of the {self.engine} server "
                "itself, because its API key is not sent anywhere else"
            )
        said = str(answer.get("error") or answer.get("detail") or answer.get("message") or answer)
        return PulseError(f"the {self.engine} server {answered}: {printable(said, _REASON_CHARACTERS)}")


class ServerFollower:
    """Keeps a server at the versions of a run. A server that was restarted is updated again.

    Args:
        server: The server.
        location: The path or URL of the run, as the server can reach it.
        store: The same run, as this process can reach it, to see what is published.
        trust: As for a `Subscriber`.
        trust_pointers: As for a `Subscriber`.
        kv_cache: What happens to the KV cache at an update: "drop" it, or "keep" it, although old weights have computed
            it.
        pointer: Name of a pointer of the run to follow; None: the newest version.
        max_staleness: By how many versions the server may differ from the version to follow if it cannot be updated;
            `follow` raises if it differs by more. None: this is not checked.
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
        trust_pointers: Collection[str] | None = None,
        kv_cache: str = "drop",
        pointer: str | None = None,
        max_staleness: int | None = None,
        follow_replaced: bool = False,
        heartbeat: str | None = None,
    ) -> None:
        self._at = ParsedLocation.parse(location).resolved()
        self.server, self.location = server, location  # which the server opens, so the text is passed on
        self._store, self._trust = store, trusted(trust)
        self._movers = trusted_for_pointers(trust_pointers, trust)
        one_of("kv_cache", kv_cache, ("drop", "keep"))
        self._options: dict[str, Any] = {"trust": trust, "kv_cache": kv_cache, "follow_replaced": follow_replaced}
        self._goals = GoalFinder(pointer, max_staleness)
        self._version: int | None = None  # the server's version when it was last asked
        self._is_torn = False  # what it said then
        beats = None if heartbeat is None else HeartbeatWriter(store, heartbeat, follows=pointer)
        self._events = SyncEvents(without_credentials(location), beats)  # of looks; those of updates are the server's

    def close(self) -> None:
        """End the heartbeat, if there is one. The server stays as it is."""
        self._events.close()

    def update(self, version: int | None = None) -> UpdateReport | None:
        """Update the server to the version to follow, or to a given one; return None if it has that version already.

        Raises:
            NothingPublishedError: there is no version yet; PulseError: as `EngineServer.update`.
        """
        try:
            goal, whole = self._look(version)
        except NothingPublishedError as e:  # it waits for a version; metrics do not count that as a failure
            self._note_failure(e)
            raise
        except Exception as e:
            self._events.newest = self._goals.version
            self._events.failed(e, self._version, torn=self._is_torn)
            raise
        self._events.newest = self._goals.version
        if goal is not None:
            version = goal.version
        assert version is not None
        if version == self._version and whole:
            if goal is not None:
                self._events.found_nothing(goal.version, goal.step, goal.digest)
            return None
        try:
            report = self.server.update(self.location, version, **self._options)
        except Exception as e:
            self._note_failure(e)  # the events of an update are the server's
            raise
        self._version = report.version
        if (heartbeat := self._events.heartbeat) is not None:
            heartbeat.synced(
                report.version,
                report.step,
                newest=self._events.newest,
                pause_s=report.pause_s,
                fetched_bytes=report.fetched_bytes,
            )
        return report

    def _note_failure(self, error: Exception) -> None:
        self._events.newest = self._goals.version
        if self._events.heartbeat is not None:
            self._events.heartbeat.failed(error, self._version, torn=self._is_torn)

    def _look(self, version: int | None) -> tuple[Manifest | None, bool]:
        """Return the record of the version to follow, None for a given one, and whether the server is consistent."""
        status = self.server.status()
        self._is_torn = bool(status["broken"])
        at = status["location"]  # as it was written in the first update
        self._version = status["version"] if at and ParsedLocation.parse(at).resolved() == self._at else None
        whole = status["ranks_agree"] and not status["broken"] and not status.get("paused_by_update")
        if version is not None:
            return None, whole
        return self._goals.find(RunReader(self._store, self._trust, trust_pointers=self._movers), None), whole

    def follow(
        self, interval_s: float = 1.0, on_error: Callable[[PulseError], None] | None = None
    ) -> Iterator[UpdateReport]:
        """Yield a report for each version that the server was updated to, without end.

        After a temporary error, which is reported, the update is tried again; that nothing is published is reported
        once.

        Raises:
            SignatureError, UnsupportedError, StateError, RunChangedError: waiting would not help. StaleWeightsError:
            the server cannot be updated, and differs from the version to follow by more than `max_staleness`.
        """
        return self._goals.follow(self.update, lambda: self._version, interval_s, on_error)
