"""`check_location`: stores that are well, and each of the ways in which one can be wrong."""

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pulsesync import Publisher, SigningKey
from pulsesync.errors import ConflictError, StoreError
from pulsesync.maintain import doctor
from pulsesync.maintain.doctor import Finding, check_location
from pulsesync.store import LocalStore, MemoryStore, ObjectEntry, ObjectStore
from pulsesync.store.http import HttpStore
from tests.runs import publish_steps
from tests.s3 import Server, free_ports
from tests.tiers import slow

WRITING = ["write", "read back", "ranges", "overwrite", "create if absent", "create at once", "list", "clock", "link"]


def findings(store: Any, **options: Any) -> dict[str, Finding]:
    return {finding.check: finding for finding in check_location(store, **options)}


def statuses(found: dict[str, Finding]) -> dict[str, str]:
    return {name: finding.status for name, finding in found.items()}


def is_clean(store: Any) -> bool:
    return not list(store.list("doctor/"))


@pytest.fixture(params=["memory", "folder", slow("s3")])
def good(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    if request.param == "memory":
        return MemoryStore()
    if request.param == "folder":
        return LocalStore(tmp_path / "run")
    server = request.getfixturevalue("s3_server")
    return ObjectStore(server.fresh_url(), **server.options)


def test_a_good_store_passes_every_check_and_is_left_as_it_was(good: Any) -> None:
    found = findings(good)
    assert list(found) == ["location", "credentials", "read", *WRITING, "delete", "run"]
    assert set(statuses(found).values()) == {"ok"}
    assert found["link"].figures is not None
    assert min(found["link"].figures.values()) > 0
    assert is_clean(good)
    if isinstance(good, LocalStore):
        assert not good.folder.exists()


def test_a_folder_with_a_run_keeps_everything_else(tmp_path: Path) -> None:
    publish_steps(str(tmp_path / "run"), 2)
    before = sorted(path for path in (tmp_path / "run").rglob("*"))
    found = findings(str(tmp_path / "run"))
    assert set(statuses(found).values()) == {"ok"}
    assert "version 1, step 1, not signed" in found["run"].found
    assert found["joining"].found.endswith(" bytes: an anchor and 1 patch")
    assert sorted(path for path in (tmp_path / "run").rglob("*")) == before


def test_folders_that_were_there_stay_and_others_do_not(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    findings(str(tmp_path / "empty"))
    findings(str(tmp_path / "new/below/it"))
    assert list(tmp_path.rglob("*")) == [tmp_path / "empty"]


class Overwriting(MemoryStore):
    """Ignores the condition of a create, as servers do that do not know it."""

    def create(self, key: str, data: bytes) -> None:
        self.put(key, data)


class Lying(MemoryStore):
    """Reports a conflict, having overwritten the object."""

    def create(self, key: str, data: bytes) -> None:
        exists = key in self._objects
        self.put(key, data)
        if exists:
            raise ConflictError("it exists", key=key)


class Racing(MemoryStore):
    """Looks first and writes later: right for one writer, wrong for several."""

    def create(self, key: str, data: bytes) -> None:
        if key in self._objects:
            raise ConflictError("it exists", key=key)
        time.sleep(0.1)
        self.put(key, data)


@pytest.mark.parametrize(
    ("store", "check", "found"),
    [
        (Overwriting, "create if absent", "creating an object that exists succeeds"),
        (Lying, "create if absent", "has overwritten the object"),
        (Racing, "create at once", "of 8 writers at once succeeded"),
    ],
)
def test_a_store_that_overwrites_on_create_is_found(store: type[MemoryStore], check: str, found: str) -> None:
    one = store()
    finding = findings(one)[check]
    assert finding.status == "fail"
    assert found in finding.found
    assert "do not publish there" in str(finding.advice)
    assert is_clean(one)


class ReadOnly(MemoryStore):
    def put(self, key: str, data: bytes | memoryview) -> None:
        raise StoreError("403 Forbidden", key=key)

    create = put


def test_a_writer_without_an_answer_is_found_and_what_it_may_leave_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pulsesync.maintain.doctor.WRITERS_S", 0.2)
    release = threading.Event()

    class Hanging(MemoryStore):
        def create(self, key: str, data: bytes) -> None:
            if data == b"writer 3":
                release.wait(30)
            super().create(key, data)

    finding = findings(Hanging())["create at once"]
    release.set()
    assert finding.status == "fail"
    assert "1 of 8 writers at once got no answer" in finding.found
    assert "/contended may appear there later" in str(finding.advice)


def test_a_store_that_refuses_writes_fails_unless_only_reading_is_asked_for() -> None:
    store = ReadOnly()
    found = findings(store)
    assert found["write"].status == "fail"
    assert "--read-only" in str(found["write"].advice)
    assert "create if absent" not in found
    again = findings(store, read_only=True)
    assert "fail" not in statuses(again).values()
    assert (again["write"].status, again["write"].found) == ("skipped", "--read-only")


def test_read_only_writes_nothing() -> None:
    class Watching(MemoryStore):
        writes = 0

        def put(self, key: str, data: bytes | memoryview) -> None:
            self.writes += 1
            super().put(key, data)

    store = Watching()
    publish_steps(store, 2)
    store.writes = 0
    found = findings(store, read_only=True)
    assert store.writes == 0
    assert found["run"].status == "ok"
    assert found["list"].found == "2 objects below manifests/"
    assert findings(MemoryStore(), read_only=True)["run"].status == "warn"


@pytest.mark.parametrize(
    ("off_s", "status", "found"),
    [
        (0.0, "ok", "agree"),
        (3.0, "ok", "agree"),
        (30.0, "warn", "behind the store's"),
        (-30.0, "warn", "ahead of the store's"),
        (3600.0, "fail", "s behind the store"),
        (-3600.0, "fail", "s ahead of the store"),
    ],
)
def test_a_clock_that_is_off_is_found(off_s: float, status: str, found: str) -> None:
    class Off(MemoryStore):
        def list(self, prefix: str) -> Iterator[ObjectEntry]:
            for entry in super().list(prefix):
                yield ObjectEntry(entry.key, entry.size_bytes, entry.modified_s + off_s)

    finding = findings(Off())["clock"]
    assert finding.status == status
    assert found in finding.found
    assert finding.figures is not None
    assert abs(finding.figures["skew_s"] - off_s) < 10


def test_ranges_that_are_ignored_are_found() -> None:
    class Whole(MemoryStore):
        def get(self, key: str, begin: int = 0, end: int | None = None) -> bytes:
            return super().get(key)

    assert findings(Whole())["ranges"].status == "fail"


def test_a_store_that_alters_or_lags_is_found() -> None:
    class Upper(MemoryStore):
        def get(self, key: str, begin: int = 0, end: int | None = None) -> bytes:
            return super().get(key, begin, end).replace(b"5", b"6")

    class Stale(MemoryStore):
        def put(self, key: str, data: bytes | memoryview) -> None:
            if key not in self._objects:
                super().put(key, data)

    class Blind(MemoryStore):
        def list(self, prefix: str) -> Iterator[ObjectEntry]:
            return iter(())

    assert findings(Upper())["read back"].status == "fail"
    assert findings(Stale())["overwrite"].status == "warn"
    blind = findings(Blind())
    assert (blind["list"].status, blind["clock"].status) == ("warn", "skipped")


def test_what_was_written_is_removed_whatever_fails() -> None:
    class Failing(MemoryStore):
        def get(self, key: str, begin: int = 0, end: int | None = None) -> bytes:
            if "absent" not in key:
                raise StoreError("500", key=key, retryable=True)
            return super().get(key, begin, end)

    store = Failing()
    found = findings(store)
    assert found["read back"].status == "fail"
    assert is_clean(store)

    class Broken(MemoryStore):
        def list(self, prefix: str) -> Iterator[ObjectEntry]:
            raise ZeroDivisionError

    broken = Broken()
    with pytest.raises(ZeroDivisionError):
        findings(broken)
    assert not broken._objects

    left = MemoryStore()
    for finding in check_location(left):
        if finding.check == "ranges":
            break
    assert not left._objects


def test_deletes_that_are_refused_name_what_is_left() -> None:
    class Keeping(MemoryStore):
        def delete(self, key: str) -> None:
            raise StoreError("deletes are refused", key=key)

    store = Keeping()
    finding = findings(store)["delete"]
    assert (finding.status, finding.found) == ("warn", "deletes are refused")
    assert all(key in str(finding.advice) for key in store._objects)


def test_a_slow_link_is_measured_by_less(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "LINK_S", 0.5)
    sizes: list[int] = []

    class Slow(MemoryStore):
        def put(self, key: str, data: bytes | memoryview) -> None:
            if key.endswith("/link"):
                sizes.append(len(data))
                time.sleep(len(data) / 1e6)
            super().put(key, data)

    finding = findings(Slow())["link"]
    assert sizes == [doctor.FIRST_BYTES]
    assert finding.figures is not None
    assert 2e5 < finding.figures["upload_bytes_per_s"] < 1.1e6


def test_a_signed_run_is_checked_against_who_is_trusted() -> None:
    key, other = SigningKey.generate(), SigningKey.generate()
    store = MemoryStore()
    publish_steps(store, 2, signing_key=key)
    assert findings(store)["run"].status == "warn"
    assert key.public in str(findings(store)["run"].advice)
    assert findings(store, trust=key.public)["run"].found.endswith("signed by a trusted key")
    assert findings(store, trust=other.public)["run"].status == "fail"


def test_a_run_without_an_anchor_and_a_bad_record_are_found() -> None:
    store = MemoryStore()
    publish_steps(store, 2)
    anchors = [entry.key for entry in store.list("anchors/")]
    for key in anchors:
        store.delete(key)
    assert findings(store)["joining"].status == "warn"
    store.put("manifests/0000000000000001", b"nonsense")
    assert findings(store)["run"].status == "fail"


def test_a_location_that_is_none_is_a_finding() -> None:
    assert statuses(findings("ftp://host/run")) == {"location": "fail"}


# Real servers


def test_wrong_credentials_are_found_and_not_shown(s3_server: Server) -> None:
    store = ObjectStore(
        s3_server.fresh_url(), endpoint=s3_server.endpoint, access_key_id="access", secret_access_key="hunter2"
    )
    found = findings(store)
    assert (found["credentials"].status, found["read"].status) == ("skipped", "fail")
    assert "not known to work" in found["credentials"].found
    assert "403" in found["read"].found
    assert "check the credentials" in str(found["read"].advice)
    assert found["other checks"].status == "skipped"
    assert "hunter2" not in repr(found)


def test_a_bucket_that_does_not_exist_is_found(s3_server: Server) -> None:
    found = findings(ObjectStore("s3://no-such-bucket/run", **s3_server.options))
    assert found["read"].status == "fail"
    assert "create the bucket" in str(found["read"].advice)


def test_an_endpoint_that_cannot_be_reached_is_found() -> None:
    (port,) = free_ports(1)
    store = ObjectStore(
        "s3://bucket/run", endpoint=f"http://127.0.0.1:{port}", access_key_id="a", secret_access_key="b"
    )
    began = time.monotonic()
    found = findings(store)
    assert found["read"].status == "fail"
    assert "check the address or endpoint" in str(found["read"].advice)
    assert time.monotonic() - began < 30
    assert findings(HttpStore(f"http://127.0.0.1:{port}"))["read"].status == "fail"


def test_a_server_is_checked_for_reading(tmp_path: Path) -> None:
    pytest.importorskip("granian")
    from tests.serving import running

    with Publisher(str(tmp_path / "run")) as publisher:
        import numpy as np

        publisher.publish({"w": np.random.default_rng(0).normal(size=1 << 18)}, step=7)
    (tmp_path / "token").write_text("sesame")
    with running("serve", tmp_path / "run", token_file=tmp_path / "token") as server:
        found = findings(HttpStore(server.url, "sesame"))
        assert set(statuses(found).values()) <= {"ok", "skipped"}
        assert (found["write"].found, found["credentials"].found) == ("servers are read only", "a token is sent")
        assert found["link"].figures is not None
        assert "version 0, step 7" in found["run"].found
        assert "sesame" not in repr(found)
        assert findings(HttpStore(server.url, "wrong"))["read"].status == "fail"
        assert findings(HttpStore(server.url))["read"].status == "fail"
