"""Weights over a process group of torch.distributed: what changed instead of all of them.

    cast = Broadcast(group, src=0)
    cast.push(model)            # on the source, after every step
    cast.pull_(model)           # on the others, at the same time

Every rank calls, and all come back with the same weights or all with an error and their own weights untouched. Trainers
that share a model among them are all sources: `src=[0, 1]`, and each pushes its shards. A rank may hold any part of the
model (DTensors, `pulsesync.Placed`, or what `pulsesync.integrations.runtime` makes of an engine's tensors).

A sync is a few messages however many tensors there are: who holds what (one), how long the first bucket is (one), the
buckets themselves, and whether all went well (one). Buckets are encoded, sent and decoded beside each other. If a rank
dies, the others get a GroupError at once (over gloo), if it falls behind, within `timeout_s`; in a new group they go on
with `regroup`.
"""

import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from pulsesync.core.threads import finish
from pulsesync.core.types import Bits, Tile
from pulsesync.errors import GroupError, StateError, VerificationError
from pulsesync.format.history import History
from pulsesync.format.weights import by_block
from pulsesync.group import bundles, messages
from pulsesync.group.bundles import Bundle, BundlePlan, LocalBundles
from pulsesync.group.calibrate import MOST, try_methods
from pulsesync.group.collective import Collective
from pulsesync.group.cost_model import METHODS, CostModel, Method, MethodTiming, TransferLoad
from pulsesync.group.messages import Bucket, SpareBuffers
from pulsesync.group.session import FailureCollector, Job, RankVersion, SyncSession
from pulsesync.state.host import HostState, HostTransition
from pulsesync.state.live import AnyTransition
from pulsesync.state.sharding import Placed, Shards, shards_of
from pulsesync.state.slices import LocalTile

BUCKET_WEIGHTS = 1 << 24  # fewer overlap better in theory; where ends share cores, each costs a wake-up or two
NOTE_BYTES = 1024  # of what ranks tell each other at a time, besides a number for each source
SAMPLE = 1 << 14  # weights of a bundle that are compared to see how much changed
_NOWHERE: Bits = np.empty(0, np.uint8)


@dataclass(frozen=True)
class BroadcastReport:
    """What a sync did, as this rank saw it."""

    version: int  # syncs so far
    digest: str  # of the weights as they travelled: the same on every rank
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
    undo_s: float  # receiver: reading what is to be changed, where decoding does not
    digest_s: float  # apart from the rest, but for a source that codes, where it is in encode_s
    apply_s: float  # writing: the only time the weights are not to be used


