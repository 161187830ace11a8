"""A folder that is followed into: always whole, whatever happens to the process that writes it."""

import json
import os
import random
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from pulsesync import Publisher, events, listen
from pulsesync.errors import (
    ConflictError,
    MissingLinkError,
    NotFoundError,
    NothingPublishedError,
    RunForkedError,
    RunReplacedError,
    RunRolledBackError,
    StoreError,
)
from pulsesync.format.signature import SigningKey
from pulsesync.integrations.folder import HuggingFaceFolder, Identity, identify, read_mark, reading
from pulsesync.maintain.squash import Squasher
from pulsesync.run import bodies, keys, reader, reporting
from pulsesync.run.reader import RunReader
from pulsesync.state.checkpoint_files import open_checkpoint
from pulsesync.store import LocalStore, MemoryStore
from tests.commands import PULSE, pulse
from tests.forked import Forked
from tests.runs import Training, Watched, equal, kept, publish_steps
from tests.tiers import slow


class Trainer:
    """Publishes a training into a store, a version at a time."""

    def __init__(self, store: Any, **options: Any) -> None:
        self.training, self.publisher = Training(), Publisher(store, **options)
        self.versions: list[dict[str, Any]] = []

    def publish(self) -> dict[str, Any]:
        if self.versions:
            self.training.step()
        self.versions.append(kept(self.training.weights))
        self.publisher.publish(self.training.weights, step=10 * len(self.versions))
        return self.versions[-1]


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


@pytest.fixture
def trainer(store: MemoryStore) -> Trainer:
    return Trainer(store, files={"config.json": b"{}", "tokenizer.json": b"[]"})


def current(folder: Path) -> Any:
    return open_checkpoint((folder / "current").resolve()).tensors


def test_versions_alternate_between_two_copies(trainer: Trainer, store: MemoryStore, tmp_path: Path) -> None:
    with HuggingFaceFolder(store, tmp_path / "f") as folder:
        for version in range(5):
            state = trainer.publish()
            flip = folder.update()
            assert flip
            mark = flip.mark
            assert (flip.mark.version, flip.mark.step, flip.folder.name) == (
                version,
                10 * (version + 1),
                "ab"[version % 2],
            )
            assert flip.began == ("nothing", "copy", "memory", "memory", "memory")[version]
            assert equal(current(tmp_path / "f"), state)
            assert folder.update() is None
    assert read_mark(tmp_path / "f" / "current") == mark
    names = {path.name for path in (tmp_path / "f" / "current").iterdir()}
    assert names == {".lock", "config.json", "tokenizer.json", "model.safetensors", "pulse.json", "pulse.history"}


def test_every_body_is_fetched_once_for_both_copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "INLINE_BYTES", 0)
    watched = Watched()
    trainer = Trainer(watched)
    with HuggingFaceFolder(watched, tmp_path / "f") as folder:
        for _ in range(6):
            trainer.publish()
            folder.update()
    fetched = Counter(watched.fetched("parts/"))
    assert len(fetched) == 6  # an anchor, five patches
    assert set(fetched.values()) == {1}


def test_a_restart_goes_on_without_the_anchor(trainer: Trainer, store: MemoryStore, tmp_path: Path) -> None:
    for _ in range(4):
        state = trainer.publish()
        with HuggingFaceFolder(store, tmp_path / "f") as folder:
            flip = folder.update()
    assert flip
    assert flip.began == "resume"
    assert flip.sync.path == ("patch", "patch")
    assert equal(current(tmp_path / "f"), state)


def test_a_restart_at_an_epoch_start_needs_no_history_and_no_anchor(store: MemoryStore, tmp_path: Path) -> None:
    states = publish_steps(store, 35, anchor_every=1e9)
    Squasher(store).run()
    for version, path in ((32, ("anchor", "squash")), (33, None), (34, None)):
        with HuggingFaceFolder(store, tmp_path / "f") as folder:
            flip = folder.update(version)
        assert flip
        assert flip.sync.path == path if path else "anchor" not in flip.sync.path
        assert equal(current(tmp_path / "f"), states[version])


