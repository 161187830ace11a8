"""A live state on a GPU: patches are decoded, checked, applied and undone there; only records and streams cross.

The same transactions as on a host (see `state`), with two differences: patches are committed one by one, because what
decodes the second must lie in memory, and what would be a dictionary of blocks is one `changes.PileChanges`.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from pulsesync.core.types import BLOCK, Bits, Sum, Tile
from pulsesync.device import decode, memory
from pulsesync.device.changes import PileChanges, as_sums, compose, device_keys, moves, on_whole
from pulsesync.device.hot import DeviceHistory, HotWeights, advance, mark_hot
from pulsesync.device.memory import DeviceStream, DeviceView, StreamPoint, to_host, to_stream
from pulsesync.device.pile import Pile, make_piles
from pulsesync.errors import FormatError, StateError, VerificationError
from pulsesync.format.body import Body
from pulsesync.format.history import History
from pulsesync.format.layout import Layout
from pulsesync.format.manifest import Manifest, RecordKind
from pulsesync.kernels import cuda
from pulsesync.state.live import Snapshot, State, Transition, find_places
from pulsesync.state.slices import LocalTile, Slices
from pulsesync.state.views import named


@dataclass(frozen=True)
class DeviceTransition(Transition):
    """The way from the live state to another, on the device."""

    changes: Sequence[PileChanges]  # type: ignore[assignment]
    history: DeviceHistory  # type: ignore[assignment]

    @property
    def changed(self) -> int:
        return sum(run.count for run in self.changes)


class DeviceState(State):
    """The tensors of one process on a GPU, in the layout of a run.

    device: where the work is done; tensors may also lie in pinned host memory, which it reads and writes.
    """

    stacks = False  # a patch is prepared for the live weights alone
    widens = False  # kernels address weights in the dtype of the run
    flats: dict[str, torch.Tensor]  # type: ignore[assignment]
    copies: dict[str, Sequence[torch.Tensor]]  # type: ignore[assignment]

    def __init__(
        self,
        layout: Layout,
        flats: Mapping[str, torch.Tensor],
        copies: Mapping[str, Sequence[torch.Tensor]] | None = None,
        slices: Slices | None = None,
        places: Mapping[int, LocalTile] | None = None,
        device: torch.device | None = None,
    ) -> None:
        self.device = device or next(iter(flats.values())).device
        places = find_places(layout, slices or {}) if places is None else places
        if cut := next((place for place in places.values() if not place.whole), None):
            name = cut.tile.tensor.name
            raise StateError(
                f"the slice of {name!r} that is held cuts through a tile of the run, which a GPU cannot take: publish "
                "with a grid that has borders there",
                tensor=name,
            )
        self.piles = make_piles(layout.tiles, {n: place.tile for n, place in places.items()}, self.device)
        self._memories = DeviceHistory()
        self.stream: DeviceStream | None = None  # of a publisher's base, which nobody else uses
        self.readers: list[
            StreamPoint
        ] = []  # comparisons with it that were launched: nothing is written before they are over
        super().__init__(layout, flats, copies, slices, places)  # type: ignore[arg-type]

    @property  # type: ignore[override]
    def history(self) -> DeviceHistory:
        return self._memories

    @history.setter
    def history(self, history: History | DeviceHistory) -> None:
        self._memories = history if isinstance(history, DeviceHistory) else DeviceHistory.of(history, self.device)

    @staticmethod
    def views(source: Any) -> Mapping[str, DeviceView]:
        views, ties = memory.view(source)
        return {**views, **{alias: views[name] for alias, name in ties.items()}}

    def holds(self, source: Any) -> bool:
        tensors = ((name, found) for name, found in named(source) if isinstance(found, torch.Tensor))
        return {name: found.data_ptr() for name, found in tensors} == self._addresses  # 0 for those without weights

    @staticmethod
    def span(flat: torch.Tensor) -> tuple[int, int]:
        return flat.data_ptr(), flat.data_ptr() + flat.numel() * flat.element_size()

    # Reading

    def block(self, tile: Tile, number: int) -> Bits:
        """Bring one block to the host."""
        place = self.places[tile.ordinal].tile
        assert place is not None
        begin, end = number * BLOCK, min((number + 1) * BLOCK, tile.size)
        flat = self.flats[tile.tensor.name]
        with self.aside():
            if place.contiguous:
                bits = flat[place.start + begin : place.start + end]
            else:
                bits = flat[self._indices(place, begin, end)]
            copied = bits.clone() if bits.device.type == "cpu" else bits
            return to_host(copied)[0].view(tile.tensor.kind.bits)

    def aside(self) -> AbstractContextManager[None]:
        """Do what is launched inside where a trainer does not wait for it, nor it for the trainer."""
        return self.stream() if self.stream is not None else nullcontext()

    def _indices(self, place: Tile, begin: int, end: int) -> torch.Tensor:
        flat = self.flats[place.tensor.name]
        return torch.from_numpy(place.flat_indices(np.arange(begin, end))).to(flat.device)

    def snapshot(self) -> "DeviceSnapshot":
        with self.lock:
            taken = DeviceSnapshot(self)
            self._snapshots.add(taken)
        return taken

    def find_damage(self) -> Tile | None:
        with self.lock:
            if (untied := self._find_untied()) is not None:
                return next(tile for tile in self.layout.tiles if tile.tensor.name == untied)
            counted = self.count()
            return next((self.layout.tiles[n] for n, total in counted.items() if total != self.sums[n]), None)

    def count(self) -> dict[int, Sum]:
        sums = {tile.ordinal: Sum(0, 0) for tile in self.layout.tiles if self._counts(tile)}
        with memory.on(self.device):
            for pile in self.piles.values():
                sums.update(count_pile(pile, self.flats))
        return sums

    def _find_untied(self) -> str | None:
        for name, others in self.copies.items():
            if any(not torch.equal(self.flats[name], other) for other in others):
                return name
        return None

    # Patches

    def prepare(
        self, manifest: Manifest, parts: "Sequence[bytes | memoryview | Body]", after: Transition | None = None
    ) -> DeviceTransition:
        assert after is None, "a state on a device takes patches one by one"
        with memory.on(self.device):
            return self._prepare(manifest, parts)

    def _prepare(self, manifest: Manifest, parts: "Sequence[bytes | memoryview | Body]") -> DeviceTransition:
        self._check_base(manifest, DeviceTransition((), self.sums, self.history))
        version = manifest.kind == RecordKind.VERSION
        memories = self.history if version and manifest.index > 1 else DeviceHistory()
        runs: list[PileChanges] = []
        promised: dict[int, Sum] = {}
        cuts: dict[int, int] = {}
        for body in self._open(manifest, parts):
            entries = {e.tile: e.sum for e in body.index.entries if e.tile in self.places}
            if not promised.keys().isdisjoint(entries):
                raise FormatError(f"two parts of version {manifest.version} change the same tile")
            promised.update(entries)
            some, of_tiles = self._decode(body, memories if version else None)
            runs += some
            cuts.update(of_tiles)
        sums = {**self.sums, **self._moved(runs, promised)}
        if self.whole and (then := self._digest(sums)) != manifest.digest:
            raise VerificationError(
                "digest mismatch: the decoded weights differ from the manifest; weights unchanged",
                version=manifest.version,
                expected=manifest.digest,
                actual=then,
            )
        later = self.remember(memories, cuts, runs, set(promised)) if version else DeviceHistory()
        if self.whole and (later.digest() if later.tiles else None) != manifest.history:
            raise VerificationError(
                "digest mismatch: the history of the epoch differs from the manifest; weights unchanged",
                version=manifest.version,
            )
        return DeviceTransition(runs, sums, later)

    def _decode(self, body: Body, memories: DeviceHistory | None) -> tuple[list[PileChanges], Mapping[int, int]]:
        wanted = None if self.whole else self.places.keys()
        opened = decode.open_part(body.index, body.sections, self.layout, memories, wanted)
        runs = []
        for number, coded in opened.coded.items():
            table = opened.tables[number]
            whole = self.piles[table.dtype]
            pile = whole.part([tile.ordinal for tile, _ in coded])
            known = memories if memories is not None and table.frequencies.shape[1] > 1 else DeviceHistory()
            some = decode.decode_coded(pile, [begun for _, begun in coded], table, pile.locate(self.flats), known)
            runs += [on_whole(run, whole) for run in some]
        for dtype, plain in opened.plain.items():
            runs += decode.decode_plain(self.piles[dtype], plain, self.flats)
        return runs, opened.cuts

    def _moved(self, runs: Sequence[PileChanges], promised: Mapping[int, Sum]) -> dict[int, Sum]:
        """The digests that changed tiles will have. Raises: VerificationError, if they are not as promised."""
        by = moves(runs)
        sums = {ordinal: self.sums[ordinal] + by.get(ordinal, Sum(0, 0)) for ordinal in promised}
        for ordinal, total in sums.items():
            if total != promised[ordinal]:
                name = self.layout.tiles[ordinal].tensor.name
                raise VerificationError(
                    f"digest mismatch: the decoded tensor {name!r} differs from the part's index; weights unchanged",
                    tensor=name,
                )
        return sums

    def remember(
        self,
        memories: DeviceHistory,
        cuts: Mapping[int, int],
        runs: Sequence[PileChanges],
        touched: set[int],
        hot: Mapping[Pile, HotWeights] | None = None,
    ) -> DeviceHistory:
        """The history after changes of the tiles that were touched; cuts: of those coded with a history.

        hot: what was found on the way; it serves where the cuts are these.
        """
        marked = []
        for pile in self.piles.values():
            new = np.array([cuts.get(ordinal, 0) for ordinal in pile.index], np.int64)
            then = np.where([n in touched for n in pile.index], np.maximum(memories.cuts(pile), new), 0)
            if then.any():
                one = (hot or {}).get(pile)
                if one is None or (one.cuts != then).any():
                    one = mark_hot(pile, pile.locate(self.flats), then, memories)
                marked.append(one)
        return advance(memories, memories.index + 1, marked, runs)

    def commit(self, transition: Transition) -> DeviceTransition:
        """Write a prepared transition into the weights, or put everything back if that fails half-way.

        Waits first until nothing else runs on the device, so that nobody reads weights that change; for a publisher's
        base until what compared with it is over. Returns the way back, whose changes are the undo log.
        """
        assert isinstance(transition, DeviceTransition)
        back = DeviceTransition([run.inverse() for run in transition.changes], self.sums, self.history)
        with self.lock:
            kept = [(taken, taken.changes) for taken in self._snapshots]
            try:
                self._write_all(transition.changes)
                with self.aside():
                    for taken, before in kept:
                        taken.changes = compose(back.changes, before)  # type: ignore[arg-type, assignment]
                self.sums, self.history = transition.sums, transition.history
            except BaseException:
                self._write_all(back.changes)
                for taken, before in kept:
                    taken.changes = before
                self.sums, self.history = back.sums, back.history
                raise
        return back

    def join(self, first: Transition, then: Transition) -> DeviceTransition:
        assert isinstance(first, DeviceTransition)
        assert isinstance(then, DeviceTransition)
        return DeviceTransition(compose(first.changes, then.changes), then.sums, then.history)

    def _write_all(self, runs: Sequence[PileChanges]) -> None:
        with self._alone():
            for run in runs:
                most = max(1 + len(self.copies.get(tile.tensor.name, ())) for tile in run.pile.tiles)
                for n in range(most):
                    run.write(self._addresses_of(run.pile, n))

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Do what is launched inside while nobody reads the weights."""
        if self.stream is not None:
            with self.stream(self.readers):
                yield
            self.readers.clear()
            return
        with memory.on(self.device):
            memory.wait(self.device)
            try:
                yield
            finally:
                memory.wait(self.device)

    def _addresses_of(self, pile: Pile, n: int) -> torch.Tensor:
        """Of each tile the address of the n-th memory that its tensor has, or of the last."""
        held = ((self.flats[t.tensor.name], *self.copies.get(t.tensor.name, ())) for t in pile.tiles)
        return to_stream(np.array([all_[min(n, len(all_) - 1)].data_ptr() for all_ in held], np.int64), self.device)

    # Anchors

    def load_whole(self, parts: Sequence[Body], sums: Mapping[int, Sum]) -> None:
        with self._alone():
            super().load_whole(parts, sums)

    def _count_block(self, tile: Tile, number: int, bits: Bits) -> Sum:
        with memory.on(self.device):
            return count_block(tile, number, bits, self.device)

    def _write_block(self, tile: Tile, number: int, bits: Bits) -> None:
        place = self.places[tile.ordinal].tile
        assert place is not None
        begin = number * BLOCK
        for flat in (self.flats[tile.tensor.name], *self.copies.get(tile.tensor.name, ())):
            new = to_stream(bits, flat.device)
            if place.contiguous:
                flat[place.start + begin : place.start + begin + bits.size] = new
            else:
                flat[self._indices(place, begin, begin + bits.size)] = new


