"""Weights between the actors of a real Ray cluster: one node, real worker processes."""

import hashlib
import os
import pickle
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from pulsesync import Publisher, Subscriber
from pulsesync.errors import AnotherPublisherError, GroupError, NotFoundError, StoreError
from pulsesync.integrations.ray import ActorTeam, Link, RayStore, cluster, patched_sync
from pulsesync.maintain.prune import prune
from pulsesync.maintain.verify import RunVerifier
from pulsesync.run.reader import RunReader
from pulsesync.testing import StoreTests
from tests.examples import Example
from tests.integrations.ray_actors import (
    ACROSS,
    GRID,
    HALVES,
    QUARTERS,
    RolloutActor,
    Slices,
    TrainerActor,
    WriterActor,
    cut,
    same,
    state_at,
)

ray = pytest.importorskip("ray", reason="pip install 'pulsesync[ray]': the Ray integration is NOT tested")

pytestmark = [pytest.mark.timeout(140)]  # the first test waits for a cluster, and each actor for its kernels
if ray.__version__.startswith("2.40."):  # the oldest that is allowed leaves its logs open
    pytestmark.append(pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"))
DOCUMENT = Path(__file__).parents[2] / "docs" / "integrations" / "ray.md"
BIG = 1 << 20  # bytes: beyond what a directory keeps by itself


@pytest.fixture(scope="module", autouse=True)
def joined() -> Iterator[None]:
    """A cluster of this file's own."""
    ray.init("local", num_cpus=4, include_dashboard=False, object_store_memory=256 << 20, log_to_driver=False)
    yield
    ray.shutdown()


@pytest.fixture
def name(request: pytest.FixtureRequest) -> Iterator[str]:
    """A name for what a test starts in the cluster; all of it is ended."""
    yield (mine := f"{request.node.name}-{time.time_ns()}")
    for found in ray.util.list_named_actors(all_namespaces=True):
        if mine in found["name"]:
            cluster.kill_actor(found["name"])


# -- the store -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def emptied() -> Iterator[RayStore]:
    """One directory for all tests of the suite: starting one takes half a second."""
    yield (store := RayStore("tests"))
    store.close()


@pytest.mark.slow
class TestRayStore(StoreTests):
    @pytest.fixture
    def store(self, emptied: RayStore) -> RayStore:
        for key, _, _ in emptied._call("list", ""):
            emptied.delete(key)
        return emptied


@pytest.mark.slow
@pytest.mark.parametrize("size", [BIG, 10])
def test_what_was_put_outlives_its_writer(name: str, size: int) -> None:
    store, writer = RayStore(name), Writer.remote()
    ray.get(writer.put.remote(store, "parts/a", size))
    ray.kill(writer)
    with pytest.raises(ray.exceptions.RayActorError):
        ray.get(writer.put.remote(store, "parts/b", size))
    assert store.get("parts/a") == b"7" * size


@pytest.mark.slow
def test_a_name_is_the_same_store_in_every_process(name: str) -> None:
    store = RayStore(name)
    store.put("head", b"1")
    assert RayStore(name).get("head") == b"1"
    assert pickle.loads(pickle.dumps(store)).get("head") == b"1"
    assert pickle.loads(pickle.dumps(store)).name == name


@pytest.mark.slow
def test_a_pickled_store_does_not_take_a_run_that_is_gone_for_an_empty_one(name: str) -> None:
    store = RayStore(name)
    store.put("head", b"1")
    pickled = pickle.dumps(store)
    store.close()
    for one in (store, pickle.loads(pickled)):
        verbs: list[Callable[[], object]] = [partial(one.get, "head"), partial(one.create, "manifests/0", b"")]
        for verb in verbs:
            with pytest.raises(StoreError) as caught:
                verb()
            assert not isinstance(caught.value, NotFoundError)
            assert not caught.value.retryable
            assert caught.value.key in ("head", "manifests/0")


@pytest.mark.slow
def test_an_answer_that_does_not_come_in_time_may_be_asked_for_again(name: str) -> None:
    store = RayStore(name)
    store.put("parts/a", bytes(BIG))
    hasty = RayStore(name, timeout_s=0.0)

    def often(verb: Callable[[], object]) -> None:
        for _ in range(50):  # on a busy machine an answer may be there before it is looked for
            verb()

    for verb in (lambda: hasty.get("parts/a"), lambda: hasty.put("parts/b", b""), lambda: list(hasty.list("parts/"))):
        with pytest.raises(StoreError) as caught:
            often(verb)
        assert caught.value.retryable


@pytest.mark.slow
def test_an_error_of_a_task_is_raised_here_with_its_fields() -> None:
    def fail() -> None:
        raise StoreError("no answer", key="head", retryable=True)

    with pytest.raises(StoreError, match="no answer") as caught:
        ray.get(ray.remote(num_cpus=0)(fail).remote())
    assert (caught.value.key, caught.value.retryable) == ("head", True)


@pytest.mark.slow
def test_deleting_frees_the_object_store(name: str) -> None:
    store, data = RayStore(name), bytes(32 << 20)
    before = free_bytes()
    for turn in range(12):  # 384 MiB through 256
        store.put(f"parts/{turn}", data)
        store.get(f"parts/{turn}", 0, 10)
        store.delete(f"parts/{turn}")
    wait_until(lambda: free_bytes() >= before - (1 << 20))
    assert not spilled()


@pytest.mark.slow
def test_an_object_that_is_deleted_while_it_is_read_stays_until_it_was_read(name: str) -> None:
    store, before = RayStore(name), free_bytes()
    directory = ray.get_actor(f"store/{name}", namespace=cluster.NAMESPACE)
    for ends in ("the reader has it", "the reader died"):
        store.put("parts/a", bytes(32 << 20))
        loan_s = 60.0 if ends == "the reader has it" else 1.0
        (found,) = ray.get(directory.read.remote("parts/a", 0, None, "mine", loan_s))
        wait_until(lambda: free_bytes() < before - (31 << 20))
        store.delete("parts/a")
        del found
        time.sleep(0.5)  # for Ray to free what nothing refers to
        assert free_bytes() < before - (31 << 20)
        if ends == "the reader has it":
            ray.get(directory.end_loan.remote("mine"))
        else:
            time.sleep(1.0)
            store.put("head", b"1")  # any write ends what is overdue
        wait_until(lambda: free_bytes() >= before - (1 << 20))


def free_bytes() -> float:
    return float(ray.available_resources().get("object_store_memory", 0.0))


def spilled() -> list[Path]:
    session = Path(ray._private.worker._global_node.get_session_dir_path())
    return [file for folder in session.glob("ray_spilled_objects*") for file in folder.iterdir()]


def wait_until(true: Callable[[], bool], within_s: float = 30.0) -> None:
    end = time.monotonic() + within_s
    while not true():
        assert time.monotonic() < end, f"the condition was still false after {within_s} s"
        time.sleep(0.1)


@pytest.mark.slow
def test_an_object_whose_owner_died_under_a_reader_is_not_there(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    store = RayStore(name)
    store.put("parts/a", bytes(BIG))
    found = store._call("read", "parts/a", 0, None, "mine", 60.0)
    monkeypatch.setattr(store, "_call", lambda *_: found)
    store.close()

    def gone() -> bool:
        try:
            return len(store.get("parts/a")) != BIG  # Ray takes a moment to notice
        except NotFoundError as e:
            return bool(e.key == "parts/a")

    wait_until(gone)


# -- the team ------------------------------------------------------------------------------------------------------


def at_once(*calls: Callable[[], Any]) -> list[Future[Any]]:
    """Make calls in threads of their own, and wait until all have ended."""
    with ThreadPoolExecutor(len(calls)) as pool:
        return [pool.submit(call) for call in calls]


@pytest.mark.slow
def test_everybody_hears_everybody_in_order(name: str) -> None:
    teams = [ActorTeam(name, rank, 3) for rank in range(3)]
    for turn in range(3):
        notes = [b"%d of %d" % (rank, turn) * (1 + 100_000 * rank) for rank in range(3)]
        told = at_once(*(lambda t=team, n=note: t.gather(n) for team, note in zip(teams, notes, strict=True)))
        assert [one.result() for one in told] == [notes] * 3


@pytest.mark.slow
def test_who_waits_too_long_has_a_named_error_and_the_team_goes_on(name: str) -> None:
    teams = [ActorTeam(name, rank, 2, timeout_s=1.0) for rank in range(2)]
    with pytest.raises(GroupError, match=r"ranks \[1\]") as caught:
        teams[0].gather(b"alone, before anybody came")
    assert caught.value.rank == 0
    assert [one.result() for one in at_once(*(lambda t=team: t.gather(b"x") for team in teams))] == [[b"x", b"x"]] * 2
    with pytest.raises(GroupError, match=r"ranks \[0\]"):
        teams[1].gather(b"alone, in a round")
    with pytest.raises(GroupError, match="has ended"):
        teams[0].gather(b"late")
    assert [one.result() for one in at_once(*(lambda t=team: t.gather(b"y") for team in teams))] == [[b"y", b"y"]] * 2


@pytest.mark.slow
def test_a_rank_that_comes_anew_ends_the_wait_of_the_others_at_once(name: str) -> None:
    teams = [ActorTeam(name, rank, 2) for rank in range(2)]
    at_once(*(lambda t=team: t.gather(b"") for team in teams))
    began = time.monotonic()
    anew = ActorTeam(name, 1, 2)

    def again() -> list[bytes]:
        with pytest.raises(GroupError, match="rank 1 has rejoined") as caught:
            teams[0].gather(b"to the rank 1 that died")
        assert caught.value.rejoin
        return teams[0].gather(b"0")

    def late() -> list[bytes]:
        time.sleep(0.5)
        return anew.gather(b"1")

    assert [one.result() for one in at_once(again, late)] == [[b"0", b"1"]] * 2
    assert time.monotonic() - began < 20
    with pytest.raises(GroupError, match="has ended: rank 1 has rejoined"):
        teams[1].gather(b"from a rank 1 that was taken for dead")


@pytest.mark.slow
def test_two_processes_of_one_rank_do_not_both_get_in(name: str) -> None:
    first, second, other = (ActorTeam(name, rank, 2, timeout_s=20) for rank in (0, 0, 1))
    with pytest.raises(GroupError):
        ActorTeam(name, 1, 2, timeout_s=0.0).gather(b"so that the actor is there")

    def slowly(team: ActorTeam, wait_s: float) -> Callable[[], list[bytes]]:
        def gather() -> list[bytes]:
            time.sleep(wait_s)
            return team.gather(b"%d" % team.rank)

        return gather

    told = at_once(slowly(first, 0.0), slowly(second, 0.5), slowly(other, 1.5))
    with pytest.raises(GroupError, match="another process has joined as rank 0"):
        told[0].result()
    assert told[1].result() == told[2].result() == [b"0", b"1"]


@pytest.mark.slow
def test_another_size_is_refused(name: str) -> None:
    teams = [ActorTeam(name, rank, 2) for rank in range(2)]
    at_once(*(lambda t=team: t.gather(b"") for team in teams))
    with pytest.raises(GroupError, match="rank 2 of 3 does not belong"):
        ActorTeam(name, 2, 3).gather(b"")
    assert [one.result() for one in at_once(*(lambda t=team: t.gather(b"x") for team in teams))] == [[b"x", b"x"]] * 2
    with pytest.raises(ValueError, match="got rank 2 of size 2"):
        ActorTeam(name, 2, 2)


@pytest.mark.slow
def test_a_team_whose_actor_was_killed_comes_together_anew(name: str) -> None:
    teams = [ActorTeam(name, rank, 2) for rank in range(2)]
    at_once(*(lambda t=team: t.gather(b"") for team in teams))
    teams[0].close()
    for team in teams:
        with pytest.raises(GroupError):
            team.gather(b"")
    assert [one.result() for one in at_once(*(lambda t=team: t.gather(b"x") for team in teams))] == [[b"x", b"x"]] * 2


# -- N trainers, M rollout actors ----------------------------------------------------------------------------------

Writer = ray.remote(num_cpus=0)(WriterActor)
Trainer = ray.remote(num_cpus=0, max_restarts=-1, max_task_retries=-1)(TrainerActor)
Rollout = ray.remote(num_cpus=0, max_restarts=-1, max_task_retries=-1)(RolloutActor)


def link_to(place: str, name: str, folder: Path) -> Link:
    """A link whose run is in Ray's object store, or in a folder."""
    return Link(name, at=None if place == "ray" else str(folder / "run"))


def start(link: Link, trainers: int, slices: list[Slices], **options: Any) -> tuple[list[Any], ...]:
    return (
        [Trainer.remote(link, rank, trainers, options) for rank in range(trainers)],
        [Rollout.remote(link, held) for held in slices],
    )


def check(rollouts: list[Any], slices: list[Slices], step: int) -> list[tuple[str, ...]]:
    """All have what they hold of a step, bit for bit. Returns how they got there."""
    found = ray.get([one.sync.remote() for one in rollouts])
    for (_, weights, _), held in zip(found, slices, strict=True):
        assert same(weights, cut(state_at(step), held))
    return [path for _, _, path in found]


def test_shards_of_two_trainers_reach_a_rollout_of_another_layout(name: str) -> None:
    """The one test of a cluster in the fast tier: the trainers are threads here, and the rollout is a process."""
    link = Link(name)
    rollout = Rollout.remote(link, ACROSS)
    trainers = [TrainerActor(link, rank, 2, {"codec": "gap"}) for rank in range(2)]
    for step in range(3):
        published = at_once(*(partial(one.publish, step) for one in trainers))
        assert [one.result() for one in published] == [step] * 2
        check([rollout], [ACROSS], step)
    for one in trainers:
        one.pub.close()
    store = link.store()
    store.put("parts/large", bytes(BIG))
    assert store.get("parts/large") == bytes(BIG)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("place", "size", "options", "slices"),
    [
        ("ray", 2, {"grid": GRID, "min_tile": 1}, [{}, HALVES, QUARTERS]),
        ("folder", 2, {"codec": "gap"}, [HALVES, ACROSS]),
        ("ray", 1, {}, [{}, {"down": None}]),
    ],
)
def test_shards_of_trainers_reach_rollouts_of_other_layouts(
    name: str, tmp_path: Path, place: str, size: int, options: dict[str, Any], slices: list[Slices]
) -> None:
    """Every rollout has the weights of its slices after every step, and waits for the first."""
    link = link_to(place, name, tmp_path)
    trainers, rollouts = start(link, size, slices, **options)
    waiting = [one.sync.remote() for one in rollouts]  # for the first version, which is not there yet
    assert ray.wait(waiting, timeout=0.3)[0] == []
    assert ray.get([one.publish.remote(0) for one in trainers]) == [0] * size
    assert [version for version, _, _ in ray.get(waiting)] == [0] * len(slices)
    for step in range(1, 5):
        assert ray.get([one.publish.remote(step) for one in trainers]) == [step] * size
        check(rollouts, slices, step)


@pytest.mark.slow
@pytest.mark.parametrize(("place", "killed"), [("ray", 0), ("folder", 1)])
def test_a_trainer_that_is_killed_in_a_publish_comes_back_and_the_run_goes_on(
    name: str, tmp_path: Path, place: str, killed: int
) -> None:
    link = link_to(place, name, tmp_path)
    slices: list[Slices] = [{}, HALVES]
    trainers, rollouts = start(link, 2, slices)
    assert ray.get([one.publish.remote(0) for one in trainers]) == [0, 0]
    waiting = trainers[1 - killed].publish.remote(1)  # for the other
    before = ray.get(trainers[killed].process.remote())
    ray.kill(trainers[killed], no_restart=False)
    assert ray.get([waiting, trainers[killed].publish.remote(1)]) == [1, 1]
    assert ray.get(trainers[killed].process.remote()) != before
    check(rollouts, slices, 1)
    assert ray.get([one.publish.remote(2) for one in trainers]) == [2, 2]
    assert check(rollouts, slices, 2) == [("patch",)] * 2


@pytest.mark.slow
def test_a_trainer_may_be_killed_at_any_moment(name: str) -> None:
    link, rng = Link(name, timeout_s=15.0), random.Random(3)
    trainers, rollouts = start(link, 2, [{}])
    ray.get([one.publish.remote(0) for one in trainers])
    for step in range(1, 4):
        calls = [one.publish.remote(step) for one in trainers]
        time.sleep(rng.random() * 0.1)
        ray.kill(trainers[step % 2], no_restart=False)
        while True:
            try:
                ray.get(calls)
                break
            except GroupError:  # the other one was away for too long, or had finished already: call again who has ended
                _, running = ray.wait(calls, num_returns=len(calls), timeout=0)
                calls = [
                    call if call in running else one.publish.remote(step)
                    for call, one in zip(calls, trainers, strict=True)
                ]
        check(rollouts, [{}], step)
    checked = list(RunVerifier(link.store()).run())
    assert len(checked) > 3
    assert [one for one in checked if one.fault] == []


@pytest.mark.slow
def test_nothing_that_was_committed_is_lost_with_all_its_trainers(name: str) -> None:
    link = Link(name)
    trainers, _ = start(link, 2, [])
    for step in range(3):
        ray.get([one.publish.remote(step) for one in trainers])
    for one in trainers:
        ray.kill(one)
    late = [Rollout.remote(link, {})]
    check(late, [{}], 2)
    taken_up, _ = start(link, 1, [])  # by fewer: one trainer, who holds all
    assert ray.get(taken_up[0].publish.remote(3)) == 3
    assert check(late, [{}], 3) == [("patch",)]


@pytest.mark.slow
def test_a_rollout_that_is_killed_catches_up(name: str) -> None:
    link = Link(name)
    slices: list[Slices] = [{}, QUARTERS]
    trainers, rollouts = start(link, 2, slices, grid=GRID, min_tile=1)
    ray.get([one.publish.remote(0) for one in trainers])
    check(rollouts, slices, 0)
    before = ray.get(rollouts[1].process.remote())
    ray.kill(rollouts[1], no_restart=False)
    for step in (1, 2):
        ray.get([one.publish.remote(step) for one in trainers])
    assert check(rollouts, slices, 2) == [("patch", "patch"), ("anchor", "patch", "patch")]
    assert ray.get(rollouts[1].process.remote()) != before


@pytest.mark.slow
def test_trainers_at_different_steps_publish_nothing(name: str) -> None:
    trainers, rollouts = start(Link(name), 2, [{}])
    ray.get([one.publish.remote(0) for one in trainers])
    for call in [one.publish.remote(1 + rank) for rank, one in enumerate(trainers)]:
        with pytest.raises(GroupError, match="different steps"):
            ray.get(call)
    check(rollouts, [{}], 0)
    assert ray.get([one.publish.remote(2) for one in trainers]) == [1, 1]
    check(rollouts, [{}], 2)


def single_publisher(link: Link, **options: Any) -> Publisher:
    publisher = link.publisher(**options)
    assert isinstance(publisher, Publisher)
    return publisher


@pytest.mark.slow
def test_who_publishes_into_a_run_that_somebody_else_took_up_must_stop(name: str) -> None:
    link = Link(name)
    with single_publisher(link) as first, single_publisher(link) as second:
        first.publish(state_at(0))
        assert second.publish(state_at(1)).version == 1
        with pytest.raises(AnotherPublisherError):
            first.publish(state_at(2))


@pytest.mark.slow
def test_a_run_in_the_object_store_is_bounded_by_pruning(name: str) -> None:
    link = Link(name)
    store = link.store()
    with single_publisher(link, anchor_every=0.0) as pub:
        for step in range(200):
            pub.publish(state_at(0, seed=step % 2), step=step)
            if step % 8 == 7:
                pub.flush()
                prune(store, keep_versions=4, keep_hours=0.0, grace_hours=0.0)
    assert sum(1 for _ in store.list("manifests/")) < 150
    held = {name: np.zeros_like(array) for name, array in state_at(0).items()}
    link.subscriber().sync(held)
    assert same(held, state_at(0, seed=1))


@pytest.mark.slow
def test_closing_a_link_frees_what_ray_holds_and_leaves_what_is_elsewhere(name: str, tmp_path: Path) -> None:
    for link in (Link(name), Link(name, at=str(tmp_path / "run"))):
        link.publisher().publish(state_at(0))
        link.close()
    with pytest.raises(StoreError):
        Link.store(pickle.loads(pickle.dumps(link)) if link.at is None else Link(name)).get("head", 0, 10)
    assert Subscriber(str(tmp_path / "run")).sync({k: np.zeros_like(v) for k, v in state_at(0).items()}).version == 0


# -- RLlib ---------------------------------------------------------------------------------------------------------


def ppo(runners: int = 2, learners: int = 0, **more: Any) -> Any:
    pytest.importorskip("ray.rllib", reason="pip install 'ray[rllib]': the RLlib integration is NOT tested")
    from ray.rllib.algorithms.ppo import PPOConfig

    return (
        PPOConfig()
        .environment("CartPole-v1")
        .env_runners(num_env_runners=runners, **more)
        .learners(num_learners=learners)
        .training(train_batch_size=400, minibatch_size=100, num_epochs=3, lr=3e-4)
        .rl_module(model_config={"fcnet_hiddens": [32, 32]})
        .debugging(seed=11)
    )


def hashed(weights: Mapping[str, Any]) -> str:
    return hashlib.sha256(
        b"".join(np.ascontiguousarray(weights[name]).tobytes() for name in sorted(weights))
    ).hexdigest()


def runner_hash(env_runner: Any) -> str:
    return hashed({name: tensor.numpy() for name, tensor in env_runner.module.state_dict().items()})


def learner_weights(algorithm: Any) -> dict[str, Any]:
    state = algorithm.learner_group.get_state(components="learner/rl_module", inference_only=True)
    return dict(state["learner"]["rl_module"]["default_policy"])


@contextmanager
def built(config: Any) -> Iterator[Any]:
    algorithm = config.build_algo()
    try:
        yield algorithm
    finally:
        algorithm.stop()


def hashes(algorithm: Any) -> list[str]:
    return list(algorithm.env_runner_group.foreach_env_runner(runner_hash))


def trained(algorithm: Any, iterations: int) -> list[tuple[float, str]]:
    """Train; after each iteration its reward, and the weights of the learner, which all env-runners have."""
    out = []
    for _ in range(iterations):
        reward = algorithm.train()["env_runners"]["episode_return_mean"]
        mine = hashed(learner_weights(algorithm))
        assert hashes(algorithm) == [mine] * (1 + algorithm.config.num_env_runners)
        out.append((reward, mine))
    return out


@pytest.fixture(scope="module")
def expected() -> list[tuple[float, str]]:
    """What PPO does with RLlib's own sync."""
    with built(ppo()) as algorithm:
        return trained(algorithm, 3)


@pytest.mark.slow
def test_ppo_synced_by_patches_is_ppo_bit_for_bit(name: str, expected: list[tuple[float, str]]) -> None:
    with built(patched_sync(ppo(), Link(name))) as algorithm:
        assert hashes(algorithm) == [hashed(learner_weights(algorithm))] * 3
        assert trained(algorithm, 3) == expected
        report = algorithm.env_runner_group.sync_weights.report
        assert (report.version, report.changed > 0) == (3, True)
        assert report.payload_bytes < report.full_bytes
    assert len({weights for _, weights in expected}) == 3  # it did learn something


@pytest.mark.slow
def test_an_env_runner_that_is_killed_is_restored_and_caught_up(name: str) -> None:
    with built(patched_sync(ppo(), Link(name))) as algorithm:
        trained(algorithm, 1)
        group = algorithm.env_runner_group
        before = group.foreach_env_runner(lambda _: os.getpid(), local_env_runner=False)
        ray.kill(group._worker_manager.actors()[1], no_restart=False)
        for _ in range(6):  # RLlib notices by its next call, and asks a restarted one in an iteration after that
            algorithm.train()
            if group.num_healthy_remote_workers() == 2:
                break
        after = group.foreach_env_runner(lambda _: os.getpid(), local_env_runner=False)
        assert len(set(before) & set(after)) == 1
        trained(algorithm, 2)


@pytest.mark.slow
def test_env_runners_act_with_rounded_weights_if_a_cast_is_asked_for(name: str) -> None:
    with built(patched_sync(ppo(runners=1), Link(name), cast="BF16")) as algorithm:
        for _ in range(2):
            algorithm.train()
            exact = learner_weights(algorithm)
            rounded = {k: v.astype(ml_dtypes.bfloat16).astype(np.float32) for k, v in exact.items()}
            assert hashes(algorithm) == [hashed(rounded)] * 2
            assert hashed(rounded) != hashed(exact)
        report = algorithm.env_runner_group.sync_weights.report
        assert report.full_bytes == sum(array.nbytes for array in exact.values()) / 2


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning:ray.data.context")  # Ray about settings of its own
def test_a_learner_in_its_own_process_publishes_from_there(name: str) -> None:
    link = Link(name)
    with built(patched_sync(ppo(runners=1, learners=1), link)) as algorithm:
        trained(algorithm, 2)
    held = {f"default_policy/{k}": np.zeros_like(v) for k, v in ppo_shapes(link).items()}
    assert link.subscriber().sync(held).version == 2


def ppo_shapes(link: Link) -> dict[str, Any]:
    records = RunReader(link.store(), None)
    manifest = records.newest()
    assert manifest is not None
    specs = records.layout(manifest.layout).tensors
    return {spec.name.removeprefix("default_policy/"): np.empty(spec.shape, np.float32) for spec in specs}


@pytest.fixture(scope="module")
def patched() -> Iterator[Any]:
    """An algorithm with one env-runner for tests that leave it as usable as they found it: building one takes long."""
    with built(patched_sync(ppo(runners=1), Link(f"patched-{time.time_ns()}"))) as algorithm:
        yield algorithm


@pytest.mark.slow
def test_weights_that_another_caller_set_are_not_taken_for_those_of_a_version(patched: Any) -> None:
    import torch

    def spoil(env_runner: Any) -> None:
        with torch.no_grad():
            for tensor in env_runner.module.parameters():
                tensor.add_(1.0)

    trained(patched, 1)
    patched.env_runner_group.foreach_env_runner(spoil)
    trained(patched, 1)


@pytest.mark.slow
def test_a_checkpoint_that_is_restored_reaches_the_env_runners(patched: Any, tmp_path: Path) -> None:
    ((_, early),) = trained(patched, 1)
    patched.save_to_path(str(tmp_path))
    trained(patched, 1)
    patched.restore_from_path(str(tmp_path))
    assert hashed(learner_weights(patched)) == early
    assert hashes(patched) == [early] * 2
    trained(patched, 1)


@pytest.mark.slow
def test_modules_of_several_agents_are_synced_each_by_its_name(name: str) -> None:
    from ray.rllib.examples.envs.classes.multi_agent import MultiAgentCartPole
    from ray.tune.registry import register_env

    register_env(name, lambda _: MultiAgentCartPole({"num_agents": 2}))  # type: ignore[call-arg]
    config = ppo(runners=1).environment(name)
    config.multi_agent(policies={"p0", "p1"}, policy_mapping_fn=lambda agent, *_, **__: f"p{agent}")
    config.multi_agent(policies_to_train=["p0"])
    with built(patched_sync(config, Link(name))) as algorithm:
        before = algorithm.learner_group.get_state(components="learner/rl_module", inference_only=True)
        algorithm.train()
        after = algorithm.learner_group.get_state(components="learner/rl_module", inference_only=True)
        was, now = ({of: hashed(w) for of, w in one["learner"]["rl_module"].items()} for one in (before, after))
        assert was["p0"] != now["p0"]
        assert was["p1"] == now["p1"]
        assert algorithm.env_runner_group.foreach_env_runner(module_hashes) == [now] * 2


def module_hashes(env_runner: Any) -> dict[str, str]:
    return {of: hashed({k: t.numpy() for k, t in one.state_dict().items()}) for of, one in env_runner.module.items()}


@pytest.mark.slow
def test_the_callbacks_of_a_config_stay(name: str) -> None:
    def mine(**_: Any) -> None: ...

    def ours(config: Any) -> list[Any]:
        return [one.__name__ for one in config.callbacks_on_algorithm_init]

    assert ours(patched_sync(ppo(), Link(name))) == ["begin"]
    assert ours(patched_sync(ppo().callbacks(on_algorithm_init=mine), Link(name))) == ["mine", "begin"]
    assert ours(patched_sync(ppo().callbacks(on_algorithm_init=[mine, mine]), Link(name))) == ["mine", "mine", "begin"]


# -- processes of their own ----------------------------------------------------------------------------------------


def run(code: str, *arguments: str, **more: str) -> str:
    """Run a script in a process of its own."""
    env = {**os.environ, "RAY_ADDRESS": "local", **more}
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=110, env=env, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.slow
def test_after_a_process_has_left_its_cluster_none_is_begun(name: str) -> None:
    out = run(
        "import sys, ray\n"
        "from pulsesync.errors import PulseError\n"
        "from pulsesync.integrations.ray import ActorTeam, RayStore\n"
        "ray.init(log_to_driver=False)\n"
        "store, team = RayStore(sys.argv[1]), ActorTeam(sys.argv[1], 0, 1)\n"
        "store.put('head', b'1')\n"
        "assert team.gather(b'1') == [b'1']\n"
        "ray.shutdown()\n"
        "for call in (lambda: store.get('head'), lambda: team.gather(b'2')):\n"
        "    try: call()\n"
        "    except PulseError as e: print(e, ray.is_initialized())\n",
        name,
        RAY_ADDRESS=ray.get_runtime_context().gcs_address,
    )
    assert out.splitlines() == ["this process is not connected to a Ray cluster: call ray.init first False"] * 2


# -- the documentation, and several nodes --------------------------------------------------------------------------


def documented(word: str) -> str:
    """The script in the documentation that has this word."""
    scripts: list[str] = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)
    return next(script for script in scripts if word in script)


