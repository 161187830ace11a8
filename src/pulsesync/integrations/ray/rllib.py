"""RLlib: sync env-runners with patches.

    config = patched_sync(PPOConfig().environment("CartPole-v1"), Link("cartpole"))
    algorithm = config.build_algo()

For the new API stack with torch, and for algorithms that call `EnvRunnerGroup.sync_weights`, as PPO does.
The learner publishes the weights for env-runners from its own process; env-runners receive the version, and sync the
weights of their module in place. RLlib still decides when to sync, what to restart and what to sample.

With a cast, learners train in FP32 as before, and env-runners act with the weights rounded to that dtype: they keep the
rounded weights separately, and widen them into their FP32 module after each sync.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from pulsesync.format.patch import CodecName
from pulsesync.integrations.ray.cluster import ray
from pulsesync.integrations.ray.link import Link
from pulsesync.maintain.prune import prune
from pulsesync.publish.pending import PublishReport
from pulsesync.publish.publisher import Publisher
from pulsesync.run.reader import RunReader
from pulsesync.run.reporting import SyncReport
from pulsesync.run.subscriber import Subscriber
from pulsesync.state.views import CASTS, torch_dtype

KEEP_VERSIONS = 16  # least number of versions of a run in Ray's object store: env-runners lag by one, or start over


def patched_sync(
    config: Any, link: Link, *, cast: str | None = None, codec: CodecName = "auto", anchor_every: float = 1.0
) -> Any:
    """Have the algorithm of an RLlib config sync its env-runners with patches through a link. Returns the config.

    A run that exists at the link is resumed, if it has the same modules, whatever its weights are. Modules must not be
    added or removed while the algorithm runs: that is a StateError. A run in Ray's object store is pruned as it grows.
    """
    ray("rllib")  # raises if RLlib is not installed
    patching = _Patching(link, cast, codec, anchor_every)
    return config.callbacks(
        on_algorithm_init=[*_listed(config.callbacks_on_algorithm_init), patching.begin],
        on_env_runners_recreated=[*_listed(config.callbacks_on_env_runners_recreated), patching.catch_up],
    )


@dataclass(frozen=True)
class _Patching:
    """The arguments of `patched_sync`. It is pickled with the config."""

    link: Link
    cast: str | None
    codec: CodecName
    anchor_every: float

    def begin(self, *, algorithm: Any, **_: Any) -> None:
        """Replace the sync of full weights with patches, and sync all env-runners to the first version."""
        for group in (algorithm.env_runner_group, algorithm.eval_env_runner_group):
            if group is not None:
                group.sync_weights = PatchedSync(group, self)
                group.sync_weights.push(algorithm.learner_group, inference_only=True)
                group.sync_weights.catch_up()

    def catch_up(self, *, env_runner_group: Any, env_runner_indices: list[int], **_: Any) -> None:
        env_runner_group.sync_weights.catch_up(env_runner_indices)


class PatchedSync:
    """Replaces the `sync_weights` of an EnvRunnerGroup. `report` is that of the last publish."""

    def __init__(self, group: Any, patching: _Patching) -> None:
        self.group, self.patching = group, patching
        self.report: PublishReport | None = None
        self.pull: Pull | None = None
        self._full = group.sync_weights

    def __call__(
        self,
        policies: Any = None,
        from_worker_or_learner_group: Any = None,
        to_worker_indices: list[int] | None = None,
        global_vars: Any = None,
        timeout_seconds: float | None = 0.0,
        inference_only: bool | None = False,
    ) -> None:
        """Sync as RLlib's own method. Modules that are not among the policies are published too, unchanged."""
        if not isinstance(from_worker_or_learner_group, ray("rllib.core.learner.learner_group").LearnerGroup):
            self._full(
                policies, from_worker_or_learner_group, to_worker_indices, global_vars, timeout_seconds, inference_only
            )
            return
        pull = self.push(from_worker_or_learner_group, bool(inference_only))
        self.group.foreach_env_runner_async_fetch_ready(
            func=pull, tag="set_state", remote_worker_ids=to_worker_indices, timeout_seconds=timeout_seconds
        )
        if self.group.local_env_runner is not None:
            pull(self.group.local_env_runner)

    def push(self, learners: Any, inference_only: bool) -> "Pull":
        """Have one learner publish. All learners have the same weights."""
        first = None if learners.is_local else learners._worker_manager.healthy_actor_ids()[:1]
        result = next(iter(learners.foreach_learner(Push(self.patching, inference_only), remote_actor_ids=first)))
        if not result.ok:
            raise result.get()
        report, seq_no = result.get()
        self.report, self.pull = report, Pull(self.patching.link, report.version, seq_no)
        return self.pull

    def catch_up(self, indices: list[int] | None = None) -> None:
        """Sync env-runners to the last version, and wait for them; if none is named, all, including the local one."""
        if self.pull is not None:
            self.group.foreach_env_runner(self.pull, local_env_runner=indices is None, remote_worker_ids=indices)


