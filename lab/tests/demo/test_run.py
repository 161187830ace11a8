"""Whole runs, with real processes: the same by patches as by full weights, and going on after kill -9."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pulsesync_lab.demo.run import PORTS, _free_ports
from pulsesync_lab.demo.settings import DemoSettings

pytest.importorskip("torch")

from lab.tests.demo.forked import ForkedRun
from tests.processes import Fleet, fleet

__all__ = ["fleet"]

SMALL = DemoSettings(prompts=8, group=4, shards=2, checkpoint_every=2)
SAME = ("reward", "loss", "weights_sha256", "rollouts_sha256")


def steps_of(fleet: Fleet, folder: Path, **settings: Any) -> list[dict[str, Any]]:
    with ForkedRun(fleet, folder, replace(SMALL, **settings)) as run:
        return list(run.lines())


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_in_lock_step_patches_and_full_weights_give_the_same_run_bit_for_bit(fleet: Fleet, tmp_path: Path) -> None:
    runs = {sync: steps_of(fleet, tmp_path / sync, steps=4, delay=0, sync=sync, seed=3) for sync in ("pulse", "full")}
    assert len(runs["pulse"]) == 4
    for by_patch, whole in zip(runs["pulse"], runs["full"], strict=True):
        assert {key: by_patch[key] for key in SAME} == {key: whole[key] for key in SAME}
        assert by_patch["behind"] == whole["behind"] == 0
        assert by_patch["size_bytes"] < whole["size_bytes"] / 4
    assert len({line["weights_sha256"] for line in runs["pulse"]}) == 4


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_run_goes_on_when_a_worker_and_the_trainer_are_killed(fleet: Fleet, tmp_path: Path) -> None:
    killed: set[str] = set()
    steps = []
    with ForkedRun(fleet, tmp_path, replace(SMALL, steps=9, workers=2)) as run:
        for line in run.lines():
            steps.append(line["step"])
            for name, when in (("0", 2), ("trainer", 5)):
                if line["step"] == when and name not in killed:
                    killed.add(name)
                    os.kill(run.processes[name].pid, signal.SIGKILL)
    assert killed == {"0", "trainer"}
    assert run.restarts == {"0": 1, "trainer": 1}
    assert steps[-1] == 9
    assert set(steps) == set(range(1, 10))
    final = json.loads((tmp_path / "final.json").read_text())
    assert {state["digest"] for state in final["workers"].values()} == {final["digest"]}
    assert len(final["workers"]) == 2


@pytest.mark.slow
def test_completions_are_never_further_behind_than_allowed(fleet: Fleet, tmp_path: Path) -> None:
    lines = steps_of(fleet, tmp_path, steps=5, delay=2, workers=1)
    assert max(line["behind"] for line in lines) <= 2


def test_a_trainer_ends_only_after_the_last_goodbye_was_answered() -> None:
    """A worker that gets no answer to its goodbye cannot know that the run is over, and ends with an error."""
    from pulsesync_lab.demo.channel import TrainerEndpoint, WorkerEndpoint
    from pulsesync_lab.demo.trainer import WorkQueue, serve

    answered = threading.Event()

    class SlowEndpoint(TrainerEndpoint):
        def accept(self) -> Any:
            connection = super().accept()
            send_at_once = connection.send_bytes

            def send_bytes(data: bytes) -> None:
                time.sleep(0.3)  # as a busy machine takes its time
                send_at_once(data)
                answered.set()

            connection.send_bytes = send_bytes  # type: ignore[method-assign, assignment]
            return connection

    book, office = WorkQueue(DemoSettings(workers=1), version=1, digests={1: "a"}), SlowEndpoint(b"secret")
    threading.Thread(target=serve, args=(office, book), daemon=True).start()
    desk = WorkerEndpoint(office.port, b"secret", 0.0)
    goodbye = {"worker": "worker 0", "state": {}, "goodbye": True, "version": 1, "digest": "a"}
    with ThreadPoolExecutor(1) as worker:
        answer = worker.submit(desk.ask, goodbye)
        assert book.end() == {"worker 0": {"version": 1, "digest": "a"}}
        assert answered.is_set()
        assert answer.result() == {"do": "go"}
    desk.close()
    office.close()


def test_trainers_listen_where_systems_do_not_put_others() -> None:
    """While a trainer is started again, nobody is to be given its port."""
    given = Path("/proc/sys/net/ipv4/ip_local_port_range")
    lowest = int(given.read_text().split()[0]) if given.exists() else 32_768
    if lowest <= PORTS[0]:
        pytest.skip(f"this system hands out ports from {lowest} on")
    assert all(PORTS[0] <= _free_ports(3) < lowest - 3 for _ in range(20))


BUSY = """
import threading, time
import torch
from pulsesync_lab.demo.process import leave

def answer():
    weights = torch.ones(300, 300)
    while True:
        (weights @ weights).sum()

for _ in range(4):
    threading.Thread(target=answer, daemon=True).start()
time.sleep(0.05)
print("done")
leave(0)
"""


@pytest.mark.slow
def test_a_process_ends_well_while_its_threads_are_in_torch() -> None:
    ended = subprocess.run([sys.executable, "-c", BUSY], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "done\n", "")
