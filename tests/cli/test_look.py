"""`pulse log` and `pulse verify`: what is in a run, and whether it is good."""

import http.server
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

from pulsesync.cli.log import utc
from pulsesync.format.signature import SigningKey
from pulsesync.integrations.folder import HuggingFaceFolder
from pulsesync.maintain.squash import Squasher
from pulsesync.store import LocalStore
from tests.commands import pulse
from tests.runs import parts_of, publish_steps

pytestmark = pytest.mark.usefixtures("parts_as_objects")

VERSIONS = 70  # two epochs and a bit


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("look") / "run"
    publish_steps(str(place), VERSIONS, anchor_every=1e9, files={"config.json": b"{}"})
    assert [(one.level, one.number) for one in Squasher(str(place)).run()] == [(0, 0), (0, 1), (1, 0)]
    return place


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def plain_web_server(folder: Path) -> Iterator[str]:
    """One that knows nothing of runs, and cannot list."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(folder))) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def test_the_log_shows_the_newest_first_with_anchors_and_squashes(run: Path) -> None:
    rows = pulse("log", run, "--limit", 0, "--json").events
    assert [row["version"] for row in rows if row["kind"] in ("version", "root")] == list(reversed(range(VERSIONS)))
    others = [(row["kind"], row["base"], row["version"]) for row in rows if row["kind"] not in ("version", "root")]
    assert ("squash", 0, 64) in others
    assert ("squash", 0, 32) in others
    assert ("squash", 32, 64) in others
    assert ("anchor", None, 0) in others
    text = pulse("log", run, "--limit", 3).out.splitlines()
    columns = ["version", "kind", "from", "step", "epoch", "patch", "bytes", "time", "(UTC)", "digest"]
    assert text[0].split() == columns
    assert [line.split()[4:6] for line in text[1:]] == [["2", "5"], ["2", "4"], ["2", "3"]]  # 2.10 would be before 2.9
    assert [line.split()[0] for line in text[1:]] == ["69", "68", "67"]


def test_the_log_of_a_place_that_cannot_list_is_the_same(run: Path) -> None:
    with plain_web_server(run) as url:
        for limit in (0, 10):
            assert pulse("log", url, "--limit", limit, "--json") == pulse("log", run, "--limit", limit, "--json")
        (facts,) = pulse("inspect", url, "--json").events
        assert facts["newest"] == VERSIONS - 1
        assert [(row["base"], row["version"]) for row in facts["squashes"]] == [(0, 32), (32, 64), (0, 64)]


def test_a_good_run_is_found_good_every_record_of_it(run: Path) -> None:
    *checked, summary = pulse("verify", run, "--json").events
    assert {one["key"] for one in checked} == {
        entry.key for kind in ("manifests/", "anchors/", "squashes/") for entry in LocalStore(run).list(kind)
    }
    assert all(one["ok"] for one in checked)
    assert (summary["bad"], summary["version"], summary["squash"]) == (0, VERSIONS, 3)
    assert pulse("verify", run).out.endswith("all good\n")


def damage(path: Path) -> bytes:
    before = path.read_bytes()
    path.write_bytes(before[:-1] + bytes([before[-1] ^ 1]))
    return before


@pytest.mark.parametrize(
    "key", ["manifests/0000000000000040", "squashes/01/0000000000000000", "anchors/0000000000000000"]
)
def test_a_body_that_is_damaged_is_found(run: Path, key: str) -> None:
    store = LocalStore(run)
    (part, *_) = parts_of(store, key)
    before = damage(run / part)
    try:
        done = pulse("verify", run, "--json")
    finally:
        (run / part).write_bytes(before)
    assert done.code == 1
    *checked, summary = done.events
    bad, blocked = (
        [one["key"] for one in checked if not one["ok"] and one["blocked"] == known] for known in (False, True)
    )
    assert bad == [key]
    assert (summary["bad"], summary["blocked"]) == (1, len(blocked))
    assert pulse("verify", run).code == 0


def test_one_damaged_part_is_one_fault_however_many_versions_need_it(run: Path) -> None:
    (part, *_) = parts_of(LocalStore(run), "manifests/0000000000000040")
    before = damage(run / part)
    try:
        done = pulse("verify", run)
    finally:
        (run / part).write_bytes(before)
    assert done.code == 1
    first, advice = done.err.splitlines()
    assert first.startswith("manifests/0000000000000040: ")
    assert "Restore what is bad" in advice
    assert re.search(
        r": 1 bad, and \d+ that could not be checked, because something that they need is bad$", done.out.strip()
    )


def test_a_companion_and_a_record_that_are_damaged_are_found(run: Path) -> None:
    for path in (next((run / "files").iterdir()), run / "manifests" / "0000000000000033"):
        before = path.read_bytes()
        path.write_bytes(b"{]")
        try:
            done = pulse("verify", run)
        finally:
            path.write_bytes(before)
        assert done.code == 1
        assert re.search(r"\b[1-9]\d* bad", done.out)
        assert "manifests/0000000000000033" in done.err
        assert "Restore what is bad from a backup" in done.err


def test_a_newest_version_that_is_damaged_does_not_hide_what_else_is(run: Path) -> None:
    paths = [run / "manifests" / f"{version:016d}" for version in (33, 69)]
    before = [path.read_bytes() for path in paths]
    for path in paths:
        damage(path)
    try:
        done = pulse("verify", run)
    finally:
        for path, data in zip(paths, before, strict=True):
            path.write_bytes(data)
    assert done.code == 1
    for path in paths:
        assert f"manifests/{path.name}: the record is damaged" in done.err


def test_a_damaged_record_is_named_with_its_location_and_what_to_do(run: Path) -> None:
    path = run / "manifests" / "0000000000000040"
    before = damage(path)
    try:
        done = pulse("inspect", run, "--version", 40)
    finally:
        path.write_bytes(before)
    assert done.refused(1, f"manifests/{path.name} in {run}: ")
    assert "pulse verify RUN" in done.err


def test_the_log_shows_a_bad_record_and_goes_on(run: Path) -> None:
    path = run / "manifests" / "0000000000000068"
    before = path.read_bytes()
    path.write_bytes(b"{]")
    try:
        rows = pulse("log", run, "--limit", 3, "--json").events
        assert f"manifests/0000000000000068: {rows[1]['fault']}" in pulse("log", run, "--limit", 3).out
    finally:
        path.write_bytes(before)
    assert [row.get("version") for row in rows] == [69, None, 67]
    assert rows[1]["fault"]


def test_a_run_by_somebody_else_is_not_good(run: Path) -> None:
    assert pulse("verify", run, "--trust", SigningKey.generate().public).refused(1, "not signed")


def test_a_folder_is_told_its_version_or_that_it_is_none(run: Path, tmp_path: Path) -> None:
    with HuggingFaceFolder(str(run), tmp_path / "f") as folder:
        folder.update(45)
    (told,) = pulse("verify", run, tmp_path / "f", "--json").events
    assert (told["ok"], told["version"], told["claimed"]) == (True, 45, 45)
    (tmp_path / "f" / "a" / "pulse.json").unlink()
    (told,) = pulse("verify", run, tmp_path / "f" / "a", "--json").events
    assert (told["ok"], told["version"], told["claimed"]) == (True, 45, None)
    damage(tmp_path / "f" / "a" / "model.safetensors")
    done = pulse("verify", run, tmp_path / "f")
    assert done.code == 1
    assert "not a published version" in done.out
    assert pulse("verify", run, tmp_path / "missing").refused(1, "missing")


def test_a_time_that_no_calendar_has_is_shown_in_seconds() -> None:
    assert utc(0) == "1970-01-01 00:00:00"
    assert utc(1 << 53) == "9007199254740992 s after 1970"
