"""A model spread over ranks, published as one version: by threads here, by processes in test_sharded_processes."""

import random
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pulsesync import SigningKey
from pulsesync.errors import (
    AnotherPublisherError,
    FormatError,
    GroupError,
    PulseError,
    SignatureError,
    StateError,
    StoreError,
)
from pulsesync.format import layout as layouts
from pulsesync.format.history import History, digest_of
from pulsesync.format.manifest import RecordKind
from pulsesync.format.patch import CodecName
from pulsesync.group.agreement import read_each
from pulsesync.group.collective import SoloTeam
from pulsesync.maintain.prune import prune
from pulsesync.publish import anchors
from pulsesync.publish.ownership import RankReport
from pulsesync.publish.resumer import RunResumer
from pulsesync.run import keys
from pulsesync.run.reader import RunReader
from pulsesync.state.sharding import Placed, tensor_parallel
from pulsesync.state.slices import Slice
from pulsesync.state.weights import Recount
from pulsesync.store import MemoryStore, Store
from pulsesync.testing import FaultyStore, random_bits
from tests.publish.test_publisher import FullDisk
from tests.publishers import Publisher, ShardedPublisher, kept_bytes
from tests.readers import RunVerifier, Squasher, Subscriber
from tests.runs import SHAPES, Training, Watched, down, equal, kept, record, version, versions, worker
from tests.tiers import slow

pytestmark = pytest.mark.usefixtures("parts_as_objects")

BF16 = ml_dtypes.bfloat16
UNSIGNED: dict[int, type[Any]] = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


