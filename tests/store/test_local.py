import os
import shutil
import socket
import time
import tracemalloc
from collections.abc import Callable
from contextlib import chdir, suppress
from pathlib import Path

import pytest

from pulsesync.errors import ConflictError, NotFoundError, StoreError
from pulsesync.store import LocalStore, size_of
from pulsesync.store.local import ServedFolder
from pulsesync.testing.stores import StoreTests
from tests.forked import Forked


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path / "run")


class TestLocalStore(StoreTests):
    races = 20

    @pytest.fixture
    def store(self, tmp_path: Path) -> LocalStore:
        return LocalStore(tmp_path / "run")


@pytest.mark.parametrize("verb", ["get", "put", "create", "delete"])
def test_a_key_that_is_a_folder_is_a_store_error(store: LocalStore, verb: str) -> None:
    store.put("a/b", b"")
    with pytest.raises(StoreError):
        getattr(store, verb)("a", *([b""] if verb in ("put", "create") else []))
    assert [entry.key for entry in store.list("a/")] == ["a/b"]


@pytest.mark.parametrize("verb", ["get", "put", "create"])
def test_a_key_below_a_file_is_a_store_error(store: LocalStore, verb: str) -> None:
    store.put("a", b"")
    with pytest.raises(StoreError):
        getattr(store, verb)("a/b", *([b""] if verb in ("put", "create") else []))


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
    processes = [Forked(RACE, tmp_path, name) for name in range(4)]
    for process in processes:
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        process.stdin.write("go\n")
        process.stdin.flush()
    won = [process.communicate(timeout=50)[0].split() for process in processes]
    assert sorted(int(attempt) for some in won for attempt in some) == list(range(200))
    store = LocalStore(tmp_path)
    for name, some in enumerate(won):
        assert all(store.get(f"m/{attempt}") == str(name).encode() for attempt in some)


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


def test_a_spool_file_is_not_listed_and_not_a_key(store: LocalStore) -> None:
    store.put("a/x", b"1")
    (store.folder / "a" / ".spool-0").write_bytes(b"half")
    assert [entry.key for entry in store.list("a/")] == ["a/x"]
    with pytest.raises(StoreError, match="cannot be a key"):
        store.put("a/.spool-0", b"")


def test_sweep_removes_what_was_spooled_more_than_an_hour_ago(store: LocalStore) -> None:
    store.put("a/x", b"1")
    old, young = store.folder / ".spool-old", store.folder / "a" / ".spool-young"
    for path, age_s in ((old, 3700), (young, 3500), (store.folder / "a" / "x", 9999)):
        path.touch()
        os.utime(path, (time.time() - age_s,) * 2)
    assert store.sweep() == 1
    assert not old.exists()
    assert young.exists()
    assert store.get("a/x") == b"1"