def test_a_copy_that_was_being_written_is_begun_again_from_the_current_one(
    trainer: Trainer, store: MemoryStore, tmp_path: Path
) -> None:
    for _ in range(2):
        trainer.publish()
        with HuggingFaceFolder(store, tmp_path / "f") as folder:
            folder.update()
    (tmp_path / "f" / "a" / "pulse.json").unlink()
    with (tmp_path / "f" / "a" / "model.safetensors").open("r+b") as file:
        file.seek(-100, os.SEEK_END)
        file.write(b"\xff" * 100)
    state = trainer.publish()
    with HuggingFaceFolder(store, tmp_path / "f") as folder:
        flip = folder.update()
    assert flip
    assert (flip.began, flip.sync.path) == ("copy", ("patch",))
    assert equal(current(tmp_path / "f"), state)


def test_both_copies_damaged_are_an_anchor_away_from_whole(
    trainer: Trainer, store: MemoryStore, tmp_path: Path
) -> None:
    for _ in range(2):
        trainer.publish()
        with HuggingFaceFolder(store, tmp_path / "f") as folder:
            folder.update()
    for name in "ab":
        with (tmp_path / "f" / name / "model.safetensors").open("r+b") as file:
            file.seek(-100, os.SEEK_END)
            file.write(b"\xff" * 100)
    state = trainer.publish()
    with HuggingFaceFolder(store, tmp_path / "f") as folder:
        flip = folder.update()
    assert flip
    assert flip.began == "nothing"
    assert flip.sync.path[0] == "anchor"
    assert equal(current(tmp_path / "f"), state)


def test_who_writes_into_a_copy_is_found_out_and_the_copy_mended_before_the_flip(
    trainer: Trainer, store: MemoryStore, tmp_path: Path
) -> None:
    with HuggingFaceFolder(store, tmp_path / "f") as folder:
        for _ in range(3):
            trainer.publish()
            folder.update()
        with (tmp_path / "f" / "b" / "model.safetensors").open("r+b") as file:
            file.seek(-100, os.SEEK_END)
            file.write(b"\xff" * 100)
        state = trainer.publish()
        flip = folder.update()
    assert flip
    assert flip.sync.replanned
    assert "anchor" in flip.sync.path
    assert equal(current(tmp_path / "f"), state)


def test_a_copy_whose_files_were_taken_away_is_made_again(trainer: Trainer, store: MemoryStore, tmp_path: Path) -> None:
    with HuggingFaceFolder(store, tmp_path / "f") as folder:
        for _ in range(3):
            trainer.publish()
            folder.update()
        (tmp_path / "f" / "b" / "model.safetensors").unlink()
        state = trainer.publish()
        folder.update()
    assert equal(current(tmp_path / "f"), state)


def test_a_version_can_be_asked_for_also_an_older_one(trainer: Trainer, store: MemoryStore, tmp_path: Path) -> None:
    for _ in range(4):
        trainer.publish()
    with HuggingFaceFolder(store, tmp_path / "f") as folder:
        for version in (3, 1, 2):
            flip = folder.update(version)
            assert flip
            assert flip.mark.version == version
            assert equal(current(tmp_path / "f"), trainer.versions[version])
        assert folder.update(2) is None
        with pytest.raises(MissingLinkError):
            folder.update(9)


def test_where_there_is_no_run_an_update_raises_and_a_follower_waits_and_reports_it_once(
    store: MemoryStore, tmp_path: Path
) -> None:
    reported: list[Exception] = []
    with HuggingFaceFolder(store, tmp_path / "f") as folder:
        with pytest.raises(NothingPublishedError):
            folder.update()
        thread = threading.Timer(0.1, lambda: Trainer(store).publish())
        thread.start()
        flip = next(folder.follow(0.01, reported.append))
        thread.join()
    assert flip.mark.version == 0
    assert [type(e) for e in reported] == [NothingPublishedError]


