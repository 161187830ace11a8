"""What a reader, a writer and the commands say of a run that another version of the format wrote."""

import hashlib
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from pulsesync import Publisher, Subscriber, UnsupportedError
from pulsesync.format import layout as layouts
from pulsesync.format import manifest as manifests
from pulsesync.format import versions
from pulsesync.format.manifest import CHECK_BYTES, MAGIC
from pulsesync.maintain.prune import prune
from pulsesync.maintain.squash import Squasher
from pulsesync.publish.checkpoint import PublisherState
from pulsesync.run import keys
from pulsesync.state.views import new_tensors
from pulsesync.store import LocalStore
from tests import records
from tests.commands import pulse

GOLDEN = Path(__file__).parents[1] / "golden" / "v1" / "two-parts"
DRAFT = r"draft 2 of the format.*before pulsesync 0\.1\.0.*Publish the weights into a new run.*trainer's checkpoint"


LAST = keys.manifest_key(5)
STATES: list[PublisherState] = [
    {
        "run": "08ca376bcee64de235b56d466058c418",
        "version": 0,
        "step": 0,
        "digest": "c41c21dc329c221e6b5aac7eb356707bfde382a6957e1cc2feb13fdfbb9067dd",
    },
    {
        "run": "08ca376bcee64de235b56d466058c418",
        "version": 3,
        "step": 30,
        "digest": "533cc316f51d88f658fa53379586dab9eed3417686da369524682c5b30b86ae9",
    },
]


def new_weights() -> dict[str, np.ndarray]:
    (layout,) = (GOLDEN / "layouts").iterdir()
    return new_tensors(layouts.parse(layout.read_bytes()).tensors)


def with_version(folder: Path, version: int) -> Path:
    """A copy of a golden run with another version byte in every record, and checksums that fit."""
    shutil.copytree(GOLDEN, folder)
    for path in (path for place in ("manifests", "anchors") for path in (folder / place).iterdir()):
        record = bytearray(path.read_bytes()[:-CHECK_BYTES])
        record[len(MAGIC)] = version
        path.write_bytes(record + hashlib.sha256(record).digest()[:CHECK_BYTES])
    return folder


@pytest.fixture
def draft(tmp_path: Path) -> Path:
    return with_version(tmp_path / "run", 0x82)


def test_a_subscriber_refuses_a_draft_and_says_what_to_do(draft: Path) -> None:
    weights = {"w": np.ones(3, np.float32)}
    with pytest.raises(UnsupportedError, match=DRAFT):
        Subscriber(str(draft)).sync(weights)
    assert weights["w"].tolist() == [1, 1, 1]