class Crew:
    """Ranks in threads. A gather ends when every rank has called it, and fails on all ranks if one does not.

    After a gather that failed, all others fail, too, until `reset`; `abort` is that failure without the wait.
    """

    def __init__(self, size: int, timeout_s: float = 10.0) -> None:
        self.size, self.timeout_s = size, timeout_s
        self.changed = threading.Condition()
        self.broken = False
        self.notes: dict[int, bytes] = {}  # of the current gather, by rank
        self.ended: list[list[bytes]] = []  # the notes of each gather: no rank that has yet to wake up misses one
        self.before: Callable[[int, int], None] = lambda rank, number: None  # to interfere
        self.after: Callable[[int, int], None] = lambda rank, number: None

    def gather(self, rank: int, note: bytes) -> list[bytes]:
        with self.changed:
            number = len(self.ended)
            self.notes[rank] = note
            if len(self.notes) == self.size and not self.broken:
                self.ended.append([self.notes[one] for one in range(self.size)])
                self.notes = {}
                self.changed.notify_all()
            else:
                self.changed.wait_for(lambda: self.broken or len(self.ended) > number, self.timeout_s)
            if len(self.ended) == number:
                self.abort()
                raise GroupError("a rank did not call gather in time", rank=rank)
            return self.ended[number]

    def abort(self) -> None:
        with self.changed:
            self.broken, self.notes = True, {}
            self.changed.notify_all()

    def reset(self) -> None:
        self.broken, self.notes = False, {}

    def act(self, work: Callable[["Rank"], Any]) -> list[Any]:
        """What work returns or raises, by rank."""
        results: list[Any] = [None] * self.size

        def run(rank: int) -> None:
            try:
                results[rank] = work(Rank(self, rank))
            except Exception as e:  # noqa: BLE001 - it is the result
                results[rank] = e

        threads = [threading.Thread(target=run, args=(rank,)) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return results


class Rank:
    def __init__(self, crew: Crew, rank: int) -> None:
        self.crew, self.rank, self.size = crew, rank, crew.size
        self.told: list[int] = []  # the bytes that it sent in each gather

    def gather(self, note: bytes) -> list[bytes]:
        self.crew.before(self.rank, len(self.told))
        self.told.append(len(note))
        out = self.crew.gather(self.rank, note)
        self.crew.after(self.rank, len(self.told) - 1)
        return out


class Threads(ThreadPoolExecutor):
    """The threads of one rank, which sends versions and writes anchors in them. A test can wait for their work."""

    def __init__(self) -> None:
        super().__init__(2)
        self.given: list[Future[Any]] = []

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Any:
        self.given.append(super().submit(fn, *args, **kwargs))
        return self.given[-1]

    def wait(self) -> None:
        """Wait until all that was begun has ended."""
        while self.given:
            self.given.pop().exception(60)


class Group:
    """One publisher per rank of a crew, each with its own store; a call is made on all ranks at the same time."""

    def __init__(
        self, store: Store | Sequence[Store], size: int, split: Any = None, timeout_s: float = 10.0, **options: Any
    ) -> None:
        self.crew = Crew(size, timeout_s)
        stores = [store] * size if not isinstance(store, Sequence) else store
        self.threads = [Threads() for _ in stores]
        self.pubs = [
            ShardedPublisher(one, Rank(self.crew, rank), **{"executor": self.threads[rank], **options})
            for rank, one in enumerate(stores)
        ]
        self.split = split or by_rows

    def try_publish(self, weights: Mapping[str, Any], step: int = 0, steps: Sequence[int] | None = None) -> list[Any]:
        shards = self.shards_of(weights)
        return self.crew.act(
            lambda team: self.pubs[team.rank].publish(shards[team.rank], step=steps[team.rank] if steps else step)
        )

    def flush(self) -> None:
        """Have everything in the store, anchors too."""
        for one in self.crew.act(lambda team: self.pubs[team.rank].flush()):
            if isinstance(one, BaseException):
                raise one

    def shards_of(self, weights: Mapping[str, Any]) -> list[Any]:
        """By rank."""
        size = self.crew.size
        return [self.split(weights, rank, size) for rank in range(size)]

    def publish(self, weights: Mapping[str, Any], step: int = 0) -> Any:
        """The report, which is the same on all ranks but for its times."""
        reports = self.try_publish(weights, step)
        for one in reports:
            if isinstance(one, BaseException):
                raise one
        facts = {(r.version, r.step, r.changed, r.total, r.payload_bytes, r.full_bytes) for r in reports}
        assert len(facts) == 1
        assert len({pub.version for pub in self.pubs}) == len({pub.digest for pub in self.pubs}) == 1
        return reports[0]


def by_rows(weights: Mapping[str, Any], rank: int, size: int) -> dict[str, Any]:
    """As FSDP does: the first ranks get larger pieces, the last perhaps none."""
    out = {}
    for name, array in weights.items():
        piece = -(-array.shape[0] // size)
        begin, end = min(rank * piece, array.shape[0]), min((rank + 1) * piece, array.shape[0])
        out[name] = Placed(array[begin:end], array.shape, rows=(begin, end))
    return out


def by_columns(weights: Mapping[str, Any], rank: int, size: int) -> dict[str, Any]:
    """Each rank has some columns of every matrix, and all vectors in full."""
    out: dict[str, Any] = {}
    for name, array in weights.items():
        if array.ndim < 2:
            out[name] = array
            continue
        cuts = [array.shape[1] * i // size for i in range(size + 1)]
        out[name] = Placed(array[:, cuts[rank] : cuts[rank + 1]], array.shape, columns=(cuts[rank], cuts[rank + 1]))
    return out


def as_a_grid(weights: Mapping[str, Any], rank: int, size: int) -> dict[str, Any]:
    """Rows over the first half of the bits of a rank, columns over the second: a mesh of two dimensions."""
    top, left = divmod(rank, 2)
    out: dict[str, Any] = {}
    for name, array in weights.items():
        rows = [array.shape[0] * i // (size // 2) for i in range(size // 2 + 1)]
        if array.ndim < 2:
            out[name] = Placed(array[rows[top] : rows[top + 1]], array.shape, rows=(rows[top], rows[top + 1]))
            continue
        columns = [0, array.shape[1] // 2, array.shape[1]]
        piece = array[rows[top] : rows[top + 1], columns[left] : columns[left + 1]]
        out[name] = Placed(
            piece, array.shape, rows=(rows[top], rows[top + 1]), columns=(columns[left], columns[left + 1])
        )
    return out


def whole_everywhere(weights: Mapping[str, Any], rank: int, size: int) -> dict[str, Any]:
    return dict(weights)


def by_stage(weights: Mapping[str, Any], rank: int, size: int) -> dict[str, Any]:
    """Each tensor on one rank."""
    return {name: array for n, (name, array) in enumerate(sorted(weights.items())) if n % size == rank}


SPLITS = {
    "rows": (by_rows, 3),
    "columns": (by_columns, 3),
    "grid": (as_a_grid, 4),
    "copies": (whole_everywhere, 2),
    "stages": (by_stage, 2),
    "more ranks than rows": (by_rows, 8),
}
# Every way to split with the codec that picks one for each tile; the other codecs where tiles and ranks differ most.
# In the fast tier: rows, where ranks hold pieces of all tensors; a grid, with a history; and tensors as a whole.
QUICK = {("rows", "auto"), ("grid", "history"), ("stages", "auto")}
SPLITS_AND_CODECS = [
    pytest.param(*case, marks=[] if case in QUICK else pytest.mark.slow)
    for case in [*((how, "auto") for how in SPLITS), *((how, "history") for how in ("rows", "grid"))]
]


def synced(store: Store, held: dict[str, Any] | None = None, **options: Any) -> dict[str, Any]:
    """What a new worker gets."""
    held = worker() if held is None else held
    sub = Subscriber(store, **options)
    assert sub.sync(held).version is not None
    sub.verify()
    return held


@pytest.fixture
def short_epochs() -> int:
    return 2


# -- what is published ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("how", "codec"),
    [*SPLITS_AND_CODECS, slow("grid", "context"), slow("grid", "gap"), ("more ranks than rows", "dense")],
)
def test_every_version_is_what_the_ranks_hold(how: str, codec: CodecName) -> None:
    split, size = SPLITS[how]
    store, plain = MemoryStore(), MemoryStore()
    training, held = Training(), worker()
    group, sub = Group(store, size, split, codec=codec), Subscriber(store)
    with Publisher(plain, codec=codec) as whole:
        for step in range(5):
            if step:
                training.step()
            report = group.publish(training.weights, step=step)
            assert (report.version, report.step) == (step, step)
            changed = whole.publish(training.weights, step=step).changed
            assert report.changed == changed
            sub.sync(held)
            assert sub.verify() == group.pubs[0].digest == whole.digest
            assert equal(held, training.weights)
    assert equal(synced(store), training.weights)


def test_plain_gridded_and_sharded_runs_of_a_state_have_one_digest() -> None:
    rng = np.random.default_rng(0)
    weights: dict[str, Any] = {
        f"layers.{n}.{name}": random_bits(rng, UNSIGNED[np.dtype(dtype).itemsize], (7, 6)).view(dtype)
        for n in range(3)
        for name, dtype in (("up", BF16), ("eight", ml_dtypes.float8_e4m3fn), ("scale", np.float32))
    }
    weights["embed"] = random_bits(rng, np.uint16, (1000, 70)).view(BF16)  # large enough for a tile of its own
    weights["layers.0.head"] = weights["embed"]  # on the same rank, where a rank has tensors as a whole
    grids: list[dict[str, Any]] = [{}, {"embed": ([10], [])}, {"*": ([2], [1, 4])}]
    plain = [Publisher(MemoryStore(), grid=grid) for grid in grids]
    stores = [MemoryStore() for _ in SPLITS]
    groups = [Group(store, size, split) for store, (split, size) in zip(stores, SPLITS.values(), strict=True)]
    for step in range(3):
        digests = set()
        for pub in plain:
            pub.publish(weights, step=step)
            digests.add(pub.digest)
        for group in groups:
            group.publish(weights, step=step)
            digests.add(group.pubs[0].digest)
        assert len(digests) == 1
        for array in weights.values():
            array.view(UNSIGNED[array.dtype.itemsize])[step, :3] += 1
    assert len({version(store, 0).layout for store in stores}) == len(stores)
    for pub in plain:
        pub.close()


def test_what_two_ranks_own_is_in_no_bundle_together() -> None:
    store = MemoryStore()
    weights = {f"layers.{n}.experts.{e}.w": np.full((6, 4), n + e, BF16) for n in range(3) for e in range(4)}

    def by_expert(weights: Mapping[str, Any], rank: int, size: int) -> dict[str, Any]:
        none = {name: Placed(array[:0], array.shape, rows=(0, 0)) for name, array in weights.items()}
        return none | {name: array for name, array in weights.items() if int(name.split(".")[3]) % size == rank}

    group, held = Group(store, 2, by_expert), {name: np.zeros_like(array) for name, array in weights.items()}
    for _ in range(3):
        group.publish(weights)
        assert equal(synced(store, held), weights)
        weights["layers.1.experts.2.w"][3, 3] += 1
        weights["layers.2.experts.1.w"][...] += 1
    layout = RunReader(store, None).layout(version(store, 0).layout)
    owned = [{int(name.split(".")[3]) % 2 for name in tile.names} for tile in layout.tiles]
    assert owned == [{0}, {1}]


def test_histories_build_up_over_epochs_as_in_one_process(short_epochs: int) -> None:
    store, training = MemoryStore(), Training()
    group, held = Group(store, 3, codec="history", epoch_patches=short_epochs), worker()
    sub = Subscriber(store, epoch_patches=short_epochs)
    for step in range(6):
        training.step()
        group.publish(training.weights, step=step)
        sub.sync(held)
        sub.verify()  # and sync itself holds the history against the record
        assert equal(held, training.weights)
    assert all(version(store, n).history for n in range(1, 6))
    assert [version(store, n).index for n in range(6)] == [0, 1, 2, 1, 2, 1]


def test_a_history_has_the_same_digest_counted_in_pieces() -> None:
    store, training = MemoryStore(), Training()
    with Publisher(store, codec="history") as pub:
        for _ in range(3):
            training.step()
            pub.publish(training.weights)
    sub = Subscriber(store)
    sub.sync(worker())
    assert sub.state is not None
    history: History = sub.state.history
    assert history.tiles
    pieces = [history.counts([ordinal]) for ordinal in history.tiles]
    assert digest_of(history.index, {n: c for piece in pieces for n, c in piece.items()}) == history.digest()
    assert digest_of(history.index, {}) != history.digest() == version(store, 2).history


def test_no_rank_keeps_more_than_the_tiles_that_are_its_own() -> None:
    for split, size in SPLITS.values():
        training = Training()
        group = Group(MemoryStore(), size, split)
        for _ in range(2):
            group.publish(training.weights)
            training.step()
        sizes = [kept_bytes(pub) for pub in group.pubs]
        assert sum(sizes) == sum(array.nbytes for array in training.weights.values())
        shards = [split(training.weights, rank, size) for rank in range(size)]
        for held, mine in zip(sizes, shards, strict=True):
            assert held <= sum((v.tensor if isinstance(v, Placed) else v).nbytes for v in mine.values())


def test_parts_are_put_by_the_ranks_that_own_them_and_records_by_the_lead() -> None:
    base, training = MemoryStore(), Training()
    stores = [Watched(base) for _ in range(3)]
    group = Group(stores, 3)
    group.publish(training.weights)
    training.step()
    group.publish(training.weights)
    anchor, patch = record(base, keys.anchor_key(0)), version(base, 1)
    assert len(patch.parts) == len(anchor.parts) == 3
    for rank, store in enumerate(stores):
        parts = [key for key in store.writes if key.startswith("parts/")]
        assert parts == [keys.part_key(anchor.parts[rank].id), keys.part_key(patch.parts[rank].id)]
        others = [key for key in store.writes if not key.startswith("parts/")]
        assert bool(others) == (rank == 0)


def test_a_worker_with_slices_fetches_only_sections_that_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pulsesync.run.bodies.SMALL_PART", 0)
    monkeypatch.setattr("pulsesync.run.bodies.HEADER_GUESS", 256)
    store, rng = Watched(), np.random.default_rng(0)
    weights = {"w": rng.standard_normal((60, 500)).astype(BF16)}
    group = Group(store, 2)
    group.publish(weights)
    weights["w"][...] = rng.standard_normal((60, 500))
    group.publish(weights)
    half = {"w": np.zeros((30, 500), BF16)}
    store.gets.clear()
    Subscriber(store, slices={"w": Slice((30, 60))}).sync(half)
    assert half["w"].tobytes() == weights["w"][30:].tobytes()
    for number, parts in ((0, record(store.store, keys.anchor_key(0)).parts), (1, version(store.store, 1).parts)):
        read = [sum(end - begin for key, begin, end in store.gets if key == keys.part_key(p.id) and end) for p in parts]
        assert read[1] >= parts[1].size > 10_000, number
        assert read[0] < 1000, number  # what says which tiles are in it


def test_nothing_changed_is_a_version_with_one_empty_part() -> None:
    store, training = MemoryStore(), Training()
    group = Group(store, 3)
    group.publish(training.weights)
    assert group.publish(training.weights, step=5).changed == 0
    found = version(store, 1)
    assert (len(found.parts), found.step, found.digest) == (1, 5, version(store, 0).digest)
    training.step()
    group.publish(training.weights)
    assert equal(synced(store), training.weights)


def test_a_rank_in_whose_tiles_nothing_changed_puts_no_part() -> None:
    store, training = MemoryStore(), Training()
    group = Group(store, 3)
    group.publish(training.weights)
    training.weights["layer.0.weight"][59, 0] = 7  # the last rank's
    assert group.publish(training.weights).changed == 1
    assert len(version(store, 1).parts) == 1
    assert equal(synced(store), training.weights)


def test_what_a_rank_tells_grows_with_its_changed_tiles_and_not_with_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layouts, "SMALL", 0)  # a tile for each tensor
    training = {f"layer.{n:03d}": np.zeros((6, 4), BF16) for n in range(100)}
    group = Group(MemoryStore(), 3)
    group.publish(training)
    told = [sum(pub.team.told) for pub in group.pubs]  # type: ignore[attr-defined]
    training["layer.050"][5, 3] = 1
    group.publish(training)
    few = [sum(pub.team.told) - before for pub, before in zip(group.pubs, told, strict=True)]  # type: ignore[attr-defined]
    for array in training.values():
        array[...] = 2
    group.publish(training)
    many = [
        sum(pub.team.told) - before - some  # type: ignore[attr-defined]
        for pub, before, some in zip(group.pubs, told, few, strict=True)
    ]
    assert max(few[1:]) < 400
    assert min(many[1:]) > 100 * 20


def test_odd_bits_empty_tensors_scalars_and_ties_arrive_exactly() -> None:
    rng = np.random.default_rng(0)

    def weights() -> dict[str, Any]:
        bits = rng.integers(0, 1 << 32, (7, 5), np.uint32)
        bits[0, :3] = 0x80000000, 0x7FC00001, 0xFFA00007
        shared = rng.integers(0, 1 << 16, (5, 4), np.uint16).view(BF16)
        return {
            "masters": bits.view(np.float32),
            "embed": shared,
            "head": shared,
            "none": np.zeros((0, 3), np.float32),
            "scale": np.array(rng.standard_normal(), np.float64),
            "ids": rng.integers(0, 99, (4, 2, 3), np.int64),
        }

    def split(state: Mapping[str, Any], rank: int, size: int) -> dict[str, Any]:
        scale = {"scale": state["scale"]}
        return by_rows({name: array for name, array in state.items() if name != "scale"}, rank, size) | scale

    store = MemoryStore()
    group = Group(store, 4, split)  # of five rows, the last rank gets none: it cannot see that they are tied
    first = weights()
    held = {name: np.zeros_like(array) for name, array in first.items()}
    held["head"] = held["embed"]
    for step in range(3):
        state = weights() if step else first
        group.publish(state)
        assert equal(synced(store, held), state)
    layout = store.get(keys.layout_key(version(store, 0).layout))
    assert b'"ties":{"head":"embed"}' in layout


@settings(max_examples=settings().max_examples // 4)
@given(st.integers(0, 1 << 32), st.integers(1, 5), st.sampled_from(["auto", "history", "gap", "dense"]))
def test_any_rectangles_of_any_dtype_make_the_whole_model(seed: int, size: int, codec: CodecName) -> None:
    rng = np.random.default_rng(seed)
    dtypes = [BF16, np.float16, np.float32, np.float64, np.uint8, ml_dtypes.float8_e4m3fn]
    weights = {}
    for n in range(4):
        shape = tuple(int(k) for k in rng.integers(0, 9, rng.integers(1, 4)))
        dtype = np.dtype(dtypes[rng.integers(len(dtypes))])
        weights[f"t{n}"] = random_bits(rng, UNSIGNED[dtype.itemsize], shape).view(dtype)
    cuts = {name: _random_cells(rng, array, size) for name, array in weights.items()}

    def split(state: Mapping[str, Any], rank: int, size: int) -> dict[str, Any]:
        out = {}
        for name, array in state.items():
            (top, bottom), (left, right) = cuts[name][rank]
            piece = array.reshape(array.shape[0], -1)[top:bottom, left:right] if array.size else array[:0]
            out[name] = Placed(piece, array.shape, rows=(top, bottom), columns=(left, right))
        return out

    store = MemoryStore()
    group = Group(store, size, split, codec=codec)
    held, sub = {name: np.zeros_like(array) for name, array in weights.items()}, Subscriber(store)
    for _ in range(3):
        group.publish(weights)
        sub.sync(held)
        sub.verify()
        assert equal(held, weights)
        for array in weights.values():
            bits = array.view(f"u{array.dtype.itemsize}")
            chosen = rng.random(array.shape) < rng.choice([0, 0.1, 1])
            bits[chosen] = random_bits(rng, bits.dtype, (int(chosen.sum()),))


def _random_cells(rng: np.random.Generator, array: Any, size: int) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """A rectangle for each rank: the cells of a grid, then copies of some, or nothing."""
    rows, columns = array.shape[0], int(np.prod(array.shape[1:]))
    down = int(rng.integers(1, size + 1))
    across = int(rng.integers(1, size // down + 1))
    lines = [[0, *sorted(rng.integers(0, n + 1, k - 1).tolist()), n] for n, k in ((rows, down), (columns, across))]
    cells = [(r, c) for r in pairwise(lines[0]) for c in pairwise(lines[1])]
    extra = [cells[rng.integers(len(cells))] if rng.random() < 0.5 else ((0, 0), (0, 0)) for _ in range(size)]
    return (cells + extra)[:size]


def test_a_root_after_the_end_of_an_epoch_has_an_anchor_of_its_own() -> None:
    """The last version of an epoch starts the next one, so that epoch's anchor may be of this version."""
    store, training = MemoryStore(), Training()
    first = Group(store, 2, by_rows, anchor_every=0.0, epoch_patches=2)
    for _ in range(3):
        first.publish(training.weights)
        training.step()
    first.flush()
    assert {entry.key for entry in store.list("anchors/")} == {keys.anchor_key(0), keys.anchor_key(1)}
    Group(store, 2, by_columns, epoch_patches=2).publish(training.weights)
    assert version(store, 3).base is None
    held = worker()
    assert Subscriber(store, epoch_patches=2).sync(held).version == 3
    assert equal(held, training.weights)


def test_shards_that_overlap_are_sent_once() -> None:
    def split(weights: Mapping[str, Any], rank: int, size: int) -> dict[str, Any]:
        rows = ((20, 40), (0, 60), (10, 45))[rank]
        out = {}
        for name, array in weights.items():
            begin, end = (min(n, array.shape[0]) for n in rows)
            out[name] = Placed(array[begin:end], array.shape, rows=(begin, end))
        return out

    store, training = MemoryStore(), Training()
    held, sub = worker(), Subscriber(store)
    for _ in range(2):
        group = Group(store, 3, split)
        for _ in range(3):
            report = group.publish(training.weights)
            sub.sync(held)
            sub.verify()
            assert equal(held, training.weights)
            training.step()
    assert len(version(store, report.version).parts) == 2
    assert [version(store, n).base is None for n in range(6)] == [True] + [False] * 5


def test_a_model_without_weights_is_published() -> None:
    store = MemoryStore()
    group = Group(store, 2)
    weights = {"none": np.zeros((0, 3), BF16)}
    for expected in range(2):
        assert group.publish(weights).version == expected
        synced(store, {"none": np.zeros((0, 3), BF16)})


def test_masters_are_cast_on_the_way() -> None:
    rng = np.random.default_rng(3)
    store, group = MemoryStore(), None
    held = {"a": np.zeros((9, 4), BF16), "norm": np.zeros(6, np.float32)}
    group = Group(store, 3, cast={"norm": "", "*": "BF16"})
    for _ in range(3):
        masters = {"a": rng.standard_normal((9, 4)).astype(np.float32), "norm": np.ones(6, np.float32)}
        group.publish(masters)
        assert equal(synced(store, held), {"a": masters["a"].astype(BF16), "norm": masters["norm"]})


def test_tensor_parallel_pieces_make_the_whole_model() -> None:
    rng = np.random.default_rng(0)

    def weights() -> dict[str, Any]:
        return {
            "q.weight": rng.standard_normal((8, 6)).astype(BF16),
            "o.weight": rng.standard_normal((6, 8)).astype(BF16),
            "norm": rng.standard_normal(6).astype(BF16),
        }

    def split(state: Mapping[str, Any], rank: int, size: int) -> dict[str, Any]:
        mine = {
            "q.weight": np.split(state["q.weight"], size)[rank],
            "o.weight": np.split(state["o.weight"], size, axis=1)[rank],
            "norm": state["norm"],
        }
        return tensor_parallel(mine, rank, size, rows=["q.*"], columns=["o.*"])

    store = MemoryStore()
    group = Group(store, 2, split)
    held = {name: np.zeros_like(array) for name, array in weights().items()}
    for _ in range(3):
        state = weights()
        group.publish(state)
        assert equal(synced(store, held), state)


def test_the_grid_cuts_shards_further() -> None:
    store, training = MemoryStore(), Training()
    group = Group(store, 2, grid={"layer.0.weight": (4, 2)}, min_tile=1)
    for _ in range(3):
        group.publish(training.weights)
        training.step()
    layout = RunReader(store, None).layout(version(store, 0).layout)
    assert next((s.row_cuts, s.column_cuts) for s in layout.tensors) == ((15, 30, 45), (25,))
    group.publish(training.weights)
    assert equal(synced(store), training.weights)


def test_files_and_a_signature_travel_along() -> None:
    store, training, key = MemoryStore(), Training(), SigningKey.generate()
    group = Group(store, 2, signing_key=key, files={"config.json": b"{}"})
    for _ in range(2):
        group.publish(training.weights)
        training.step()
    assert [file.name for file in version(store, 1).files] == ["config.json"]
    group.publish(training.weights)
    assert equal(synced(store, trust=key.public), training.weights)
    with pytest.raises(SignatureError):
        synced(store, trust=SigningKey.generate().public)


def test_the_configuration_of_a_model_and_files_given_as_paths_travel_along(tmp_path: Path) -> None:
    class Config:
        def to_json_string(self) -> str:
            return '{"model_type": "llama"}'

    class Model(dict[str, Any]):
        config = Config()

    (tmp_path / "vocab").write_bytes(b"a b c")
    store = MemoryStore()
    ShardedPublisher(store, SoloTeam(), files={"vocab.txt": tmp_path / "vocab"}).publish(Model(Training().weights))
    files = {file.name: store.get(keys.file_key(file.id)) for file in version(store, 0).files}
    assert files == {"config.json": b'{"model_type": "llama"}', "vocab.txt": b"a b c"}


def test_a_team_of_one_publishes_too() -> None:
    store, training = MemoryStore(), Training()
    pub = ShardedPublisher(store, SoloTeam())
    for _ in range(3):
        pub.publish(training.weights)
        assert equal(synced(store), training.weights)
        training.step()


# -- anchors -------------------------------------------------------------------------------------------------------


def test_anchors_are_written_at_epoch_starts_when_the_way_is_long(short_epochs: int) -> None:
    watched, training = Watched(), Training()
    store, group = watched.store, Group(watched, 3, anchor_every=0.0, epoch_patches=short_epochs)
    for step in range(5):
        group.publish(training.weights, step=step)
        group.flush()
        training.step()
    found = [record(store, entry.key) for entry in store.list("anchors/")]
    assert [(one.version, one.starts, len(one.parts), one.anchor) for one in found] == [
        (0, 0, 3, None),
        (2, 1, 3, 0),
        (4, 2, 3, 1),
    ]
    assert version(store, 3).anchor == 1
    assert all(one.kind == RecordKind.ANCHOR for one in found)
    assert len([key for key in watched.writes if key.startswith("parts/")]) == 3 * 3 + 4 * 3  # each once


def test_anchors_wait_until_the_way_is_long(short_epochs: int) -> None:
    store, training = MemoryStore(), Training()
    group = Group(store, 3, anchor_every=100.0, epoch_patches=short_epochs)
    for _ in range(5):
        group.publish(training.weights)
        training.step()
    assert [entry.key for entry in store.list("anchors/")] == [keys.anchor_key(0)]


def test_a_rank_writes_its_anchor_in_parts_of_bounded_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layouts, "SMALL", 0)
    monkeypatch.setattr(anchors, "PART_BYTES", 1000)
    store, training = MemoryStore(), Training()
    Group(store, 2, grid={"*": (10, 1)}, min_tile=1).publish(training.weights)
    parts = record(store, keys.anchor_key(0)).parts
    assert len(parts) > 4
    assert max(part.size for part in parts) < 3500
    assert equal(synced(store), training.weights)


def unavailable(verb: str, key: str) -> None:
    if key.startswith(("parts/", "anchors/")):
        raise StoreError("503 unavailable", key=key, retryable=True)


def test_an_anchor_that_failed_is_finished_with_the_next_publish() -> None:
    base, training = MemoryStore(), Training()
    stores = [Watched(base) for _ in range(3)]
    group = Group(stores, 3)
    stores[1].before = unavailable
    assert all(isinstance(e, StoreError) for e in group.try_publish(training.weights))
    assert [pub.version for pub in group.pubs] == [0, 0, 0]
    assert not list(base.list("anchors/"))
    stores[1].fail_at()
    training.step()
    assert group.publish(training.weights).version == 1
    group.flush()
    assert equal(synced(base), training.weights)


def test_ranks_with_other_shards_are_told_that_a_new_publisher_resumes_the_run() -> None:
    training, store = Training(), MemoryStore()
    group = Group(store, 2)
    group.publish(training.weights)
    group.split = by_columns
    found = group.try_publish(training.weights, step=1)
    assert all("create a new Publisher, which resumes the run" in str(one) for one in found)
    assert Group(store, 2, by_columns).publish(training.weights, step=1).version == 1


def test_an_anchor_waits_for_a_rank_whose_disk_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    disk, training, store = FullDisk(monkeypatch, at="outbox-1/*/record"), Training(), MemoryStore()
    group = Group(store, 2)
    assert [type(one) for one in group.try_publish(training.weights)] == [StoreError, StoreError]
    assert versions(store) == [0]
    group.publish(training.weights, step=1)
    disk.full = False
    for step in (2, 3):  # the share is written with the first, and recorded with the second
        group.publish(training.weights, step=step)
        group.threads[1].wait()
    assert [entry.key for entry in store.list("anchors/")] == [keys.anchor_key(0)]
    assert equal(synced(store), training.weights)


def test_an_anchor_that_fails_at_a_later_epoch_does_not_stop_versions_and_is_logged(
    short_epochs: int, caplog: pytest.LogCaptureFixture
) -> None:
    base, training = MemoryStore(), Training()
    lead = Watched(base)
    group = Group([lead, base], 2, anchor_every=0.0, epoch_patches=short_epochs)
    group.publish(training.weights)
    lead.fail_at("anchors/")
    for step in range(1, 4):
        training.step()
        assert group.publish(training.weights).version == step
        for threads in group.threads:
            threads.wait()  # for the share of each rank; nobody has flushed
    assert [entry.key for entry in base.list("anchors/")] == [keys.anchor_key(0)]
    assert "The record of the anchor of epoch 1 was not created: the line is down" in caplog.text
    with pytest.raises(StoreError, match="the line is down"):
        group.flush()
    lead.fail_at()
    training.step()
    group.publish(training.weights)
    group.flush()
    assert [entry.key for entry in base.list("anchors/")] == [keys.anchor_key(epoch) for epoch in (0, 1, 2)]
    assert equal(synced(base, epoch_patches=short_epochs), training.weights)


def test_a_sharded_run_is_audited_squashed_and_pruned_like_any_other(short_epochs: int) -> None:
    store, training = MemoryStore(), Training()
    held, sub = worker(), Subscriber(store, epoch_patches=short_epochs)
    group = Group(store, 3, anchor_every=100.0, epoch_patches=short_epochs)
    for step in range(9):
        training.step()
        group.publish(training.weights, step=step)
        if step == 0:
            sub.sync(held)
    Squasher(store, epoch_patches=short_epochs).run()
    assert len(list(store.list("squashes/"))) == 4 + 2 + 1
    assert sub.sync(held).path == ("squash",)
    assert equal(held, training.weights)
    group = Group(store, 3, anchor_every=0.0, epoch_patches=short_epochs)
    for _ in range(2):
        training.step()
        group.publish(training.weights)
        group.flush()
    checked = list(RunVerifier(store, epoch_patches=short_epochs).run())
    assert [one.fault for one in checked if one.fault] == []
    assert len(checked) == 11 + 3 + 7  # versions, anchors, squashed patches
    prune(store, keep_versions=1, keep_hours=0, grace_hours=0)
    assert versions(store) == [10]
    assert equal(synced(store, epoch_patches=short_epochs), training.weights)


# -- faults --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rank", [0, 2])
def test_a_rank_that_cannot_put_its_part_stops_all_and_the_next_publish_covers_both(rank: int) -> None:
    base, training = MemoryStore(), Training()
    stores = [Watched(base) for _ in range(3)]
    group = Group(stores, 3)
    group.publish(training.weights)
    first = kept(training.weights)
    digest = group.pubs[0].digest
    training.step()
    stores[rank].fail_at("parts/")
    for _ in range(2):
        for other, error in enumerate(group.try_publish(training.weights)):
            assert isinstance(error, StoreError)
            assert (str(error) == "the line is down") == (other == rank)
            if other != rank:
                assert (error.failed_rank, error.retryable) == (rank, False)
    assert [(pub.version, pub.digest) for pub in group.pubs] == [(0, digest)] * 3
    assert equal(synced(base), first)
    stores[rank].fail_at()
    training.step()
    assert group.publish(training.weights).version == 1
    assert versions(base) == [0, 1]
    assert equal(synced(base), training.weights)


def test_a_message_that_is_no_report_names_the_rank_that_sent_it() -> None:
    with pytest.raises(FormatError, match="malformed message from rank 1"):
        read_each([RankReport(()).to_bytes(), b"[]\n"], RankReport.from_bytes)


def test_an_error_that_is_not_ours_is_a_group_error_elsewhere() -> None:
    base, training = MemoryStore(), Training()
    stores = [Watched(base) for _ in range(2)]
    group = Group(stores, 2)
    group.publish(training.weights)
    training.step()

    def fail(verb: str, key: str) -> None:
        raise MemoryError("no more")

    stores[1].before = fail
    first, second = group.try_publish(training.weights)
    assert isinstance(second, MemoryError)
    assert isinstance(first, GroupError)
    assert "rank 1" in str(first)
    assert "MemoryError: no more" in str(first)
    stores[1].fail_at()
    group.publish(training.weights)
    assert equal(synced(base), training.weights)


@pytest.mark.parametrize("arrived", [True, False])
def test_if_the_store_does_not_say_whether_a_version_was_created_the_lead_looks(arrived: bool) -> None:
    base, training = MemoryStore(), Training()
    stores = [Watched(base) for _ in range(3)]
    lead, group = stores[0], Group(stores, 3)
    group.publish(training.weights)
    training.step()
    second = kept(training.weights)

    def lose(verb: str, key: str) -> None:
        if verb == "create":
            down(key)

    if arrived:
        lead.after = lose
    else:
        lead.before = lose
    assert all(isinstance(e, StoreError) for e in group.try_publish(training.weights))
    assert [pub.version for pub in group.pubs] == [0, 0, 0]
    lead.fail_at()
    lead.after = lambda verb, key: None
    training.step()
    assert group.publish(training.weights).version == (2 if arrived else 1)
    assert equal(synced(base), training.weights)
    assert not any(store.fetched("parts/") for store in stores)  # nobody had to read anything again
    if arrived:
        held = worker()
        Subscriber(base).sync(held, version=1)
        assert equal(held, second)


def test_while_the_store_still_does_not_say_nobody_goes_on() -> None:
    base, training = MemoryStore(), Training()
    lead = Watched(base)
    group = Group([lead, base], 2)
    group.publish(training.weights)
    training.step()
    lead.after = lambda verb, key: down(key) if verb == "create" else None
    group.try_publish(training.weights)
    lead.after = lambda verb, key: None
    lead.fail_at("manifests/")
    for _ in range(2):
        assert all(isinstance(e, StoreError) for e in group.try_publish(training.weights))
        assert [pub.version for pub in group.pubs] == [0, 0]
    lead.fail_at()
    assert group.publish(training.weights).version == 2
    assert versions(base) == [0, 1, 2]


def test_another_publisher_stops_all_ranks_for_good() -> None:
    store, training = MemoryStore(), Training()
    first, second = Group(store, 2), Group(store, 2)
    first.publish(training.weights)
    training.step()
    second.publish(training.weights)
    for _ in range(2):
        assert all(isinstance(e, AnotherPublisherError) for e in first.try_publish(training.weights))
    assert versions(store) == [0, 1]
    training.step()
    assert second.publish(training.weights).version == 2
    assert equal(synced(store), training.weights)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_team_that_broke_anywhere_in_a_publish_goes_on_when_it_is_whole_again(rank: int) -> None:
    for gather in range(3):
        store, training = MemoryStore(), Training()
        group = Group(store, 3)
        group.publish(training.weights)
        training.step()
        begun = len(group.pubs[rank].team.told)  # type: ignore[attr-defined]

        def stay_away(who: int, number: int, *, group: Group = group, lost: int = begun + gather) -> None:
            if (who, number) == (rank, lost):
                group.crew.abort()
                raise GroupError("lost the others", rank=who)

        group.crew.before = stay_away
        assert all(isinstance(e, GroupError) for e in group.try_publish(training.weights)), gather
        group.crew.before = lambda who, number: None
        group.crew.reset()
        committed = gather == 2
        assert versions(store) == ([0, 1] if committed else [0])
        training.step()
        assert group.publish(training.weights).version == (2 if committed else 1)
        assert equal(synced(store), training.weights)


@pytest.mark.parametrize(
    ("rank", "gathers"),
    [(0, range(0, 10, 2)), (1, range(1, 10, 2)), slow(0, range(1, 10, 2)), slow(1, range(0, 10, 2))],
    ids=str,
)
def test_a_rank_that_alone_does_not_hear_the_others_any_more_is_brought_back(rank: int, gathers: Sequence[int]) -> None:
    """At any gather of the first two publishes."""
    for gather in gathers:
        store, training = MemoryStore(), Training()
        group = Group(store, 3)

        def lose(who: int, number: int, *, group: Group = group, lost: int = gather) -> None:
            if (who, number) == (rank, lost):
                group.crew.abort()  # of what the others gather next: this gather has ended on all of them
                raise GroupError("lost the others", rank=who)

        group.crew.after = lose
        failed = 0
        for step in range(3):
            training.step()
            results = group.try_publish(training.weights, step)
            group.crew.reset()
            if any(isinstance(one, GroupError) for one in results):
                failed += 1
                assert isinstance(results[rank], GroupError), gather
            else:
                assert not any(isinstance(one, Exception) for one in results), (gather, results)
                assert len({(pub.version, pub.digest) for pub in group.pubs}) == 1, gather
                assert equal(synced(store), training.weights), gather
        assert failed == 1, gather


def test_an_anchor_that_is_owed_is_of_the_version_it_was_begun_with_whatever_was_settled_meanwhile() -> None:
    base, training = MemoryStore(), Training()
    lead = Watched(base)
    group = Group([lead, base], 2)
    lead.fail_at("anchors/")
    group.try_publish(training.weights)
    training.step()
    first = kept(training.weights)
    lead.after = lambda verb, key: down(key) if key == keys.manifest_key(1) and verb == "create" else None
    group.try_publish(training.weights)
    assert versions(base) == [0, 1]
    lead.fail_at()
    training.step()
    assert group.publish(training.weights).version == 2
    assert [record(base, entry.key).version for entry in base.list("anchors/")] == [0]
    sub, held = Subscriber(base), worker()
    assert sub.sync(held, version=1).path == ("anchor", "patch")
    assert equal(held, first)


def test_a_rank_that_is_elsewhere_in_a_publish_is_found_out() -> None:
    store, training = MemoryStore(), Training()
    group = Group(store, 2)
    group.publish(training.weights)
    training.step()

    def other(team: Rank) -> Any:
        if team.rank == 1:
            team.gather(b"\x02+")
            return None
        return group.pubs[0].publish(by_rows(training.weights, 0, 2))

    assert isinstance(group.crew.act(other)[0], GroupError)
    assert group.publish(training.weights).version == 1
    assert equal(synced(store), training.weights)


def test_ranks_that_publish_different_steps_are_told() -> None:
    store, training = MemoryStore(), Training()
    group = Group(store, 2)
    assert all(isinstance(e, GroupError) for e in group.try_publish(training.weights, steps=[1, 2]))
    assert not versions(store)
    first, second = group.try_publish(training.weights, steps=[1, -1])
    assert isinstance(second, ValueError)
    assert isinstance(first, GroupError)
    assert group.publish(training.weights, step=3).version == 0


def test_tensors_that_change_on_one_rank_stop_all() -> None:
    store, training = MemoryStore(), Training()

    def split(weights: Mapping[str, Any], rank: int, size: int) -> dict[str, Any]:
        mine = by_rows(weights, rank, size)
        if rank == 1 and broken:
            del mine["norm"]
        return mine

    broken = False
    group = Group(store, 2, split)
    group.publish(training.weights)
    broken = True
    for error in group.try_publish(training.weights):
        assert isinstance(error, StateError)
        assert "'norm'" in str(error)
    broken = False
    training.step()
    group.publish(training.weights)
    assert equal(synced(store), training.weights)


def test_a_tensor_that_nobody_holds_whole_or_that_differs_is_refused() -> None:
    def lacking(weights: Mapping[str, Any], rank: int, size: int) -> dict[str, Any]:
        return by_rows(weights, rank, size + 1)

    def other(weights: Mapping[str, Any], rank: int, size: int) -> dict[str, Any]:
        mine = by_rows(weights, rank, size)
        return mine | ({"norm": np.zeros(3, BF16)} if rank else {})

    def half_tied(weights: Mapping[str, Any], rank: int, size: int) -> dict[str, Any]:
        mine = by_rows(weights, rank, size)
        twin = mine["norm"] if rank else Placed(mine["norm"].tensor.copy(), (50,), rows=mine["norm"].rows)
        return mine | {"other": twin}

    for split in (lacking, other, half_tied):
        store = MemoryStore()
        assert all(isinstance(e, StateError) for e in Group(store, 2, split).try_publish(Training().weights))
        assert not any(list(store.list(f"{room}/")) for room in ("manifests", "layouts", "parts"))


def test_a_store_that_fails_now_and_then_never_parts_the_ranks_or_loses_a_step() -> None:
    base, training = MemoryStore(), Training()
    stores = [FaultyStore(base, random.Random(seed), lost=0.02, unanswered=0.02) for seed in range(3)]
    group = Group(stores, 3)
    failed, follower, held = 0, Subscriber(base), worker()
    for step in range(24):
        training.step()
        results = group.try_publish(training.weights, step)
        assert len({isinstance(one, PulseError) for one in results}) == 1
        assert len({(pub.version, pub.digest) for pub in group.pubs}) == 1
        if isinstance(results[0], PulseError):
            assert all(isinstance(one, StoreError) for one in results)
            failed += 1
        elif list(base.list("anchors/")):
            follower.sync(held)
            assert equal(held, training.weights)
            assert step % 8 or equal(synced(base), training.weights)
    assert 1 < failed < 22
    assert [one.fault for one in RunVerifier(base).run() if one.fault] == []


# -- resuming a run ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("how", "codec"), [*SPLITS_AND_CODECS, slow("columns", "gap")])
def test_a_new_team_takes_the_run_up_where_it_ended(how: str, codec: CodecName, short_epochs: int) -> None:
    split, size = SPLITS[how]
    store, training = MemoryStore(), Training()
    held, sub = worker(), Subscriber(store, epoch_patches=short_epochs)
    for _ in range(3):  # ends at the end of an epoch and in the middle of one
        group = Group(store, size, split, codec=codec, epoch_patches=short_epochs)
        for _ in range(3):
            training.step()
            group.publish(training.weights)
            report = sub.sync(held)
            sub.verify()
            assert equal(held, training.weights)
            assert report.path in (("anchor",), ("patch",))
    assert [version(store, n).base is None for n in versions(store)] == [True] + [False] * 8
    assert len({version(store, n).run for n in versions(store)}) == 1


def test_fewer_ranks_with_larger_shards_take_a_run_up_and_others_begin_anew_in_it() -> None:
    store, training = MemoryStore(), Training()
    sizes = [4, 2, 1, 3]  # rows of 60 and 50: pieces of 4 make pieces of 2, but not of 3
    shapes = {name: (60 if shape[0] == 60 else 48, *shape[1:]) for name, shape in SHAPES.items()}
    weights = {name: np.zeros(shape, BF16) for name, shape in shapes.items()}
    rng = np.random.default_rng(0)
    for size in sizes:
        group = Group(store, size)
        for _ in range(2):
            for array in weights.values():
                array[rng.random(array.shape) < 0.1] = rng.standard_normal()
            group.publish(weights)
            held = {name: np.zeros_like(array) for name, array in weights.items()}
            assert equal(synced(store, held), weights)
    found = [version(store, n) for n in versions(store)]
    assert [one.version for one in found if one.base is None] == [0, 6]
    assert [one.epoch for one in found] == [0] * 6 + [1] * 2
    assert len({one.run for one in found}) == 1
    assert not training.weights.keys() - weights.keys()


def test_a_run_that_one_process_began_is_taken_up_by_many_and_back() -> None:
    store, training = MemoryStore(), Training()
    with Publisher(store, grid={"layer.*": ([30], [])}) as pub:
        pub.publish(training.weights)

    def split(weights: Mapping[str, Any], rank: int, size: int) -> dict[str, Any]:
        rows = ((0, 30), (30, 60))[rank]
        out: dict[str, Any] = {}
        for name, array in weights.items():
            begin, end = (min(n, array.shape[0]) for n in rows)
            out[name] = Placed(array[begin:end], array.shape, rows=(begin, end)) if name != "norm" else array
        return out

    training.step()
    Group(store, 2, split).publish(training.weights)
    training.step()
    with Publisher(store) as pub:
        pub.publish(training.weights)
    assert [version(store, n).base is None for n in range(3)] == [True, False, False]
    assert equal(synced(store), training.weights)


def test_a_run_without_an_anchor_is_begun_anew() -> None:
    base, training = Watched(), Training()
    group = Group(base, 2)
    base.fail_at("anchors/")
    group.try_publish(training.weights)
    base.fail_at()
    training.step()
    group = Group(base, 2)
    group.publish(training.weights)
    assert [version(base.store, n).base is None for n in versions(base.store)] == [True, True]
    assert equal(synced(base.store), training.weights)


def test_other_tensors_do_not_go_into_a_run() -> None:
    store, training = MemoryStore(), Training()
    Group(store, 2).publish(training.weights)
    other = {name: array for name, array in training.weights.items() if name != "norm"}
    for error in Group(store, 2).try_publish(other):
        assert isinstance(error, StateError)
    assert versions(store) == [0]


def test_a_signed_run_is_taken_up_with_its_key_alone() -> None:
    store, training, key = MemoryStore(), Training(), SigningKey.generate()
    Group(store, 2, signing_key=key).publish(training.weights)
    training.step()
    others: list[dict[str, Any]] = [{}, {"signing_key": SigningKey.generate()}]
    for options in others:
        assert all(isinstance(e, SignatureError) for e in Group(store, 2, **options).try_publish(training.weights))
    Group(store, 2, signing_key=key).publish(training.weights)
    assert versions(store) == [0, 1]
    assert equal(synced(store, trust=key.public), training.weights)


def test_a_base_that_would_not_be_the_last_version_is_not_taken_up(monkeypatch: pytest.MonkeyPatch) -> None:
    store, training = MemoryStore(), Training()
    group = Group(store, 2)
    for _ in range(2):
        training.step()
        group.publish(training.weights)
    plain = RunResumer._rebuild

    def damaged(self: RunResumer, last: Any, share: Any, shards: Any) -> Any:
        state = plain(self, last, share, shards)
        if state is not None and self._rounds.team.rank == 1:
            next(iter(state.flats.values()))[0] ^= 1
            Recount(state).digest()
        return state

    monkeypatch.setattr(RunResumer, "_rebuild", damaged)
    training.step()
    Group(store, 2).publish(training.weights)
    assert version(store, 2).base is None
    assert equal(synced(store), training.weights)
