"""`pulse point`, and what other commands do with pointers."""

import json
import shutil
from pathlib import Path

import pytest

from pulsesync import PointerMovedError, Subscriber, move_pointer, read_pointers
from pulsesync.cli import point as command
from pulsesync.format.signature import SigningKey
from pulsesync.integrations.folder import read_mark
from pulsesync.run import keys
from pulsesync.store import LocalStore
from tests.cli.test_look import plain_web_server
from tests.commands import pulse, start
from tests.runs import publish_steps, versions, worker

pytestmark = pytest.mark.timeout(180)  # on a machine without cached kernels the first test compiles them


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("point") / "run"
    publish_steps(str(place), 6, files={"config.json": b"{}"})
    return place


@pytest.fixture
def run(published: Path, tmp_path: Path) -> Path:
    shutil.copytree(published, tmp_path / "run")
    return tmp_path / "run"


def test_a_pointer_is_created_moved_on_and_moved_back(run: Path) -> None:
    for version, said in (
        (3, "stable was created and names version 3"),
        (5, "stable was moved from version 3 to version 5"),
        (5, "stable names version 5 already"),
        (4, "stable was moved from version 5 to version 4"),
    ):
        done = pulse("point", run, "stable", version)
        assert (done.code, done.out, done.err) == (0, f"{said}\n", "")
    assert read_pointers(str(run))["stable"].version == 4


def test_pointers_are_listed_with_version_and_step(run: Path) -> None:
    pulse("point", run, "stable", 3)
    (moved,) = pulse("point", run, "canary", 5, "--json").events
    assert (moved["event"], moved["name"], moved["version"], moved["before"]) == ("moved", "canary", 5, None)
    first, second = pulse("point", run, "--json").events
    assert (first["name"], first["version"], first["step"], first["signed_by"]) == ("canary", 5, 5, None)
    assert (second["name"], second["version"], second["step"], second["number"]) == ("stable", 3, 3, 0)
    heading, *rows = pulse("point", run).out.splitlines()
    assert heading.split()[:4] == ["pointer", "move", "version", "step"]
    assert [row.split()[:4] for row in rows] == [["canary", "0", "5", "5"], ["stable", "0", "3", "3"]]


def test_the_moves_of_one_pointer_are_listed_the_newest_first(run: Path) -> None:
    for version in (3, 5, 4):
        pulse("point", run, "stable", version)
    pulse("point", run, "canary", 1)
    assert [(row["number"], row["version"]) for row in pulse("point", run, "stable", "--json").events] == [
        (2, 4),
        (1, 5),
        (0, 3),
    ]


def test_a_run_without_pointers_says_how_to_create_one(run: Path) -> None:
    done = pulse("point", run)
    assert (done.code, done.out) == (0, "")
    assert f"pulse point {run} stable VERSION" in done.err
    assert pulse("point", run, "canary").refused(3, f"there is no pointer canary in {run}")


def test_what_cannot_be_named_is_refused(run: Path, tmp_path: Path) -> None:
    assert pulse("point", run, "stable", 99).refused(1, "version 99 is not published")
    assert pulse("point", run, "Stable", 1).refused(2, "must be 1 to 64 lower-case letters")
    assert pulse("point", run, "stable", "new").refused(2, "")
    assert pulse("point", tmp_path / "none", "stable", 1).refused(3, "there is no run")
    assert read_pointers(str(run)) == {}


