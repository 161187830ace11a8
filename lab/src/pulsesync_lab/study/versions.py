"""The versions of a run, for a study: replayed into memory one by one, or counted from the headers of their patches.

Replay yields the weights of every version, and so everything that a recorder can measure. The headers alone yield how
many weights of each tensor changed and the real bytes: no anchor is read, nothing is decoded.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pulsesync.core.types import Codec, TensorSpec
from pulsesync.errors import MissingLinkError, NotFoundError, NothingPublishedError, StateError, UnsupportedError
from pulsesync.format import patch, wire
from pulsesync.format.body import Body
from pulsesync.format.codecs import context
from pulsesync.format.index import TileEntry
from pulsesync.format.layout import Layout
from pulsesync.format.manifest import Manifest, RecordKind
from pulsesync.format.patch import WHOLE
from pulsesync.format.predict import PREDICTING
from pulsesync.maintain.verify import find_records
from pulsesync.run import planner
from pulsesync.run.bodies import check_room, fetch_body
from pulsesync.run.follower import RunFollower
from pulsesync.run.reader import RunReader
from pulsesync.state.views import new_tensors
from pulsesync.store import Store
from pulsesync_lab.study.recording import PatchBytes, Recording, RecordingHeader, Step, WatchedTensor


@dataclass(frozen=True)
class ReplayedVersion:
    """A version that was replayed. The tensors are the same arrays every time: copy them to keep them."""

    number: int  # of versions so far
    of: int
    step: int  # the trainer's
    tensors: Mapping[str, Any]
    facts: Mapping[str, Any]
    # Bytes by the codec that wrote most of them; empty if the path to this version was not a single patch.
    real: Mapping[str, int]


class Versions:
    """The newest versions of a run with the layout of its last one, oldest first.

    Raises:
        NotFoundError: there is no run; StoreError; FormatError: its newest version cannot be read.
    """

    def __init__(self, store: Store, trust: Collection[str] | None, limit: int = 0) -> None:
        self.store, self.trust = store, trust
        self._records = RunReader(store, trust)
        found = find_records(self._records, limit + 1 if limit else None)  # and the one before the first
        versions = [one.record for one in found if one.record and one.record.kind == RecordKind.VERSION]
        if not versions:
            raise NotFoundError("no version is published at this location", key="manifests/")
        self.layout = self._records.layout(versions[-1].layout)
        self.records = [record for record in versions if record.layout == self.layout.id]

    @property
    def dtype(self) -> str:
        """The dtype that most weights have. Raises: StateError, if there are no tensors."""
        return main_dtype(self.layout.tensors, "this run")

    @property
    def others(self) -> dict[str, str]:
        """By name, the dtypes of the tensors that have another one."""
        return other_dtypes(self.layout.tensors, self.dtype)

    def replay(self) -> Iterator[ReplayedVersion]:
        """Bring weights from the oldest reachable version to the newest, and yield them at each.

        Raises:
            MissingLinkError: none can be reached; LimitError: the first anchor cannot contain the weights that the
            layout describes, for which no memory is allocated then; StoreError, FormatError, VerificationError: as a
            Subscriber.
        """
        tensors: dict[str, Any] = {}
        follower = RunFollower(self.store, self.trust)
        for number, record in enumerate(self.records, 1):
            try:
                if not tensors:
                    anchor = planner.find_path(None, record, self._records.look)[0]
                    check_room(self.store, anchor, self.layout)
                    tensors = new_tensors(self.layout.tensors)
                report = follower.sync(tensors, version=record.version)
            except (MissingLinkError, NothingPublishedError):
                if follower.version is None:
                    continue  # earlier versions were pruned: an anchor follows later
                raise
            real = _real(record, self._bodies(record, ())) if report.path == ("patch",) else {}
            yield ReplayedVersion(number, len(self.records), record.step, tensors, {"version": record.version}, real)
        if follower.version is None:
            raise MissingLinkError("no version of this run can be read: it has no anchor")

    def count(self) -> Iterator[Step]:
        """Counts from the headers of the patches, version by version.

        They distinguish bundles, not the tensors in them.

        A tile that was written whole does not state how much of it changed: all of it is counted, and the fact `dense`
        has the number of these weights.
        """
        numbers = {spec.name: n for n, spec in enumerate(self._coded)}
        for record in self.records:
            if record.base is None:
                continue
            changed, dense = [0] * len(numbers), 0
            bodies = self._bodies(record, None)
            for body in bodies:
                for entry, payload in patch.payloads(body.index, body.sections):
                    tile = self.layout.tiles[entry.tile]
                    changed[numbers[tile.tensor.name]] += changes(entry, payload, self.layout)
                    dense += tile.size if entry.codec in WHOLE else 0
            sizes = {codec: PatchBytes(None, size) for codec, size in _real(record, bodies).items()}
            facts = {"version": record.version, **({"dense": dense} if dense else {})}
            yield Step(record.step, tuple(changed), sizes=sizes, facts=facts)

    @property
    def _coded(self) -> list[TensorSpec]:
        """The tensors that have their own tiles, and the bundles."""
        return list(dict.fromkeys(tile.tensor for tile in self.layout.tiles))

    def _bodies(self, record: Manifest, wanted: Collection[int] | None) -> list[Body]:
        """The parts of a version: all of them, or the index and these tiles."""
        return [fetch_body(self.store, ref, self.layout, wanted)[0] for ref in record.parts]

    def counted(self) -> Recording:
        """The counts as a recording without a sample."""
        seen = tuple(WatchedTensor(spec.name, spec.shape, spec.size, 0) for spec in self._coded)
        facts = {"source": "headers", **({"dtypes": self.others} if self.others else {})}
        return Recording(RecordingHeader(self.dtype, seen, (), (), facts), tuple(self.count()))


def main_dtype(tensors: Iterable[TensorSpec], where: object) -> str:
    """The dtype that most weights have. Raises: StateError, if there are no tensors."""
    sizes: Counter[str] = Counter()
    for spec in tensors:
        sizes[spec.dtype] += spec.size
    if not sizes:
        raise StateError(f"{where} has no tensors: there is nothing to compare")
    return sizes.most_common(1)[0][0]


def other_dtypes(tensors: Iterable[TensorSpec], dtype: str) -> dict[str, str]:
    """By name, the dtypes of the tensors that have another one."""
    return {spec.name: spec.dtype for spec in tensors if spec.dtype != dtype}


def changes(entry: TileEntry, payload: memoryview, layout: Layout) -> int:
    """How many weights of a tile its payload changes; for one that is written whole, all of them.

    Raises:
        FormatError: it is cut off; UnsupportedError: a codec without a count.
    """
    tile = layout.tiles[entry.tile]
    if entry.codec in WHOLE:
        return tile.size
    if entry.codec in (Codec.GAP, Codec.STEP):
        return wire.ByteReader(payload, "a payload of gaps").number(tile.size)
    if entry.codec in PREDICTING:
        parsed = context.parse(payload, tile).heads
        return int(parsed.changes.sum()) + parsed.cold.size
    raise UnsupportedError(f"payloads of codec {entry.codec.name} do not state how many weights they change")


def _real(record: Manifest, bodies: Iterable[Body]) -> dict[str, int]:
    """All bytes of a version, under the codec that wrote most of them."""
    written: Counter[str] = Counter()
    for body in bodies:
        for entry in body.index.entries:
            written[entry.codec.name.lower()] += entry.size
    return {written.most_common(1)[0][0]: record.size_bytes} if written else {}
