"""Writes the golden files: small runs that every reader must read to the same weights, for ever.

Everything is made from integers by a fixed rule, so that neither numpy's random numbers nor floating-point arithmetic
have a say in the bytes. Run ids and times are fixed as well. `make golden` writes the runs of new cases and never one
that exists: version 1 of the format is frozen (CONTRIBUTING.md). v1.sha256 lists every file, as sha256sum does.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from pulsesync.core.types import DTYPES, Bits, TensorSpec, Tile
from pulsesync.format import layout as layouts
from pulsesync.format import manifest as manifests
from pulsesync.format import patch, signature
from pulsesync.format.epochs import EPOCH_PATCHES
from pulsesync.format.history import History
from pulsesync.format.manifest import BaseRef, FileRef, Manifest, PartRef, RecordKind
from pulsesync.format.pointer import Pointer
from pulsesync.format.signature import SigningKey
from pulsesync.format.weights import by_block
from pulsesync.run import keys
from pulsesync.run.bodies import inline_share, put_body
from pulsesync.state.backend import Transition
from pulsesync.state.host import HostBackend
from pulsesync.state.weights import WeightState
from pulsesync.store import LocalStore
from tests import records

FOLDER = Path(__file__).parent / "v1"
HASHES = FOLDER.with_suffix(".sha256")
CREATED = 1_750_000_000
KEY = SigningKey(hashlib.sha256(b"the key of the signed golden run").hexdigest())
HELPER = SigningKey(hashlib.sha256(b"the key of whoever squashes it").hexdigest())


class Run:
    """A run folder, written version by version as Publisher would, but with ids, clocks and epochs under control."""

    def __init__(
        self,
        folder: Path,
        specs: Iterable[TensorSpec],
        flats: Mapping[str, Bits],
        ties: Mapping[str, str] | None = None,
        key: SigningKey | None = None,
        files: Mapping[str, bytes] | None = None,
        bundled: bool = False,
        anchor_codec: patch.AnchorCodec = "dense",
        extensions: Sequence[tuple[int, bytes]] = (),
    ) -> None:
        self.folder, self.key, self.anchor_codec = folder, key, anchor_codec
        self.extensions = [*extensions]  # of all records
        self.steps_lost = 0
        self.rewound_at: int | None = None
        self.run = hashlib.sha256(folder.name.encode()).hexdigest()[:32]
        pieces = layouts.make(specs, ties)
        self.layout = layouts.bundle(pieces) if bundled else pieces
        self.last: Manifest | None = None
        self.newest: int | None = None  # epoch of the newest anchor
        self.moves: Counter[str] = Counter()  # of each pointer
        self._write(keys.layout_key(self.layout.id), self.layout.data)
        self.files = tuple(self._add_file(name, data) for name, data in sorted((files or {}).items()))
        self.publish_root(flats)

    @property
    def flats(self) -> dict[str, Bits]:
        """A copy of the weights, to be changed and published."""
        return {name: flat.copy() for name, flat in self.state.flats.items()}

    def publish_root(self, flats: Mapping[str, Bits], pieces: int = 1) -> None:
        """Publish a state without a base, as the root of a new epoch, and an anchor for it."""
        self.state = WeightState(HostBackend(self.layout, {name: flat.copy() for name, flat in flats.items()}))
        self._add((), 0 if self.last is None else self.last.epoch + 1, 0, base=None)
        self.publish_anchor(pieces)

    def publish_anchor(self, pieces: int = 1) -> None:
        """Write an anchor (the full state) for the version that was published last, which must be an epoch's start."""
        last, state = self.last, self.state
        assert last is not None
        assert last.at_start
        parts = [
            patch.encode_whole(self.layout, tiles, state.flats, state.sums, codec=self.anchor_codec)
            for tiles in self._share(pieces)
        ]
        record = replace(
            last, kind=RecordKind.ANCHOR, base=None, history=None, parts=self._put(parts), anchor=self.newest
        )
        self.newest = last.starts
        self._write(keys.anchor_key(self.newest), self._sign(record))

    def publish(self, new: Mapping[str, Bits], codec: patch.CodecName, *, pieces: int = 1) -> None:
        """Publish a patch from the current state to `new`, in the given number of parts over disjoint tiles."""
        state, last = self.state, self.last
        assert last is not None
        epoch, index = last.next_patch
        history = History() if index == 1 else state.history
        known = history if codec in ("auto", "history") else None
        parts = [
            patch.encode(self.layout, tiles, state.flats, new, state.sums, codec=codec, history=known)
            for tiles in self._share(pieces)
        ]
        patches = tuple(one for part in parts for one in part.patches)
        sums = {**state.sums, **{tile: total for part in parts for tile, total in part.sums.items()}}
        changed = sum(one.changed for one in patches)
        state.commit(Transition(by_block(patches), sums, history.after(patches, state.flats), changed))
        assert all(np.array_equal(state.flats[name], flat) for name, flat in new.items())
        self._add(parts, epoch, index, BaseRef(last.version, last.digest))

    def rewind(self, steps: int) -> None:
        """Go back by some steps, as a trainer that is restored from a checkpoint: before the next version."""
        assert self.last is not None
        self.steps_lost, self.rewound_at = self.steps_lost + steps, self.last.version + 1

    def squash(
        self, since: Manifest, flats: Mapping[str, Bits], key: SigningKey | None = None, pieces: int = 1
    ) -> None:
        """Publish one patch from an epoch's start to this one."""
        last = self.last
        assert last is not None
        sums = WeightState(HostBackend(self.layout, flats)).sums
        parts = [patch.encode(self.layout, tiles, flats, self.state.flats, sums) for tiles in self._share(pieces)]
        record = replace(
            last,
            kind=RecordKind.SQUASH,
            base=BaseRef(since.version, since.digest),
            history=None,
            parts=self._put(parts),
            anchor=self.newest,
        )
        level = (last.starts - since.starts).bit_length() - 1
        self._write(keys.squash_key(level, since.starts >> level), self._sign(record, key))

    def point(self, name: str, version: int, **added: str) -> None:
        """Move a pointer; added: fields of a later release."""
        record = manifests.parse((self.folder / keys.manifest_key(version)).read_bytes())
        number = self.moves[name]
        move = Pointer(self.run, name, number, version, record.digest, CREATED + 3600 + 60 * number)
        line = json.dumps({**move.table, **added}, sort_keys=True, separators=(",", ":")).encode() + b"\n"
        self._write(keys.pointer_key(name, number), signature.sign(line, self.key) if self.key else line)
        self._write(keys.pointer_hint(name), str(number).encode())
        self.moves[name] += 1

    def finish(self) -> None:
        """Write down what a reader must arrive at."""
        assert self.last is not None
        self._write(keys.HEAD, str(self.last.version).encode())
        arrays: dict[str, Any] = dict(self.state.flats)
        np.savez_compressed(self.folder / "expected.npz", **arrays)

    def _share(self, pieces: int) -> list[Sequence[Tile]]:
        return [self.layout.tiles[first::pieces] for first in range(pieces)]

    def _put(self, parts: Sequence[patch.EncodedPart]) -> tuple[PartRef, ...]:
        store = LocalStore(self.folder)
        return tuple(put_body(store, part, inline_share(len(parts))) for part in parts)

    def _add_file(self, name: str, data: bytes) -> FileRef:
        ref = FileRef(name, hashlib.sha256(data).hexdigest(), len(data))
        self._write(keys.file_key(ref.id), data)
        return ref

    def _add(self, parts: Sequence[patch.EncodedPart], epoch: int, index: int, base: BaseRef | None) -> None:
        version, history = 0 if self.last is None else self.last.version + 1, self.state.history
        self.last = Manifest(
            run=self.run,
            version=version,
            step=10 * version - self.steps_lost,
            epoch=epoch,
            index=index,
            base=base,
            layout=self.layout.id,
            parts=self._put(parts),
            digest=self.state.digest,
            history=history.digest() if history.tiles else None,
            created=CREATED + 60 * version,
            anchor=self.newest,
            files=self.files,
            rewound_at=self.rewound_at,
        )
        if self.last.at_start or self.last.history is None:
            self._write(keys.start_key(self.last.digest), str(version).encode())
        self._write(keys.manifest_key(version), self._sign(self.last))

    def _sign(self, record: Manifest, key: SigningKey | None = None) -> bytes:
        key = key or self.key
        data = record.build()
        if self.extensions:
            data = records.write(records.table_of(record) | {"extensions": self.extensions})
        return signature.sign(data, key) if key else data

    def _write(self, key: str, data: bytes) -> None:
        path = self.folder / key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)


