"""What do patches change for RLlib: PPO on CartPole, env-runners synced by full weights and by patches, same seeds?

    python -m benchmarks rllib                              # about four minutes
    python -m benchmarks rllib --hidden 1024,1024 --iterations 8

A real local Ray cluster. Each method runs its own algorithm on the same cluster, in interleaved rounds, because the
speed of a machine drifts. `full` is RLlib's own sync; `patch` publishes FP32 through Ray's object store; `patch BF16`
publishes rounded weights, with which env-runners then act. A sync lasts from the call of `sync_weights` until every
env-runner has answered a call made after it. The bytes of a sync are those that one env-runner receives: for full
weights, the arrays; for patches, all that its subscriber fetched, records included, and the call that requests the
sync. Results are printed only if in every iteration of every round all env-runners had the learner's weights (rounded,
with BF16), and the rewards and weights of `patch` were those of `full`, bit for bit.
"""

import argparse
import hashlib
import pickle
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np
import ray

from benchmarks.harness.report import json_line, provenance, shown, spread, table
from pulsesync.integrations.ray import Link, patched_sync
from pulsesync.integrations.ray.rllib import last_sync

QUICK = ("--iterations", "2", "--rounds", "1", "--batch", "256", "--hidden", "32,32", "--runners", "1")
SEED = 7
WAYS = ("full", "patch", "patch BF16")


@dataclass
class Measured:
    """The figures of one method by iteration; lists begin with the second iteration unless noted."""

    sync_s: list[float] = field(default_factory=list)
    sync_bytes: list[float] = field(default_factory=list)
    publish_s: list[float] = field(default_factory=list)  # of it, in the learner
    steps_per_s: list[float] = field(default_factory=list)
    stored_bytes: list[float] = field(default_factory=list)  # by the learner, without anchors
    rewards: list[float] = field(default_factory=list)  # from the first iteration
    weights: list[str] = field(default_factory=list)  # the same, hashed

    def extend(self, other: "Measured") -> None:
        for name in ("sync_s", "sync_bytes", "publish_s", "steps_per_s", "stored_bytes"):
            getattr(self, name).extend(getattr(other, name))
        if self.rewards:
            assert (self.rewards, self.weights) == (other.rewards, other.weights), "not the same in every round"
        self.rewards, self.weights = other.rewards, other.weights


class Timed:
    """Replaces `sync_weights`: calls it, and waits until every env-runner has the weights."""

    def __init__(self, group: Any) -> None:
        self.group, self.sync, self.seconds = group, group.sync_weights, 0.0

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        began = time.perf_counter()
        self.sync(*args, **kwargs)
        self.group.foreach_env_runner(_nothing, local_env_runner=False)
        self.seconds = time.perf_counter() - began


def _nothing(_: Any) -> None:
    return None


def hashed(weights: Mapping[str, Any]) -> str:
    return hashlib.sha256(b"".join(np.ascontiguousarray(weights[k]).tobytes() for k in sorted(weights))).hexdigest()


def runner_hash(env_runner: Any) -> str:
    return hashed({name: tensor.numpy() for name, tensor in env_runner.module.state_dict().items()})


def learner_weights(algorithm: Any) -> dict[str, Any]:
    state = algorithm.learner_group.get_state(components="learner/rl_module", inference_only=True)
    return dict(state["learner"]["rl_module"]["default_policy"])


def config(args: argparse.Namespace) -> Any:
    from ray.rllib.algorithms.ppo import PPOConfig

    return (
        PPOConfig()
        .environment("CartPole-v1")
        .env_runners(num_env_runners=args.runners)
        .training(train_batch_size=args.batch, minibatch_size=128, num_epochs=6, lr=3e-4)
        .rl_module(model_config={"fcnet_hiddens": [int(width) for width in args.hidden.split(",")]})
        .debugging(seed=SEED)
    )


