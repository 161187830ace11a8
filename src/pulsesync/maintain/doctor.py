"""Checks of a location: can a trainer publish there, can workers read from there, and how fast is it.

    for finding in check_location("s3://bucket/run"):
        print(finding.status, finding.check, finding.found)

What is written is below `doctor/<random>/`, a few MB for some seconds, and is removed afterwards, also when a check
fails. Every check really does what it is about: no store is taken at its word.
"""

import secrets
import threading
import time
from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

from pulsesync.core.scratch import nearest
from pulsesync.errors import (
    ChainError,
    ConflictError,
    FormatError,
    MissingBucketError,
    MissingLinkError,
    NotFoundError,
    PulseError,
    SignatureError,
    StoreError,
)
from pulsesync.format.manifest import Manifest
from pulsesync.format.signature import trusted
from pulsesync.run import planner
from pulsesync.run.reader import RunReader
from pulsesync.store import LocalStore, Location, RetryStore, Store, open_store
from pulsesync.store.base import is_local

Status: TypeAlias = Literal["ok", "warn", "fail", "skipped"]

PREFIX = "doctor/"
WRITERS = 8  # threads that create the same object at once
WRITERS_S = 120.0  # for all of them to get an answer
FIRST_BYTES, MOST_BYTES = 1 << 18, 1 << 22  # of the objects by which the link is measured
LINK_S = 5.0  # that sending or fetching one of them may take
CLOCK_WARN_S, CLOCK_FAIL_S = 5.0, 60.0

_CREDENTIALS = "see docs/operations.md for where credentials are looked for"
_OVERWRITES = (
    "do not publish there: two trainers could overwrite each other's versions. Use a store that honours conditional "
    "writes (S3 itself does; of others, a recent release), or publish to a folder and serve that"
)


@dataclass(frozen=True)
class Finding:
    """What a check has found, and what to do about it."""

    check: str
    status: Status
    found: str
    advice: str | None = None
    figures: dict[str, float] | None = None  # for programs


def check_location(
    location: Location, *, read_only: bool = False, trust: str | Collection[str] | None = None
) -> Iterator[Finding]:
    """Check a location, and yield what each check finds. Nothing is raised: what fails is a finding.

    Args:
        location: A path or URL, or a store.
        read_only: Write nothing: for the credentials of workers. A server over http is read only in any case.
        trust: As for a `Subscriber`.
    """
    try:
        store = open_store(location)
    except ValueError as e:
        yield Finding("location", "fail", str(e), "give a path, s3://…, gs://…, az://… or https://…")
        return
    yield from StoreCheck(store, read_only=read_only, trust=trusted(trust)).run()


