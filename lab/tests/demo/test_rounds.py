"""Several trainers in real processes: the same weights for all, the same run every time, and going on after kill -9."""

import json
import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pulsesync.errors import PulseError, VerificationError
from pulsesync.loco import PulseLoCo
from pulsesync.run.reader import RunReader
from pulsesync.run.subscriber import Subscriber
from pulsesync.store import LocalStore
from pulsesync_lab.demo.run import DemoRun, _free_ports
from pulsesync_lab.demo.settings import DemoSettings

torch = pytest.importorskip("torch")

from lab.tests.demo.forked import ForkedRun  # noqa: E402
from pulsesync_lab.demo.policy import Policy  # noqa: E402
from pulsesync_lab.demo.rounds import Peer  # noqa: E402 - needs torch
from pulsesync_lab.demo.sync import values  # noqa: E402
from pulsesync_lab.demo.trainer import WorkQueue  # noqa: E402
from tests.processes import Fleet, fleet  # noqa: E402

__all__ = ["fleet"]

SMALL = DemoSettings(trainers=2, workers=2, sync_every=2, prompts=4, group=4, shards=2, checkpoint_every=2)
CHECKPOINTS = ("checkpoint.pt", "checkpoint-1.pt")
SAME = ("reward", "loss", "weights_sha256", "rollouts_sha256", "loco")


def shared_states(folder: Path) -> list[Any]:
    """What each trainer's checkpoint says all of them have."""
    return [torch.load(folder / name, weights_only=True)["loco"]["shared"][0] for name in CHECKPOINTS]


def versions_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "versions.jsonl").read_text().splitlines() if line]


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_in_lock_step_two_trainers_come_to_the_same_weights_every_time(fleet: Fleet, tmp_path: Path) -> None:
    runs = []
    for name in ("one", "two"):
        with ForkedRun(fleet, tmp_path / name, replace(SMALL, steps=6, delay=0, seed=3)) as run:
            runs.append(list(run.lines()))
    for first, second in zip(*runs, strict=True):
        for line in (first, second):
            del line["loco"]["sent_bytes"], line["loco"]["received_bytes"]  # who decides a round writes a record more
        assert {key: first[key] for key in SAME} == {key: second[key] for key in SAME}
    one, lines = tmp_path / "one", runs[0]
    assert [line["step"] for line in lines] == [2, 4, 6]
    assert all(line["loco"]["trainers"] == ["trainer", "trainer-1"] for line in lines)
    assert [list(line["versions"]) for line in lines] == [["0"], ["1"], ["2"]]  # each round learns from its own version
    assert len({line["weights_sha256"] for line in lines}) == 3
    mine, theirs = shared_states(one)
    assert mine["round"] == theirs["round"] == 3
    assert torch.equal(mine["theta"].view(torch.int32), theirs["theta"].view(torch.int32))
    versions, final = versions_of(one), json.loads((one / "final.json").read_text())
    assert [line["round"] for line in versions] == [0, 1, 2, 3]
    assert final["digest"] == versions[-1]["digest"]
    assert {name: state["digest"] for name, state in final["workers"].items()} == {
        "worker 0": final["digest"],
        "worker 1": final["digest"],
    }
    published = {name: torch.zeros_like(weight) for name, weight in values(Policy().state_dict()).items()}
    assert Subscriber(str(one / "store")).sync(published).version == 3
    flat = torch.cat([weight.flatten() for weight in published.values()])
    assert torch.equal(flat.view(torch.int16), mine["theta"].bfloat16().view(torch.int16))
    own = [torch.load(one / name, weights_only=True)["loco"]["private"]["weights"][0] for name in CHECKPOINTS]
    assert all(not torch.equal(weights, mine["theta"]) for weights in own)  # policies hold what was not sent, too
    newest = RunReader(LocalStore(one / "store"), None).newest()
    assert newest is not None
    assert (newest.version, newest.step) == (3, 6)


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_run_goes_on_when_a_trainer_the_first_trainer_and_a_worker_are_killed(fleet: Fleet, tmp_path: Path) -> None:
    killed: set[str] = set()
    settings = replace(SMALL, steps=14, loco="exact")
    with ForkedRun(fleet, tmp_path, settings) as run:
        for line in run.lines():
            for name, when in (("trainer-1", 2), ("trainer", 6), ("0", 10)):
                if line["step"] >= when and name not in killed:
                    killed.add(name)
                    os.kill(run.processes[name].pid, signal.SIGKILL)
                    break
    assert killed == {"trainer", "trainer-1", "0"}
    said = {name: (tmp_path / f"{name}.log").read_text() for name in sorted(killed)}
    assert run.restarts == {"trainer": 1, "trainer-1": 1, "0": 1}, said
    mine, theirs = shared_states(tmp_path)
    assert mine["round"] == theirs["round"] == 7
    assert torch.equal(mine["theta"].view(torch.int32), theirs["theta"].view(torch.int32))
    final = json.loads((tmp_path / "final.json").read_text())
    assert {state["digest"] for state in final["workers"].values()} == {final["digest"]}
    assert versions_of(tmp_path)[-1]["round"] == 7


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    replace(SMALL, store=str(tmp_path / "store"), port=_free_ports(2), secret="x").save(tmp_path)
    return tmp_path


@pytest.fixture
def second(folder: Path) -> Iterator[Peer]:
    peer = Peer(folder, 1)
    yield peer
    peer.office.close()


def test_a_trainer_that_is_not_where_the_first_is_says_so(folder: Path, second: Peer) -> None:
    told = {"round": 0, "version": 0, "digest": "d", "shared": second.loco.digests[0]}
    (folder / "versions.jsonl").write_text(json.dumps(told) + "\n" + '{"round": 1, "versi')
    assert second._settle() == [told]
    assert (second.book.version, second.book.digests) == (0, {0: "d"})
    (folder / "versions.jsonl").write_text(json.dumps({**told, "shared": "other"}) + "\n")
    with pytest.raises(VerificationError, match="trainer 1 has other shared weights"):
        second._settle()


def test_what_trainers_tell_each_other_is_chosen_in_the_settings(folder: Path, second: Peer) -> None:
    assert isinstance(second.loco, PulseLoCo)
    second.settings = replace(second.settings, loco="dense")
    assert not isinstance(second._open_meeting(), PulseLoCo)


def test_a_round_is_worked_on_as_a_whole_and_the_next_ones_as_far_as_they_may_be_ahead() -> None:
    def open_steps(delay: int, step: int) -> list[int]:
        book = WorkQueue(replace(SMALL, steps=10, sync_every=4, shards=1, delay=delay))
        book.open(0)
        book.open(step)
        return [piece.step for piece in book._pieces]

    assert open_steps(0, 0) == [0, 1, 2, 3]
    assert open_steps(1, 5) == [5, 6, 7, 8, 9]  # earlier steps are of no use to any trainer


def test_a_new_run_does_not_go_on_with_the_rounds_of_another(tmp_path: Path) -> None:
    settings = replace(SMALL, steps=4, store=str(tmp_path / "store"))
    (tmp_path / "store-trainers" / "rounds" / "0000").mkdir(parents=True)
    (tmp_path / "store-trainers" / "rounds" / "0000" / "here").write_bytes(b"")
    with pytest.raises(PulseError, match="give several trainers a new store"):
        DemoRun(tmp_path / "run", settings)
    assert DemoRun(tmp_path / "run", replace(settings, trainers=1)).trainers == ["trainer"]


def test_a_run_of_several_trainers_is_whole_rounds(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="steps must be a multiple"):
        DemoRun(tmp_path, replace(SMALL, steps=5))
