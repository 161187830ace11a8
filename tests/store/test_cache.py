import errno
import hashlib
import os
import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pulsesync.errors import NotFoundError, StoreError
from pulsesync.format.container import build
from pulsesync.store import CachedStore, LocalStore, MemoryStore, ObjectEntry, Store
from pulsesync.testing.stores import StoreTests, in_threads
from tests.forked import Forked

LARGE = bytes(range(256)) * 10_000  # three pieces
PIECE = 1 << 20


class TestCachedStore(StoreTests):
    @pytest.fixture
    def store(self, tmp_path: Path) -> CachedStore:
        return CachedStore(MemoryStore(), tmp_path / "cache")


class TestCachedStoreWithoutRoom(StoreTests):
    @pytest.fixture
    def store(self, tmp_path: Path) -> CachedStore:
        return CachedStore(MemoryStore(), tmp_path / "cache", max_bytes=0)


class TestCachedStoreWithoutADisk(StoreTests):
    @pytest.fixture
    def store(self, tmp_path: Path) -> CachedStore:
        (tmp_path / "file").touch()
        return CachedStore(MemoryStore(), tmp_path / "file" / "cache")


NAMED_BY_CONTENT = ("parts/a", "layouts/a", "files/a", "one/parts/a", "several/runs/files/a")
CHANGING = ("manifests/0", "head", "one/head", "parts/head", "parts/manifests/0", "one/pointers/parts/0", "parts")


class Counting(MemoryStore):
    def __init__(self) -> None:
        super().__init__()
        self.gets: list[tuple[str, int, int | None]] = []

    def get(self, key: str, begin: int = 0, end: int | None = None) -> bytes:
        self.gets.append((key, begin, end))
        return super().get(key, begin, end)


@pytest.fixture
def upstream() -> Counting:
    store = Counting()
    for key in (*NAMED_BY_CONTENT, *CHANGING):
        store.put(key, LARGE)
    return store


@pytest.fixture
def cached(upstream: Counting, tmp_path: Path) -> CachedStore:
    return CachedStore(upstream, tmp_path / "cache")


def entries(store: CachedStore) -> list[str]:
    return sorted(path.name for path in store.folder.iterdir())


def taken(store: CachedStore) -> int:
    return sum(path.stat().st_size for path in store.folder.iterdir()) if store.folder.exists() else 0


def test_what_is_named_by_its_content_is_fetched_once(cached: CachedStore, upstream: Counting) -> None:
    for key in NAMED_BY_CONTENT:
        for _ in range(3):
            assert cached.get(key) == LARGE
    assert upstream.gets == [(key, 0, None) for key in NAMED_BY_CONTENT]


def test_everything_else_is_fetched_every_time(cached: CachedStore, upstream: Counting) -> None:
    for key in CHANGING:
        for _ in range(3):
            assert cached.get(key) == LARGE
    assert [key for key, *_ in upstream.gets] == [key for key in CHANGING for _ in range(3)]
    assert not cached.folder.exists()


def test_a_new_process_finds_what_another_left(cached: CachedStore, upstream: Counting) -> None:
    cached.get("parts/a")
    assert CachedStore(upstream, cached.folder).get("parts/a") == LARGE
    assert len(upstream.gets) == 1


def test_ranges_come_from_the_whole_where_it_is_there(cached: CachedStore, upstream: Counting) -> None:
    cached.get("parts/a")
    ranges: list[tuple[int, int | None]] = [(0, 10), (5, PIECE), (PIECE, 2 * PIECE), (PIECE - 1, PIECE + 1)]
    for begin, end in (*ranges, (100, None), (2_559_999, None), (2_560_000, None), (0, 1 << 40), (7, 3)):
        assert cached.get("parts/a", begin, end) == LARGE[begin:end], (begin, end)
    assert len(upstream.gets) == 1


def test_a_range_is_kept_as_the_aligned_pieces_it_lies_in(cached: CachedStore, upstream: Counting) -> None:
    for _ in range(2):
        assert cached.get("parts/a", 10, 20) == LARGE[10:20]
        assert cached.get("parts/a", PIECE + 5, 2 * PIECE + 5) == LARGE[PIECE + 5 : 2 * PIECE + 5]
    assert upstream.gets == [("parts/a", 0, PIECE), ("parts/a", PIECE, 3 * PIECE)]
    assert entries(cached) == ["parts%2Fa@0", "parts%2Fa@1", "parts%2Fa@2", "parts%2Fa@size"]