class Broadcast:
    """Sends weights from some ranks of a group to the others.

    Args:
        group: The process group, the default one if not given; used for nothing else while this is.
        src: The rank, in the group, that sends; or the ranks, if trainers share a model.
        cast: The dtype of the receivers, for all FP32 tensors of a source or by name pattern.
        timeout_s: How long to wait for the others, at each message.
        method: How to send; "auto" takes the quickest, by what was measured.
        bucket_weights: How many weights a bucket covers, at most; the same on every rank.
    """

    def __init__(
        self,
        group: Any = None,
        src: int | Sequence[int] = 0,
        *,
        cast: str | Mapping[str, str] | None = None,
        timeout_s: float = 300.0,
        method: Method | Literal["auto"] = "auto",
        bucket_weights: int = BUCKET_WEIGHTS,
    ) -> None:
        if method != "auto" and method not in METHODS:
            raise ValueError(f"method must be one of {', '.join(map(repr, ('auto', *METHODS)))}; got {method!r}")
        self.method = method
        self.costs = CostModel(bucket_weights=bucket_weights)
        self._cast = {"*": cast} if isinstance(cast, str) else dict(cast or {})
        self._timeout_s, self._bucket_weights = timeout_s, bucket_weights
        self._shards: Shards | None = None
        self._addresses: list[int] = []
        self._wire: BundlePlan | None = None
        self._held: LocalBundles | None = None  # the live weights, in bundles
        self._state: HostState | None = None  # a source's copy of what it last sent, or a receiver's live weights
        self._at: RankVersion | None = None
        self._before: tuple[RankVersion, AnyTransition] | None = None  # the last sync: its start, and how to roll back
        self._spare = SpareBuffers()
        self._messages: list[tuple[Bits, set[int]]] = []  # that a source's copy lies in, and which tiles of it
        self._latency_s = 1.0
        self._version = 0  # the last of any rank
        self._team, self._sources = Collective(group, timeout_s), list[int]()
        self.regroup(group, src)

    # For people

    def push(self, source: Any) -> BroadcastReport:
        """Send a model; the others pull.

        Raises:
            StateError: the ranks do not hold the same model; GroupError: a rank died, fell behind or failed;
            VerificationError. Nobody's weights have then changed, and the next push makes up for it.
        """
        if not self._pushes:
            raise ValueError(f"rank {self._team.rank} is no source here ({self._sources}): it pulls")
        return self._sync(source)

    def pull_(self, source: Any) -> BroadcastReport:
        """Bring a model to what the sources push, in place. Raises: as `push`."""
        if self._pushes:
            raise ValueError(f"rank {self._team.rank} is a source here: it pushes")
        return self._sync(source)

    def regroup(self, group: Any = None, src: int | Sequence[int] = 0) -> None:
        """Go on in another group. Ranks that hold what the sources last sent get patches, others everything."""
        team, sources = Collective(group, self._timeout_s), [src] if isinstance(src, int) else list(src)
        if not sources or len(set(sources)) < len(sources) or not all(0 <= rank < team.size for rank in sources):
            raise ValueError(f"a group of {team.size} has no ranks {sources} to be its sources")
        if (team.rank in sources) != self._pushes:  # the other end now: nothing that is held is of use to it
            self._shards, self._addresses = None, []
            self._forget()
        self._team, self._sources = team, sources
        self._joined = False

    def _forget(self) -> None:
        """Hold nothing that was sent or received."""
        self._at = self._before = self._state = None
        self._messages, self._spare = [], SpareBuffers()

    @property
    def version(self) -> int | None:
        """Syncs so far, of which this rank holds the last."""
        return self._at.version if self._at else None

    @property
    def digest(self) -> str | None:
        """The digest of the weights as they last travelled: the same on every rank."""
        return self._at.digest if self._at else None

    def verify(self) -> None:
        """Recount a receiver's weights. Raises: VerificationError, if they are not what was last pulled."""
        if self._state is None or self._at is None or self._wire is None or self._pushes:
            raise StateError("nothing was pulled yet")
        for ordinal, counted in self._state.count().items():
            place = self._state.places[ordinal]
            if counted != self._at.sums[ordinal] or (isinstance(place, Bundle) and place.untied()):
                names = sorted({piece.tensor for piece in self._wire.pieces[ordinal]})
                among = names[0] if len(names) == 1 else f"{names[0]}, or of {len(names) - 1} tensors beside it,"
                raise VerificationError(f"weights of {among} are not what came", tensor=names[0])

    # A sync

    @property
    def _pushes(self) -> bool:
        return self._team.rank in self._sources

    def _sync(self, source: Any) -> BroadcastReport:
        began, team = time.perf_counter(), self._team
        counts = team.messages, team.sent_bytes, team.received_bytes
        base, late = self._meet(source)
        assert self._wire is not None
        assert self._held is not None
        assert self._state is not None
        stream = SyncSession(
            team, self._sources, self._wire, self._held, self._state, self._bucket_weights, self._spare
        )
        if late and base:
            self._at = stream.bring(late, base)
        started = time.perf_counter()
        jobs, method = list[Job](), ""
        with FailureCollector(stream.faults):
            jobs, method = self._plan() if self._pushes else ([], "")
        stream.run(jobs, self._at.sums if self._at else {})
        point, notes = self._verdict(stream, method)
        with stream.clock.timed("apply"):
            finish(lambda: self._commit(stream, point))
        if self._pushes:
            self._learn(stream, jobs, notes, started)
        tiles, whole = self._wire.layout.tiles, any(bucket.whole for bucket in stream.made)
        changed = sum(patch.changed for bucket in stream.made for patch in bucket.patches)
        return BroadcastReport(
            point.version,
            point.digest,
            notes[self._sources[0]]["method"],
            None if whole else changed,
            sum(tile.size for tile in tiles),
            bundles.bytes_of(tiles),
            team.sent_bytes - counts[1],
            team.received_bytes - counts[2],
            team.messages - counts[0],
            time.perf_counter() - began,
            *(stream.clock[what] for what in ("diff", "encode", "wire", "prepare", "undo", "digest", "apply")),
        )

    def _plan(self) -> tuple[list[Job], str]:
        """What this source sends, bucket by bucket, and by which methods: decided before it is compared."""
        assert self._wire is not None
        tiles = self._wire.owned_by(self._sources.index(self._team.rank))
        if self._at is None:
            return [("dense", some) for some in messages.cut(self._wire, tiles, self._bucket_weights)], "full"
        chosen = self.costs.choose(self._sample(tiles)) if self.method == "auto" else [self.method] * len(tiles)
        jobs: list[Job] = []
        for method in METHODS:
            ours = [tile for tile, its in zip(tiles, chosen, strict=True) if its == method]
            jobs += [(method, some) for some in messages.cut(self._wire, ours, self._bucket_weights)]
        kinds = {method for method, _ in jobs}
        return jobs, "mixed" if len(kinds) > 1 else next(iter(kinds), "coded")

    def _sample(self, tiles: Sequence[Tile]) -> list[TransferLoad]:
        """How much of each bundle has changed, as far as a piece of it tells."""
        assert self._held is not None
        assert self._state is not None
        assert self._at is not None
        rng = np.random.default_rng(self._at.version)
        loads = []
        for tile, at in zip(tiles, rng.random(len(tiles)), strict=True):
            begin = int(at * max(tile.size - SAMPLE, 0))
            end = min(begin + SAMPLE, tile.size)
            old = self._state.flats[tile.tensor.name][begin:end]
            differ = np.count_nonzero(old != self._held.read(tile, begin, end))
            loads.append(TransferLoad(tile.size, bundles.bytes_of([tile]), differ / (end - begin) * tile.size))
        return loads

    def _verdict(self, stream: SyncSession, method: str) -> tuple[RankVersion, list[dict[str, Any]]]:
        """Hear whether every rank is ready, and come to the same version. Raises: on all of them, if not."""
        point = stream.conclude(self._at, self._version + 1)
        clock = stream.clock
        note = {
            "digest": point.digest,
            "fault": _short(stream.faults[0]) if stream.faults else "",
            "method": method,
            "waits_ms": [round(1e3 * wait_s, 2) for wait_s in stream.waits_s],
            "work_s": clock["prepare"] + clock["undo"] + clock["digest"] if not self._pushes else 0.0,
        }
        notes = self._tell(note)
        if stream.faults:
            raise stream.faults[0]
        self._end_together(notes, "could not take what was sent, so nobody did")
        if len({note["digest"] for note in notes}) > 1:
            raise VerificationError("ranks disagree on the result's digest; sync aborted, weights unchanged")
        return point, notes

    def _commit(self, stream: SyncSession, point: RankVersion) -> None:
        """Write what came into the weights, or what was sent into the copy of it."""
        assert self._state is not None
        state, patches = self._state, [patch for bucket in stream.made for patch in bucket.patches]
        whole = {ordinal: bits for bucket in stream.made for ordinal, bits in bucket.whole.items()}
        sums = {ordinal: point.sums[ordinal] for ordinal in state.places}
        back = state.commit(HostTransition(by_block(patches), sums, History()))
        before, self._before = self._at, None
        if whole:
            self._at = None  # should writing them fail, the weights are neither here nor there
            (state.adopt if self._pushes else state.load_tiles)(whole, {n: sums[n] for n in whole})
        self._keep_memory(stream.made)
        self._before = (before, back) if before and not whole else None
        self._at, self._version = point, point.version

    def _keep_memory(self, made: Sequence[Bucket]) -> None:
        """Have the memory of whole tiles for the next sync: a receiver what came, a source what it had before."""
        came = [(bucket.message, set(bucket.whole)) for bucket in made if bucket.whole]
        if not self._pushes:
            self._spare.replace(message for message, _ in came)
            return
        new = {ordinal for _, tiles in came for ordinal in tiles}
        left = [(message, tiles - new) for message, tiles in self._messages]
        self._spare.replace(message for message, tiles in left if came and not tiles)
        self._messages = [(message, tiles) for message, tiles in left if tiles] + came

    def _learn(
        self, stream: SyncSession, jobs: Sequence[Job], notes: Sequence[Mapping[str, Any]], began: float
    ) -> None:
        """Take in what this sync took: the link, and the method if it was one."""
        place = self._sources.index(self._team.rank)
        waits = [note["waits_ms"][place] / 1e3 for rank, note in enumerate(notes) if rank not in self._sources]
        if not waits:
            return
        clock, work_s = stream.clock, max(note["work_s"] for note in notes)
        source_s = clock["diff"] + clock["encode"] + clock["digest"]
        wire_s = max(waits) - stream.starved_s - self._latency_s
        self.costs.learn_link(stream.sent_bytes, wire_s, max(source_s, work_s))
        methods = {method for method, _ in jobs}
        if len(methods) != 1 or notes[self._team.rank]["method"] == "full":  # the first is slow for reasons of its own
            return
        tiles = [tile for _, some in jobs for tile in some]
        changed = sum(patch.changed for bucket in stream.made for patch in bucket.patches)
        load = TransferLoad(sum(tile.size for tile in tiles), bundles.bytes_of(tiles), changed)
        took = MethodTiming(source_s, work_s, time.perf_counter() - began, stream.sent_bytes)
        self.costs.learn(methods.pop(), load, took)

    # Who holds what

    def _meet(self, source: Any) -> tuple[RankVersion | None, list[int]]:
        """Come together on bundles and on the version to start from; return it and the receivers that lack it.

        If all of them do, there is none, and everything is sent.
        """
        faults: list[Exception] = []
        with FailureCollector(faults):
            self._attach(source)
        notes = self._tell({"fault": _short(faults[0]) if faults else ""})
        if faults:
            raise faults[0]
        self._end_together(notes, "could not take part")
        if len({note["alike"] for note in notes}) > 1:
            raise StateError("the ranks of this group were not told the same sources and bucket_weights")
        if not all(note["joined"] for note in notes) or len({note["wire"] for note in notes}) > 1:
            self._join()
            notes = self._tell({"fault": ""})
        self._version = max(int(note["at"].partition(":")[0] or 0) for note in notes)
        receivers = [rank for rank in range(self._team.size) if rank not in self._sources]
        name, late = _choose_base(notes, self._sources, receivers)
        if name is None or late == receivers:
            self._at = self._before = None
            return None, []
        if self._team.rank in late:
            self._at = self._before = None
            version, _, digest = name.partition(":")
            return RankVersion(int(version), digest, {}), late
        if self._at is None or self._at.name != name:
            self._roll_back()
        return self._at, late

    def _tell(self, note: dict[str, Any]) -> list[dict[str, Any]]:
        """Tell everybody where this rank stands, and something else; return what each has told."""
        alike = hashlib.sha256(f"{self._sources} {self._bucket_weights}".encode())
        stand = {
            "alike": alike.hexdigest()[:16],
            "joined": self._joined,
            "wire": self._wire.id[:16] if self._wire else "",
            "at": self._at.name if self._at else "",
            "before": self._before[0].name if self._before else "",
        }
        size = NOTE_BYTES + 16 * len(self._sources)
        data = json.dumps({**stand, **note}).encode()
        assert len(data) <= size, data
        rows = self._team.gather_rows(np.frombuffer(data.ljust(size), np.uint8))
        self._latency_s = min(1.1 * self._latency_s, self._team.last_s)
        try:
            said = [json.loads(row.tobytes()) for row in rows]
            if any(not isinstance(one, dict) or one.keys() != said[self._team.rank].keys() for one in said):
                raise ValueError("something else was told")
        except ValueError as e:
            raise GroupError(f"the group is out of step: {e}", rank=self._team.rank) from e
        return said

    def _end_together(self, notes: Sequence[Mapping[str, Any]], what: str) -> None:
        for rank, note in enumerate(notes):
            if note["fault"]:
                raise GroupError(f"rank {rank} {what}: {note['fault']}", rank=self._team.rank, failed_rank=rank)

    def _attach(self, source: Any) -> None:
        """Read the source as shards, unless they are the very ones of the last time."""
        source = source if isinstance(source, Mapping) else _state_dict(source)
        addresses = [hash((name, *_address(value))) for name, value in source.items()]  # numbers: nothing to collect
        if self._shards is not None and addresses == self._addresses:
            return
        shards = shards_of(source, self._cast if self._pushes else None)
        own = all(view.shared for view in shards.published.views.values())  # else what was read is a copy, of now
        if not self._pushes:
            for name, view in shards.published.views.items():
                if not view.shared:
                    raise StateError(f"tensor {name!r} is not contiguous, or read-only: not to be written", tensor=name)
            HostState.check_apart({name: view.flat for name, view in shards.published.views.items()})
            self._at = self._before = None  # other memory: what was pulled is not there
        same = self._shards is not None and (shards.windows, shards.ties) == (self._shards.windows, self._shards.ties)
        self._shards, self._addresses = shards, addresses if own else []
        if same and self._joined and self._wire is not None:
            self._bind(self._wire)
        else:
            self._joined = False

    def _join(self) -> None:
        """Agree on bundles with everybody. Raises: StateError, on all ranks alike."""
        assert self._shards is not None
        wire = bundles.agree(self._team.gather(bundles.tell(self._shards)), self._sources)
        known = self._wire.id if self._wire else "", sorted(self._held.places) if self._held else []
        if known != (wire.id, [tile.ordinal for tile in self._mine(wire)]):
            self._forget()
        self._bind(wire)
        self._joined = True

    def _mine(self, wire: BundlePlan) -> list[Tile]:
        """The bundles that this rank sends, or those that it takes."""
        rank = self._team.rank
        return wire.owned_by(self._sources.index(rank)) if self._pushes else wire.held_by(rank)

    def _bind(self, wire: BundlePlan) -> None:
        """Find the bundles in memory; a receiver's are its state, a source keeps a copy of what it last sent."""
        assert self._shards is not None
        tiles = self._mine(wire)
        self._wire, self._held = wire, LocalBundles(wire, tiles, self._shards)
        nowhere = {spec.name: _NOWHERE for spec in wire.layout.tensors}
        if not self._pushes:
            known = self._state.sums if self._state is not None and self._at is not None else {}
            self._state = HostState(wire.layout, nowhere, places=self._held.places, sums=known)
        elif self._state is None:
            places = {tile.ordinal: LocalTile(tile, True) for tile in tiles}
            self._state = HostState(wire.layout, nowhere, places=places, sums={})
            self._measure(tiles)

    def _measure(self, tiles: Sequence[Tile]) -> None:
        """Try the codecs on some of these weights, if there may be a choice."""
        assert self._held is not None
        coded = [tile for tile in tiles if tile.tensor.kind.exponent_shift is not None]
        if self.method == "auto" and coded:
            largest = max(coded, key=lambda tile: tile.size)
            try_methods(self.costs, self._held.read(largest, 0, min(MOST, largest.size)).copy(), largest.tensor.dtype)

    def _roll_back(self) -> None:
        """Undo the last sync: some ranks did not get to commit it."""
        assert self._state is not None
        assert self._before is not None
        state, (point, back) = self._state, self._before

        def undo() -> None:
            state.commit(back)
            self._at, self._before = point, None

        finish(undo)


