"""The checkpoint engine by itself, as verl's manager calls it: one trainer and rollouts in this process."""

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry
from verl.workers.rollout.sglang_rollout.utils import get_named_tensor_buckets

from pulsesync import Publisher, SigningKey
from pulsesync.errors import (
    AnotherPublisherError,
    ChainError,
    ClosedError,
    FormatError,
    NothingPublishedError,
    SignatureError,
    StateError,
)
from pulsesync.integrations import verl
from pulsesync.integrations.verl import PulseCheckpointEngine
from tests.integrations.verl.actors import CAST, damage, described, published_at, weights_at

pytestmark = pytest.mark.timeout(120)  # the first patch compiles the kernels


def engine(folder: Path, is_master: bool = False, **options: Any) -> PulseCheckpointEngine:
    given = {"location": str(folder / "run"), "cast": CAST, "timeout_s": 20.0, **options}
    made = CheckpointEngineRegistry.new("pulse", bucket_size=1 << 20, is_master=is_master, **given)
    assert isinstance(made, PulseCheckpointEngine)
    return made


def begin(trainer: PulseCheckpointEngine, *rollouts: PulseCheckpointEngine) -> None:
    """What CheckpointEngineManager.build_process_group does."""
    workers = [trainer, *rollouts]
    topology = PulseCheckpointEngine.build_topology(1, len(rollouts), [one.prepare() for one in workers])
    for n, one in enumerate(workers):
        given, place = (topology[0], 0) if n == 0 else (topology[1], n - 1)
        one.init_process_group(**{name: values[place] for name, values in given.items()})


def send(trainer: PulseCheckpointEngine, step: int, seed: int = 0) -> dict[str, float]:
    return asyncio.run(trainer.send_weights(iter(weights_at(step, seed).items()), global_steps=step))


async def collect(rollout: PulseCheckpointEngine, step: int | None) -> dict[str, torch.Tensor]:
    return {name: tensor async for name, tensor in rollout.receive_weights(global_steps=step)}


def receive(rollout: PulseCheckpointEngine, step: int | None) -> dict[str, Any]:
    return described(asyncio.run(collect(rollout, step)))


def sync(trainer: PulseCheckpointEngine, step: int, *rollouts: PulseCheckpointEngine) -> None:
    begin(trainer, *rollouts)
    send(trainer, step)
    for one in rollouts:
        assert receive(one, step) == described(published_at(step))
    for one in (trainer, *rollouts):
        one.finalize()


def test_the_engine_is_of_verls_class_and_registered() -> None:
    assert issubclass(PulseCheckpointEngine, CheckpointEngine)
    assert CheckpointEngineRegistry.get("pulse") is PulseCheckpointEngine
    assert PulseCheckpointEngine.__abstractmethods__ == frozenset()


def test_each_step_arrives_bit_for_bit(tmp_path: Path) -> None:
    trainer, rollout = engine(tmp_path, is_master=True), engine(tmp_path)
    for step in (3, 4, 5):
        sync(trainer, step, rollout)


def test_what_verl_makes_of_it_for_sglang_has_every_bit(tmp_path: Path) -> None:
    trainer, rollout = engine(tmp_path, is_master=True), engine(tmp_path)
    begin(trainer, rollout)
    send(trainer, 1)

    async def packed() -> list[list[tuple[str, torch.Tensor]]]:
        return [bucket async for bucket in get_named_tensor_buckets(rollout.receive_weights(1), 200_000)]

    buckets = asyncio.run(packed())
    assert len(buckets) > 1
    assert described(dict(pair for bucket in buckets for pair in bucket)) == described(published_at(1))


def test_a_step_without_a_change_is_a_version_too(tmp_path: Path) -> None:
    trainer, rollout = engine(tmp_path, is_master=True), engine(tmp_path)
    sync(trainer, 1, rollout)
    begin(trainer, rollout)
    metrics = asyncio.run(trainer.send_weights(iter(weights_at(1).items()), global_steps=2))
    assert (metrics["checkpoint_engine/changed_elems"], metrics["checkpoint_engine/version"]) == (0, 1)
    assert receive(rollout, 2) == described(published_at(1))


