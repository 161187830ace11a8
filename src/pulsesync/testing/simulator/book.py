"""What was published, and which versions came of it: a simulation's own memory of a run, beside the store's."""

from collections.abc import Callable, Iterator

from pulsesync.format import manifest as manifests
from pulsesync.format.manifest import Manifest, RecordKind
from pulsesync.store import Store
from pulsesync.testing.simulator.actors import Content
from pulsesync.testing.simulator.line import RECORDS


class PublishLog:
    """Every call to publish, and every version. Sees that each follows from the one before, and that it was called for.

    store: the store as it is. trust: the key that records are signed with, if they are. epoch_patches: of the run.
    note: is called with each version.
    """

    def __init__(self, store: Store, trust: str | None, epoch_patches: int, note: Callable[[str], None]) -> None:
        self.records: list[Manifest] = []  # every version that ever was
        self.contents: list[Content] = []  # of each version
        self.ordinals: list[int] = []  # of each version: the last call that can have led to it
        self._store, self._trust, self._note = store, trust, note
        self._epoch_patches = epoch_patches
        self._published: dict[str, list[tuple[int, int, Content]]] = {}  # digest -> number of the call, step, weights
        self._calls = 0
        self._parsed: dict[bytes, Manifest] = {}

    def add_call(self, digest: str, step: int, content: Content) -> int:
        """Remember what is published, by its digest: that is how a version is known for what it is."""
        self._calls += 1
        self._published.setdefault(digest, []).append((self._calls, step, content))
        return self._calls

    def add_version(self, data: bytes) -> None:
        """A version was committed: it must follow from the one before, and be what some trainer published."""
        record = manifests.parse(data, {self._trust} if self._trust else None, self._epoch_patches)
        version, last = record.version, self.records[-1] if self.records else None
        assert version == len(self.records), f"version {version} is made; the next would be {len(self.records)}"
        if record.base is not None:
            assert last is not None, f"version {version} has a base, and is the first"
            assert (record.base.version, record.base.digest) == (last.version, last.digest), (
                f"version {version} has version {record.base.version} for its base, with another digest, or another one"
            )
            assert (record.epoch, record.index) == last.next_patch, f"version {version} is out of place"
        else:
            assert record.epoch == (last.epoch + 1 if last else 0), f"root {version} is out of place"
        assert last is None or record.run == last.run, f"version {version} is of another run"
        calls = [call for call in self._published.get(record.digest, []) if call[1] == record.step]
        assert calls, f"version {version} is a state that nobody published at step {record.step}"
        self.records.append(record)
        self.contents.append(calls[-1][2])
        self.ordinals.append(calls[-1][0])
        self._note(f"version {version}: epoch {record.epoch}, index {record.index}")

    def stored(self) -> Iterator[tuple[str, Manifest]]:
        """All records that are in the store now, by key."""
        for prefix in RECORDS:
            for entry in self._store.list(prefix):
                data = self._store.get(entry.key)
                if data not in self._parsed:
                    self._parsed[data] = manifests.parse(data, epoch_patches=self._epoch_patches)
                yield entry.key, self._parsed[data]

    def joinable(self) -> bool:
        """Whether a way leads to the newest version from nothing, by all records that are there."""
        records = [record for _, record in self.stored()]
        reached = {record.version for record in records if record.kind == RecordKind.ANCHOR}
        for record in sorted(records, key=lambda record: record.version):
            if record.base is not None and record.base.version in reached:
                reached.add(record.version)
        return bool(self.records) and self.records[-1].version in reached