# Two nodes on one machine: two object stores, and what is on the other has to travel. The driver may be on either.
TWO_NODES = """
import os, ray
from ray.cluster_utils import Cluster
here = {"num_cpus": 2, "object_store_memory": 128 << 20, "include_dashboard": False}
cluster = Cluster(initialize_head=True, head_node_args={**here, "resources": {"first": 4}})
cluster.add_node(**here, resources={"second": 4})
cluster.wait_for_nodes()
os.environ["RAY_ADDRESS"] = cluster.address
try:
    BODY
finally:
    ray.shutdown()
    cluster.shutdown()
"""


def on_two_nodes(body: str) -> str:
    code = TWO_NODES.replace("BODY", body.replace("\n", "\n    "))
    with tempfile.TemporaryDirectory(
        prefix="ray", dir="/tmp", ignore_cleanup_errors=True
    ) as folder:  # paths of sockets are short
        return run(code, RAY_TMPDIR=folder)


@pytest.mark.slow
def test_the_example_ends_with_the_same_weights_in_every_actor(tmp_path: Path) -> None:
    """About 12 s."""
    with Example("ray_workers.py", tmp_path, RAY_ADDRESS=ray.get_runtime_context().gcs_address) as example:
        last = example.lines(timeout_s=100)[-1]
    assert last == "all 2 rollout actors have the weights of version 10, bit for bit"