def run(way: str, args: argparse.Namespace, name: str) -> Measured:
    link = Link(name)
    chosen = config(args)
    if way != "full":
        chosen = patched_sync(chosen, link, cast="BF16" if way == "patch BF16" else None)
    algorithm = chosen.build_algo()
    group = algorithm.env_runner_group
    group.sync_weights = timed = Timed(group)
    out = Measured()
    try:
        for iteration in range(args.iterations):
            began = time.perf_counter()
            result = algorithm.train()
            seconds = time.perf_counter() - began
            exact = learner_weights(algorithm)
            check(way, exact, group)
            out.rewards.append(float(result["env_runners"]["episode_return_mean"]))
            out.weights.append(hashed(exact))
            if iteration:  # in the first, kernels are loaded
                out.sync_s.append(timed.seconds)
                out.steps_per_s.append(result["env_runners"]["num_env_steps_sampled"] / seconds)
                note_bytes(way, out, exact, group, timed)
    finally:
        algorithm.stop()
        link.close()
    return out


def check(way: str, exact: Mapping[str, Any], group: Any) -> None:
    if way == "patch BF16":
        exact = {name: array.astype(ml_dtypes.bfloat16).astype(np.float32) for name, array in exact.items()}
    found = group.foreach_env_runner(runner_hash, local_env_runner=False)
    assert set(found) == {hashed(exact)}, way


def note_bytes(way: str, out: Measured, exact: Mapping[str, Any], group: Any, timed: Timed) -> None:
    if way == "full":
        out.sync_bytes.append(sum(array.nbytes for array in exact.values()))
        return
    report = timed.sync.report
    call = len(pickle.dumps(timed.sync.pull))
    fetched = [one.fetched_bytes for one in group.foreach_env_runner(last_sync, local_env_runner=False)]
    out.sync_bytes.append(float(np.mean(fetched)) + call)
    out.publish_s.append(report.blocked_s + report.encode_s + report.store_s)
    out.stored_bytes.append(report.payload_bytes)


def report(by_way: dict[str, Measured], args: argparse.Namespace) -> None:
    assert by_way["full"].rewards == by_way["patch"].rewards, "rewards differ"
    assert by_way["full"].weights == by_way["patch"].weights, "weights differ"
    print(
        f"PPO on CartPole-v1, {args.runners} env-runners, {args.batch} steps an iteration, fcnet {args.hidden}, "
        f"seed {SEED}: {args.iterations} iterations, {args.rounds} interleaved rounds."
    )
    print("Median (20th–80th percentile) over iterations of all rounds but the first of each.\n")
    full_bytes = float(np.mean(by_way["full"].sync_bytes))
    rows = [
        [
            way,
            f"{np.mean(one.sync_bytes):,.0f}",
            f"{full_bytes / np.mean(one.sync_bytes):.2f}",
            shown(one.sync_s, 1e3, 1),
            shown(one.publish_s, 1e3, 1),
            shown(one.steps_per_s, 1.0, 0),
        ]
        for way, one in by_way.items()
    ]
    head = ["sync", "bytes to an env-runner", "full ÷ this", "sync ms", "of it publish ms", "env steps/s"]
    print(table(head, rows) + "\n")
    turns = [[str(n + 1), *(f"{one.rewards[n]:.2f}" for one in by_way.values())] for n in range(args.iterations)]
    print("Mean return of an episode, by iteration:\n")
    print(table(["iteration", *by_way], turns) + "\n")
    fields = {
        "bench": "ray",
        "seed": SEED,
        **vars(args),
        **provenance("ray", "torch", "gymnasium"),
        "ways": {
            way: {
                "sync_bytes": float(np.mean(one.sync_bytes)),
                "sync_s": spread(one.sync_s),
                "publish_s": spread(one.publish_s),
                "steps_per_s": spread(one.steps_per_s),
                "rewards": one.rewards,
                "last_weights": one.weights[-1][:16],
            }
            for way, one in by_way.items()
        },
    }
    print(json_line(fields))


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--runners", type=int, default=2)
    parser.add_argument("--batch", type=int, default=2000)
    parser.add_argument("--hidden", default="256,256")
    parser.add_argument("--iterations", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=2)


def main(given: argparse.Namespace) -> None:
    ray.init(
        "local", num_cpus=given.runners + 2, include_dashboard=False, object_store_memory=1 << 30, log_to_driver=False
    )
    by_way = {way: Measured() for way in WAYS}
    for number in range(given.rounds):
        for way in WAYS:
            by_way[way].extend(run(way, given, f"bench-{number}-{way}"))
    report(by_way, given)
    ray.shutdown()
