"""What was published, and the versions that followed: the simulation's own record of a run."""

from collections.abc import Callable, Iterator

from pulsesync.format import layout as layouts
from pulsesync.format import manifest as manifests
from pulsesync.format.manifest import Manifest, RecordKind
from pulsesync.run import keys
from pulsesync.store import Store
from tests.simulator.actors import Content, TensorSet
from tests.simulator.invariants import Fail, Invariant
from tests.simulator.line import RECORDS


class PublishLog:
    """Every call to publish, and every version.

    Checks that each version follows from the one before, and that it was published.

    store: the store without faults. trust: the key that records are signed with, if they are. epoch_patches: of the
    run. note: is called with each version. fail: called if an invariant is violated.
    """

    def __init__(
        self,
        store: Store,
        model: TensorSet,
        trust: str | None,
        epoch_patches: int,
        note: Callable[[str], None],
        fail: Fail,
    ) -> None:
        self.records: list[Manifest] = []  # every version ever committed
        self.contents: list[Content] = []  # of each version
        self.ordinals: list[int] = []  # of each version: the last call that it can contain
        self._store, self._model, self._trust, self._note, self._fail = store, model, trust, note, fail
        self._epoch_patches = epoch_patches
        self._published: dict[int, list[tuple[int, Content]]] = {}  # step -> number of the call, weights
        self._calls = 0
        self._parsed: dict[bytes, Manifest] = {}

    def add_call(self, step: int, content: Content) -> int:
        """Record a call to publish."""
        self._calls += 1
        self._published.setdefault(step, []).append((self._calls, content))
        return self._calls

    def add_version(self, data: bytes) -> None:
        """A version was committed: it must follow from the one before, and be what some trainer published."""
        record = manifests.parse(data, {self._trust} if self._trust else None, self._epoch_patches)
        version, last = record.version, self.records[-1] if self.records else None
        if reason := self._out_of_order(record, last):
            self._fail(Invariant.VERSION_ORDER, f"version {version} {reason}")
        layout = layouts.parse(self._store.get(keys.layout_key(record.layout)), record.layout)
        calls = [
            (number, content)
            for number, content in self._published.get(record.step, ())
            if self._model.digest(content, layout) == record.digest
        ]
        if not calls:
            self._fail(Invariant.PUBLISHED_STATE, f"version {version} was not published at step {record.step}")
        self.records.append(record)
        self.contents.append(calls[-1][1])
        self.ordinals.append(calls[-1][0])
        self._note(f"version {version}: epoch {record.epoch}, index {record.index}")

    def _out_of_order(self, record: Manifest, last: Manifest | None) -> str:
        """Why a version does not follow from the last one; nothing if it does."""
        if record.version != len(self.records):
            return f"is committed, and the next one is {len(self.records)}"
        if last is not None and record.run != last.run:
            return "belongs to another run"
        if record.base is None:
            epoch = last.next_patch[0] + 1 if last else 0  # an epoch that no version has started
            return "" if record.epoch == epoch else f"is a root in epoch {record.epoch}, and not {epoch}"
        if last is None:
            return "has a base, and is the first"
        if (record.base.version, record.base.digest) != (last.version, last.digest):
            return f"has base {record.base.version}, digest {record.base.digest[:12]}, which is not the last version"
        if (record.epoch, record.index) != last.next_patch:
            return f"has index {record.index} in epoch {record.epoch}, and {last.next_patch} comes next"
        return ""

    def stored(self) -> Iterator[tuple[str, Manifest]]:
        """All records in the store, by key."""
        for prefix in RECORDS:
            for entry in self._store.list(prefix):
                data = self._store.get(entry.key)
                if data not in self._parsed:
                    self._parsed[data] = manifests.parse(data, epoch_patches=self._epoch_patches)
                yield entry.key, self._parsed[data]

    def joinable(self, version: int | None = None) -> bool:
        """Whether the records in the store contain a path from an anchor to a version, or to the newest."""
        records = [record for _, record in self.stored()]
        reached = {record.version for record in records if record.kind == RecordKind.ANCHOR}
        for record in sorted(records, key=lambda record: record.version):
            if record.base is not None and record.base.version in reached:
                reached.add(record.version)
        return bool(self.records) and (self.records[-1].version if version is None else version) in reached