class StoreCheck:
    """The checks of one store, in order; later ones are skipped where an earlier one leaves nothing to check."""

    def __init__(self, store: Store, *, read_only: bool, trust: Collection[str] | None) -> None:
        # Without retries: the first error is what people should see, and a retry could hide what a store does.
        self.store: Store = store.store if isinstance(store, RetryStore) else store
        self._is_http = hasattr(self.store, "has_token")
        self._read_only, self._trust = read_only or self._is_http, trust
        self._folder = f"{PREFIX}{secrets.token_hex(8)}/"
        self._there = nearest(self.store.folder / PREFIX) if isinstance(self.store, LocalStore) else None
        self._written: set[str] = set()  # keys, whether or not the store said that it has them

    def run(self) -> Iterator[Finding]:
        """Yield what each check finds; remove what was written, whatever happens."""
        yield Finding("location", "ok", _describe(self.store))
        reading = self._read()
        yield self._credentials(reading)
        yield reading
        if reading.status == "fail":
            yield Finding("other checks", "skipped", "the store cannot be read")
            return
        if self._read_only:
            why = "servers are read only" if self._is_http else "--read-only"
            yield Finding("write", "skipped", why)
            yield self._list("manifests/")
        else:
            try:
                yield from self._check_writing()
            finally:
                cleaned = self._clean_up()
            yield cleaned
        yield from self._run()

    # Reading

    def _credentials(self, reading: Finding) -> Finding:
        """Where the credentials come from. Whether there are any is known only after a request succeeded."""
        if (source := getattr(self.store, "credentials_from", None)) is not None:
            if reading.status == "fail":
                unknown = f"from {source}; not known to work, because nothing could be read"
                return Finding("credentials", "skipped", unknown)
            return Finding("credentials", "ok", f"from {source}")
        if self._is_http:
            shown = "a token is sent" if getattr(self.store, "has_token", False) else "no token is sent"
            return Finding("credentials", "ok", shown)
        return Finding("credentials", "ok", "none are needed")

    def _read(self) -> Finding:
        began = time.perf_counter()
        try:
            self.store.get(f"{self._folder}absent", 0, 1)
        except MissingBucketError as e:
            return Finding("read", "fail", e.reason, "create the bucket, or correct its name")
        except NotFoundError:
            took_s = time.perf_counter() - began
            return Finding("read", "ok", f"answers in {1e3 * took_s:.0f} ms", None, {"latency_s": took_s})
        except StoreError as e:
            return self._cannot_read(e)
        advice = "something other than a store of objects answers at this address"
        return Finding("read", "fail", "an object that does not exist was read", advice)

    def _cannot_read(self, error: StoreError) -> Finding:
        """S3 answers 403 for what does not exist if the credentials may not list, so an object of the run decides."""
        with suppress(StoreError):
            self.store.get("head", 0, 1)
            found = "objects can be read, and what does not exist is refused instead of not found"
            advice = (
                "let these credentials list the bucket (s3:ListBucket), so that workers can see what is not there yet"
            )
            return Finding("read", "warn", found, advice)
        advice = f"check the credentials and what they may do; {_CREDENTIALS}"
        if error.retryable:
            advice = "check the address or endpoint, the network, and that the server runs"
        return Finding("read", "fail", error.reason, advice)

    def _list(self, prefix: str) -> Finding:
        try:
            count = sum(1 for _ in self.store.list(prefix))
        except StoreError as e:
            advice = "pulse log, status, verify and prune need listings; syncs work without them, but for lost hints"
            return Finding("list", "warn", e.reason, advice)
        return Finding("list", "ok", f"{count:,} objects below {prefix}")

    # Writing

    def _key(self, name: str) -> str:
        """Return the key of an object that is written now, and removed at the end."""
        self._written.add(key := self._folder + name)
        return key

    def _check_writing(self) -> Iterator[Finding]:
        before_s = time.time()
        try:
            self.store.put(key := self._key("object"), b"0123456789")
            yield Finding("write", "ok", "an object was written")
        except StoreError as e:
            advice = f"a trainer needs credentials that may write; for a worker, check with --read-only; {_CREDENTIALS}"
            yield Finding("write", "fail", e.reason, advice)
            return
        for check in (self._read_back, self._ranges, self._overwrite, self._create_once, self._create_at_once):
            try:
                yield check(key)
            except StoreError as e:
                name = check.__name__.strip("_").replace("_", " ")
                yield Finding(name, "fail", e.reason, "the store accepted a write and failed here: see its own log")
        yield from self._listing(key, before_s)
        yield from self._link()

    def _read_back(self, key: str) -> Finding:
        got = self.store.get(key)
        if got != b"0123456789":
            advice = "something between here and the store alters objects"
            return Finding("read back", "fail", f"read {got[:20]!r} where b'0123456789' was written", advice)
        return Finding("read back", "ok", "what was written is read at once")

    def _ranges(self, key: str) -> Finding:
        got = [self.store.get(key, 3, 7), self.store.get(key, 8, 20), self.store.get(key, 30, 40)]
        if got != [b"3456", b"89", b""]:
            advice = "resumed downloads and relays need ranges: use another server, or switch its compression off"
            return Finding("ranges", "fail", f"bytes 3..7, 8..20 and 30..40 of 10 are {got}", advice)
        return Finding("ranges", "ok", "parts of objects can be read")

    def _overwrite(self, key: str) -> Finding:
        self.store.put(key, b"second")
        if (got := self.store.get(key)) != b"second":
            advice = "hints may lag there; if a cache is in between, let it revalidate"
            return Finding("overwrite", "warn", f"read {got[:20]!r} after the object was replaced", advice)
        return Finding("overwrite", "ok", "an object can be replaced, and is read as it is now")

    def _create_once(self, key: str) -> Finding:
        name = "create if absent"
        self.store.create(created := self._key("created"), b"first")
        try:
            self.store.create(created, b"second")
        except ConflictError:
            if self.store.get(created) == b"first":
                return Finding(name, "ok", "an object that exists is not overwritten")
            return Finding(name, "fail", "the store reports a conflict, and has overwritten the object", _OVERWRITES)
        return Finding(name, "fail", "creating an object that exists succeeds: it was overwritten", _OVERWRITES)

    def _create_at_once(self, key: str) -> Finding:
        """Let several threads create one object: one of them must succeed, and its bytes must be there."""
        name = "create at once"
        results: list[int | Exception] = []
        gate = threading.Barrier(WRITERS)

        def create(number: int) -> None:
            gate.wait(30)
            try:
                self.store.create(self._key("contended"), b"writer %d" % number)
                results.append(number)
            except Exception as e:  # noqa: BLE001 - looked at below
                results.append(e)

        threads = [threading.Thread(target=create, args=(number,), daemon=True) for number in range(WRITERS)]
        for thread in threads:
            thread.start()
        until = time.monotonic() + WRITERS_S
        for thread in threads:
            thread.join(max(0.0, until - time.monotonic()))
        if waiting := sum(thread.is_alive() for thread in threads):
            advice = f"see the log of the store; {self._folder}contended may appear there later: remove it by hand"
            found = f"{waiting} of {WRITERS} writers at once got no answer within {WRITERS_S:.0f} s"
            return Finding(name, "fail", found, advice)
        winners = [one for one in results if isinstance(one, int)]
        errors = [one for one in results if isinstance(one, Exception) and not isinstance(one, ConflictError)]
        if errors and not all(getattr(one, "retryable", False) for one in errors):
            return Finding(name, "fail", f"of {WRITERS} writers at once, one got: {errors[0]}", _OVERWRITES)
        if len(winners) > 1:
            return Finding(name, "fail", f"{len(winners)} of {WRITERS} writers at once succeeded", _OVERWRITES)
        if winners and self.store.get(f"{self._folder}contended") != b"writer %d" % winners[0]:
            return Finding(name, "fail", "the object is not that of the writer that succeeded", _OVERWRITES)
        if not winners:
            return Finding(name, "warn", f"none of {WRITERS} writers at once succeeded", "a publisher will try again")
        return Finding(name, "ok", f"of {WRITERS} writers at once, one succeeded")

    def _listing(self, key: str, before_s: float) -> Iterator[Finding]:
        try:
            entries = {entry.key: entry for entry in self.store.list(self._folder)}
        except StoreError as e:
            advice = "let these credentials list: pulse log, status, verify and prune need it"
            yield Finding("list", "fail", e.reason, advice)
            yield Finding("clock", "skipped", "listings show the store's clock, and there are none")
            return
        if key not in entries:
            yield Finding("list", "warn", "what was just written is not listed", "listings lag: prune with long grace")
            yield Finding("clock", "skipped", "what was just written is not listed")
            return
        yield Finding("list", "ok", f"{len(entries)} objects that were just written are listed")
        yield _clock(entries[key].modified_s, before_s, time.time())

    # The link

    def _link(self) -> Iterator[Finding]:
        try:
            data, up_s = b"", 0.0
            for size in (FIRST_BYTES, MOST_BYTES):
                if data and up_s * size / len(data) > LINK_S:
                    break  # it would take too long
                data = secrets.token_bytes(size)
                began = time.perf_counter()
                self.store.put(key := self._key("link"), data)
                up_s = max(time.perf_counter() - began, 1e-6)
            began = time.perf_counter()
            got = self.store.get(key)
            down_s = max(time.perf_counter() - began, 1e-6)
        except StoreError as e:
            advice = "small objects were written, and a larger one was not: see the limits of the store and of proxies"
            yield Finding("link", "fail", e.reason, advice)
            return
        if got != data:
            yield Finding("link", "fail", "a larger object came back altered", "something in between alters objects")
            return
        yield _speed(len(data), up_s, down_s, is_local(self.store))

    # The run

    def _run(self) -> Iterator[Finding]:
        reader = RunReader(self.store, self._trust)
        try:
            newest = reader.newest()
        except SignatureError as e:
            yield Finding("run", "fail", e.reason, "pass the publisher's public key as --trust")
            return
        except (FormatError, ChainError, StoreError) as e:
            yield Finding("run", "fail", e.reason, "pulse verify shows which records are bad")
            return
        if newest is None:
            advice = "check the location, if a trainer has published there" if self._read_only else None
            yield Finding("run", "warn" if self._read_only else "ok", "there is no run here yet", advice)
            return
        yield self._newest(newest)
        yield self._path(reader, newest)
        if self._read_only:
            yield self._download(newest)

    def _newest(self, newest: Manifest) -> Finding:
        found = f"version {newest.version}, step {newest.step}"
        if newest.signed_by is None:
            return Finding("run", "ok", f"{found}, not signed")
        if self._trust is None:
            advice = f"let workers check it: --trust {newest.signed_by}, if that is the publisher's key"
            return Finding("run", "warn", f"{found}, signed, and the signature was not checked", advice)
        return Finding("run", "ok", f"{found}, signed by a trusted key")

    def _path(self, reader: RunReader, newest: Manifest) -> Finding:
        """Whether a worker that joins now can reach the newest version."""
        try:
            path = planner.find_path(None, newest, reader.look)
        except MissingLinkError:
            advice = "the first anchor is probably still being written; if not, publish again to write one"
            return Finding("joining", "warn", "no anchor leads to the newest version", advice)
        except PulseError as e:
            return Finding("joining", "fail", e.reason, "pulse verify shows which records are bad")
        size = sum(record.size_bytes for record in path)
        later = len(path) - 1
        patches = "" if not later else " and 1 patch" if later == 1 else f" and {later} patches"
        found = f"a worker that joins fetches {size:,} bytes: an anchor{patches}"
        return Finding("joining", "ok", found, None, {"bytes": float(size)})

    def _download(self, newest: Manifest) -> Finding:
        """Fetch a piece of what the newest version needs: nothing can be written to measure by."""
        keys = [f"parts/{part.id}" for part in newest.parts if part.data is None]
        with suppress(StoreError):
            keys += [entry.key for entry in sorted(self.store.list("parts/"), key=lambda one: -one.size_bytes)][:1]
        for key in reversed(keys):
            with suppress(StoreError):
                began = time.perf_counter()
                got = self.store.get(key, 0, MOST_BYTES)
                if got:
                    return _speed(len(got), None, max(time.perf_counter() - began, 1e-6), is_local(self.store))
        return Finding("link", "skipped", "there is no object in the run that is large enough to measure by")

    def _clean_up(self) -> Finding:
        """Remove what was written. A key whose write failed may have arrived all the same."""
        left: list[str] = []
        error: StoreError | None = None
        for key in sorted(self._written):
            try:
                self.store.delete(key)
            except StoreError as e:
                left.append(key)
                error = e
        with suppress(StoreError):
            left += [entry.key for entry in self.store.list(self._folder) if entry.key not in left]
        if isinstance(self.store, LocalStore) and self._there is not None:
            _remove_empty(self.store.folder / self._folder, self._there)
        if left:
            advice = f"pulse prune needs to delete; remove these by hand: {', '.join(left)}"
            return Finding("delete", "warn", str(error or "deleted objects are still listed"), advice)
        return Finding("delete", "ok", "everything that was written is removed")


