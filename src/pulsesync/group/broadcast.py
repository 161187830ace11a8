"""Weights over a process group of torch.distributed: changes instead of all weights.

    cast = Broadcast(group, src=0)
    cast.push(model)            # on the source, after every step
    cast.pull_(model)           # on the others, at the same time

Every rank calls, and all return with the same weights, or all raise and their weights are unchanged. Trainers that
share a model are all sources: `src=[0, 1]`, and each pushes its shards. A rank may have any part of the model
(DTensors, `pulsesync.Placed`, or what `pulsesync.integrations.runtime` makes of an engine's tensors).

A sync is a few messages however many tensors there are: where each rank stands (one), how long the first bucket is
(one), the buckets, and whether all ranks are ready to commit (one). Buckets are encoded, sent and decoded concurrently.
If a rank dies, the others get a GroupError at once (over gloo); if it is slow, within `timeout_s`. In a new group they
resume with `regroup`.
"""

import hashlib
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pulsesync.core.events import GroupSynced, GroupSyncFailed, describe_error, emit, has_listeners
from pulsesync.core.threads import finish
from pulsesync.errors import FormatError, GroupError, StateError, VerificationError
from pulsesync.group import bundles
from pulsesync.group.agreement import describe_fault, exchange_notes
from pulsesync.group.collective import Collective
from pulsesync.group.cost_model import METHODS, CostModel, Method, MethodTiming, TransferLoad
from pulsesync.group.peers import GroupEnd, Job, LocalModel, RankVersion, ReceiverEnd, SourceEnd, addresses_of
from pulsesync.group.session import FailureCollector, SyncSession
from pulsesync.state.views import Cast, mapping_of, read_cast

NOTE_BYTES = 1024  # size of a note between ranks, plus 16 for each source

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class BroadcastReport:
    """What a sync did, as this rank saw it."""

    version: int  # syncs so far
    digest: str  # of the weights as they were sent: the same on every rank
    method: str  # "full" to begin with; then "dense", "plain", "gap", "coded" or "mixed"
    changed: int | None  # weights; None where all were sent and none compared
    total: int  # weights
    full_bytes: int
    sent_bytes: int
    received_bytes: int
    messages: int
    seconds: float
    diff_s: float  # source: comparing
    encode_s: float  # source: coding, or copying
    wire_s: float  # sending or receiving, and waiting for it
    prepare_s: float  # receiver: checking and decoding
    undo_s: float  # receiver: reading old weights for the undo log, where decoding does not
    digest_s: float  # counting digests; of coded changes that is part of encode_s and prepare_s
    apply_s: float  # writing: the only time in which the weights must not be used


