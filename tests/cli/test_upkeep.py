"""`pulse squash`, `pulse prune`, `pulse keygen`, `pulse delegate`."""

import json
import stat
from pathlib import Path

import pytest

from pulsesync.format.signature import SigningKey
from pulsesync.run import keys
from pulsesync.store import LocalStore
from tests.commands import pulse
from tests.runs import publish_steps, versions


def test_a_key_is_written_once_and_for_its_owner_alone(tmp_path: Path) -> None:
    done = pulse("keygen", tmp_path / "key")
    assert done.code == 0
    assert stat.S_IMODE((tmp_path / "key").stat().st_mode) == 0o600
    secret = (tmp_path / "key").read_text()
    assert done.out.strip() == SigningKey(secret.strip()).public
    assert secret.strip() not in done.out
    assert pulse("keygen", tmp_path / "key").refused(1, "never overwritten")
    assert (tmp_path / "key").read_text() == secret
    assert pulse("keygen", tmp_path / "missing" / "key").refused(1, "cannot write")


def test_a_delegate_squashes_and_readers_who_trust_the_run_follow(tmp_path: Path) -> None:
    run = tmp_path / "run"
    trainer, squasher = (pulse("keygen", tmp_path / name).out.strip() for name in ("trainer", "squasher"))
    publish_steps(str(run), 66, anchor_every=1e9, signing_key=SigningKey((tmp_path / "trainer").read_text().strip()))
    assert pulse("delegate", run, squasher, "--key", tmp_path / "squasher").refused(1, "not trusted")
    said = pulse("delegate", run, squasher, "--key", tmp_path / "trainer")
    pulse("delegate", run, squasher, "--key", tmp_path / "trainer", "--out", tmp_path / "said")
    assert json.loads((tmp_path / "said").read_text()) == json.loads(said.out)
    (tmp_path / "wrong").write_text("{}")
    given = ["--key", tmp_path / "squasher", "--trust", trainer]
    assert pulse("squash", run, *given, "--delegation", tmp_path / "wrong").refused(2, "pulse delegate")
    *written, summary = pulse("squash", run, *given, "--delegation", tmp_path / "said", "--json").events
    assert [(one["level"], one["base"], one["version"]) for one in written] == [(0, 0, 32), (0, 32, 64), (1, 0, 64)]
    assert summary["written"] == 3
    assert pulse("squash", run, *given, "--delegation", tmp_path / "said").out == (
        "0 squashed patches written: one replaces 32 patches, and the epoch that begins at version 64 has 1 so far\n"
    )
    assert pulse("verify", run, "--trust", trainer).code == 0
    flip, *_ = pulse("follow", run, tmp_path / "f", "--once", "--trust", trainer, "--json").events
    assert flip["path"] == ["anchor", "squash", "patch"]


def test_without_an_anchor_nothing_is_squashed_and_the_reason_is_given(tmp_path: Path) -> None:
    publish_steps(str(tmp_path / "run"), 1)
    LocalStore(tmp_path / "run").delete(keys.anchor_key(0))
    found = pulse("squash", tmp_path / "run").out
    assert (
        found == "0 squashed patches written: the run has no anchor yet, and the first squashed patch begins at one\n"
    )


def test_a_run_is_pruned_and_can_still_be_followed(tmp_path: Path) -> None:
    run = tmp_path / "run"
    publish_steps(str(run), 70, anchor_every=0.0)
    done = pulse("prune", run, "--keep-versions", 3, "--keep-hours", 0, "--grace-hours", 0, "--json")
    (report,) = done.events
    assert (report["kept_from"], report["newest"], report["versions"]) == (64, 69, 64)
    assert versions(LocalStore(run)) == list(range(64, 70))
    assert pulse("prune", run, "--grace-hours", 0).out.startswith("versions 64 to 69 are kept; 0 versions")
    assert pulse("verify", run).code == 0
    assert pulse("follow", run, tmp_path / "f", "--once").code == 0
    assert [row["version"] for row in pulse("log", run, "--json").events][-1] == 64


@pytest.mark.parametrize("options", [["--keep-hours", "-1"], ["--keep-versions", "0"]])
def test_what_cannot_be_kept_is_refused(options: list[str], tmp_path: Path) -> None:
    assert pulse("prune", tmp_path, *options).refused(2, options[0])
