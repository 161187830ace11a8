import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from pulsesync.errors import ConflictError, NotFoundError, StoreError
from pulsesync.store import LocalStore, open_store


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path / "run")


def test_what_was_put_is_got(store: LocalStore) -> None:
    store.put("parts/a", b"one")
    assert store.get("parts/a") == b"one"


def test_put_replaces(store: LocalStore) -> None:
    store.put("head", b"1")
    store.put("head", b"2")
    assert store.get("head") == b"2"


@pytest.mark.parametrize("key", ["head", "manifests/0", "a/b/c"])
def test_what_is_not_there_is_not_found(store: LocalStore, key: str) -> None:
    with pytest.raises(NotFoundError) as caught:
        store.get(key)
    assert caught.value.key == key


def test_create_creates_once(store: LocalStore) -> None:
    store.create("manifests/0", b"first")
    with pytest.raises(ConflictError) as caught:
        store.create("manifests/0", b"second")
    assert caught.value.key == "manifests/0"
    assert store.get("manifests/0") == b"first"


def test_create_after_delete_creates(store: LocalStore) -> None:
    store.create("a", b"1")
    store.delete("a")
    store.create("a", b"2")
    assert store.get("a") == b"2"


def test_deleting_nothing_is_no_error(store: LocalStore) -> None:
    store.delete("nothing/there")


def test_list_yields_keys_below_a_prefix_in_order(store: LocalStore) -> None:
    for key in ("parts/b", "parts/a", "manifests/1", "parts/c/d", "head"):
        store.put(key, b"")
    assert list(store.list("parts/")) == ["parts/a", "parts/b", "parts/c/d"]


def test_listing_where_nothing_is_yields_nothing(store: LocalStore) -> None:
    assert list(store.list("parts/")) == []


def test_list_is_sorted_by_key_across_folders(store: LocalStore) -> None:
    for key in ("x/a/b", "x/a-b"):
        store.put(key, b"")
    assert list(store.list("x/")) == ["x/a-b", "x/a/b"]


ESCAPES = ["", "/", "/etc/passwd", "../x", "a/../../x", "a/..", "./a", "a//b", "a/", "..\\x", "a\\..\\x"]


@pytest.mark.parametrize("key", ESCAPES)
def test_keys_that_leave_the_folder_are_refused(store: LocalStore, key: str) -> None:
    for verb in (store.get, store.delete, lambda k: store.put(k, b""), lambda k: store.create(k, b"")):
        with pytest.raises(StoreError, match="not a key"):
            verb(key)


@pytest.mark.parametrize("prefix", ["../", "/", "a/../../"])
def test_prefixes_that_leave_the_folder_are_refused(store: LocalStore, prefix: str) -> None:
    with pytest.raises(StoreError, match="not a key"):
        list(store.list(prefix))


def test_a_key_with_a_nul_is_refused(store: LocalStore) -> None:
    with pytest.raises(StoreError):
        store.get("a\0b")


@pytest.mark.parametrize("verb", ["get", "put", "create", "delete"])
def test_a_key_that_is_a_folder_is_a_store_error(store: LocalStore, verb: str) -> None:
    store.put("a/b", b"")
    with pytest.raises(StoreError):
        getattr(store, verb)("a", *([b""] if verb in ("put", "create") else []))
    assert list(store.list("a/")) == ["a/b"]


@pytest.mark.parametrize("verb", ["get", "put", "create"])
def test_a_key_below_a_file_is_a_store_error(store: LocalStore, verb: str) -> None:
    store.put("a", b"")
    with pytest.raises(StoreError):
        getattr(store, verb)("a/b", *([b""] if verb in ("put", "create") else []))


def test_of_sixteen_threads_one_creates(store: LocalStore) -> None:
    for attempt in range(20):
        ready = threading.Barrier(16)

        def create(name: int, key: str = f"manifests/{attempt}", ready: threading.Barrier = ready) -> bool:
            ready.wait()
            try:
                store.create(key, str(name).encode() * 1000)
            except ConflictError:
                return False
            return True

        with ThreadPoolExecutor(16) as pool:
            won = list(pool.map(create, range(16)))
        assert sum(won) == 1
        assert store.get(f"manifests/{attempt}") == str(won.index(True)).encode() * 1000
    assert len(list(store.list("manifests/"))) == 20


RACE = """
import sys, time
from pulsesync.errors import ConflictError
from pulsesync.store import LocalStore
store, name = LocalStore(sys.argv[1]), sys.argv[2]
print("ready", flush=True)
sys.stdin.readline()
for attempt in range(200):
    try:
        store.create(f"m/{attempt}", name.encode())
        print(attempt)
    except ConflictError:
        pass
"""


def test_of_four_processes_one_creates(tmp_path: Path) -> None:
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", RACE, str(tmp_path), str(name)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=with_source(),
        )
        for name in range(4)
    ]  # fmt: skip
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    won = [process.communicate(timeout=50)[0].split() for process in processes]
    assert sorted(int(attempt) for some in won for attempt in some) == list(range(200))
    store = LocalStore(tmp_path)
    for name, some in enumerate(won):
        assert all(store.get(f"m/{attempt}") == str(name).encode() for attempt in some)


def with_source() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2] / "src")}


def test_nobody_ever_sees_part_of_an_object(store: LocalStore) -> None:
    sizes = (1 << 20, (1 << 20) + 1)
    store.put("a/x", bytes(sizes[0]))
    stop = threading.Event()

    def write() -> None:
        for turn in range(60):
            store.put("a/x", bytes([turn]) * sizes[turn % 2])
        stop.set()

    with ThreadPoolExecutor(2) as pool:
        writing = pool.submit(write)
        while not stop.is_set():
            data = store.get("a/x")
            assert len(data) in sizes
            assert data == data[:1] * len(data)
            assert list(store.list("a/")) == ["a/x"]
        writing.result()


def test_no_spool_file_is_left_behind(store: LocalStore) -> None:
    store.put("a/x", b"1")
    store.create("a/y", b"1")
    with pytest.raises(ConflictError):
        store.create("a/y", b"2")
    assert sorted(p.name for p in (store.folder / "a").iterdir()) == ["x", "y"]


@pytest.mark.parametrize("verb", ["put", "create"])
def test_a_write_that_fails_is_a_store_error_and_leaves_nothing(
    store: LocalStore, verb: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.put("a/x", b"before")

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StoreError, match="No space left"):
        getattr(store, verb)("a/y", b"1")
    monkeypatch.undo()
    assert [p.name for p in (store.folder / "a").iterdir()] == ["x"]


@pytest.mark.parametrize("call", ["link", "replace"])
def test_a_file_system_that_cannot_is_a_store_error(
    store: LocalStore, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, call, refuse)
    with pytest.raises(StoreError, match="not permitted"):
        (store.create if call == "link" else store.put)("a", b"")


def test_other_users_may_read_as_far_as_the_umask_lets_them(store: LocalStore) -> None:
    before = os.umask(0o022)
    try:
        store.put("x", b"")
        store.create("y", b"")
    finally:
        os.umask(before)
    assert [(store.folder / name).stat().st_mode & 0o777 for name in "xy"] == [0o644, 0o644]


def test_a_location_is_a_folder_with_or_without_a_scheme(tmp_path: Path) -> None:
    for location in (str(tmp_path), f"file://{tmp_path}"):
        store = open_store(location)
        assert isinstance(store, LocalStore)
        assert store.folder == tmp_path


def test_an_unknown_scheme_is_refused() -> None:
    with pytest.raises(ValueError, match="s3://"):
        open_store("s3://bucket/run")