@pytest.fixture
def look_again_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "LOOK_AGAIN_S", 0.0)


def test_a_version_without_its_first_anchor_raises_and_a_follower_waits_and_reports_it_once(
    trainer: Trainer, store: MemoryStore, tmp_path: Path
) -> None:
    trainer.publish()
    trainer.publisher.flush()
    (key,) = [entry.key for entry in store.list("anchors/")]
    anchor = store.get(key)
    store.delete(key)
    reported: list[Exception] = []
    with HuggingFaceFolder(store, tmp_path / "f") as folder:
        with pytest.raises(NothingPublishedError, match="anchor") as caught:
            folder.update()
        assert caught.value.version == 0
        assert folder.current is None
        thread = threading.Timer(0.1, lambda: store.put(key, anchor))
        thread.start()
        flip = next(folder.follow(0.01, reported.append))
        thread.join()
    assert flip.mark.version == 0
    assert [type(e) for e in reported] == [NothingPublishedError]


def test_a_follower_reports_every_time_that_the_location_has_become_empty(
    look_again_at_once: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = MemoryStore()
    reported: list[bool] = []
    looks = iter(range(10))

    def between_looks(seconds: float) -> None:
        look = next(looks) if seconds else None  # none: a second look, of one update
        if look == 1:
            Trainer(store).publish()
        if look == 3:
            for key in ["head", *(entry.key for entry in store.list("manifests/"))]:
                store.delete(key)
        if look == 6:
            raise InterruptedError

    with HuggingFaceFolder(store, tmp_path / "f") as folder:
        monkeypatch.setattr(time, "sleep", between_looks)
        follower = folder.follow(0.01, lambda e: reported.append(isinstance(e, NothingPublishedError)))
        assert next(follower).mark.version == 0
        with pytest.raises(InterruptedError):
            next(follower)
    assert reported == [True, True]  # before the first version, and after all were removed


def test_a_folder_of_a_run_that_was_replaced_is_an_error_unless_asked_for(
    look_again_at_once: None, tmp_path: Path
) -> None:
    first, second = MemoryStore(), MemoryStore()
    old, new = Trainer(first), Trainer(second)
    states = [old.publish() for _ in range(3)]
    state = new.publish()
    with HuggingFaceFolder(first, tmp_path / "f") as folder:
        folder.update()
    with HuggingFaceFolder(second, tmp_path / "f") as folder:  # a follower that was restarted
        with pytest.raises(RunReplacedError):
            folder.update()
        with pytest.raises(RunReplacedError):
            next(folder.follow(0.001))
        assert equal(current(tmp_path / "f"), states[2])
    with HuggingFaceFolder(second, tmp_path / "f", follow_replaced=True) as folder:
        flip = folder.update()
        assert flip
        assert flip.mark.version == 0
        assert equal(current(tmp_path / "f"), state)
        assert folder.update() is None


@pytest.mark.parametrize("to", [3, 5], ids=["rolled back", "forked"])
def test_a_live_follower_finds_out_that_its_run_was_restored_from_a_backup(
    look_again_at_once: None, tmp_path: Path, to: int
) -> None:
    store = MemoryStore()
    trainer = Trainer(store)
    states = [trainer.publish() for _ in range(5)]
    with (
        HuggingFaceFolder(store, tmp_path / "f") as folder,
        HuggingFaceFolder(store, tmp_path / "g", follow_replaced=True) as other,
    ):
        for version in (3, 4):
            folder.update(version)
            other.update(version)
        for version in range(3, 5):
            store.delete(keys.manifest_key(version))
        store.put("head", b"2")
        if to == 5:
            again = Trainer(store)
            states = [*states[:3], again.publish(), again.publish()]
        with pytest.raises(RunForkedError if to == 5 else RunRolledBackError):
            folder.update()
        flip = other.update()
        assert flip
        assert flip.mark.version == to - 1
        assert equal(current(tmp_path / "g"), states[to - 1])


def test_files_that_are_run_or_would_replace_weights_are_left_out(store: MemoryStore, tmp_path: Path) -> None:
    bad = ["model.safetensors", "pulse.json", "pulse.history", "modeling.py", "pytorch_model.bin", "current"]
    trainer = Trainer(store, files=dict.fromkeys([*bad, "config.json"], b"{}"))
    state = trainer.publish()
    with HuggingFaceFolder(store, tmp_path / "f") as folder:
        flip = folder.update()
    assert flip
    assert sorted(flip.left_out) == sorted(bad)
    assert equal(current(tmp_path / "f"), state)
    assert not (tmp_path / "f" / "a" / "modeling.py").exists()


def test_a_damaged_companion_stops_the_flip(trainer: Trainer, store: MemoryStore, tmp_path: Path) -> None:
    trainer.publish()
    keys = [entry.key for entry in store.list("files/")]
    good = store.get(keys[0])
    store.put(keys[0], b"xx")
    with HuggingFaceFolder(store, tmp_path / "f") as folder:
        with pytest.raises(Exception, match="damaged"):
            folder.update()
        assert folder.current is None
        store.put(keys[0], good)
        assert folder.update()


def test_one_process_at_a_time_and_no_folder_of_somebody_else(store: MemoryStore, tmp_path: Path) -> None:
    with HuggingFaceFolder(store, tmp_path / "f"), pytest.raises(ConflictError, match="another process"):
        HuggingFaceFolder(store, tmp_path / "f")
    HuggingFaceFolder(store, tmp_path / "f").close()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("…")
    with pytest.raises(StoreError, match="contains other files"):
        HuggingFaceFolder(store, tmp_path / "mine")


@pytest.mark.parametrize("name", ["a", "b", ".cache"])
def test_nothing_is_written_or_deleted_where_a_link_leads(
    trainer: Trainer, store: MemoryStore, tmp_path: Path, name: str
) -> None:
    mine, folder = tmp_path / "mine", tmp_path / "f"
    mine.mkdir()
    (mine / "thesis.txt").write_text("…")
    refused = rf"{name} is a symbolic link to .*mine.*remove the link, or give another folder"
    trainer.publish()
    with HuggingFaceFolder(store, folder) as kept:
        if name != ".cache":
            (folder / name).symlink_to(mine)
            if name == "b":
                kept.update()
                trainer.publish()
            with pytest.raises(StoreError, match=refused):
                kept.update()
            (folder / name).unlink()
    (folder / name).symlink_to(mine)
    with pytest.raises(StoreError, match=refused):
        HuggingFaceFolder(store, folder)
    assert [path.name for path in mine.iterdir()] == ["thesis.txt"]


def test_files_of_a_copy_that_are_links_are_replaced(trainer: Trainer, store: MemoryStore, tmp_path: Path) -> None:
    with HuggingFaceFolder(store, tmp_path / "f") as kept:
        for _ in "ab":
            trainer.publish()
            kept.update()
    linked = []
    for path in [path for side in "ab" for path in (tmp_path / "f" / side).iterdir() if path.name != ".lock"]:
        target = tmp_path / f"mine-{path.parent.name}-{path.name}"
        path.rename(target)
        path.symlink_to(target)
        path.with_name(f".new-{path.name}").symlink_to(target)
        linked.append((target, target.read_bytes()))
    with HuggingFaceFolder(store, tmp_path / "f") as kept:
        for _ in "ab":
            trainer.publish()
            assert kept.update()
    assert all(target.read_bytes() == content for target, content in linked)


def test_what_may_pass_is_told_and_tried_again(trainer: Trainer, tmp_path: Path) -> None:
    watched = Watched()
    trainer = Trainer(watched)
    trainer.publish()
    refused = iter([True] * 3)

    def refuse(verb: str, key: str) -> None:
        if verb == "get" and next(refused, False):
            raise StoreError("away", retryable=True)

    watched.before = refuse
    told: list[Exception] = []
    with HuggingFaceFolder(watched, tmp_path / "f") as folder:
        flip = next(folder.follow(0.001, told.append))
    assert flip.mark.version == 0
    assert [str(e) for e in told] == ["away"] * 3


def bits_of(folder: Path, store: Any) -> Identity:
    return identify(RunReader(store, None), folder)


def test_identify_knows_every_version_and_what_is_none(trainer: Trainer, store: MemoryStore, tmp_path: Path) -> None:
    for _ in range(4):
        trainer.publish()
    with HuggingFaceFolder(store, tmp_path / "f") as folder:
        for version in (0, 3, 1, 2):
            folder.update(version)
            found = bits_of(tmp_path / "f", store)
            assert found.record
            assert found.record.version == version
    (tmp_path / "f" / "b" / "pulse.json").unlink()
    found = bits_of(tmp_path / "f", store)
    assert found.record
    assert found.record.version == 2
    with (tmp_path / "f" / "b" / "model.safetensors").open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\x55")
    assert bits_of(tmp_path / "f", store).record is None


def good(folder: Path, digests: dict[int, str], store: Any) -> int:
    """The version in a folder that is to be read from now on; it must be what it says, bit for bit."""
    where = (folder / "current").resolve()
    mark = read_mark(where)
    assert mark is not None
    found = bits_of(where, store)
    assert (found.digest, mark.digest) == (digests[mark.version],) * 2
    return mark.version


@pytest.mark.parametrize("locking", [True, False])
def test_readers_never_meet_a_version_that_is_not_whole(locking: bool, tmp_path: Path) -> None:
    store = MemoryStore()
    trainer = Trainer(store)
    trainer.publish()
    seen: Counter[int] = Counter()
    faults: list[BaseException] = []
    done = threading.Event()

    def load(where: Path) -> None:
        mark = read_mark(where)
        if mark is None and not locking:
            return  # it is written again already
        assert mark
        tensors, copies = open_checkpoint(where).tensors, {}
        for name in tensors:
            copies[name] = tensors[name].copy()
            time.sleep(0.02 if locking else 0)  # under the lock, as slowly as one likes
        if locking or read_mark(where) == mark:  # else it was written again meanwhile, and says so
            assert equal(copies, trainer.versions[mark.version])
            seen[mark.version] += 1

    def read() -> None:
        try:
            while not done.is_set():
                if locking:
                    with reading(tmp_path / "f") as where:
                        load(where)
                else:
                    load((tmp_path / "f" / "current").resolve())
        except BaseException as e:  # noqa: BLE001 - for the test to see
            faults.append(e)

    with HuggingFaceFolder(store, tmp_path / "f") as folder:
        folder.update()
        readers = [threading.Thread(target=read) for _ in range(2)]
        for reader in readers:
            reader.start()
        for _ in range(12):
            trainer.publish()
            folder.update()
        done.set()
        for reader in readers:
            reader.join()
    assert not faults
    assert len(seen) > 2


def test_a_copy_that_was_current_is_left_alone_for_a_while(
    trainer: Trainer, store: MemoryStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float] = []
    with HuggingFaceFolder(store, tmp_path / "f", hold_s=3600) as folder:
        for age_s in (0, 0, 600, 7200):
            trainer.publish()
            if (link := tmp_path / "f" / "current").is_symlink():
                then = time.time() - age_s
                os.utime(link, (then, then), follow_symlinks=False)
            with monkeypatch.context() as patch:
                patch.setattr(time, "sleep", waits.append)
                assert folder.update()
    assert [round(wait, -2) for wait in waits] == [3600, 3000, 0]  # none for the first


def test_reading_before_there_is_a_version_says_so(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="pulse follow"), reading(tmp_path):
        pass


@pytest.mark.timeout(120)
@pytest.mark.parametrize("kills", [5, slow(15)])
def test_a_follower_that_is_killed_at_any_moment_leaves_a_whole_version(tmp_path: Path, kills: int) -> None:
    """Kill -9: at random moments, and while a copy is being written."""
    rng, place, run = random.Random(0), tmp_path / "f", str(tmp_path / "run")
    trainer = Trainer(run, signing_key=(key := SigningKey.generate()))
    digests: dict[int, str] = {}
    store, done = LocalStore(run), threading.Event()

    def train() -> None:
        while not done.is_set():
            trainer.publish()
            done.wait(0.05)

    trainer.publish()
    thread = threading.Thread(target=train)
    thread.start()
    versions, written = [], 0
    try:
        for kill in range(kills):
            options = ("--hold", 0, "--interval", 0.01, "--trust", key.public, "--json")
            with Forked(PULSE[-1], "follow", run, place, *options, kernels=True) as process:
                if kill % 3 == 0:
                    time.sleep(rng.uniform(0.0, 0.3))
                else:
                    first = process.stdout.readline()
                    assert json.loads(first)["event"] in ("holds", "waits"), process.stderr.read()
                    deadline = time.monotonic() + 5
                    while all((place / name / "pulse.json").exists() for name in "ab") and time.monotonic() < deadline:
                        pass
                    time.sleep(rng.uniform(0, 0.06) if kill > 1 else 0)  # one at once, while it is surely written
            written += not all((place / name / "pulse.json").exists() for name in "ab")
            if (place / "current").exists():
                for version in range(len(digests), trainer.publisher.version + 1):  # type: ignore[operator]
                    digests[version] = RunReader(store, None).version(version).digest  # type: ignore[union-attr]
                versions.append(good(place, digests, store))
    finally:
        done.set()
        thread.join()
    assert versions == sorted(versions)
    assert written > kills // 6, "no kill met a copy that was being written"
    done_ = pulse("follow", run, place, "--once", "--hold", 0, "--trust", key.public, "--json")
    assert done_.code == 0
    assert equal(current(place), trainer.versions[-1])
    assert pulse("verify", run, place).code == 0


def test_a_run_of_an_adapter_is_a_folder_as_peft_and_vllm_look_for_it(
    store: MemoryStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pulsesync.state.checkpoint_files.SHARD_BYTES", 1)
    trainer = Trainer(store, files={"adapter_config.json": b"{}"})
    with HuggingFaceFolder(store, tmp_path / "f") as folder:
        for _ in range(3):
            state = trainer.publish()
            flip = folder.update()
            assert flip
            assert flip.missing == ()
            names = {path.name for path in (tmp_path / "f" / "current").iterdir()}
            assert names >= {"adapter_config.json", "adapter_model.safetensors"}
            assert not [name for name in names if name.startswith("model")]
            assert equal(current(tmp_path / "f"), state)
    found = identify(RunReader(store, None), tmp_path / "f")
    assert found.record is not None
    assert found.record.version == 2


def test_every_look_is_an_event_whether_it_finds_something_or_fails(
    trainer: Trainer, store: MemoryStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without them, an exporter of pulse follow shows a worker that is well as silent, and one that fails as well."""
    monkeypatch.setattr(reporting, "IDLE_S", 0.0)
    received: list[events.Event] = []
    with HuggingFaceFolder(store, tmp_path / "folder") as folder, listen(received.append):
        with pytest.raises(NothingPublishedError):
            folder.update()
        trainer.publish()
        trainer.publisher.flush()
        folder.update()
        folder.update()
        trainer.publish()
        trainer.publisher.flush()
        with monkeypatch.context() as patch:
            patch.setattr(HuggingFaceFolder, "_begin", lambda *_: fail())
            with pytest.raises(StoreError, match="no route"):
                folder.update()
    found = [event for event in received if isinstance(event, events.Synced | events.SyncFailed)]
    assert [type(event) for event in found] == [events.Synced, events.Synced, events.SyncFailed]
    assert [(event.version, event.newest) for event in found] == [(0, 0), (0, 0), (0, 1)]
    assert isinstance(found[1], events.Synced)
    assert found[1].path == ()


def fail() -> None:
    raise StoreError("no route", retryable=True)