def test_a_rollout_that_joins_late_gets_the_version_of_the_sync_it_joins(tmp_path: Path) -> None:
    trainer = engine(tmp_path, is_master=True)
    for step in (1, 2, 3):
        sync(trainer, step, *[engine(tmp_path)][: step - 2])


def test_a_resumed_trainer_hands_out_its_own_step_and_not_that_of_before_the_crash(tmp_path: Path) -> None:
    trainer, rollout = engine(tmp_path, is_master=True), engine(tmp_path)
    sync(trainer, 7, rollout)
    sync(trainer, 8, rollout)
    resumed = engine(tmp_path, is_master=True, resume=True)
    begin(resumed, rollout)  # from a checkpoint of step 6: its steps 7 and 8 come out otherwise
    rollout.timeout_s = 0.2
    with pytest.raises(NothingPublishedError, match="no version after 1"):
        receive(rollout, 8)
    rollout.timeout_s = 20.0
    send(resumed, 8, seed=1)
    assert receive(rollout, 8) == described(published_at(8, seed=1))


def test_a_version_of_another_step_is_not_handed_out(tmp_path: Path) -> None:
    trainer, rollout = engine(tmp_path, is_master=True), engine(tmp_path)
    begin(trainer, rollout)
    send(trainer, 4)
    with pytest.raises(ChainError, match="version 0 belongs to step 4, but this sync to step 5"):
        receive(rollout, 5)


def test_a_sync_without_a_step_hands_out_the_version_that_it_makes(tmp_path: Path) -> None:
    trainer, rollout = engine(tmp_path, is_master=True), engine(tmp_path)
    begin(trainer, rollout)
    asyncio.run(trainer.send_weights(iter(weights_at(2).items())))
    assert receive(rollout, None) == described(published_at(2))


def test_a_second_trainer_on_the_same_run_is_refused(tmp_path: Path) -> None:
    trainer, other, rollout = engine(tmp_path, is_master=True), engine(tmp_path, is_master=True), engine(tmp_path)
    sync(trainer, 1, rollout)
    sync(other, 2, rollout)
    begin(trainer, rollout)
    with pytest.raises(AnotherPublisherError):
        send(trainer, 3)


def test_a_run_that_was_replaced_during_a_sync_is_not_handed_out(tmp_path: Path) -> None:
    trainer, rollout = engine(tmp_path, is_master=True), engine(tmp_path)
    sync(trainer, 1)
    begin(trainer, rollout)
    (tmp_path / "run").rename(tmp_path / "before")
    with Publisher(str(tmp_path / "run")) as other:
        for step in (0, 1, 2):
            other.publish(published_at(step), step=step)
    with pytest.raises(ChainError, match="another program writes to its location"):
        receive(rollout, 2)


def test_nothing_of_a_damaged_version_is_handed_out_and_the_same_call_can_be_repeated(tmp_path: Path) -> None:
    trainer, rollout = engine(tmp_path, is_master=True), engine(tmp_path)
    sync(trainer, 1, rollout)
    begin(trainer, rollout)
    before = set((tmp_path / "run").rglob("*"))
    send(trainer, 2)
    files = {path for path in (tmp_path / "run").rglob("*") if path.is_file()} - before
    damage(files)
    with pytest.raises(FormatError):
        receive(rollout, 2)
    assert described(rollout._mirror) == described(published_at(1))
    damage(files)  # back to what they were
    assert receive(rollout, 2) == described(published_at(2))


def test_a_rollout_gives_up_when_the_sync_is_over(tmp_path: Path) -> None:
    trainer, rollout = engine(tmp_path, is_master=True), engine(tmp_path)
    begin(trainer, rollout)

    async def ended() -> None:
        waiting = asyncio.create_task(collect(rollout, 1))
        await asyncio.sleep(0.1)
        rollout.finalize()
        await waiting

    with pytest.raises(ClosedError, match="this sync has ended"):
        asyncio.run(ended())