def test_ranges_of_an_object_never_take_more_room_than_the_object(cached: CachedStore) -> None:
    for begin in range(len(LARGE) + 3 * PIECE, 0, -211_111):
        for end in (begin + 1, begin + 100_000, 1 << 40, None):
            assert cached.get("parts/a", begin, end) == LARGE[begin:end]
    assert taken(cached) <= len(LARGE) + 4 * 40  # a checksum for each of three pieces and for the size


def test_what_does_not_exist_takes_no_room(cached: CachedStore) -> None:
    for begin in (0, 5, PIECE, 100 * PIECE):
        with pytest.raises(NotFoundError):
            cached.get("parts/none", begin, begin + 5)
        with pytest.raises(NotFoundError):
            cached.size("parts/none")
    assert taken(cached) == 0
    assert entries(cached) == []


def test_what_lies_beyond_the_end_takes_no_room(cached: CachedStore) -> None:
    for number in range(10, 30):
        assert cached.get("parts/a", number * PIECE, None) == b""
        assert cached.get("parts/a", number * PIECE, (number + 1) * PIECE) == b""
    assert taken(cached) == 0


def test_a_piece_that_is_there_is_not_fetched_with_its_neighbours(cached: CachedStore, upstream: Counting) -> None:
    cached.get("parts/a", PIECE, PIECE + 1)
    assert cached.get("parts/a") == LARGE
    assert upstream.gets == [("parts/a", PIECE, 2 * PIECE), ("parts/a", 0, PIECE), ("parts/a", 2 * PIECE, None)]


def test_a_range_that_ends_beyond_the_object_holds_all_of_it(cached: CachedStore, upstream: Counting) -> None:
    assert cached.get("parts/a", 0, len(LARGE) + 1) == LARGE
    assert cached.get("parts/a") == LARGE
    assert cached.get("parts/a", 3, 5) == LARGE[3:5]
    assert cached.get("parts/a", 1 << 30) == b""
    assert cached.size("parts/a") == len(LARGE)
    assert len(upstream.gets) == 1


def test_a_size_once_known_is_known_while_the_store_is_away(tmp_path: Path) -> None:
    upstream = Away()
    for size in (0, 10, PIECE - 1, PIECE, PIECE + 1, 3 * PIECE):
        upstream.away = False
        upstream.put(f"parts/{size}", bytes(size))
        CachedStore(upstream, tmp_path).size(f"parts/{size}")
        CachedStore(upstream, tmp_path).get(f"parts/{size}")
        upstream.away = True
        assert CachedStore(upstream, tmp_path).size(f"parts/{size}") == size


class Away(Counting):
    """A store that can be away."""

    away = False
    refused = 0

    def get(self, key: str, begin: int = 0, end: int | None = None) -> bytes:
        self.check()
        return super().get(key, begin, end)

    def size(self, key: str) -> int:
        self.check()
        return super().size(key)

    def check(self) -> None:
        if self.away:
            self.refused += 1
            raise StoreError("away", retryable=True)


def test_what_was_put_is_found_without_a_fetch(cached: CachedStore, upstream: Counting) -> None:
    cached.put("parts/new", memoryview(b"one"))
    assert cached.get("parts/new") == upstream.get("parts/new") == b"one"
    assert len(upstream.gets) == 1


def test_what_is_put_over_another_is_found_with_its_own_size(cached: CachedStore) -> None:
    for data in (LARGE, b"one", LARGE[:PIECE], b"", LARGE):
        cached.put("parts/a", data)
        assert cached.get("parts/a") == data
        assert cached.get("parts/a", 0, 1 << 40) == data
        assert cached.size("parts/a") == len(data)


def test_a_put_that_fails_is_not_kept(tmp_path: Path) -> None:
    class Refusing(MemoryStore):
        def put(self, key: str, data: bytes | memoryview) -> None:
            raise StoreError("no", key=key)

    store = CachedStore(Refusing(), tmp_path)
    with pytest.raises(StoreError):
        store.put("parts/a", b"")
    with pytest.raises(NotFoundError):
        store.get("parts/a")


def cut_short(path: Path, left: int) -> None:
    os.truncate(path, min(left, path.stat().st_size - 1))