class Broadcast:
    """Sends weights from some ranks of a group to the others.

    Args:
        group: The process group, the default one if not given; use it for nothing else at the same time.
        src: The rank, in the group, that sends; or the ranks, if trainers share a model.
        cast: The dtype of the receivers, for all FP32 tensors of a source or by name pattern.
        timeout_s: How long to wait for the other ranks, at each message.
        method: How to send; "auto" chooses the fastest by measurement.
    """

    def __init__(
        self,
        group: Any = None,
        src: int | Sequence[int] = 0,
        *,
        cast: "Cast | Mapping[str, Cast] | None" = None,
        timeout_s: float = 300.0,
        method: Method | Literal["auto"] = "auto",
    ) -> None:
        if method != "auto" and method not in METHODS:
            raise ValueError(f"method must be one of {', '.join(map(repr, ('auto', *METHODS)))}; got {method!r}")
        self.method = method
        self.costs = CostModel()
        self._cast = read_cast(cast)
        self._timeout_s = timeout_s
        self._model: LocalModel | None = None  # the last one, if the next sync can recognize it by its addresses
        self._end: GroupEnd | None = None  # source or receiver, since this rank first joined
        self._latency_s = 1.0
        self._pushes = self._on_gpu = False
        self.regroup(group, src)

    # Public methods

    def push(self, source: Any) -> BroadcastReport:
        """Send a model; the other ranks pull.

        Raises:
            StateError: the ranks do not have the same model; GroupError: a rank died, fell behind or failed;
            VerificationError, also if something else has written to this receiver's weights, to which the next push
            then sends everything. No rank's weights have changed, and the next push covers both steps.
        """
        if not self._pushes:
            raise ValueError(f"rank {self._team.rank} is not a source (src={self._sources}): call pull_, not push")
        return self._sync(source)

    def pull_(self, source: Any) -> BroadcastReport:
        """Bring a model to what the sources push, in place. Raises: as `push`."""
        if self._pushes:
            raise ValueError(f"rank {self._team.rank} is a source (src={self._sources}): call push, not pull_")
        return self._sync(source)

    def regroup(self, group: Any = None, src: int | Sequence[int] = 0) -> None:
        """Resume in another group. Ranks that are at the version last sent get patches, others all weights."""
        team, sources = Collective(group, self._timeout_s), [src] if isinstance(src, int) else list(src)
        if not sources or len(set(sources)) < len(sources) or not all(0 <= rank < team.size for rank in sources):
            raise ValueError(f"src must name one or more ranks of the group, 0 to {team.size - 1}, once; got {sources}")
        pushes = team.rank in sources
        if pushes != self._pushes:  # a source cannot use the state of a receiver, and vice versa
            self._model = self._end = None
        if self._end is not None:
            self._end.joined = False
        self._team, self._sources, self._pushes = team, sources, pushes

    @property
    def version(self) -> int | None:
        """The number of the last sync, if this rank is at its weights."""
        return self._end.at.version if self._end and self._end.at else None

    @property
    def digest(self) -> str | None:
        """The digest of the weights as they were last sent: the same on every rank."""
        return self._end.at.digest if self._end and self._end.at else None

    def verify(self) -> None:
        """Recount a receiver's weights.

        Raises:
            VerificationError: they are not those that were last pulled; the next pull gets all weights again.
        """
        if not isinstance(self._end, ReceiverEnd) or self._end.at is None:
            raise StateError(f"rank {self._team.rank} has no pulled weights to verify: call pull_ on a receiver first")
        self._end.verify(self._end.at)

    # A sync

    def _sync(self, source: Any) -> BroadcastReport:
        """Sync, and log and emit what came of it."""
        try:
            report = self._sync_all(source)
        except Exception as e:
            if has_listeners():
                emit(GroupSyncFailed(rank=self._team.rank, error=describe_error(e)))
            raise
        logger.info(
            "Rank %d synced to version %d by method %r: %s of %d weights changed, %d bytes sent, %d received, %.3f s.",
            self._team.rank,
            report.version,
            report.method,
            "an unknown number" if report.changed is None else report.changed,
            report.total,
            report.sent_bytes,
            report.received_bytes,
            report.seconds,
        )
        if has_listeners():
            emit(GroupSynced.of(report, rank=self._team.rank, pause_s=report.apply_s))
        return report

    def _sync_all(self, source: Any) -> BroadcastReport:
        began, team = time.perf_counter(), self._team
        counts = team.messages, team.sent_bytes, team.received_bytes
        end, notes = self._agree(source)
        version = 1 + max(note["version"] for note in notes)
        base, late = _choose_base(notes, self._sources)
        end.weights.begin()
        with end.leaving(base):
            stream = SyncSession(team, self._sources, end)
            if late:
                stream.send_version(late, base)
            started = time.perf_counter()
            jobs, method = list[Job](), ""
            with FailureCollector(stream.faults):
                if isinstance(end, SourceEnd):
                    jobs, method = end.plan(self.method, self.costs)
            stream.run(jobs)
            point, notes = self._verdict(stream, version, method)
        with stream.clock.timed("apply"):
            finish(lambda: end.commit(stream.buckets, point))
        if self._pushes:
            self._learn(stream, jobs, notes, started)
        tiles, whole = end.wire.layout.tiles, any(bucket.whole for bucket in stream.buckets)
        return BroadcastReport(
            point.version,
            point.digest,
            notes[self._sources[0]]["method"],
            None if whole else sum(bucket.changed for bucket in stream.buckets),
            sum(tile.size for tile in tiles),
            bundles.bytes_of(tiles),
            team.sent_bytes - counts[1],
            team.received_bytes - counts[2],
            team.messages - counts[0],
            time.perf_counter() - began,
            *(stream.clock[what] for what in ("diff", "encode", "wire", "prepare", "undo", "digest", "apply")),
        )

    def _verdict(self, stream: SyncSession, version: int, method: str) -> tuple[RankVersion, list[dict[str, Any]]]:
        """Learn whether every rank is ready to commit, and the version that follows. Raises: on all of them, if not."""
        point, clock, end = stream.conclude(version), stream.clock, stream.end
        if stream.faults and isinstance(end, ReceiverEnd) and end.at is not None:
            # Weights that something else has written can look like bad bytes: they are counted before a rank is blamed.
            damage = list[Exception]()
            with FailureCollector(damage):
                end.verify(end.at)
            stream.faults[:0] = damage
        note = {
            "digest": point.digest,
            "method": method,
            "waits_ms": [round(1e3 * wait_s, 2) for wait_s in stream.waits_s],
            "work_s": clock["prepare"] + clock["undo"] + clock["digest"] if not self._pushes else 0.0,
        }
        notes = self._exchange(note, stream.faults, "failed in this sync, which is aborted with all weights unchanged")
        if len({note["digest"] for note in notes}) > 1:
            raise VerificationError("ranks disagree on the result's digest; sync aborted, weights unchanged")
        return point, notes

    def _learn(
        self, stream: SyncSession, jobs: Sequence[Job], notes: Sequence[Mapping[str, Any]], began: float
    ) -> None:
        """Improve the cost model by what this sync took: the link, and the method if there was only one."""
        place = self._sources.index(self._team.rank)
        waits = [note["waits_ms"][place] / 1e3 for rank, note in enumerate(notes) if rank not in self._sources]
        if not waits:
            return
        clock, work_s = stream.clock, max(note["work_s"] for note in notes)
        source_s = clock["diff"] + clock["encode"] + clock["digest"]
        wire_s = max(waits) - stream.starved_s - self._latency_s
        self.costs.learn_link(stream.sent_bytes, wire_s, max(source_s, work_s))
        methods = {method for method, _ in jobs}
        if len(methods) != 1 or notes[self._team.rank]["method"] == "full":  # a first sync has costs of its own
            return
        tiles = [tile for _, some in jobs for tile in some]
        changed = sum(bucket.changed for bucket in stream.buckets)
        load = TransferLoad(sum(tile.size for tile in tiles), bundles.bytes_of(tiles), changed)
        took = MethodTiming(source_s, work_s, time.perf_counter() - began, stream.sent_bytes)
        self.costs.learn(methods.pop(), load, took)

    # Before a sync: what each rank has

    def _agree(self, source: Any) -> tuple[GroupEnd, list[dict[str, Any]]]:
        """Attach a model, and join if any rank must; return this rank's end and the notes of all ranks."""
        faults: list[Exception] = []
        with FailureCollector(faults):
            model = self._attach(source)
        notes = self._exchange({}, faults, "cannot take part in this sync")
        if len({note["alike"] for note in notes}) > 1:
            raise StateError(
                f"ranks disagree on src: rank {self._team.rank} has src={self._sources}; pass the same on every rank"
            )
        end = self._end
        if end is None or not all(note["joined"] for note in notes) or len({note["wire"] for note in notes}) > 1:
            on_gpu = all(note["on_gpu"] for rank, note in enumerate(notes) if rank not in self._sources)
            with FailureCollector(faults):
                end = self._join(model, on_gpu)
            notes = self._exchange({}, faults, "cannot join")
        assert end is not None  # otherwise this rank has raised an error
        return end, notes

    def _attach(self, source: Any) -> LocalModel:
        """Read the source as shards, unless its tensors are those of the last sync."""
        tensors = mapping_of(source)
        addresses = addresses_of(tensors)
        if self._model is not None and self._model.addresses == addresses:
            return self._model
        model = LocalModel.of(tensors, self._cast if self._pushes else None, addresses)
        if not self._pushes:
            model.check_writable()
        if self._end is not None and self._end.device != model.device:
            self._end, self.costs = None, CostModel()  # memory and costs are those of other weights
        if self._end is not None:
            self._end.attach(model.shards)
        self._on_gpu = model.device is not None
        self._model = None if model.copied else model
        return model

    def _join(self, model: LocalModel, receivers_on_gpu: bool) -> GroupEnd:
        """Agree on bundles with all ranks. Raises: StateError, on all ranks, whose ends are unchanged."""
        team = self._team
        wire = bundles.agree(team.gather(bundles.describe_shards(model.shards)), self._sources)
        tiles = wire.owned_by(self._sources.index(team.rank)) if self._pushes else wire.local_to(team.rank)
        if self._end is not None and (self._end.wire.id, self._end.tiles) == (wire.id, tiles):
            self._end.bind(wire, model.shards)
        elif self._pushes:
            end = SourceEnd(wire, tiles, model)
            if self.method == "auto":
                end.calibrate(self.costs, receivers_on_gpu)
            self._end = end
        else:
            self._end = ReceiverEnd(wire, tiles, model)
        return self._end

    def _exchange(self, note: Mapping[str, Any], faults: Sequence[Exception], failed: str) -> list[dict[str, Any]]:
        """Exchange notes, each with the first error of its rank. Raises: that of this rank; GroupError: of another."""
        end = self._end
        mine = {
            "alike": hashlib.sha256(str(self._sources).encode()).hexdigest()[:16],
            "joined": end is not None and end.joined,
            "wire": end.wire.id[:16] if end else "",
            "version": end.at.version if end and end.at else 0,
            "at": end.at.name if end and end.at and end.has_weights else "",
            "before": end.before[0].name if end and end.before else "",
            "on_gpu": self._on_gpu,
            "fault": describe_fault(f"{type(faults[0]).__name__}: {faults[0]}", 300) if faults else "",
            **note,
        }
        try:
            notes = exchange_notes(self._team, mine, NOTE_BYTES + 16 * len(self._sources))
        except FormatError as e:
            raise GroupError(
                f"the group is out of step: {e}; all ranks must call push or pull_ equally often and use the group for "
                "nothing else",
                rank=self._team.rank,
            ) from e
        self._latency_s = min(1.1 * self._latency_s, self._team.last_s)
        if faults:
            raise faults[0]
        for rank, other in enumerate(notes):
            if other["fault"]:
                raise GroupError(f"rank {rank} {failed}: {other['fault']}", rank=self._team.rank, failed_rank=rank)
        return notes


def _choose_base(notes: Sequence[Mapping[str, Any]], sources: Sequence[int]) -> tuple[str, list[int]]:
    """The name of the version to start from, and the receivers that cannot reach it; every rank chooses the same.

    A rank can start from the version that it is at, and from the one where its last sync began. All sources must be
    able to; of the two, the one that fewer receivers lack is chosen, the later one if that is equal. If all receivers
    lack it, there is no base, named "": all weights are sent.
    """

    def reaches(rank: int, name: str) -> bool:
        return name in (notes[rank]["at"], notes[rank]["before"])

    receivers = [rank for rank in range(len(notes)) if rank not in sources]
    first = notes[sources[0]]
    names = [name for name in (first["at"], first["before"]) if name and all(reaches(rank, name) for rank in sources)]
    late = {name: [rank for rank in receivers if not reaches(rank, name)] for name in names}
    best = min(names, key=lambda name: len(late[name]), default="")
    return (best, late[best]) if best and late[best] != receivers else ("", [])
