"""`pulse doctor`: what it prints of this machine and of a location, and its exit codes."""

import os
import subprocess
from pathlib import Path

import pytest

from pulsesync.cli import doctor
from pulsesync.errors import StoreError
from pulsesync.maintain.doctor import Finding
from pulsesync.store import LocalStore
from tests.commands import PULSE, pulse
from tests.runs import publish_steps
from tests.s3 import Server

MACHINE = ["python", "packages", "extras", "kernels", "torch", "gpu", "triton", "memory", "temporary disk"]


def test_this_machine_is_checked_without_a_location() -> None:
    done = pulse("doctor")
    assert (done.code, done.err) == (0, "")
    *lines, summary = [line for line in done.out.splitlines() if not line.startswith(" ")]
    assert [line[8:26].strip() for line in lines] == MACHINE
    assert {line[:8].strip() for line in lines} <= {"ok", "warn", "skipped"}
    assert summary.endswith(("ok", "skipped", "warn"))


def test_json_has_every_check_and_a_summary(tmp_path: Path) -> None:
    publish_steps(str(tmp_path / "run"), 2)
    done = pulse("doctor", tmp_path / "run", "--json")
    *checks, summary = done.events
    assert done.code == 0
    assert [one["check"] for one in checks][:9] == MACHINE
    assert {"create if absent", "clock", "link", "run", "joining", "codec"} <= {one["check"] for one in checks}
    assert summary["healthy"] is True
    assert summary["ok"] == sum(one["status"] == "ok" for one in checks)


def test_a_failing_check_is_exit_code_1_and_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: LocalStore, key: str, data: bytes) -> None:
        raise StoreError("cannot write: \x1b[31mread-only file system", key=key)

    monkeypatch.setattr(LocalStore, "put", refuse)
    done = pulse("doctor", tmp_path / "run")
    assert done.code == 1
    assert "fail    write             cannot write: \N{REPLACEMENT CHARACTER}[31mread-only file system\n" in done.out
    assert "check with --read-only" in done.out
    assert pulse("doctor", tmp_path / "run", "--read-only").code == 0


def test_a_location_that_makes_no_sense_is_a_failing_check() -> None:
    done = pulse("doctor", "ftp://host/run")
    assert done.code == 1
    assert "fail    location" in done.out


def test_options_of_a_location_need_one() -> None:
    assert pulse("doctor", "--read-only").refused(2, "apply to a location")


def test_a_package_that_cannot_be_imported_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> Finding:
        raise ImportError("libcudart.so.12: cannot open shared object file")

    broken.__name__ = "_torch"
    finding = doctor._guarded(broken)
    assert (finding.check, finding.status) == ("torch", "fail")
    assert "libcudart" in finding.found


def test_a_package_that_may_be_left_out_breaks_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    found = doctor._version
    monkeypatch.setattr(doctor, "_version", lambda name: None if name == "ml-dtypes" else found(name))
    finding = doctor._codec(1e6)
    assert (finding.status, finding.advice) == ("skipped", "pip install ml-dtypes")


def test_kernels_that_are_not_compiled_are_found(tmp_path: Path) -> None:
    """In a process of its own, where torch fails: importing it would take longer than all else."""
    empty = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path / "empty")}
    program = f"import sys; sys.modules.update(torch=None, triton=None); {PULSE[-1]}"
    command = [*PULSE[:-1], program, "doctor"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False, env=empty)
    line = next(line for line in done.stdout.splitlines() if "kernels" in line)
    assert line.startswith("warn    kernels           0 of ")
    assert "pulsesync.warm_up()" in done.stdout


@pytest.mark.slow
def test_a_real_bucket_is_checked_with_what_codec_auto_makes_of_the_link(
    s3_server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in s3_server.environment.items():
        monkeypatch.setenv(name, value)
    done = pulse("doctor", s3_server.fresh_url())
    assert done.code == 0, done.out
    assert "credentials       from AWS_ACCESS_KEY_ID" in done.out
    assert "ok      create at once" in done.out
    assert "codec=auto would code versions as" in done.out
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hunter2")
    wrong = pulse("doctor", s3_server.fresh_url())
    assert wrong.code == 1
    assert "hunter2" not in wrong.out + wrong.err