@pytest.mark.slow
def test_the_script_of_the_documentation_runs_as_it_is_on_two_nodes() -> None:
    out = on_two_nodes(
        documented("class Trainer") + "print({node['Alive'] for node in ray.nodes()}, len(ray.nodes()))\n"
    )
    assert out.splitlines()[-3:] == ["rollout 0 holds version 9", "rollout 1 holds version 9", "{True} 2"]


@pytest.mark.slow
def test_the_rllib_script_of_the_documentation_runs() -> None:
    out = run(documented("PPOConfig"), RAY_ADDRESS=ray.get_runtime_context().gcs_address)
    assert "iteration 2: " in out


@pytest.mark.slow
def test_what_was_put_outlives_the_node_of_its_writer_and_is_read_on_any() -> None:
    out = on_two_nodes("""
from pulsesync.integrations.ray import RayStore
class Far:
    def put(self, store, size): store.put("parts/a", b"7" * size)
    def get(self, store): return len(store.get("parts/b"))
ray.init(log_to_driver=False)
mine = ray.get_runtime_context().get_node_id()
(other,) = [node for node in cluster.list_all_nodes() if node.node_id != mine]
resource = next(name for node in ray.nodes() if node["NodeID"] == other.node_id for name in ("first", "second") if name in node["Resources"])
far = ray.remote(num_cpus=0, resources={resource: 1})(Far).remote()
store = RayStore("x")
store.put("parts/b", bytes(1 << 22))
ray.get(far.put.remote(store, 1 << 22))
print(ray.get(far.get.remote(store)))
if resource == "second":  # the head cannot go
    cluster.remove_node(other)
    print(store.get("parts/a") == b"7" * (1 << 22))
else:
    ray.kill(far)
    print(store.get("parts/a") == b"7" * (1 << 22))
""")  # noqa: E501
    assert out.splitlines() == [str(1 << 22), "True"]
