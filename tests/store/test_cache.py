import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pulsesync.errors import NotFoundError, StoreError
from pulsesync.store import CachedStore, Entry, LocalStore, MemoryStore, Store
from pulsesync.testing.stores import StoreTests, in_threads

LARGE = bytes(range(256)) * 10_000  # three blocks


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
    for key in ("parts/a", "layouts/a", "files/a", "manifests/0", "head"):
        store.put(key, LARGE)
    return store


@pytest.fixture
def cached(upstream: Counting, tmp_path: Path) -> CachedStore:
    return CachedStore(upstream, tmp_path / "cache")


def entries(store: CachedStore) -> list[str]:
    return sorted(path.name for path in store.folder.iterdir())


@pytest.mark.parametrize("key", ["parts/a", "layouts/a", "files/a"])
def test_what_is_named_by_its_content_is_fetched_once(cached: CachedStore, upstream: Counting, key: str) -> None:
    for _ in range(3):
        assert cached.get(key) == LARGE
    assert upstream.gets == [(key, 0, None)]


@pytest.mark.parametrize("key", ["head", "manifests/0"])
def test_everything_else_is_fetched_every_time(cached: CachedStore, upstream: Counting, key: str) -> None:
    for _ in range(3):
        assert cached.get(key) == LARGE
    assert len(upstream.gets) == 3
    assert not cached.folder.exists()


def test_a_new_process_finds_what_another_left(cached: CachedStore, upstream: Counting) -> None:
    cached.get("parts/a")
    assert CachedStore(upstream, cached.folder).get("parts/a") == LARGE
    assert len(upstream.gets) == 1


@pytest.mark.parametrize(
    ("begin", "end"),
    [(0, 10), (5, 1 << 20), (1 << 20, 2 << 20), ((1 << 20) - 1, (1 << 20) + 1), (100, None), (2_559_999, None),
     (2_560_000, None), (0, 1 << 40), (7, 3)],
)  # fmt: skip
def test_ranges_come_from_the_whole_where_it_is_there(
    cached: CachedStore, upstream: Counting, begin: int, end: int | None
) -> None:
    cached.get("parts/a")
    assert cached.get("parts/a", begin, end) == LARGE[begin:end]
    assert len(upstream.gets) == 1


def test_a_range_alone_is_kept_alone(cached: CachedStore, upstream: Counting) -> None:
    for _ in range(2):
        assert cached.get("parts/a", 10, 20) == LARGE[10:20]
        assert cached.get("parts/a", 20) == LARGE[20:]
    assert upstream.gets == [("parts/a", 10, 20), ("parts/a", 20, None)]
    assert entries(cached) == ["parts%2Fa@10-20", "parts%2Fa@20-"]


def test_a_range_that_ends_beyond_the_object_holds_all_of_it(cached: CachedStore, upstream: Counting) -> None:
    assert cached.get("parts/a", 0, len(LARGE) + 1) == LARGE
    assert cached.get("parts/a") == LARGE
    assert cached.get("parts/a", 3, 5) == LARGE[3:5]
    assert len(upstream.gets) == 1


def test_what_was_put_is_found_without_a_fetch(cached: CachedStore, upstream: Counting) -> None:
    cached.put("parts/new", memoryview(b"one"))
    assert cached.get("parts/new") == upstream.get("parts/new") == b"one"
    assert len(upstream.gets) == 1


def test_a_put_that_fails_is_not_kept(tmp_path: Path) -> None:
    class Refusing(MemoryStore):
        def put(self, key: str, data: bytes | memoryview) -> None:
            raise StoreError("no", key=key)

    store = CachedStore(Refusing(), tmp_path)
    with pytest.raises(StoreError):
        store.put("parts/a", b"")
    with pytest.raises(NotFoundError):
        store.get("parts/a")


@pytest.mark.parametrize("at", [0, 7, 8, 39, 40, 50, 1 << 20, (1 << 20) + 48, -1])
def test_a_damaged_entry_is_fetched_again(cached: CachedStore, upstream: Counting, at: int) -> None:
    cached.get("parts/a")
    path = cached.folder / "parts%2Fa"
    damaged = bytearray(path.read_bytes())
    damaged[at] ^= 1
    path.write_bytes(damaged)
    for _ in range(2):
        assert cached.get("parts/a") == LARGE
    assert len(upstream.gets) == 2


@pytest.mark.parametrize("left", [0, 5, 8, 40, 100, (1 << 20) + 40, 2_000_000])
def test_an_entry_cut_short_is_fetched_again(cached: CachedStore, upstream: Counting, left: int) -> None:
    cached.get("parts/a")
    os.truncate(cached.folder / "parts%2Fa", left)
    for _ in range(2):
        assert cached.get("parts/a") == LARGE
    assert len(upstream.gets) == 2


def test_damage_outside_a_range_does_not_spoil_it(cached: CachedStore, upstream: Counting) -> None:
    cached.get("parts/a")
    path = cached.folder / "parts%2Fa"
    damaged = bytearray(path.read_bytes())
    damaged[-1] ^= 1
    path.write_bytes(damaged)
    assert cached.get("parts/a", 0, 100) == LARGE[:100]
    assert len(upstream.gets) == 1