def test_a_sync_that_is_over_does_not_touch_what_the_next_one_hands_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, rollout = engine(tmp_path, is_master=True), engine(tmp_path)
    found, go_on = threading.Event(), threading.Event()
    wait_for = rollout._wait_for

    def stall(*arguments: Any) -> Any:
        record = wait_for(*arguments)
        found.set()
        assert go_on.wait(60)
        return record

    begin(trainer, rollout)
    send(trainer, 1)
    with ThreadPoolExecutor(1) as pool, monkeypatch.context() as patched:
        patched.setattr(rollout, "_wait_for", stall)
        assert rollout._awaited is not None
        cancelled = pool.submit(rollout._receive, rollout._awaited, 1)  # asyncio cannot stop its thread
        try:
            assert found.wait(60)
            patched.undo()
            rollout.finalize()
            begin(trainer, rollout)
            send(trainer, 2)
            assert receive(rollout, 2) == described(published_at(2))
        finally:
            go_on.set()
        with pytest.raises(ClosedError, match="this sync has ended"):
            cancelled.result()
    assert described(rollout._mirror) == described(published_at(2))


@pytest.mark.parametrize("trust", [True, False])
def test_a_signed_run_is_believed_by_its_key_alone(tmp_path: Path, trust: bool) -> None:
    key, other = SigningKey.generate(), SigningKey.generate()
    (tmp_path / "key").write_text(f"{key.secret}\n")
    trainer = engine(tmp_path, is_master=True, signing_key=str(tmp_path / "key"))
    rollout = engine(tmp_path, trust=[(key if trust else other).public])
    begin(trainer, rollout)
    send(trainer, 1)
    if trust:
        assert receive(rollout, 1) == described(published_at(1))
        return
    with pytest.raises(SignatureError):
        receive(rollout, 1)


def test_a_tensor_that_comes_twice_is_refused(tmp_path: Path) -> None:
    trainer = engine(tmp_path, is_master=True)
    begin(trainer)
    one = ("w", torch.zeros(3))
    with pytest.raises(StateError, match="'w' twice"):
        asyncio.run(trainer.send_weights(iter([one, one]), global_steps=1))
    assert not (tmp_path / "run").exists()


def test_what_is_published_does_not_change_with_memory_that_is_used_again(tmp_path: Path) -> None:
    trainer, rollout = engine(tmp_path, is_master=True), engine(tmp_path)
    begin(trainer, rollout)

    def gathered() -> Iterator[tuple[str, torch.Tensor]]:
        buffer = torch.zeros(40)
        for n in range(3):
            yield f"w{n}", buffer.fill_(n + 1)

    asyncio.run(trainer.send_weights(gathered(), global_steps=1))
    received = asyncio.run(collect(rollout, 1))
    assert {name: set(tensor.tolist()) for name, tensor in received.items()} == {"w0": {1.0}, "w1": {2.0}, "w2": {3.0}}


def test_buffers_of_whole_numbers_travel_as_they_are(tmp_path: Path) -> None:
    trainer, rollout = engine(tmp_path, is_master=True), engine(tmp_path)
    begin(trainer, rollout)
    state = {"steps": torch.tensor(7), "mask": torch.tensor([True, False]), "ids": torch.arange(9, dtype=torch.int32)}
    asyncio.run(trainer.send_weights(iter(state.items()), global_steps=1))
    assert receive(rollout, 1) == described(state)


@pytest.mark.parametrize("verb", ["send_weights", "receive_weights"])
def test_a_transfer_outside_of_a_sync_is_refused(tmp_path: Path, verb: str) -> None:
    one = engine(tmp_path)
    with pytest.raises(StateError, match=f"{verb} needs init_process_group first"):
        asyncio.run(one.send_weights(iter([]), 1) if verb == "send_weights" else collect(one, 1))


def test_a_topology_without_rank_0_first_is_refused() -> None:
    with pytest.raises(StateError, match="must be rank 0 of the trainers"):
        PulseCheckpointEngine.build_topology(1, 1, [{}, {"run": None, "version": -1}])


def test_trainers_without_a_process_group_are_refused(tmp_path: Path) -> None:
    with pytest.raises(StateError, match=r"verl has 2 trainers, but torch\.distributed's default group has 0"):
        engine(tmp_path).init_process_group(trainers=2)


def test_a_second_import_registers_nothing_else() -> None:
    from importlib import import_module

    assert import_module("pulsesync.integrations.verl") is verl
    assert CheckpointEngineRegistry.get("pulse") is PulseCheckpointEngine