def _choose_base(
    notes: Sequence[Mapping[str, Any]], sources: Sequence[int], receivers: Sequence[int]
) -> tuple[str | None, list[int]]:
    """The version to start from, and the receivers that are not there; every rank comes to the same.

    A rank can be where it is, or where the last sync began. Sources must be there; of the two, the one that leaves
    fewer receivers behind is taken, the later one if that is equal.
    """

    def reaches(rank: int, name: str) -> bool:
        return name in (notes[rank]["at"], notes[rank]["before"])

    lead = notes[sources[0]]
    names = [name for name in (lead["at"], lead["before"]) if name and all(reaches(rank, name) for rank in sources)]
    if not names:
        return None, list(receivers)
    behind = {name: [rank for rank in receivers if not reaches(rank, name)] for name in names}
    best = min(names, key=lambda name: len(behind[name]))
    return best, behind[best]


def _short(fault: Exception) -> str:
    """As much of it as fits into a note, in characters that JSON leaves as they are."""
    said = f"{type(fault).__name__}: {fault}"
    return "".join(c if c.isascii() and c.isprintable() and c not in '"\\' else "?" for c in said)[:300]


def _state_dict(source: Any) -> Mapping[str, Any]:
    if not hasattr(source, "state_dict"):
        raise StateError(f"expected a module, a state dict or a mapping of arrays, not {type(source).__name__}")
    state: Mapping[str, Any] = source.state_dict()
    return state


def _address(value: Any) -> tuple[Any, ...]:
    """Where a tensor lies, what it is and which part it is said to be: what changes when it is replaced."""
    if isinstance(value, Placed):
        return *_address(value.tensor), value.shape, value.rows, value.columns
    value = getattr(value, "_local_tensor", value)  # a DTensor
    if isinstance(value, np.ndarray):
        return value.__array_interface__["data"][0], value.shape, value.dtype
    return (value.data_ptr(), value.shape, value.dtype) if hasattr(value, "data_ptr") else (id(value),)