def test_a_publisher_refuses_to_resume_a_draft_and_writes_nothing(draft: Path) -> None:
    before = {path: path.read_bytes() for path in draft.rglob("*") if path.is_file()}
    with pytest.raises(UnsupportedError, match=DRAFT), Publisher(str(draft)) as publisher:
        publisher.publish({"w": np.ones(3, np.float32)})
    assert {path: path.read_bytes() for path in draft.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("command", ["log", "verify", "squash", "prune"])
def test_a_command_refuses_a_draft_and_says_what_to_do(command: str, draft: Path) -> None:
    done = pulse(command, draft)
    assert done.code == 1, done
    assert re.search(DRAFT, done.err), done


LATER: dict[str, Callable[[records.Table], records.Table]] = {  # what a later release may write in a record
    "version": lambda table: {"format": 2},
    "kind": lambda table: {"kind": 3},
    "flag": lambda table: {"flags": (table["base"] is not None) + 2 * (table["history"] is not None) + 8},
    "part": lambda table: {"parts": [{"id": "0a" * 32, "size": 1, "form": 2}]},
    "extension": lambda table: {"extensions": [(1, b"optional"), (2, b"required")]},
}


def with_later(folder: Path, what: str) -> Path:
    """A copy of a golden run, of which a later release has written the last version."""
    shutil.copytree(GOLDEN, folder)
    table = records.table_of(manifests.parse((folder / LAST).read_bytes()))
    (folder / LAST).write_bytes(records.write(table | LATER[what](table)))
    return folder


def files_in(folder: Path) -> dict[str, bytes]:
    found = (path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in found}


@pytest.mark.parametrize("what", LATER)
def test_a_worker_keeps_its_version_until_it_is_upgraded(what: str, tmp_path: Path) -> None:
    run = with_later(tmp_path / "run", what)
    subscriber, weights = Subscriber(str(run)), new_weights()
    subscriber.sync(weights, version=4)
    before = {name: tensor.tobytes() for name, tensor in weights.items()}
    with pytest.raises(UnsupportedError, match="Upgrade pulsesync"):
        subscriber.sync(weights)
    assert {name: tensor.tobytes() for name, tensor in weights.items()} == before
    assert subscriber.version == 4


@pytest.mark.parametrize("what", LATER)
def test_what_a_later_release_wrote_is_never_pruned_squashed_or_overwritten(what: str, tmp_path: Path) -> None:
    run = with_later(tmp_path / "run", what)
    before = files_in(run)
    with pytest.raises(UnsupportedError, match="Upgrade pulsesync"):
        prune(LocalStore(run), keep_versions=1, keep_hours=0, grace_hours=0)
    with pytest.raises(UnsupportedError, match="Upgrade pulsesync"):
        Squasher(str(run)).run()
    with pytest.raises(UnsupportedError, match="Upgrade pulsesync"), Publisher(str(run)) as publisher:
        publisher.publish(new_weights())
    after = files_in(run)
    after.pop("pruned/clock")
    assert after == before


def test_objects_under_other_keys_are_never_looked_at(tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(GOLDEN, run)
    for key in ("branches/0000000000000000", "notes", "parts-index/0a", "manifests-2/0000000000000006"):
        (run / key).parent.mkdir(exist_ok=True)
        (run / key).write_bytes(b"of a later release")
    prune(LocalStore(run), keep_versions=1, keep_hours=0, grace_hours=0)
    assert Subscriber(str(run)).sync(new_weights()).version == 5
    assert list(files_in(run).values()).count(b"of a later release") == 4


@pytest.mark.parametrize("state", STATES, ids=["root", "patch"])
def test_what_a_trainers_checkpoint_holds_is_accepted_for_ever(state: PublisherState, tmp_path: Path) -> None:
    """Of 0.1.0, written out: `Publisher.state_dict()` is promised as the format is. Never change these."""
    run = tmp_path / "run"
    shutil.copytree(GOLDEN, run)
    weights = new_weights()
    Subscriber(str(run)).sync(weights)
    with Publisher(str(run)) as publisher:
        publisher.load_state_dict(state)
        assert publisher.publish(weights, step=9).version == 6
        assert publisher.state_dict().keys() == state.keys()


def test_a_later_version_asks_for_an_upgrade(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=r"format version 2; .*reads version 1\. Upgrade pulsesync"):
        Subscriber(str(with_version(tmp_path / "run", 2))).sync({"w": np.ones(3, np.float32)})


@pytest.mark.parametrize("found", [None, 7, [], "pulse-layout/10", "pulse-layout/2-draft", "pulse-pointer/1"])
def test_a_name_that_is_not_the_format_asks_for_an_upgrade(found: object) -> None:
    with pytest.raises(UnsupportedError, match=r"reads 'pulse-layout/1'\. Upgrade pulsesync"):
        versions.check_name(found, "pulse-layout/1", "the layout")


@pytest.mark.parametrize("found", ["pulse-layout/1-draft", "pulse-layout/1-draft-2"])
def test_the_name_of_a_draft_asks_for_a_new_run(found: str) -> None:
    with pytest.raises(UnsupportedError, match="new run"):
        versions.check_name(found, "pulse-layout/1", "the layout")