def _remove_empty(path: Path, there: Path) -> None:
    """Remove the folders that were created below one that was there, as long as nothing else is in them."""
    path = path.absolute()
    with suppress(OSError):
        while path != there:
            path.rmdir()
            path = path.parent


def _describe(store: Store) -> str:
    inner: Any = store
    place = next((getattr(inner, fact) for fact in ("url", "folder", "name") if getattr(inner, fact, None)), "")
    return f"{place} ({type(inner).__name__})" if place else type(inner).__name__


def _clock(modified_s: float, before_s: float, after_s: float) -> Finding:
    """Compare the store's clock with this machine's. Stores round times down to a second."""
    skew_s = 0.0
    if not before_s - 1 <= modified_s <= after_s:
        skew_s = modified_s - after_s if modified_s > after_s else modified_s - before_s
    figures = {"skew_s": skew_s}
    if abs(skew_s) <= CLOCK_WARN_S:
        return Finding("clock", "ok", "this machine and the store agree to within 5 s", None, figures)
    found = f"the clock of this machine is {abs(skew_s):,.0f} s {'behind' if skew_s > 0 else 'ahead of'} the store's"
    advice = (
        "set this machine's clock, for instance by NTP: clouds refuse requests that are 15 min off, and pulse status "
        "compares the two clocks"
    )
    return Finding("clock", "warn" if abs(skew_s) <= CLOCK_FAIL_S else "fail", found, advice, figures)


def _speed(size: int, up_s: float | None, down_s: float, local: bool) -> Finding:
    down = size / down_s
    figures = {"download_bytes_per_s": down}
    found = f"download {8e-6 * down:,.0f} Mbit/s"
    if up_s is not None:
        figures["upload_bytes_per_s"] = size / up_s
        found = f"upload {8e-6 * size / up_s:,.0f} Mbit/s, {found}"
    return Finding("link", "ok", f"{found}, by {size:,} bytes{' on this machine' if local else ''}", None, figures)
