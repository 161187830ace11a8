"""What a reader, a writer and the commands say of a run that another version of the format wrote."""

import hashlib
import re
import shutil
from pathlib import Path

import numpy as np
import pytest

from pulsesync import Publisher, Subscriber, UnsupportedError
from pulsesync.format import versions
from pulsesync.format.manifest import CHECK_BYTES, MAGIC
from tests.commands import pulse

GOLDEN = Path(__file__).parents[1] / "golden" / "v1" / "two-parts"
DRAFT = r"draft 2 of the format.*before pulsesync 0\.1\.0.*Publish the weights into a new run.*trainer's checkpoint"


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
