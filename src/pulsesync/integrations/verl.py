"""verl: the checkpoint engine "pulse". Trainers publish each step into a run, and rollouts follow it.

    actor_rollout_ref:
      rollout:
        checkpoint_engine:
          backend: pulse
          custom_backend_module: pulsesync.integrations.verl
          engine_kwargs:
            pulse:
              location: s3://bucket/run

Only verl imports this module: in the driver and in every trainer and rollout process, where `custom_backend_module`
names it, and, by the entry point of the group `verl.plugins`, wherever verl is imported and pulsesync installed. The
import registers the engine; a second one does nothing.

One sync, as verl's `CheckpointEngineManager` drives it: `prepare` reads the run's newest version, `build_topology`
sends it to the rollouts, the trainers publish one version, and each rollout waits for a version after the one it got.
So a rollout never receives an older version of the same step, such as one from before a crash.
"""

import asyncio
import hashlib
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry
from verl.utils.device import get_device_id, get_device_name, get_torch_device
from verl.workers.rollout.utils import ensure_async_iterator

from pulsesync.errors import ChainError, ClosedError, NothingPublishedError, StateError
from pulsesync.format.layout import SMALL, Layout
from pulsesync.format.manifest import Manifest
from pulsesync.format.signature import SigningKey, trusted
from pulsesync.group.collective import Collective, SoloTeam, Team
from pulsesync.publish.pending import PublishReport
from pulsesync.publish.publisher import Publisher
from pulsesync.run.reader import RunReader
from pulsesync.run.subscriber import Subscriber
from pulsesync.state.views import new_torch_tensors, read_cast

BACKEND = "pulse"
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.02, 1.0  # between two checks of the store while the trainers publish


@dataclass(frozen=True)
class AwaitedVersion:
    """The version that a sync publishes: the one after the newest when the sync began."""

    run: str | None  # None: there was no run
    after: int  # -1: there was no version