# In the learner's process

_PUBLISHERS: WeakKeyDictionary[Any, Publisher] = WeakKeyDictionary()  # by learner


@dataclass(frozen=True)
class Push:
    """A call for a learner: publish the weights of its modules."""

    patching: _Patching
    inference_only: bool

    def __call__(self, learner: Any) -> tuple[PublishReport, int]:
        how = self.patching
        if (publisher := _PUBLISHERS.get(learner)) is None:
            publisher = _PUBLISHERS[learner] = Publisher(
                how.link.store(),
                resume=True,  # RLlib restores a learner from its own checkpoint after it has published new weights
                codec=how.codec,
                cast={} if how.cast is None else how.cast,  # {}: env-runners use FP32, without a warning
                anchor_every=how.anchor_every,
            )
        state = learner.get_state(components="rl_module", inference_only=self.inference_only)
        modules: Mapping[str, Mapping[str, Any]] = state["rl_module"]
        source = {f"{of}/{name}": array for of, module in modules.items() for name, array in module.items()}
        seq_no = int(state["weights_seq_no"])
        report = publisher.publish(source, step=seq_no)
        if how.link.at is None and report.version and report.version % KEEP_VERSIONS == 0:
            prune(publisher.store, keep_versions=KEEP_VERSIONS, keep_hours=0.0, grace_hours=0.0)
        return report, seq_no


# In an env-runner's process

_RECEIVERS: WeakKeyDictionary[Any, "ModuleReceiver"] = WeakKeyDictionary()  # by env-runner


@dataclass(frozen=True)
class Pull:
    """A call for an env-runner: sync the weights of its module to a version."""

    link: Link
    version: int
    seq_no: int

    def __call__(self, env_runner: Any) -> SyncReport:
        if (receiver := _RECEIVERS.get(env_runner)) is None:
            receiver = _RECEIVERS[env_runner] = ModuleReceiver(self.link)
        report = receiver.pull(env_runner.module, self.version)
        env_runner._weights_seq_no = self.seq_no  # as its set_state does
        return report


def last_sync(env_runner: Any) -> SyncReport | None:
    """Return the report of an env-runner's last sync: for `EnvRunnerGroup.foreach_env_runner`."""
    receiver = _RECEIVERS.get(env_runner)
    return receiver.report if receiver else None


class ModuleReceiver:
    """A subscriber for a module's weights. If something else has written to them, it starts over."""

    def __init__(self, link: Link) -> None:
        self.link = link
        self.report: SyncReport | None = None  # of the last sync
        self._subscriber: Subscriber | None = None
        self._held: dict[str, Any] = {}  # the module's tensors, or stand-ins in the dtype of the run
        self._stamps: dict[str, tuple[int, int]] = {}

    def pull(self, module: Any, version: int) -> SyncReport:
        tensors = dict(_tensors(module))
        if self._subscriber is None or _stamps(tensors) != self._stamps:
            self._subscriber = self.link.subscriber(undo=0)
            self._held = _in_dtypes_of(self._subscriber, version, tensors)
        report = self.report = self._subscriber.sync(self._held, version)
        for name, tensor in tensors.items():
            if self._held[name] is not tensor:
                tensor.copy_(self._held[name])
        self._stamps = _stamps(tensors)
        return report


def _tensors(module: Any) -> Iterator[tuple[str, Any]]:
    """Yield the weights of an env-runner's module by the names under which the learner publishes them."""
    core = ray("rllib.core")
    multi = ray("rllib.core.rl_module.multi_rl_module").MultiRLModule
    modules = module.items() if isinstance(module, multi) else [(core.DEFAULT_MODULE_ID, module)]
    for of, one in modules:
        for name, tensor in one.unwrapped().state_dict().items():
            yield f"{of}/{name}", tensor


def _stamps(tensors: Mapping[str, Any]) -> dict[str, tuple[int, int]]:
    """Return the addresses of tensors, and how often torch has written to them; a subscriber writes without torch."""
    return {name: (tensor.data_ptr(), tensor._version) for name, tensor in tensors.items()}


def _in_dtypes_of(subscriber: Subscriber, version: int, tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tensors themselves if they have the dtype of the run; otherwise copies in that dtype."""
    records = RunReader(subscriber.store, subscriber.trust)
    specs = {spec.name: spec for spec in records.layout(records.required_version(version).layout).tensors}
    dtypes = {name: torch_dtype(spec.dtype) for name, spec in specs.items() if spec.dtype in ("F32", *CASTS)}
    return {name: tensor.to(dtypes.get(name, tensor.dtype)) for name, tensor in tensors.items()}


def _listed(callbacks: Any) -> list[Any]:
    """Return the callbacks of a config as a list: the config has none, one, or several."""
    return list(callbacks) if isinstance(callbacks, list | tuple) else [callbacks] if callbacks is not None else []