def test_a_file_that_vanishes_during_a_listing_is_left_out(store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    store.put("a/x", b"1")
    store.put("a/y", b"1")
    stat = Path.stat

    def vanishing(path: Path, **options: bool) -> os.stat_result:
        if path.name == "x":
            path.unlink(missing_ok=True)
        return stat(path, **options)

    monkeypatch.setattr(Path, "stat", vanishing)
    assert [entry.key for entry in store.list("a/")] == ["a/y"]


def test_a_folder_that_cannot_be_listed_is_not_an_empty_one(store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    store.put("a/x", b"1")

    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(StoreError, match="Permission denied"):
        list(store.list("a/"))


@pytest.mark.parametrize("verb", ["put", "create"])
def test_what_was_written_is_on_the_disk_with_its_name_and_every_new_folder(
    tmp_path: Path, verb: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = record_disk(monkeypatch)
    store = LocalStore(tmp_path / "new" / "run")
    getattr(store, verb)("a/b/x", b"1")
    run = tmp_path / "new" / "run"
    made = [("sync", run.parent.parent), ("sync", run.parent), ("sync", run), ("sync", run / "a")]
    written = [("sync", "spool"), ("name", run / "a" / "b" / "x"), ("sync", run / "a" / "b")]
    assert steps == [*made, *written]
    steps.clear()
    getattr(store, verb)("a/b/y", b"1")
    assert steps == [("sync", "spool"), ("name", run / "a" / "b" / "y"), ("sync", run / "a" / "b")]


def test_folders_that_another_process_made_are_synced_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    LocalStore(tmp_path / "run").put("a/x", b"1")
    steps = record_disk(monkeypatch)
    LocalStore(tmp_path / "run").put("a/x", b"1")
    assert steps[:2] == [("sync", tmp_path), ("sync", tmp_path / "run")]


def record_disk(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, object]]:
    """What is synced and what gets its name, in order."""
    steps: list[tuple[str, object]] = []
    sync, replace, link = os.fsync, os.replace, os.link

    def fsync(handle: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{handle}"))
        steps.append(("sync", "spool" if path.name.startswith(".spool-") else path))
        sync(handle)

    def naming(call: Callable[[Path, Path], None]) -> Callable[[Path, Path], None]:
        def named(spool: Path, path: Path) -> None:
            steps.append(("name", path))
            call(spool, path)

        return named

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "replace", naming(replace))
    monkeypatch.setattr(os, "link", naming(link))
    return steps


def test_a_parent_that_may_not_be_read_is_no_obstacle(store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    open_ = os.open

    def refuse(path: Path, *flags: int) -> int:
        if Path(path) == store.folder.parent:
            raise PermissionError(13, "Permission denied")
        return open_(path, *flags)

    monkeypatch.setattr(os, "open", refuse)
    store.put("x", b"1")
    assert store.get("x") == b"1"


def test_a_run_whose_folders_were_removed_is_written_again(store: LocalStore) -> None:
    store.put("a/x", b"1")
    shutil.rmtree(store.folder)
    store.put("a/x", b"2")
    assert store.get("a/x") == b"2"


def test_a_huge_range_takes_no_more_memory_than_the_object(store: LocalStore) -> None:
    store.put("x", b"12345")
    tracemalloc.start()
    try:
        assert store.get("x", 1, 1 << 30) == b"2345"
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


NO_OBJECTS = {
    "a folder": "folder",
    "below a file": "file/x",
    "a name that no folder can hold": "a" * 300,
    "a path that is too long": "/".join(["a" * 200] * 30),
    "a FIFO": "fifo",
    "a socket": "socket",
    "a device": "null",
    "links in a circle": "circle",
    "a link that leads nowhere": "dangling",
    "a temporary file": ".spool-1",
}


def fill(folder: Path) -> None:
    """Put everything into a folder that a file system can hold and that is not an object."""
    (folder / "folder").mkdir(parents=True)
    for name in ("file", ".spool-1"):
        (folder / name).write_bytes(b"1")
    os.mkfifo(folder / "fifo")
    with socket.socket(socket.AF_UNIX) as bound, chdir(folder):  # the path of a socket is limited to 100 bytes
        bound.bind("socket")
    (folder / "null").symlink_to("/dev/null")
    (folder / "circle").symlink_to("circle")
    (folder / "dangling").symlink_to("nowhere")


@pytest.mark.parametrize("kind", [LocalStore, ServedFolder])
@pytest.mark.parametrize("key", NO_OBJECTS.values(), ids=NO_OBJECTS)
def test_what_is_not_a_file_is_not_found(tmp_path: Path, kind: type[LocalStore], key: str) -> None:
    fill(tmp_path / "run" / "x")
    store = kind(tmp_path / "run")
    for read in (store.get, store.size):
        with pytest.raises(NotFoundError):
            read(f"x/{key}")


@pytest.mark.parametrize("kind", [LocalStore, ServedFolder])
def test_what_is_not_a_file_is_not_listed(tmp_path: Path, kind: type[LocalStore]) -> None:
    fill(tmp_path / "run" / "x")
    store = kind(tmp_path / "run")
    assert [entry.key for entry in store.list("x/")] == ["x/file"]
    for prefix in ("x/file/", "x/circle/", "x/fifo/", "a" * 300 + "/"):
        assert list(store.list(prefix)) == []


@pytest.fixture
def linked(tmp_path: Path) -> Path:
    """A run, reached by a link, with links in it: to files and folders inside and outside."""
    outside, run = tmp_path / "outside", tmp_path / "disk" / "run"
    LocalStore(outside).put("parts/secret", b"secret")
    LocalStore(run).put("parts/a", b"1")
    LocalStore(run).put("elsewhere/b", b"22")
    (run / "parts" / "inside").symlink_to(run / "elsewhere" / "b")
    (run / "parts" / "outside").symlink_to(outside / "parts" / "secret")
    (run / "layouts").symlink_to(outside / "parts")
    (run / "files").symlink_to("elsewhere")
    (run / "up").symlink_to("..")
    (tmp_path / "link").symlink_to(run)
    return tmp_path / "link"


def test_the_owner_of_a_run_may_keep_some_of_it_elsewhere(linked: Path) -> None:
    store = LocalStore(linked)
    assert store.get("layouts/secret") == b"secret"
    assert [entry.key for entry in store.list("layouts/")] == ["layouts/secret"]


def test_a_served_folder_is_not_left_through_a_link(linked: Path) -> None:
    store = ServedFolder(linked)
    for key in ("parts/outside", "layouts/secret", "up/run/parts/a", "up/run/parts/outside"):
        for read in (store.get, store.size):
            if key == "up/run/parts/a":
                assert read(key) in (b"1", 1)  # it leads out, and in again
                continue
            with pytest.raises(NotFoundError):
                read(key)
    assert [entry.key for entry in store.list("parts/")] == ["parts/a", "parts/inside"]
    assert list(store.list("layouts/")) == []
    assert list(store.list("up/")) == []


def test_links_inside_a_served_folder_are_followed(linked: Path) -> None:
    store = ServedFolder(linked)
    assert [store.get(key) for key in ("parts/a", "parts/inside", "files/b")] == [b"1", b"22", b"22"]
    assert [entry.key for entry in store.list("files/")] == ["files/b"]
    assert size_of(store, "parts/inside") == 2


def test_a_link_that_appears_between_the_check_and_the_opening_is_not_followed(
    linked: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, target = ServedFolder(linked), linked / "parts" / "a"
    resolve = os.path.realpath

    def replacing(path: Path) -> str:
        real = resolve(path)
        if Path(real).name == "a" and not target.is_symlink():
            target.unlink()
            target.symlink_to(linked.parent / "outside" / "parts" / "secret")
        return real

    monkeypatch.setattr(os.path, "realpath", replacing)
    with pytest.raises(NotFoundError):
        store.get("parts/a")


def test_a_served_folder_is_not_written(linked: Path) -> None:
    store = ServedFolder(linked)
    writes: list[Callable[[], object]] = [
        lambda: store.put("x", b""),
        lambda: store.create("x", b""),
        lambda: store.delete("parts/a"),
    ]
    for write in writes:
        with pytest.raises(StoreError, match="a ServedFolder is read-only"):
            write()
    assert store.get("parts/a") == b"1"


def test_reading_leaves_no_file_open(linked: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for store in (LocalStore(linked), ServedFolder(linked)):
        for key in ("parts/a", "parts/outside", "parts", "files/b", "parts/a/b", "none/none"):
            with suppress(NotFoundError):
                store.get(key)
    assert len(os.listdir("/proc/self/fd")) == before


def test_each_link_that_leads_out_of_a_served_folder_is_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    LocalStore(tmp_path / "disk").put("a", b"a")
    LocalStore(tmp_path / "disk").put("b", b"b")
    LocalStore(tmp_path / "run").put("files/c", b"c")
    (tmp_path / "run" / "parts").symlink_to(tmp_path / "disk")
    (tmp_path / "run" / "files" / "a").symlink_to(tmp_path / "disk" / "a")
    served = ServedFolder(tmp_path / "run")
    for key in ("parts/a", "parts/b", "parts/none", "files/a", "files/none", "parts/a"):
        with pytest.raises(NotFoundError):
            served.get(key)
    assert [entry.key for prefix in ("parts/", "files/") for entry in served.list(prefix)] == ["files/c"]
    assert [record.getMessage().partition(",")[0] for record in caplog.records] == [
        f"Not read: {tmp_path}/run/parts is a link to {tmp_path}/disk",
        f"Not read: {tmp_path}/run/files/a is a link to {tmp_path}/disk/a",
    ]
