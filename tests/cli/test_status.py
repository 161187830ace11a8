"""`pulse status`: what it prints, its exit codes, and that nothing from outside reaches the terminal as it is."""

import json
import os
import re
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest

from pulsesync.run.heartbeats import Heartbeat
from pulsesync.store import LocalStore
from tests.commands import pulse, start
from tests.runs import publish_steps

RECORD = Heartbeat(worker="w", host="node", pid=7, package="0.1", time_s=1e9, version=1, step=1, newest=1)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    publish_steps(str(tmp_path / "run"), 2)
    return tmp_path / "run"


def put(run: Path, worker: str, **facts: object) -> None:
    LocalStore(run).put(f"heartbeats/{worker}", replace(RECORD, worker=worker, **facts).build())  # type: ignore[arg-type]


def test_a_run_without_workers_is_well(run: Path) -> None:
    done = pulse("status", run)
    assert (done.code, done.err) == (0, "")
    assert f"{run}: version 1 (step 1)" in done.out
    assert "anchor    version 0" in done.out
    assert "no worker has left a heartbeat" in done.out


def test_workers_are_shown_with_what_is_wrong(run: Path) -> None:
    put(run, "good", pause_s=0.0125, fetched_bytes=1000, recounted_s=RECORD.time_s - 20, recount_equal=True)
    assert pulse("status", run).code == 0
    put(run, "bad", error="digest mismatch", torn=True)
    put(run, "late", version=0)
    done = pulse("status", run, "--max-lag", 0)
    assert done.code == 1
    lines = {line.split()[0]: line for line in done.out.splitlines() if line}
    assert lines["good"].split()[1:5] == ["1", "0", "12.5", "ms"]
    assert re.search(r"equal, [23]\d s ago", lines["good"])  # 20, and what this test has taken
    assert lines["good"].endswith("ok")
    assert "bad is torn: its weights are between two versions and must not be used: digest mismatch" in done.out
    assert "late is behind: it is 1 versions away from the newest" in done.out
    assert done.out.endswith("3 workers: 2 need attention\n")


def test_a_worker_that_says_nothing_is_silent(run: Path) -> None:
    put(run, "w")
    then = time.time() - 60
    os.utime(run / "heartbeats" / "w", (then, then))
    assert pulse("status", run, "--max-age", 3600).code == 0
    done = pulse("status", run, "--max-age", 50)
    assert done.code == 1
    assert "w is silent" in done.out


def test_one_junk_heartbeat_is_shown_and_raises_no_alarm(run: Path) -> None:
    put(run, "good")
    LocalStore(run).put("heartbeats/junk", b"x" * 5000)
    done = pulse("status", run)
    assert done.code == 0
    assert "junk is unreadable: the heartbeat of junk has more than 2048 bytes" in done.out
    assert done.out.endswith("1 worker: all is well; 1 heartbeat cannot be read\n")


def test_json_has_everything(run: Path) -> None:
    put(run, "w", error="it failed")
    done = pulse("status", run, "--json")
    assert done.code == 1
    (facts,) = done.events
    assert facts["ok"] is False
    assert facts["newest"]["version"] == 1
    assert facts["workers"][0]["state"] == "failing"
    assert facts["workers"][0]["heartbeat"]["error"] == "it failed"


def test_nothing_hostile_reaches_the_terminal(run: Path) -> None:
    store = LocalStore(run)
    clear = "\x1b[2J\x1b]0;x\x07\u202e"
    hostile = json.loads(RECORD.build()) | {"error": clear, "host": clear, "package": clear, "follows": clear}
    store.put("heartbeats/w", json.dumps(hostile).encode())
    store.put("heartbeats/raw", clear.encode())
    store.put("heartbeats/huge", b"x" * (1 << 20))
    (run / "heartbeats" / "\x1b[31m").write_bytes(RECORD.build())
    for options in ((), ("--json",)):
        done = pulse("status", run, *options)
        assert done.code == 1
        assert all(c.isprintable() or c == "\n" for c in done.out + done.err)


def test_watch_looks_again_until_it_is_interrupted(run: Path) -> None:
    put(run, "w")
    with start("status", run, "--watch", "--interval", 0.02, "--json") as process:
        assert json.loads(process.stdout.readline())["newest"]["version"] == 1
        publish_steps(str(run), 1)
        until = time.monotonic() + 30
        while json.loads(process.stdout.readline())["newest"]["version"] < 2:
            assert time.monotonic() < until
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 130