def test_a_move_that_another_process_made_first_is_reported(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def lose(*_: object, **__: object) -> None:
        raise PointerMovedError("stable was moved to version 2 meanwhile, and not to 5; look", version=2)

    monkeypatch.setattr(command, "move_pointer", lose)
    assert pulse("point", run, "stable", 5).refused(1, "stable was moved to version 2 meanwhile")


def test_the_pointers_of_a_signed_run_are_moved_with_its_key(tmp_path: Path) -> None:
    run = tmp_path / "run"
    public = pulse("keygen", tmp_path / "key").out.strip()
    publish_steps(str(run), 3, signing_key=SigningKey((tmp_path / "key").read_text().strip()))
    assert pulse("point", run, "stable", 1).refused(1, "pulse point --key")
    assert pulse("point", run, "stable", 1, "--key", tmp_path / "key").code == 0
    (row,) = pulse("point", run, "--trust", public, "--json").events
    assert (row["version"], row["signed_by"]) == (1, public)
    assert "signed by (not checked)" in pulse("point", run).out
    assert "signed by (not checked)" not in pulse("point", run, "--trust", public).out
    assert pulse("point", run, "--trust", "ab" * 32).refused(1, "not trusted")


def test_an_operators_own_key_moves_pointers_and_every_command_takes_it_as_such(tmp_path: Path) -> None:
    run, trainer, operator = tmp_path / "run", tmp_path / "trainer", tmp_path / "operator"
    trust = ("--trust", pulse("keygen", trainer).out.strip())
    own = pulse("keygen", operator).out.strip()
    both = (*trust, "--trust-pointers", own)
    publish_steps(str(run), 3, signing_key=SigningKey.from_file(trainer), files={"config.json": b"{}"})
    for version in (0, 2, 1):
        assert pulse("point", run, "stable", version, "--key", operator, *trust).code == 0
    for arguments in (
        ("point", run),
        ("point", run, "stable"),
        ("status", run),
        ("verify", run),
        ("prune", run),
        ("follow", run, tmp_path / "f", "--once", "--pointer", "stable"),
    ):
        assert pulse(*arguments, *both).code == 0
        assert pulse(*arguments, *trust).code == 1, "without the operator's key, its moves are refused"
    assert [row["pointers"] for row in pulse("log", run, *both, "--json").events if row["version"] == 1] == [["stable"]]
    mark = read_mark(tmp_path / "f" / "current")
    assert mark
    assert mark.version == 1
    assert pulse("point", run, "--trust-pointers", own).refused(2, "--trust-pointers needs --trust as well")
    assert pulse("point", run, "--trust", f"{own},{trust[1]}", "--trust-pointers", own).refused(
        2, "is in both --trust and --trust-pointers"
    )
    assert pulse("point", run, "--key", trainer, "--trust-pointers", own).code == 0
    assert pulse("point", run, "stable", 2, "--key", trainer, "--trust-pointers", own).code == 0
    assert pulse("point", run, *trust, "--trust-pointers", "x").refused(2, "--trust-pointers must be a public key")


def test_a_folder_follows_a_pointer_forwards_and_backwards(run: Path, tmp_path: Path) -> None:
    place = tmp_path / "f"
    for version in (3, 5, 3, 1):
        pulse("point", run, "stable", version)
        (flip,) = pulse("follow", run, place, "--once", "--hold", 0, "--pointer", "stable", "--json").events
        assert flip["version"] == version
        mark = read_mark(place / "current")
        assert mark
        assert mark.version == version
    assert "is version 1 already" in pulse("follow", run, place, "--once", "--pointer", "stable").out


def test_a_pointer_is_followed_from_a_web_server_that_cannot_list(run: Path) -> None:
    for version in (5, 2):
        pulse("point", run, "stable", version)
    with plain_web_server(run) as url:
        sub = Subscriber(url, follow="stable", max_staleness=0)
        assert sub.sync(worker()).version == 2
        assert sub.check_fresh() == 0


def test_a_folder_whose_pointer_does_not_exist_yet_is_exit_code_3(run: Path, tmp_path: Path) -> None:
    done = pulse("follow", run, tmp_path / "f", "--once", "--pointer", "stable")
    assert done.refused(3, "has no pointer 'stable' yet")
    assert pulse("follow", run, tmp_path / "f", "--once", "--pointer", "../x").refused(2, "--pointer ../x")


def test_a_live_follower_waits_for_its_pointer_and_says_so_once(run: Path, tmp_path: Path) -> None:
    with start("follow", run, tmp_path / "f", "--pointer", "stable", "--interval", 0.05, "--json") as process:
        lines = (json.loads(line) for line in process.stdout)
        waits = [next(lines)["event"] for _ in range(2)]
        move_pointer(str(run), "stable", 2)
        flip = next(lines)
    assert waits == ["waits", "waits"]  # for a version in the folder, and for the pointer
    assert (flip["event"], flip["version"]) == ("version", 2)


def test_a_live_follower_ends_if_its_folder_is_too_old(run: Path, tmp_path: Path) -> None:
    place, store = tmp_path / "f", LocalStore(run)
    assert pulse("follow", run, place, "--version", 1, "--hold", 0).code == 0
    store.delete(keys.manifest_key(3))
    arguments = ["follow", run, place, "--hold", 0, "--interval", 0.05, "--max-staleness"]
    done = pulse(*arguments, 3)
    assert done.code == 1
    last = done.err.splitlines()[-1]
    assert "the local version is 1, 4 versions away, but the version to follow is 5: max_staleness=3" in last
    mark = read_mark(place / "current")
    assert mark
    assert mark.version == 1


def test_the_log_marks_the_versions_that_pointers_name(run: Path) -> None:
    assert "pointers" not in pulse("log", run).out
    for name, version in (("canary", 5), ("stable", 3), ("old", 3)):
        pulse("point", run, name, version)
    named = {row["key"]: row["pointers"] for row in pulse("log", run, "--json").events if row["pointers"]}
    assert named == {keys.manifest_key(5): ["canary"], keys.manifest_key(3): ["old", "stable"]}
    heading, first, *_ = pulse("log", run).out.splitlines()
    assert heading.endswith("pointers")
    assert first.endswith("canary")


def test_verify_checks_every_move(run: Path) -> None:
    for version in (3, 5, 4):
        pulse("point", run, "stable", version)
    assert "3 moves of pointers: all good" in pulse("verify", run).out
    store, other = LocalStore(run), keys.pointer_key("stable", 1)
    store.put(other, store.get(keys.pointer_key("stable", 0)))
    done = pulse("verify", run)
    assert done.code == 1
    assert f"{other}: the record is move 0" in done.err


def test_verify_finds_a_pointer_that_leads_nowhere(run: Path) -> None:
    move = move_pointer(str(run), "stable", 5)
    store = LocalStore(run)
    store.put(keys.pointer_key("stable", 0), move.build().replace(b'"version":5', b'"version":9'))
    done = pulse("verify", run, "--json")
    (bad,) = (row for row in done.events if row["event"] == "checked" and not row["ok"])
    assert (done.code, bad["key"], bad["kind"]) == (1, keys.pointer_key("stable", 0), "pointer")
    assert "names version 9" in bad["fault"]


def test_prune_says_which_pointer_keeps_it_from_deleting_more(tmp_path: Path) -> None:
    run = tmp_path / "run"
    publish_steps(str(run), 70, anchor_every=0.0)
    pulse("point", run, "stable", 69)
    pulse("point", run, "canary", 40)
    arguments = ["prune", run, "--keep-versions", 3, "--keep-hours", 0, "--grace-hours", 0]
    done = pulse(*arguments)
    assert "versions 32 to 69 are kept" in done.out
    assert f"pulse point {run} canary VERSION" in done.err
    pulse("point", run, "canary", 69)
    done = pulse(*arguments)
    assert ("versions 64 to 69 are kept" in done.out, done.err) == (True, "")
    assert versions(LocalStore(run)) == list(range(64, 70))
    assert pulse("verify", run).code == 0
