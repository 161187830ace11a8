"""Two trainers and two rollouts of a real Ray cluster, driven by verl's own CheckpointEngineManager.

Every actor is a process that imports verl, which takes seconds: the tests share them, and stay in the order of a run.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from omegaconf import OmegaConf
from verl.checkpoint_engine import CheckpointEngineManager
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.config import RolloutConfig

from pulsesync import warm_up
from pulsesync.run.reader import RunReader
from pulsesync.store import open_store
from tests.integrations.verl.actors import (
    CAST,
    RolloutWorker,
    ServerlessReplica,
    TrainerWorker,
    damage,
    described,
    published_at,
)

pytestmark = pytest.mark.timeout(400)  # four processes import verl at the same time
TRAINERS, ROLLOUTS = 2, 2


class Job:
    """What a driver of verl has: trainers, rollouts and their manager."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "run"
        pulse = {"location": str(self.folder), "cast": CAST, "timeout_s": 60.0, "cache": str(folder / "cache")}
        self.config = {
            "_target_": "verl.workers.config.CheckpointEngineConfig",
            "backend": "pulse",
            "custom_backend_module": "pulsesync.integrations.verl",
            "update_weights_bucket_megabytes": 8,
            "engine_kwargs": {"pulse": pulse},
        }
        self.trainers = self.start_trainers()
        self.replicas = [self.start_replica(n) for n in range(ROLLOUTS)]
        self.connect()

    def start_trainers(self, count: int = TRAINERS, ahead: int = 0) -> Any:
        made = RayClassWithInitArgs(ray.remote(TrainerWorker), self.config, ahead)
        pool = RayResourcePool([count], use_gpu=False, max_colocate_count=1)
        return RayWorkerGroup(pool, made, use_gpu=False)

    def start_replica(self, rank: int) -> Any:
        config = RolloutConfig(name="vllm", checkpoint_engine=self.engine_config())
        made = RayClassWithInitArgs(ray.remote(RolloutWorker), config)
        replica = ServerlessReplica(rank, config, None, gpus_per_node=1)
        pool = RayResourcePool([1], use_gpu=False, max_colocate_count=1)
        replica.group = RayWorkerGroup(pool, made, use_gpu=False)
        replica.workers = replica.group.workers
        return replica

    def engine_config(self) -> Any:
        return omega_conf_to_dataclass(OmegaConf.create(self.config))

    def connect(self) -> None:
        self.manager = CheckpointEngineManager(self.engine_config(), self.trainers, self.replicas)

    def sync(self, step: int) -> dict[str, float]:
        self.trainers.train(step)
        metrics: dict[str, float] = self.manager.update_weights(global_steps=step)
        return metrics

    def check(self, step: int, ahead: int = 0) -> None:
        """Every rollout has this step, bit for bit."""
        for replica in self.replicas:
            assert replica.group.received() == [(step, described(published_at(step + ahead)))]


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Job]:
    warm_up()  # once here, and not in each of the processes
    warm_up("F32")
    ray.init("local", num_cpus=16, include_dashboard=False, object_store_memory=256 << 20, log_to_driver=False)
    yield Job(tmp_path_factory.mktemp("verl"))
    ray.shutdown()


def test_every_rollout_gets_each_step_bit_for_bit(job: Job) -> None:
    for step in (1, 2, 3):
        metrics = job.sync(step)
        job.check(step)
        assert metrics["checkpoint_engine/version"] == step - 1
    assert 0 < metrics["checkpoint_engine/changed_ratio"] < 0.05
    assert metrics["checkpoint_engine/payload_mbytes"] < 0.05  # of 0.58 MB


def test_each_trainer_keeps_a_share_of_the_model(job: Job) -> None:
    total = sum(len(data) for _, _, data in described(published_at(0)).values())
    shares = job.trainers.kept_bytes()
    assert sum(shares) == total
    assert min(shares) > 0


def test_nothing_of_a_damaged_patch_reaches_a_rollout(job: Job) -> None:
    job.trainers.train(4)
    workers = [worker for replica in job.replicas for worker in replica.workers]
    rollouts = RayWorkerGroup(worker_handles=workers, ray_cls_with_init=RayClassWithInitArgs(ray.remote(RolloutWorker)))
    job.manager.build_process_group(rollouts)
    before = set(job.folder.rglob("*"))
    ray.get(job.trainers.update_weights(global_steps=4, mode="pulse"))
    files = {path for path in job.folder.rglob("*") if path.is_file()} - before
    damage(files)
    with pytest.raises(ray.exceptions.RayTaskError, match=r"FormatError|ChecksumError"):
        ray.get(rollouts.update_weights(global_steps=4))
    job.check(3)
    damage(files)  # back to what they were
    job.sync(5)
    job.check(5)


def test_trainers_that_are_given_different_tensors_publish_nothing(job: Job) -> None:
    newest = max((job.folder / "manifests").iterdir()).name
    job.trainers.skip_on_rank_1("norm.weight")
    with pytest.raises(ray.exceptions.RayTaskError, match="every rank must be given the entire model"):
        ray.get(job.trainers.update_weights(global_steps=6, mode="pulse"))
    assert max((job.folder / "manifests").iterdir()).name == newest
    job.trainers.skip_on_rank_1("")
    job.sync(6)
    job.check(6)


def test_a_rollout_that_was_killed_is_replaced_and_follows(job: Job) -> None:
    killed = job.replicas.pop()
    ray.kill(killed.workers[0])
    job.replicas.append(job.start_replica(ROLLOUTS))
    job.connect()
    job.sync(7)
    job.check(7)


def test_trainers_of_which_one_died_in_a_sync_resume_the_run_and_no_older_step_is_handed_out(job: Job) -> None:
    job.trainers.die_on_rank_1("up.weight")
    job.trainers.train(8)
    with pytest.raises(ray.exceptions.RayError):
        job.manager.update_weights(global_steps=8)
    job.check(7)
    for worker in job.trainers.workers:
        ray.kill(worker)
    job.trainers = job.start_trainers(count=1, ahead=1)  # fewer trainers, from an earlier checkpoint
    job.connect()
    metrics = job.sync(7)
    job.check(7, ahead=1)
    assert 0 < metrics["checkpoint_engine/changed_ratio"] < 0.05  # a patch to the newest version
    reader = RunReader(open_store(str(job.folder)), None)
    assert [record.step for n in range(8) if (record := reader.version(n))] == [1, 2, 3, 4, 5, 6, 7, 7]
