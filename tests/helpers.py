"""What several tests need: weights of every kind, small layouts, and a patch applied the plainest way."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st

from pulsesync.core import digest
from pulsesync.core.types import DTYPES, Bits, Sum, TensorSpec, TilePatch
from pulsesync.format import layout as layouts
from pulsesync.format import patch
from pulsesync.format.body import Body
from pulsesync.format.history import History
from pulsesync.format.layout import Layout
from pulsesync.format.manifest import BaseRef, Manifest, PartRef, RecordKind
from pulsesync.format.weights import FlatWeights
from pulsesync.state.anchors import AnchorLoader
from pulsesync.state.backend import Transition
from pulsesync.state.host import HostBackend
from pulsesync.state.patches import PatchTransaction
from pulsesync.state.sharding import Shards, ShardWeights
from pulsesync.state.slices import place_tile
from pulsesync.state.staging import StagedBlocks
from pulsesync.state.weights import WeightState
from pulsesync.testing import mutate, random_bits

RUN = "0123456789abcdef" * 2
FLOATS = [name for name, kind in DTYPES.items() if kind.exponent_shift is not None]

# For tests that take a millisecond an example: 40 in make test, else 100.
many = settings(max_examples=2 * settings().max_examples)
seeds = st.integers(0, 2**32 - 1)
densities = st.sampled_from([0.0, 0.001, 0.01, 0.1, 0.5, 1.0])


def orders(bits: Bits) -> list[int]:
    """Where each bit pattern stands among the values, as format.md says: plain integers, one at a time."""
    width = 8 * bits.itemsize
    full, sign = (1 << width) - 1, 1 << (width - 1)
    return [int(b) ^ full if int(b) & sign else int(b) | sign for b in bits]


def step(old: int, new: int, width: int) -> int:
    """The step from one order to another: the short way round the circle."""
    half, plain = 1 << (width - 1), new - old
    if abs(plain) <= half:
        return plain
    return plain - 2 * half if plain > 0 else plain + 2 * half


def classes(bits: Bits, shift: int) -> np.ndarray:
    """Bits without the sign, shifted right."""
    return (bits.astype(np.uint64) & np.uint64((1 << (8 * bits.itemsize - 1)) - 1)) >> np.uint64(shift)


def near(rng: np.random.Generator, dtype: str, shape: tuple[int, ...], around: int) -> Bits:
    """Weights with classes just below and above one of them, either sign."""
    kind = DTYPES[dtype]
    width, shift = 8 * kind.itemsize, kind.exponent_shift or 0
    top = (1 << (width - 1)) - 1
    sizes = rng.integers(max(0, (around - 2) << shift), min(top, (around + 2) << shift), shape, endpoint=True)
    signs = rng.integers(0, 2, shape, dtype=np.uint64) << np.uint64(width - 1)
    return (sizes.astype(np.uint64) | signs).astype(kind.bits)


def nudge(rng: np.random.Generator, bits: Bits, density: float, places: int = 3) -> Bits:
    """Move some weights by a few units in the last place, as training does."""
    by = rng.integers(1, places, bits.shape, endpoint=True).astype(bits.dtype)
    moved = np.where(rng.random(bits.shape) < 0.5, bits + by, bits - by)
    return np.asarray(np.where(rng.random(bits.shape) < density, moved, bits), bits.dtype)


def specs_of(dtypes: Iterable[str], shapes: Iterable[tuple[int, ...]]) -> list[TensorSpec]:
    return [TensorSpec(f"t{i:03}", dtype, shape) for i, (dtype, shape) in enumerate(zip(dtypes, shapes, strict=True))]


def cuts(rng: np.random.Generator, end: int) -> tuple[int, ...]:
    count = int(rng.integers(0, min(3, max(end - 1, 0)), endpoint=True))
    return tuple(sorted(int(n) for n in rng.choice(np.arange(1, end), count, replace=False))) if count else ()


SHAPES = [
    (),
    (0,),
    (3, 0),
    (1,),
    (7,),
    (64,),
    (1, 1),
    (5, 9),
    (16, 33),
    (2, 3, 4),
    (1, 70),
    (70, 1),
    (4100,),
    (40, 120),
    (0, 3),
]


def random_layout(seed: int, dtypes: Sequence[str] = tuple(DTYPES), shapes: Sequence[tuple[int, ...]] = ()) -> Layout:
    """One to four tensors of any dtype and shape, each cut into a grid or not."""
    rng = np.random.default_rng(seed)
    specs = []
    for i in range(int(rng.integers(1, 4, endpoint=True))):
        shape = (shapes or SHAPES)[int(rng.integers(0, len(shapes or SHAPES)))]
        whole = TensorSpec(f"tensor.{i}", str(rng.choice(list(dtypes))), shape)
        grid = (cuts(rng, whole.rows), cuts(rng, whole.columns)) if rng.random() < 0.5 else ((), ())
        specs.append(TensorSpec(whole.name, whole.dtype, shape, *grid))
    return layouts.make(specs)


def random_state(rng: np.random.Generator, layout: Layout) -> dict[str, Bits]:
    return {spec.name: random_bits(rng, spec.kind.bits.type, (spec.size,)) for spec in layout.tensors}


def changed_state(rng: np.random.Generator, state: Mapping[str, Bits], density: float, small: bool) -> dict[str, Bits]:
    """Some weights moved a little, or to any bits at all."""
    return {k: nudge(rng, v, density) if small else mutate(rng, v, density) for k, v in state.items()}


def copied(state: Mapping[str, Bits]) -> dict[str, Bits]:
    return {name: bits.copy() for name, bits in state.items()}


def same(a: Mapping[str, Bits], b: Mapping[str, Bits]) -> bool:
    return a.keys() == b.keys() and all(np.array_equal(a[name], b[name]) for name in a)


def count_sums(layout: Layout, state: Mapping[str, Bits]) -> dict[int, Sum]:
    weights = FlatWeights(state)
    return {
        tile.ordinal: digest.sum_up(
            digest.count_block(tile, n, weights.block(tile, n)) for n in range(tile.block_count if tile.size else 0)
        )
        for tile in layout.tiles
    }


def applied(patches: Iterable[TilePatch], state: Mapping[str, Bits]) -> dict[str, Bits]:
    """The state after a patch, in arrays of its own; checks the old weights that the patch says it met."""
    out = copied(state)
    for one in patches:
        for block in one.blocks:
            where = one.flat_indices(block)
            assert np.array_equal(out[one.tile.tensor.name][where], block.old)
            out[one.tile.tensor.name][where] = block.new
    return out


def encode(layout: Layout, old: Mapping[str, Bits], new: Mapping[str, Bits], **options: Any) -> patch.EncodedPart:
    return patch.encode(layout, layout.tiles, old, new, count_sums(layout, old), **options)


@dataclass(frozen=True)
class Mark:
    """Where a writer was: what a squashed patch starts from."""

    base: BaseRef
    state: Mapping[str, Bits]
    sums: Mapping[int, Sum]


@dataclass
class Writer:
    """A publisher without a store: makes records and parts for one state after another."""

    layout: Layout
    state: dict[str, Bits]
    codec: patch.CodecName = "auto"
    version: int = 0
    epoch: int = 0

    def __post_init__(self) -> None:
        self.state = copied(self.state)
        self.sums = count_sums(self.layout, self.state)
        self.history = History()

    @property
    def digest(self) -> str:
        return digest.state_digest(self.layout.tables, self.sums.values())

    def root(self) -> Manifest:
        """The current state as a root: a version without a base, which begins an epoch."""
        if self.history.index:
            self.history, self.epoch = History(), self.epoch + 1
        return self._manifest(None, (), 0)

    def anchor(self, pieces: int = 1) -> tuple[Manifest, list[bytes]]:
        """An anchor of the current state, in the given number of parts. It begins an epoch, as a root does."""
        root = self.root()
        parts = [
            patch.encode_whole(self.layout, self.layout.tiles[first::pieces], self.state, self.sums)
            for first in range(pieces)
        ]
        return replace(root, kind=RecordKind.ANCHOR, parts=_refs(parts)), [bytes(part.data) for part in parts]

    def advance(self, new: Mapping[str, Bits], new_epoch: bool = False) -> tuple[Manifest, list[bytes]]:
        if new_epoch:
            self.history, self.epoch = History(), self.epoch + 1
        base = BaseRef(self.version, self.digest)
        history = self.history if self.codec in ("auto", "history") else None
        part = patch.encode(
            self.layout, self.layout.tiles, self.state, new, self.sums, codec=self.codec, history=history
        )
        self.history = self.history.after(part.patches, self.state)
        self.state, self.sums, self.version = copied(new), {**self.sums, **part.sums}, self.version + 1
        return self._manifest(base, [part], self.history.index), [bytes(part.data)]

    def mark(self) -> Mark:
        return Mark(BaseRef(self.version, self.digest), self.state, self.sums)

    def squash(self, since: Mark, codec: patch.CodecName = "auto") -> tuple[Manifest, list[bytes]]:
        """One patch from an earlier state to this one, without a history."""
        part = patch.encode(self.layout, self.layout.tiles, since.state, self.state, since.sums, codec=codec)
        record = self._manifest(since.base, [part], self.history.index)
        return replace(record, kind=RecordKind.SQUASH, history=None), [bytes(part.data)]

    def _manifest(self, base: BaseRef | None, parts: Sequence[patch.EncodedPart], index: int) -> Manifest:
        return Manifest(
            run=RUN,
            version=self.version,
            step=0,
            epoch=self.epoch,
            index=index,
            base=base,
            layout=self.layout.id,
            parts=_refs(parts),
            digest=self.digest,
            history=self.history.digest() if self.history.tiles else None,
            created=0,
        )


def _refs(parts: Sequence[patch.EncodedPart]) -> tuple[PartRef, ...]:
    return tuple(PartRef(part.id, len(part.data)) for part in parts)


def weights_of(shards: Shards, layout: Layout) -> ShardWeights:
    """The tiles of a layout that lie in some shards completely, as weights to encode from."""
    found = {tile.ordinal: place_tile(tile, shards.windows) for tile in layout.tiles}
    return ShardWeights(shards.published, {n: place for n, place in found.items() if place and place.whole})


def reader(layout: Layout, state: Mapping[str, Bits]) -> WeightState:
    return WeightState(HostBackend(layout, copied(state)))


def apply(state: WeightState, version: tuple[Manifest, list[bytes]]) -> Transition:
    """Apply a patch, squashed or not, to a state; returns the transition that rolls it back."""
    return state.commit(PatchTransaction(state).prepare(*version))


def load(state: WeightState, anchor: tuple[Manifest, list[bytes]]) -> None:
    """Check an anchor and load it into a state."""
    record, parts = anchor
    bodies = [Body.of(data, state.layout, ref.id) for ref, data in zip(record.parts, parts, strict=True)]
    with StagedBlocks() as staged:
        AnchorLoader(state).load_whole(staged, AnchorLoader(state).check_whole(record, bodies, staged))