def noise(seed: int, count: int) -> Bits:
    """Random 64-bit numbers, the same for ever (splitmix64)."""
    z: Bits = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(seed << 32)
    z = (z ^ z >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ z >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return z ^ z >> np.uint64(31)


def some(seed: int, dtype: str, count: int) -> Bits:
    """Weights: for floats of either sign, half of them in the class below 1/4, a quarter in the next one down, …"""
    kind, z = DTYPES[dtype], noise(seed, count)
    if dtype == "BOOL":
        return (z & 1).astype(np.uint8)
    if kind.exponent_shift is None:
        return z.astype(kind.bits)
    width, shift = 8 * kind.itemsize, kind.exponent_shift
    top, fall = (1 << width - 2 - shift) - 3, np.zeros(count, np.int64)
    for k in range(1, 24):
        fall += z >> np.uint64(40) & np.uint64((1 << k) - 1) == 0
    rest = z & np.uint64(1 << width - 1 | (1 << shift) - 1)
    return (np.maximum(top - fall, 0).astype(np.uint64) << np.uint64(shift) | rest).astype(kind.bits)


def move(bits: Bits, steps: np.ndarray) -> Bits:
    """Move each float weight by its number of steps in the order of the values."""
    sign = 1 << 8 * bits.itemsize - 1
    wide = bits.astype(np.int64)
    order = (wide ^ np.where(wide & sign, 2 * sign - 1, sign)) + steps & 2 * sign - 1
    moved: Bits = (order ^ np.where(order & sign, sign, 2 * sign - 1)).astype(bits.dtype)
    return moved


def train_(flat: Bits, dtype: str, seed: int) -> None:
    """Change weights as training does: smaller weights change more often and further, and a few weights by a lot."""
    kind, z = DTYPES[dtype], noise(seed, flat.size)
    assert kind.exponent_shift is not None
    magnitude = flat.astype(np.int64) & (1 << 8 * kind.itemsize - 1) - 1
    below_top = (1 << 8 * kind.itemsize - 2 - kind.exponent_shift) - 3 - (magnitude >> kind.exponent_shift)
    odds = np.select([below_top >= 6, below_top >= 4, below_top >= 2], [160, 64, 8], 1)  # of 256
    changes = (z & np.uint64(255)).astype(np.int64) < odds
    far = np.where(z >> np.uint64(8) & np.uint64(63) == 0, 1 << kind.exponent_shift, 1)
    size = far * (1 + (z >> np.uint64(16)).astype(np.int64) % np.maximum(1, 2 * below_top))
    flat[:] = move(flat, np.where(changes, np.where(z >> np.uint64(63), -size, size), 0))


def bf16_history(folder: Path) -> None:
    """A grid, a tie, other codecs among history, two blocks of which one has 32 lanes; a root in mid-run."""
    specs = [
        TensorSpec("embed", "BF16", (160, 90), row_cuts=(16, 144), column_cuts=(55,)),
        TensorSpec("layers.0.größe", "BF16", (8, 6, 12), row_cuts=(3,)),
        TensorSpec("layers.0.norm", "BF16", (64,)),
        TensorSpec("wide", "BF16", (1040, 1024)),
    ]
    flats = {spec.name: some(11 + i, "BF16", spec.size) for i, spec in enumerate(specs[:2])}
    flats["layers.0.norm"] = np.full(64, 0x3F80, np.uint16)
    flats["wide"] = np.full(1040 * 1024, 0xBF80, np.uint16)
    flats["wide"][1000:141_000] = 0x3A00  # enough hot weights for 32 lanes, though hardly any of them changes
    flats["wide"][-9000:] = 0x3A11  # and a second block of two lanes
    run = Run(folder, specs, flats, {"lm_head": "embed", "lm_head.copy": "embed"})

    def next_weights() -> dict[str, Bits]:
        assert run.last is not None
        seed = 100 * (run.last.version + 1)
        new = run.flats
        for i, spec in enumerate(specs[:2]):
            train_(new[spec.name], "BF16", seed + i)
        wide, z = new["wide"], noise(seed + 3, 420)
        at = np.r_[1000 + z[:360] % 140_000, wide.size - 1 - z[360:] % 9000].astype(np.int64)
        wide[at] = move(wide[at], np.where(z >> np.uint64(60) < 9, 1, -1))
        wide[seed : seed + 3] ^= 1  # cold
        wide[200_000 + seed : 200_005 + seed] = 0x3A00  # turn hot
        wide[at[:3]] = 0xBF80  # turn cold
        return new

    def step(codec: patch.CodecName) -> None:
        run.publish(next_weights(), codec)

    step("history")
    step("history")
    step("gap")
    step("history")
    step("auto")
    new = run.flats
    new["layers.0.norm"][7] += 1  # too cold to be remembered
    new["wide"][-20_000] ^= 1  # cold changes alone, in a tile that is; the others are not listed
    run.publish(new, "history")
    run.publish(run.flats, "auto")  # nothing changes at all
    run.publish_root(next_weights())
    step("history")
    step("dense")
    step("history")
    run.finish()


def two_parts(folder: Path) -> None:
    """Versions in two parts; a root in mid-run, with an anchor in two parts."""
    specs = [
        TensorSpec("a", "BF16", (48, 48), row_cuts=(24,), column_cuts=(24, 25)),  # the middle tiles: one column
        TensorSpec("b", "F32", (30, 20), row_cuts=(11,)),
        TensorSpec("c", "I16", (40,)),
    ]
    run = Run(folder, specs, {spec.name: some(21 + i, spec.dtype, spec.size) for i, spec in enumerate(specs)})

    def step(codec: patch.CodecName, pieces: int) -> None:
        assert run.last is not None
        seed = 100 * (run.last.version + 1)
        new = run.flats
        train_(new["a"], "BF16", seed)
        train_(new["b"], "F32", seed + 1)
        new["c"][seed % 40] ^= 1
        run.publish(new, codec, pieces=pieces)

    step("history", 2)
    step("history", 2)
    run.publish_root(run.flats, pieces=2)
    step("auto", 1)
    step("history", 2)
    run.finish()


def dtypes(folder: Path) -> None:
    """Every dtype, with values that float arithmetic would spoil; tensors of no dimension and of no weights."""
    specs = [TensorSpec(f"{name}.matrix", name, (9, 31)) for name in DTYPES]
    specs += [TensorSpec(f"{name}.scalar", name, ()) for name in ("BF16", "F64", "I64")]
    specs += [TensorSpec(f"{name}.none", name, shape) for name, shape in (("F16", (0, 4)), ("U8", (3, 0)))]
    flats = {spec.name: some(31 + i, spec.dtype, spec.size) for i, spec in enumerate(specs)}
    run = Run(folder, specs, flats)

    def step(codec: patch.CodecName) -> None:
        assert run.last is not None
        seed = 100 * (run.last.version + 1)
        new = run.flats
        for i, spec in enumerate(specs):
            flat, kind = new[spec.name], DTYPES[spec.dtype]
            if kind.exponent_shift is not None:
                train_(flat, spec.dtype, seed + i)
                special = _special_values(spec.dtype)
                at = (noise(seed + i, special.size) % np.uint64(max(flat.size, 1))).astype(np.int64)
                if flat.size > 1:
                    flat[at] = special
            elif flat.size:
                flat[seed % flat.size] ^= flat.dtype.type(1)
        run.publish(new, codec)

    step("auto")
    step("context")
    step("history")
    step("history")
    flips: tuple[patch.CodecName, ...] = ("history", "gap", "history")
    for codec in flips:  # of large weights: the short way round the circle leads through the NaNs, not through zero
        new = run.flats
        for flat in (new[spec.name] for spec in specs if DTYPES[spec.dtype].exponent_shift is not None):
            flat[::9] ^= flat.dtype.type(1 << 8 * flat.itemsize - 1)
        run.publish(new, codec)
    run.finish()


def _special_values(dtype: str) -> Bits:
    """Both zeros, the ends of the subnormals, infinities or their like, and NaNs with several payloads."""
    kind = DTYPES[dtype]
    assert kind.exponent_shift is not None
    sign, one = 1 << 8 * kind.itemsize - 1, 1 << kind.exponent_shift
    positive = np.array([0, 1, one - 1, one, sign - one, sign - one + 1, sign - 2, sign - 1], np.int64)
    values: Bits = np.r_[positive, positive | sign].astype(kind.bits)
    return values


def gap_and_dense(folder: Path) -> None:
    """The codecs that need no old weights; `context` with cold changes and with long steps; `step` and `xor`."""
    specs = [TensorSpec("flat", "BF16", (70_000,)), TensorSpec("square", "BF16", (40, 50), column_cuts=(20,))]
    flats = {"flat": np.full(70_000, 0x3F80, np.uint16), "square": some(41, "BF16", 2000)}
    run = Run(folder, specs, flats)
    new = run.flats
    new["flat"][[0, 1, 300, 68_000, 69_999]] = [0x3F81, 0x8000, 0x7FC1, 0, 1]  # gaps of three bytes
    new["square"][::7] += 1
    run.publish(new, "gap")
    train_(new["square"], "BF16", 42)
    new["flat"][5::1000] ^= 0x8000
    run.publish(new, "dense")
    train_(new["square"], "BF16", 43)
    new["flat"][[17, 40_000, 69_998]] = [0xBF80, 0x3F80 - 300, 0xFFFF]  # cold, and far
    run.publish(new, "context")
    new["square"][:] = some(44, "BF16", 2000)
    new["square"][:400] = np.resize(np.array([0, 0x8000, 0x0001, 0x8001], np.uint16), 400)
    run.publish(new, "auto")  # all of a tile: dense
    new["square"][:400] = np.roll(new["square"][:400], 1)  # across zero, by one place and by three
    new["square"][400:800] ^= 0x8000  # long ways round, up and down
    new["square"][0:2], new["square"][800:802] = [0x7FFF, 0xFFFF], [0xFFFF, 0x7FFF]  # half the circle
    run.publish(new, "context")
    new["flat"][5::70] += 1  # a thousand changes of 70,000 weights: enough to make them hot
    run.publish(new, "context")
    new["flat"][[0, 9, 68_000]] += 1
    run.publish(new, "auto")  # step
    new["flat"][1::7] = 0x3C00
    run.publish(new, "context")  # ten thousand times the same long step, which the table lists
    new["square"][:] ^= 0x0155
    run.publish(new, "auto")  # xor
    run.finish()


def signed_squash(folder: Path) -> None:
    """A signed run over an epoch's end, with files; an anchor there, and a squash of the first epoch by a delegate.

    Two pointers, of which one is moved on and back.
    """
    specs = [
        TensorSpec("codes", "I32", (9,)),
        TensorSpec("norm", "F32", (30,)),
        TensorSpec("proj", "BF16", (40, 36), row_cuts=(20,), column_cuts=(12,)),
    ]
    files = {"config.json": b'{"model_type": "golden"}\n', "tokenizer.model": bytes(range(256)), "empty": b""}
    flats = {spec.name: some(51 + i, spec.dtype, spec.size) for i, spec in enumerate(specs)}
    run = Run(folder, specs, flats, key=KEY, files=files)
    root = run.last
    assert root is not None

    def step(codec: patch.CodecName, pieces: int = 1) -> None:
        assert run.last is not None
        seed = 100 * (run.last.version + 1)
        new = run.flats
        train_(new["proj"], "BF16", seed)
        new["norm"][seed // 100 % 30] ^= 3
        new["codes"][seed // 100 % 9] += 1
        run.publish(new, codec, pieces=pieces)

    for index in range(1, EPOCH_PATCHES + 1):
        step("history" if index % 8 else "auto", pieces=2 if index == 5 else 1)
    run.publish_anchor(pieces=2)
    run.squash(root, flats, SigningKey(HELPER.secret, KEY.delegate(run.run, HELPER.public)), pieces=2)
    step("history")
    step("context")
    step("history")
    for version in (32, 34, 33):
        run.point("stable", version)
    run.point("canary-eu.1_b", 35)
    run.finish()


def bundles(folder: Path) -> None:
    """Layers and experts of small tensors in bundles; some groups change and some do not; a grid, a tie."""
    specs = [TensorSpec("embed", "BF16", (90, 20), row_cuts=(45,)), TensorSpec("norm", "BF16", (17,))]
    for layer in range(3):
        for expert in range(4):
            name = f"layers.{layer}.experts.{expert}"
            specs += [TensorSpec(f"{name}.down", "BF16", (30, 20)), TensorSpec(f"{name}.up", "BF16", (20, 30))]
        specs += [TensorSpec(f"layers.{layer}.norm", "F32", (40,)), TensorSpec(f"layers.{layer}.step", "I32", ())]
    flats = {spec.name: some(61 + i, spec.dtype, spec.size) for i, spec in enumerate(specs)}
    run = Run(folder, specs, flats, {"lm_head": "embed"}, bundled=True)

    def step(codec: patch.CodecName, some_of_them: int) -> None:
        assert run.last is not None
        seed = 100 * (run.last.version + 1)
        new = run.flats
        for i, spec in enumerate(specs):
            if spec.dtype == "I32":
                new[spec.name] += 1
            elif i % some_of_them == 0:
                train_(new[spec.name], spec.dtype, seed + i)
        new["norm"][3] ^= 1
        run.publish(new, codec)

    step("history", 1)
    step("history", 5)
    step("gap", 2)
    step("auto", 3)
    step("context", 1)
    step("history", 4)
    step("dense", 7)
    step("history", 1)
    run.finish()


def sections(folder: Path) -> None:
    """Parts of several sections, which writers begin after 1 MiB, and anchors as `raw`."""
    specs = [TensorSpec(f"layers.{i}.w", dtype, (20, 60)) for i, dtype in enumerate(["BF16", "F8_E4M3", "F32", "BF16"])]
    flats = {spec.name: some(71 + i, spec.dtype, spec.size) for i, spec in enumerate(specs)}
    with mock.patch.object(patch, "SECTION_BYTES", 1 << 10):
        run = Run(folder, specs, flats, anchor_codec="raw")
        codecs: tuple[patch.CodecName, ...] = ("history", "context", "dense", "history", "step", "xor")
        for number, codec in enumerate(codecs):
            new = run.flats
            for i, spec in enumerate(specs):
                train_(new[spec.name], spec.dtype, 1000 + 10 * number + i)
            run.publish(new, codec)
        run.publish_root(run.flats, pieces=2)
        run.finish()


def squash_levels(folder: Path) -> None:
    """Two epochs of small patches, a squash of each and one of both; a pointer that nobody signed."""
    specs = [TensorSpec("bias", "F32", (25,)), TensorSpec("proj", "BF16", (50, 30))]
    flats = {spec.name: some(81 + i, spec.dtype, spec.size) for i, spec in enumerate(specs)}
    run = Run(folder, specs, flats)
    starts = [(run.last, run.flats)]
    for version in range(1, 2 * EPOCH_PATCHES + 2):
        new = run.flats
        new["proj"][version::97] = move(new["proj"][version::97], np.array(1 - 2 * (version % 3 == 0)))
        new["bias"][version % 25] ^= 1
        run.publish(new, "history" if version % 2 else "auto")
        if version % EPOCH_PATCHES == 0:
            for since, before in starts:
                assert since is not None
                if since.starts == 0 or version == 2 * EPOCH_PATCHES:
                    run.squash(since, before)
            starts.append((run.last, run.flats))
    run.point("stable", 64)
    run.finish()


def extensions(folder: Path) -> None:
    """What a later release may add and a reader of this one ignores: extensions of records, fields of pointers."""
    specs = [TensorSpec("w", "BF16", (30, 30))]
    added = [(1, b""), (3, b"of a later release"), (65_535, bytes(range(256)))]
    run = Run(folder, specs, {"w": some(91, "BF16", 900)}, key=KEY, extensions=added)
    for version in range(1, 4):
        new = run.flats
        train_(new["w"], "BF16", 900 + version)
        run.publish(new, "history")
    run.point("stable", 2, **{"x-reason": "größer", "x-": ""})
    run.finish()


def rewinds(folder: Path) -> None:
    """A trainer that goes back twice, with a squash over the first time and an anchor over the second."""
    specs = [TensorSpec("w", "BF16", (30, 30))]
    run = Run(folder, specs, {"w": some(92, "BF16", 900)}, key=KEY)
    start, flats = run.last, run.flats
    for version in range(1, EPOCH_PATCHES + 8):
        if version in (20, 36):
            run.rewind(35)
        new = run.flats
        train_(new["w"], "BF16", 9200 + version)
        run.publish(new, "history")
        if version == EPOCH_PATCHES:
            assert start is not None
            run.squash(start, flats)
            run.publish_anchor()
    run.finish()


def corners(folder: Path) -> None:
    """What the other runs do not have: many cold changes, half the circle, long steps back, every dtype as whole tiles.

    Changes are cold where fewer than one of 1,024 weights of a class change.
    """
    floats = {name: kind for name, kind in DTYPES.items() if kind.exponent_shift is not None}
    specs = [TensorSpec(f"cold.{name}", name, (128_000,)) for name in floats]
    specs += [TensorSpec("far", "BF16", (70_000,))]
    specs += [TensorSpec(f"layers.{n}.{name}.𝛼", name, (150,)) for n in range(2) for name in DTYPES]
    small = {spec.name: spec.dtype for spec in specs if spec.size == 150}
    flats = {spec.name: some(101 + i, spec.dtype, spec.size) for i, spec in enumerate(specs)}
    flats["far"] = np.full(70_000, 0x3F80, np.uint16)
    for name, kind in floats.items():
        one, sign = 1 << (kind.exponent_shift or 0), 1 << 8 * kind.itemsize - 1
        flats[f"cold.{name}"] = np.full(128_000, 5 * one, kind.bits)
        flats[f"cold.{name}"][:3000] = 2 * one
        flats[f"cold.{name}"][64_000:] |= kind.bits.type(sign)
    run = Run(folder, specs, flats, bundled=True)

    def turn_cold_(flat: Bits, number: int) -> None:
        """Change 100 weights: most by a random step, some by half the circle, up and down; and some that are hot."""
        at, half = 5000 + 1000 * np.arange(100) + number, 1 << 8 * flat.itemsize - 1
        steps = 1 + (noise(200 + number, 100) % np.uint64(half)).astype(np.int64)
        steps[::9] = half
        flat[at] = move(flat[at], np.where(at % 2000 < 1000, steps, -steps))
        flat[number:3000:5] = move(flat[number:3000:5], np.array(1))

    codecs: tuple[patch.CodecName, ...] = ("context", "history", "history", "step")
    for number, codec in enumerate(codecs):
        new = run.flats
        for name in floats:
            turn_cold_(new[f"cold.{name}"], number)
        new["far"][::7] = (0x3F80, 0x3C00, 0x3F80, 0x3C00)[number]  # a long step that the table lists, and back
        for i, (name, dtype) in enumerate(small.items()):
            if dtype in floats:
                train_(new[name], dtype, 2000 + 100 * number + i)
            else:
                new[name][number::40] ^= 1
        run.publish(new, codec)
    whole: tuple[patch.CodecName, ...] = ("xor", "dense", "xor")
    for number, codec in enumerate(whole):
        new = run.flats
        for name in small:
            new[name][:] = np.arange(number, number + 150) // 50 % 2 if number else new[name][::-1]
        run.publish(new, codec)
    run.finish()


CASES: dict[str, Callable[[Path], None]] = {
    "bf16-history": bf16_history,
    "two-parts": two_parts,
    "dtypes": dtypes,
    "gap-and-dense": gap_and_dense,
    "signed-squash": signed_squash,
    "bundles": bundles,
    "sections": sections,
    "squash-levels": squash_levels,
    "extensions": extensions,
    "corners": corners,
    "rewinds": rewinds,
}


def list_hashes() -> str:
    """A line for every golden file, as sha256sum writes it in this folder."""
    paths = sorted(path for path in FOLDER.rglob("*") if path.is_file())
    lines = (f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.relative_to(FOLDER.parent)}" for path in paths)
    return "".join(f"{line}\n" for line in lines)


def main() -> None:
    for name, make in CASES.items():
        if (FOLDER / name).exists():
            print(f"{name:16}exists and stays as it is")
            continue
        make(FOLDER / name)
        files = [path for path in (FOLDER / name).rglob("*") if path.is_file()]
        print(f"{name:16}{len(files):4} files {sum(path.stat().st_size for path in files):8,} bytes")
    HASHES.write_text(list_hashes())


if __name__ == "__main__":
    main()