class DeviceSnapshot(Snapshot):
    """A state as it was, readable block by block while the live one moves on."""

    changes: Sequence[PileChanges] = ()  # type: ignore[assignment]
    _state: DeviceState

    def __init__(self, state: DeviceState) -> None:
        super().__init__(state)
        self._piles = {tile.ordinal: pile for pile in state.piles.values() for tile in pile.tiles}
        self.changes = ()

    def block(self, tile: Tile, number: int) -> Bits:
        with self._state.lock:
            bits = self._state.block(tile, number)
            runs = [run for run in self.changes if run.pile is self._piles[tile.ordinal]]
        with self._state.aside():
            for run in runs:
                b = int(run.pile.first_block[run.pile.index[tile.ordinal]]) + number
                begin, end = run.starts[b : b + 2].tolist()
                if begin < end:
                    bits = bits.copy()
                    where, new = to_host(run.positions[begin:end], run.new[begin:end])
                    bits[where] = new.view(bits.dtype)
        return bits


def count_pile(pile: Pile, flats: Mapping[str, torch.Tensor]) -> dict[int, Sum]:
    """Count the digests of a pile's tiles from all their weights."""
    counted: dict[int, Sum] = {}
    for part, count in zip(pile.regular_and_odd, (_recount, _recount_any), strict=True):
        if part is not None:
            sums = torch.zeros(2 * len(part.tiles), dtype=torch.int64, device=pile.device)
            weights = part.locate(flats)
            count(part, weights.at, sums)
            counted.update(as_sums(part, to_host(sums)[0]))
    return counted