@CheckpointEngineRegistry.register(BACKEND)
class PulseCheckpointEngine(CheckpointEngine):  # type: ignore[misc]
    """Moves weights from verl's trainers to its rollouts through a run: as patches, bit for bit.

    Trainers: verl gives every rank all tensors of the model, one after another. Each rank copies some of them to host
    memory, keeps the last version of only those, and compares, encodes and uploads them; rank 0 commits the version.
    Rollouts: each process has a copy of the model in host memory, which a `Subscriber` syncs to the version of the
    step; then all its tensors are passed to the inference engine. If anything fails, the engine gets nothing.

    Args:
        bucket_size: Bytes of verl's transfer buckets; verl passes `update_weights_bucket_megabytes`.
        is_master: Whether this is rank 0 of the trainers; verl passes it.
        location: A path or URL of the run, which all processes can reach.
        cast: The dtype that FP32 tensors are published in: one for all, or by name pattern, "" to leave them FP32.
        anchor_every: As for `Publisher`.
        resume: As for `Publisher`.
        signing_key: A file with the signing key, on the host of trainer rank 0. The key itself cannot be an option,
            because verl logs its configuration.
        trust: Public keys (64 hexadecimal digits); records that none of them signed are refused.
        cache: A folder in which the rollout processes of a host share fetched bytes.
        timeout_s: How long a rollout waits for the version of a step, and trainers for each other.

    Raises:
        ValueError: a key, a dtype or a location is not valid.
    """

    wire_format = "named_tensors"  # docs/integrations/verl.md explains why not "delta_flush"

    def __init__(
        self,
        bucket_size: int,
        is_master: bool = False,
        *,
        location: str,
        cast: str | Mapping[str, str] | None = "BF16",
        anchor_every: float = 1.0,
        resume: bool = False,
        signing_key: str | None = None,
        trust: str | Sequence[str] | None = None,
        cache: str | None = None,
        timeout_s: float = 600.0,
    ) -> None:
        self.bucket_size, self.is_master = bucket_size, is_master
        self.location, self.timeout_s = location, timeout_s
        cast = None if cast is None else read_cast(cast)
        self._options: dict[str, Any] = {"cast": cast, "anchor_every": anchor_every, "resume": resume}
        self._key_file = signing_key
        keys = trust if trust is None or isinstance(trust, str) else list(trust)
        self._subscriber = Subscriber(location, trust=keys, cache=cache)
        self._trust = trusted(keys)
        self._team: Team | None = None  # of the trainers, from the first sync on
        self._publisher: Publisher | None = None
        self._awaited: AwaitedVersion | None = None  # while a rollout syncs
        self._layout: Layout | None = None
        self._mirror: dict[str, Any] = {}
        self._receiving = threading.Lock()  # locked while the mirror is written

    # What verl calls on every worker, before and after each sync

    def prepare(self) -> dict[str, Any]:
        """Return, on rank 0 of the trainers, which version the run has. Raises: StoreError, FormatError, ChainError."""
        if not self.is_master:
            return {}
        newest = RunReader(self._subscriber.store, self._trust).newest()
        return {"run": newest.run, "version": newest.version} if newest else {"run": None, "version": -1}

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[dict[str, Any]]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """Pass the number of trainers to the trainers, and the run's newest version to the rollouts."""
        before = metadata[0]
        if not before:
            raise StateError(
                "the first worker must be rank 0 of the trainers, which reports the run's newest version; it is "
                "another one: use verl's own CheckpointEngineManager"
            )
        trainers = {"trainers": [actor_wg_world_size] * actor_wg_world_size}
        rollouts = {"run": [before["run"]] * rollout_world_size, "after": [before["version"]] * rollout_world_size}
        return trainers, rollouts

    def init_process_group(self, *, trainers: int = 0, run: str | None = None, after: int = -1) -> None:
        """Join as one of the trainers, or as a rollout that waits for the version after `after`. Raises: StateError."""
        if not trainers:
            self._awaited = AwaitedVersion(run, after)
        elif self._team is None:
            self._team = self._meet(trainers)

    def finalize(self) -> None:
        """End the sync; a rollout that still waits for its version stops waiting."""
        self._awaited = None

    # Trainers

    async def send_weights(self, weights: Any, global_steps: int | None = None) -> dict[str, float]:
        """Publish the weights of a step as one version. Every rank calls it, with the same tensors in the same order.

        Returns:
            On rank 0 the metrics of a sync that verl logs; on other ranks nothing.

        Raises:
            StateError: the ranks were given different tensors, or one twice; otherwise as `Publisher.publish`. The
            run is then unchanged, and the next sync contains this step too.
        """
        team = self._team
        if team is None:
            raise StateError("send_weights needs init_process_group first, which CheckpointEngineManager calls")
        share = _TrainerShare(team)
        async for name, tensor in ensure_async_iterator(weights):
            share.add(name, tensor)
        report = await asyncio.to_thread(self._publish, share, global_steps or 0)
        return _metrics(report) if team.rank == 0 else {}

    def _publish(self, share: "_TrainerShare", step: int) -> PublishReport:
        share.check()
        if self._publisher is None:
            file = self._key_file if share.team.rank == 0 else None
            key = None if file is None else SigningKey.from_file(file)
            self._publisher = Publisher(self.location, team=share.team, signing_key=key, **self._options)
        return self._publisher.publish(share.tensors, step=step)

    def _meet(self, trainers: int) -> Team:
        """Return the team of all trainers, which have a process group already."""
        if trainers == 1:
            return SoloTeam()
        from torch import distributed

        found = distributed.get_world_size() if distributed.is_initialized() else 0
        if found != trainers:
            raise StateError(
                f"verl has {trainers} trainers, but torch.distributed's default group has {found} processes; it must "
                "be the group of all trainers"
            )
        # Over gloo wherever the weights are: the ranks send each other digests and sizes.
        return Collective(distributed.new_group(backend="gloo"), timeout_s=self.timeout_s)

    # Rollouts

    async def receive_weights(self, global_steps: int | None = None) -> AsyncIterator[tuple[str, Any]]:
        """Yield all tensors of this sync's version, by name, in host memory. They must not be written to.

        Raises:
            NothingPublishedError: the trainers published no version within `timeout_s`; ChainError: the version belongs
            to another step or run; otherwise as `Subscriber.sync`. Nothing was yielded then.
        """
        awaited = self._awaited
        if awaited is None:
            raise StateError("receive_weights needs init_process_group first, which CheckpointEngineManager calls")
        await asyncio.to_thread(self._receive, awaited, global_steps)
        for name, tensor in self._mirror.items():
            yield name, self._passable(tensor)

    def _receive(self, awaited: AwaitedVersion, step: int | None) -> None:
        until = time.monotonic() + self.timeout_s
        reader, record = self._wait_for(awaited, step, until)
        with self._receiving:  # the thread of a cancelled sync may still run, while the next sync uses the mirror
            self._check_current(awaited)
            if self._layout is None or self._layout.id != record.layout:
                self._layout = reader.layout(record.layout)
                self._mirror = new_torch_tensors(self._layout)
            self._subscriber.sync(self._mirror, record.version, wait_s=max(0.0, until - time.monotonic()))

    def _check_current(self, awaited: AwaitedVersion) -> None:
        if self._awaited is not awaited:
            raise ClosedError("this sync has ended: verl cancelled it or started another one")

    def _wait_for(self, awaited: AwaitedVersion, step: int | None, until: float) -> tuple[RunReader, Manifest]:
        pause_s = FIRST_PAUSE_S
        while True:
            reader = RunReader(self._subscriber.store, self._trust)
            record = reader.newest(awaited.after)
            self._check_current(awaited)
            if record is not None:
                _check_record(record, awaited, step)
                return reader, record
            if time.monotonic() > until:
                raise NothingPublishedError(
                    f"the trainers published no version after {awaited.after} at {self.location} within "
                    f"{self.timeout_s:g} s; read their log, and raise engine_kwargs.pulse.timeout_s if they need longer"
                )
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    def _passable(self, tensor: Any) -> Any:
        """With a GPU, verl passes a tensor that is larger than a bucket through CUDA IPC, so it must be on the GPU."""
        if tensor.nbytes <= self.bucket_size or not get_torch_device().is_available():
            return tensor
        return tensor.to(f"{get_device_name()}:{get_device_id()}")