def test_what_is_forgotten_is_fetched_again(cached: CachedStore, upstream: Counting) -> None:
    upstream.put("parts/ab", b"")
    cached.get("parts/ab")
    cached.get("parts/a", 0, 5)
    cached.get("parts/a")
    cached.forget("parts/a")
    assert entries(cached) == ["parts%2Fab"]
    cached.get("parts/a")
    assert len(upstream.gets) == 4


def test_what_was_not_used_for_longest_goes_first(upstream: Counting, tmp_path: Path) -> None:
    store = CachedStore(upstream, tmp_path / "cache", max_bytes=3 * 1100)
    for age, name in enumerate("abc"):
        store.put(f"parts/{name}", bytes(1000))
        os.utime(store.folder / f"parts%2F{name}", (age, age))
    store.get("parts/a")
    store.put("parts/d", bytes(1000))
    assert entries(store) == ["parts%2Fa", "parts%2Fc", "parts%2Fd"]


def test_what_a_killed_process_left_goes_like_any_other(upstream: Counting, tmp_path: Path) -> None:
    store = CachedStore(upstream, tmp_path, max_bytes=3000)
    (tmp_path / ".spool-old").write_bytes(bytes(2500))
    os.utime(tmp_path / ".spool-old", (1, 1))
    store.put("parts/x", bytes(1000))
    assert entries(store) == ["parts%2Fx"]


@pytest.mark.parametrize("call", ["replace", "utime"])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EIO])
def test_a_disk_that_fails_costs_no_read(
    cached: CachedStore, number: int, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, call, fail)
    for _ in range(2):
        assert cached.get("parts/a") == LARGE
        assert cached.get("parts/a", 1, 3) == LARGE[1:3]
    cached.put("parts/b", b"1")
    assert cached.get("parts/b") == b"1"
    assert not [name for name in entries(cached) if name.startswith(".")]


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
    assert entries(cached) == ["parts%2Fa"]


def test_after_a_fetch_that_failed_the_next_one_tries(upstream: Counting, tmp_path: Path) -> None:
    store = CachedStore(upstream, tmp_path)
    with pytest.raises(NotFoundError):
        store.get("parts/late")
    upstream.put("parts/late", b"1")
    assert store.get("parts/late") == b"1"
    assert entries(store) == ["parts%2Flate"]


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


def test_of_six_processes_one_fetches_each_object(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "run")
    for number in range(20):
        store.put(f"parts/{number}", str(number).encode() * 100_000)
        store.put(f"files/{number}", b"0123456789")
    source = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2] / "src")}
    command = [sys.executable, "-c", READER, str(tmp_path / "run"), str(tmp_path / "cache")]
    readers = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=source)
        for _ in range(6)
    ]
    for reader in readers:
        assert reader.stdout is not None
        assert reader.stdout.readline() == "ready\n"
    for reader in readers:
        assert reader.stdin is not None
        reader.stdin.write("go\n")
        reader.stdin.flush()
    fetched = [line for reader in readers for line in reader.communicate(timeout=50)[0].splitlines()]
    assert [reader.returncode for reader in readers] == [0] * 6
    expected = [f"parts/{number} 0 None" for number in range(20)] + [f"files/{number} 5 9" for number in range(20)]
    assert sorted(fetched) == sorted(expected)
    assert not [path for path in (tmp_path / "cache").iterdir() if path.name.startswith(".")]


def test_a_process_killed_while_it_fetches_does_not_hold_up_the_others(tmp_path: Path) -> None:
    program = f"""
import sys, time
from pulsesync.store import CachedStore, MemoryStore

class Stuck(MemoryStore):
    def get(self, key, begin=0, end=None):
        print("fetching", flush=True)
        time.sleep(60)

CachedStore(Stuck(), {str(tmp_path)!r}).get("parts/a")
"""
    source = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2] / "src")}
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, env=source) as stuck:
        assert stuck.stdout is not None
        assert stuck.stdout.readline() == "fetching\n"
        stuck.kill()
    upstream = MemoryStore()
    upstream.put("parts/a", b"1")
    assert CachedStore(upstream, tmp_path).get("parts/a") == b"1"
    assert [path.name for path in tmp_path.iterdir()] == ["parts%2Fa"]


def test_listings_and_creations_are_the_store_s_own(tmp_path: Path) -> None:
    store: Store = CachedStore(MemoryStore(clock=lambda: 7.0), tmp_path)
    store.create("parts/a", b"1")
    assert list(store.list("parts/")) == [Entry("parts/a", 1, 7.0)]


def test_a_folder_among_the_entries_does_not_keep_the_cache_from_making_room(tmp_path: Path) -> None:
    store = CachedStore(MemoryStore(), tmp_path, max_bytes=5000)
    (tmp_path / "anchors").mkdir()
    for n in range(20):
        store.put(f"parts/{n}", bytes(1000))
    assert sum(path.stat().st_size for path in tmp_path.iterdir() if path.is_file()) <= 5000