def _recount(pile: Pile, at: torch.Tensor, sums: torch.Tensor) -> None:
    some = 64  # chunks that a program sums up
    units, starts, chunks = pile.units
    cuda.recount[(pile.blocks, -(-chunks // some))](
        at, units, starts, pile.block_tile, device_keys(pile.device), sums, PER=some, num_warps=8, maxnreg=80
    )


def _recount_any(pile: Pile, at: torch.Tensor, sums: torch.Tensor) -> None:
    cuda.recount_any[(pile.blocks, 16)](
        at, pile.sizes, pile.block_tile, pile.begins, *pile.run_geometry, device_keys(pile.device), sums,
        ITEM=pile.kind.itemsize, SPAN=1024,
    )  # fmt: skip


def count_block(tile: Tile, number: int, bits: Bits, device: torch.device) -> Sum:
    """Count the digest of one block of a tile, given its weights on the host."""
    here = to_stream(bits, device)
    sums = torch.zeros(2, dtype=torch.int64, device=device)
    columns, stride = (tile.size, 0) if tile.contiguous else (tile.columns, tile.tensor.columns)
    facts = np.array([here.data_ptr(), bits.size, 0, number * BLOCK, tile.start, columns, stride], np.int64)
    at, *rest = to_stream(facts.reshape(-1, 1), device)
    cuda.recount_any[(1, 64)](at, *rest, device_keys(device), sums, ITEM=tile.tensor.kind.itemsize, SPAN=1024)
    return Sum(*to_host(sums)[0].view(np.uint64).tolist())