class _TrainerShare:
    """The tensors that this trainer publishes, of all that verl passes to every rank.

    Tensors are not split, so that a run can be resumed with another number of trainers: each belongs to the rank that
    has the fewest bytes so far, and the small ones, which share tiles, to rank 0.
    """

    def __init__(self, team: Team) -> None:
        self.team = team
        self.tensors: dict[str, Any] = {}
        self._bytes = [0] * team.size
        self._given: list[tuple[str, str]] = []  # names, and what else the ranks must agree on

    def add(self, name: str, tensor: Any) -> None:
        """Copy a tensor if it belongs to this rank: verl frees or changes its own when the next one is requested."""
        self._given.append((name, f"{tensor.dtype} {tuple(tensor.shape)}"))
        owner = 0 if tensor.numel() < SMALL else self._bytes.index(min(self._bytes))
        self._bytes[owner] += tensor.nbytes
        if owner == self.team.rank:
            self.tensors[name] = tensor.detach().to("cpu", copy=True)

    def check(self) -> None:
        """Raises: StateError, if the tensors are not the same on all ranks, or one was passed twice.

        It is called after the last tensor: gathering takes all ranks, so a rank that stopped would block the others.
        """
        mine = hashlib.sha256(repr(self._given).encode()).digest()
        others = [rank for rank, digest in enumerate(self.team.gather(mine)) if digest != mine]
        if others:
            raise StateError(
                f"trainer {self.team.rank} was given {len(self._given)} tensors, but trainer {others[0]} was given "
                "others, or in another order or dtype; every rank must be given the entire model in the same order"
            )
        counts = Counter(name for name, _ in self._given)
        if twice := [name for name, count in counts.items() if count > 1]:
            raise StateError(f"verl's training engine gave tensor {twice[0]!r} twice", tensor=twice[0])


def _metrics(report: PublishReport) -> dict[str, float]:
    """Return the metrics of a sync for verl's log, under the names that its own engines use, and the version."""
    return {
        "checkpoint_engine/changed_ratio": report.density,
        "checkpoint_engine/changed_elems": float(report.changed),
        "checkpoint_engine/payload_mbytes": report.payload_bytes / (1 << 20),
        "checkpoint_engine/version": float(report.version or 0),
    }


def _check_record(record: Manifest, awaited: AwaitedVersion, step: int | None) -> None:
    """Raises: ChainError, if a version is not the one of this sync."""
    if awaited.run not in (None, record.run):
        raise ChainError(
            f"the run was {awaited.run} when this sync began, but is {record.run} now: another program writes to its "
            "location; give each training a location of its own",
            version=record.version,
        )
    if step is not None and record.step != step:
        raise ChainError(
            f"version {record.version} belongs to step {record.step}, but this sync to step {step}: another trainer "
            "writes to this run; give each training a location of its own",
            version=record.version,
        )