def test_a_piece_that_is_damaged_or_cut_short_is_fetched_again(upstream: Counting, tmp_path: Path) -> None:
    cases: list[tuple[Any, str, int]] = [(damage, name, at) for name in "012" for at in (0, 31, 32, 400_000, -1)]
    cases += [(cut_short, name, left) for name in "02" for left in (0, 5, 32, 100, PIECE + 31)]
    for spoil, name, number in cases:
        upstream.gets.clear()
        cached = CachedStore(upstream, tmp_path / f"{spoil.__name__} {name} {number}")
        cached.get("parts/a")
        spoil(cached.folder / f"parts%2Fa@{name}", number)
        for _ in range(2):
            assert cached.get("parts/a") == LARGE, cached.folder
        assert len(upstream.gets) == 2, cached.folder
        shutil.rmtree(cached.folder)


def test_a_damaged_size_is_found_out_again(upstream: Counting, tmp_path: Path) -> None:
    for at in (0, 32, -1):
        upstream.gets.clear()
        cached = CachedStore(upstream, tmp_path / f"{at}")
        cached.get("parts/a")
        damage(cached.folder / "parts%2Fa@size", at)
        assert cached.get("parts/a") == LARGE, at
        assert cached.size("parts/a") == len(LARGE), at
        assert len(upstream.gets) == 1, at


def test_damage_outside_a_range_does_not_spoil_it(cached: CachedStore, upstream: Counting) -> None:
    cached.get("parts/a")
    damage(cached.folder / "parts%2Fa@2", -1)
    assert cached.get("parts/a", 0, 100) == LARGE[:100]
    assert len(upstream.gets) == 1


def damage(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def test_what_is_forgotten_is_fetched_again(cached: CachedStore, upstream: Counting) -> None:
    upstream.put("parts/ab", b"")
    cached.get("parts/ab")
    cached.get("parts/a")
    cached.forget("parts/a")
    upstream.put("parts/a", b"new")
    assert cached.get("parts/a") == b"new"
    assert cached.size("parts/a") == 3
    assert len(upstream.gets) == 3


def test_what_is_forgotten_is_still_served_while_the_store_is_away(tmp_path: Path) -> None:
    upstream = Away()
    upstream.put("parts/a", LARGE)
    CachedStore(upstream, tmp_path).get("parts/a")
    upstream.away = True
    for _ in range(3):
        CachedStore(upstream, tmp_path).forget("parts/a")
        cached = CachedStore(upstream, tmp_path)
        assert cached.get("parts/a") == LARGE
        assert cached.get("parts/a", PIECE, PIECE + 5) == LARGE[PIECE : PIECE + 5]
        assert cached.size("parts/a") == len(LARGE)
    upstream.away = False
    upstream.put("parts/a", LARGE[::-1])
    assert CachedStore(upstream, tmp_path).get("parts/a") == LARGE[::-1]
    assert not [name for name in entries(cached) if name.endswith("!")]


def test_a_store_that_is_away_is_not_asked_again_at_once_for_what_was_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now = 1000.0
    monkeypatch.setattr("pulsesync.store.cache.time.monotonic", lambda: now)
    upstream = Away()
    upstream.put("parts/a", LARGE)
    cached = CachedStore(upstream, tmp_path)
    cached.get("parts/a")
    cached.forget("parts/a")
    upstream.away = True
    for _ in range(3):
        assert cached.get("parts/a") == LARGE
    assert upstream.refused == 1  # as many as it may take to time out
    assert len(caplog.records) == 1
    now += 10
    upstream.away = False
    upstream.put("parts/a", b"new")
    assert cached.get("parts/a") == b"new"


def named(kind: str) -> tuple[str, bytes]:
    """A content-addressed object with the key it has in a run: two pieces, of which a part has three sections."""
    data = LARGE[: PIECE + 99]
    if kind == "parts":
        id_, content = build("ab" * 32, [[data[:5]], [data[5:PIECE]], [data[PIECE:]]])
        return f"parts/{id_}", bytes(content)
    return f"{kind}/{hashlib.sha256(data).hexdigest()}", data


@pytest.mark.parametrize("kind", ["parts", "layouts", "files"])
def test_a_copy_with_the_right_hash_is_not_fetched_again_whatever_a_reader_reports(tmp_path: Path, kind: str) -> None:
    key, data = named(kind)
    upstream = Counting()
    upstream.put(key, data)
    cached = CachedStore(upstream, tmp_path)
    cached.get(key)
    before = entries(cached)
    for _ in range(3):
        cached.forget(key)
        assert cached.get(key) == data
    assert entries(cached) == before
    assert len(upstream.gets) == 1


@pytest.mark.parametrize("kind", ["parts", "layouts", "files"])
def test_a_copy_with_a_wrong_hash_is_fetched_again_when_a_reader_reports_it(tmp_path: Path, kind: str) -> None:
    key, data = named(kind)
    upstream, wrong = Counting(), [data[:-1], data + b"1", data[: PIECE - 1], data[:10], b""]
    wrong += [data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :] for at in (0, 200, PIECE // 2, len(data) - 1)]
    for bad in wrong:
        cached = CachedStore(upstream, tmp_path)
        cached._keep_pieces(key, 0, memoryview(bad), ended=True)  # by a process that did not check it
        upstream.put(key, data)
        assert cached.get(key) == bad
        cached.forget(key)
        assert cached.get(key) == data
        cached.delete(key)


class Damaging(Counting):
    """A store whose transfers of the bytes at one position are damaged a few times."""

    def __init__(self, at: int, times: int) -> None:
        super().__init__()
        self.at, self.times = at, times

    def get(self, key: str, begin: int = 0, end: int | None = None) -> bytes:
        data = bytearray(super().get(key, begin, end))
        if self.times and begin <= self.at < begin + len(data):
            self.times -= 1
            data[self.at - begin] ^= 1
        return bytes(data)


@pytest.mark.parametrize("kind", ["parts", "layouts", "files"])
def test_what_arrives_damaged_is_fetched_again_and_not_kept(tmp_path: Path, kind: str) -> None:
    key, data = named(kind)
    for at, times in ((0, 1), (200, 2), (PIECE // 2, 3), (PIECE + 100, 4), (PIECE + 100, 1), (0, 4)):
        upstream = Damaging(at if kind == "parts" or at < len(data) else 5, times)
        upstream.put(key, data)
        cached = CachedStore(upstream, tmp_path / f"{at} {times}")
        for _ in range(max(0, times - 2)):
            assert cached.get(key) != data  # the reader decides what it means that all copies are damaged
            assert not any(name.startswith(kind) for name in entries(cached))
        assert cached.get(key) == data
        assert len(upstream.gets) == times + 1
        assert cached.get(key) == data
        assert len(upstream.gets) == times + 1


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 3, 2, 1), (0, 2, 1, 3)])
@pytest.mark.parametrize("kind", ["parts", "files"])
def test_a_transfer_that_turns_out_to_be_damaged_ends(tmp_path: Path, kind: str, order: tuple[int, ...]) -> None:
    """Pieces of a megabyte in this order, as a server reads ahead; the last of them is never given out."""
    data = LARGE[: 3 * PIECE + 7]
    if kind == "parts":
        id_, content = build("ab" * 32, [[data[: 2 * PIECE]], [data[2 * PIECE :]]])
        key, data = f"parts/{id_}", bytes(content)
    else:
        key = f"files/{hashlib.sha256(data).hexdigest()}"
    upstream = Damaging(PIECE + 9, 1)
    upstream.put(key, data)
    cached = CachedStore(upstream, tmp_path)

    def fetch() -> None:
        for number in order:
            cached.get(key, number * PIECE, (number + 1) * PIECE)

    with pytest.raises(StoreError, match="damaged in transit") as caught:
        fetch()
    assert caught.value.retryable
    assert not any(name.startswith(kind) for name in entries(cached))
    for number in order:
        assert cached.get(key, number * PIECE, (number + 1) * PIECE) == data[number * PIECE : (number + 1) * PIECE]
    assert cached._is_right(key)
    assert not cached._arrivals._arriving
    assert not cached._arrivals._damaged


def test_of_an_object_that_is_here_in_part_the_reported_pieces_are_fetched_again(tmp_path: Path) -> None:
    key, data = named("parts")
    upstream = Counting()
    upstream.put(key, data)
    cached = CachedStore(upstream, tmp_path)
    for _ in range(2):
        assert cached.get(key, 0, 10) == data[:10]
        cached.forget(key)
    assert cached.get(key, 0, 10) == data[:10]
    assert upstream.gets == [(key, 0, PIECE)] * 3


def test_what_was_not_used_for_longest_goes_first(upstream: Counting, tmp_path: Path) -> None:
    store = CachedStore(upstream, tmp_path / "cache", max_bytes=3 * 1100)
    for age, name in enumerate("abc"):
        store.put(f"parts/{name}", bytes(1000))
        os.utime(store.folder / f"parts%2F{name}@0", (age, age))
    store.get("parts/a")
    store.put("parts/d", bytes(1000))
    assert entries(store) == ["parts%2Fa@0", "parts%2Fc@0", "parts%2Fd@0"]


def test_what_a_killed_process_left_goes_like_any_other(upstream: Counting, tmp_path: Path) -> None:
    store = CachedStore(upstream, tmp_path, max_bytes=3000)
    (tmp_path / ".spool-old").write_bytes(bytes(2500))
    os.utime(tmp_path / ".spool-old", (1, 1))
    store.put("parts/x", bytes(1000))
    assert entries(store) == ["parts%2Fx@0"]


def test_a_disk_that_fails_costs_no_read(upstream: Counting, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(number: int, *_: object) -> None:
        raise OSError(number, os.strerror(number))

    for call in ("replace", "utime"):
        for number in (errno.ENOSPC, errno.EROFS, errno.EIO):
            cached = CachedStore(upstream, tmp_path / f"{call} {number}")
            with monkeypatch.context() as patched:
                patched.setattr(os, call, partial(fail, number))
                for _ in range(2):
                    assert cached.get("parts/a") == LARGE
                    assert cached.get("parts/a", 1, 3) == LARGE[1:3]
                cached.put("parts/b", b"1")
                assert cached.get("parts/b") == b"1"
            assert not [name for name in entries(cached) if name.startswith(".")], cached.folder


def test_a_folder_that_cannot_be_written_is_still_read(
    cached: CachedStore, upstream: Counting, monkeypatch: pytest.MonkeyPatch
) -> None:
    cached.get("parts/a")
    opened = Path.open

    def read_only(path: Path, mode: str = "r", *rest: object) -> object:
        if mode != "rb":
            raise OSError(errno.EROFS, "Read-only file system")
        return opened(path, mode)

    def no_date(*_: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(Path, "open", read_only)
    monkeypatch.setattr(os, "utime", no_date)
    assert cached.get("parts/a") == LARGE
    assert len(upstream.gets) == 1
    assert cached.get("layouts/a") == LARGE


def test_threads_wait_for_the_one_that_fetches(cached: CachedStore, upstream: Counting) -> None:
    assert in_threads(8, lambda _: cached.get("parts/a")) == [LARGE] * 8
    assert len(upstream.gets) == 1
    assert entries(cached) == ["parts%2Fa@0", "parts%2Fa@1", "parts%2Fa@2", "parts%2Fa@size"]


def test_after_a_fetch_that_failed_the_next_one_tries(upstream: Counting, tmp_path: Path) -> None:
    store = CachedStore(upstream, tmp_path)
    with pytest.raises(NotFoundError):
        store.get("parts/late")
    upstream.put("parts/late", b"1")
    assert store.get("parts/late") == b"1"
    assert entries(store) == ["parts%2Flate@0"]


READER = """
import sys, time
from pulsesync.store import CachedStore, LocalStore

class Slow(LocalStore):
    def get(self, key, begin=0, end=None):
        print(key, begin, end)
        time.sleep(0.05)
        return super().get(key, begin, end)

store = CachedStore(Slow(sys.argv[1]), sys.argv[2])
print("ready", flush=True)
sys.stdin.readline()
for number in range(20):
    assert store.get(f"parts/{number}") == str(number).encode() * 100_000
    assert store.get(f"files/{number}", 5, 9) == b"56789"[:4]
"""


@pytest.mark.slow
def test_of_six_processes_one_fetches_each_object(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "run")
    for number in range(20):
        store.put(f"parts/{number}", str(number).encode() * 100_000)
        store.put(f"files/{number}", b"0123456789")
    readers = [Forked(READER, tmp_path / "run", tmp_path / "cache") for _ in range(6)]
    for reader in readers:
        assert reader.stdout.readline() == "ready\n"
    for reader in readers:
        reader.stdin.write("go\n")
        reader.stdin.flush()
    fetched = [line for reader in readers for line in reader.communicate(timeout=50)[0].splitlines()]
    assert [reader.returncode for reader in readers] == [0] * 6
    expected = [f"parts/{number} 0 None" for number in range(20)] + [
        f"files/{number} 0 1048576" for number in range(20)
    ]
    assert sorted(fetched) == sorted(expected)
    assert not [path for path in (tmp_path / "cache").iterdir() if path.name.startswith(".")]


FETCHING = """
import sys, time
from pulsesync.store import CachedStore, MemoryStore, host_lock

class Stuck(MemoryStore):
    def get(self, key, begin=0, end=None):
        print("fetching", flush=True)
        time.sleep(float(sys.argv[2]))
        return b"1"

host_lock._BEAT_S = 0.05
CachedStore(Stuck(), sys.argv[1]).get("parts/a")
"""


@contextmanager
def fetching(cache: Path, seconds: float) -> Iterator[Forked]:
    """A process that has the turn to fetch parts/a, for a while."""
    with Forked(FETCHING, cache, seconds) as process:
        assert process.stdout.readline() == "fetching\n"
        yield process


def test_a_process_killed_while_it_fetches_does_not_hold_up_the_others(tmp_path: Path) -> None:
    with fetching(tmp_path, 60):
        pass
    upstream = MemoryStore()
    upstream.put("parts/a", b"1")
    assert CachedStore(upstream, tmp_path).get("parts/a") == b"1"
    assert [path.name for path in tmp_path.iterdir()] == ["parts%2Fa@0"]


def test_a_process_that_is_stopped_while_it_fetches_does_not_hold_up_the_others(
    upstream: Counting, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pulsesync.store.host_lock.PATIENCE_S", 0.3)
    with fetching(tmp_path, 60) as stuck:
        stuck.send_signal(signal.SIGSTOP)
        begin = time.monotonic()
        assert CachedStore(upstream, tmp_path).get("parts/a") == LARGE
        assert 0.3 <= time.monotonic() - begin < 5
    assert "makes no progress" in caplog.text


def test_a_process_that_fetches_slowly_and_is_alive_is_waited_for(
    upstream: Counting, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pulsesync.store.host_lock.PATIENCE_S", 0.8)
    with fetching(tmp_path, 1.0):  # longer than the patience: a sign of life comes twenty times a second
        assert CachedStore(upstream, tmp_path).get("parts/a") == b"1"
    assert upstream.gets == []


def test_no_process_is_waited_for_without_end(
    upstream: Counting, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pulsesync.store.host_lock._LONGEST_WAIT_S", 0.2)
    with fetching(tmp_path, 60):
        assert CachedStore(upstream, tmp_path).get("parts/a") == LARGE


def test_threads_that_miss_the_same_piece_by_other_ranges_fetch_it_once(tmp_path: Path) -> None:
    class Slow(Counting):
        def get(self, key: str, begin: int = 0, end: int | None = None) -> bytes:
            time.sleep(0.1)
            return super().get(key, begin, end)

    upstream = Slow()
    upstream.put("parts/a", LARGE)
    cached = CachedStore(upstream, tmp_path)
    assert in_threads(8, lambda i: cached.get("parts/a", i, i + 9)) == [LARGE[i : i + 9] for i in range(8)]
    assert upstream.gets == [("parts/a", 0, PIECE)]


def test_the_folder_is_measured_now_and_then_and_stays_below_its_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = CachedStore(MemoryStore(), tmp_path, max_bytes=100_000)
    measured = 0
    scan = os.scandir

    def counting(folder: Path) -> object:
        nonlocal measured
        measured += 1
        return scan(folder)

    monkeypatch.setattr(os, "scandir", counting)
    for number in range(300):
        store.put(f"parts/{number}", bytes(968))
        assert taken(store) <= 100_000
    assert taken(store) > 90_000
    assert measured <= 110  # three files of 1,000 bytes go into a 32nd


def test_threads_that_write_at_the_same_time_leave_the_folder_below_its_limit(tmp_path: Path) -> None:
    cached = CachedStore(MemoryStore(), tmp_path, max_bytes=100_000)
    for turn in range(5):
        in_threads(8, lambda i, turn=turn: cached.put(f"parts/{turn}-{i}", bytes(30_000)))  # type: ignore[misc]
        assert taken(cached) <= 100_000


def test_there_is_a_limit_unless_there_is_to_be_none() -> None:
    assert CachedStore(MemoryStore(), "cache").max_bytes == 1 << 34


def test_listings_and_creations_are_the_store_s_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pulsesync.store.memory.time", SimpleNamespace(time=lambda: 7.0))
    store: Store = CachedStore(MemoryStore(), tmp_path)
    store.create("parts/a", b"1")
    assert list(store.list("parts/")) == [ObjectEntry("parts/a", 1, 7.0)]


def test_a_folder_among_the_entries_does_not_keep_the_cache_from_making_room(tmp_path: Path) -> None:
    store = CachedStore(MemoryStore(), tmp_path, max_bytes=5000)
    (tmp_path / "anchors").mkdir()
    for n in range(20):
        store.put(f"parts/{n}", bytes(1000))
    assert sum(path.stat().st_size for path in tmp_path.iterdir() if path.is_file()) <= 5000


def test_a_name_that_is_too_long_for_the_disk_costs_the_cache_alone(cached: CachedStore, upstream: Counting) -> None:
    key = "files/" + "b/" * 120 + "x"
    with pytest.raises(NotFoundError):
        cached.get(key, 0, 3 * PIECE)
    upstream.put(key, LARGE)
    assert cached.get(key, 0, 3 * PIECE) == LARGE
    assert not cached.has(key)
    cached.forget(key)
    assert cached.size(key) == len(LARGE)


def test_a_copy_that_another_process_replaced_is_checked_again(tmp_path: Path) -> None:
    key, data = named("files")
    upstream = Counting()
    upstream.put(key, data)
    cached, other = CachedStore(upstream, tmp_path), CachedStore(upstream, tmp_path)
    cached.get(key)
    cached.forget(key)  # finds that the copy is right
    for path in tmp_path.iterdir():
        path.unlink()
    other._keep_pieces(key, 0, memoryview(bytes(len(data))), ended=True)
    assert cached.get(key) == bytes(len(data))
    cached.forget(key)
    assert cached.get(key) == data


def test_the_end_of_a_reported_copy_is_known_while_the_store_is_away(tmp_path: Path) -> None:
    upstream = Away()
    upstream.put("parts/a", bytes(2 * PIECE))
    cached = CachedStore(upstream, tmp_path)
    cached.get("parts/a")
    cached.forget("parts/a")
    upstream.away = True
    for begin, end in ((PIECE, 2 * PIECE + 1), (PIECE, 4 * PIECE), (0, None), (3 * PIECE, 4 * PIECE)):
        assert cached.get("parts/a", begin, end) == bytes(2 * PIECE)[begin:end]


def test_a_right_copy_whose_size_was_never_asked_for_is_not_fetched_again(tmp_path: Path) -> None:
    data = LARGE[: 2 * PIECE]
    key = f"files/{hashlib.sha256(data).hexdigest()}"
    upstream = Away()
    upstream.put(key, data)
    cached = CachedStore(upstream, tmp_path)
    cached.get(key, 0, len(data))  # nothing says that it ends there
    cached.forget(key)
    upstream.away = True
    assert cached.get(key, 0, len(data) + 1) == data
    assert not [name for name in entries(cached) if name.endswith("!")]


def test_an_empty_object_that_is_not_here_is_not_taken_for_a_right_copy(tmp_path: Path) -> None:
    reports: list[str] = []
    upstream = MemoryStore()
    upstream.forget = reports.append  # type: ignore[attr-defined]
    key = f"files/{hashlib.sha256().hexdigest()}"
    CachedStore(upstream, tmp_path).forget(key)
    assert reports == [key]


def test_what_is_here_is_known_without_asking_the_store(cached: CachedStore, upstream: Counting) -> None:
    assert not cached.has("parts/a")
    cached.get("parts/a", PIECE, len(LARGE) + 1)
    upstream.gets.clear()
    assert cached.has("parts/a", PIECE, 2 * PIECE)
    assert cached.has("parts/a", PIECE)
    assert not cached.has("parts/a")
    assert not cached.has("parts/a", 0, 1)
    assert not cached.has("head")
    assert not upstream.gets
