"""Live weights on a GPU: the backend of torch and Triton. Only records and streams are copied to the host and back.

Patches are committed one by one: the kernels that decode the second one read weights from memory, so the changes of the
first one must be written there, and a copy with these changes would be a second copy of the weights (gpu.md).
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import cache, cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from pulsesync.core.threads import spread
from pulsesync.core.types import BLOCK, Bits, Sum, Tile
from pulsesync.device import decode, memory
from pulsesync.device.changes import (
    Changes,
    PileChanges,
    WriteAddresses,
    as_sums,
    begin_moves,
    block_moves,
    compose,
    device_key_planes,
    device_keys,
    digest_changes,
)
from pulsesync.device.decode import DecodedTiles, GroupChecks, OpenedPayloads
from pulsesync.device.indices import BlockIndices
from pulsesync.device.memory import DeviceStream, DeviceView, Point, Tensors, fetch, to_device, to_host, to_stream
from pulsesync.device.pieces import piece_begins
from pulsesync.device.pile import Pile, PileAddresses, make_piles, parts_of, place_of, rectangle
from pulsesync.device.tracked import DeviceHistory, HotWeights, begin_advance, find_hot
from pulsesync.errors import StateError
from pulsesync.format.body import Body
from pulsesync.format.history import History
from pulsesync.format.layout import Layout
from pulsesync.format.patch import WholeBlock
from pulsesync.kernels import cuda
from pulsesync.state.backend import BlockSums, StateBackend, VersionChanges
from pulsesync.state.slices import Slices, TileStorage, find_places
from pulsesync.state.staging import StagedBlocks
from pulsesync.state.views import named
from pulsesync.state.weights import WeightState

TOGETHER = 32  # blocks of an anchor that are decoded, copied to the device and counted at a time


class DeviceBackend(StateBackend):
    """The tensors of one process on a GPU.

    Each tensor on a GPU is processed there, so that a module may be spread over several GPUs. A tensor in pinned host
    memory is read and written by a GPU: that of `workers`, by name, else `device`.
    """

    overlays = False  # kernels read weights from memory only
    widens = False  # kernels address weights in the dtype of the run

    def __init__(
        self,
        layout: Layout,
        flats: Mapping[str, torch.Tensor],
        copies: Mapping[str, Sequence[torch.Tensor]] | None = None,
        slices: Slices | None = None,
        places: Mapping[int, TileStorage] | None = None,
        device: torch.device | None = None,
        workers: Mapping[str, torch.device] | None = None,
    ) -> None:
        self.device = device or memory.main_device(flats.values())
        works_on = {name: memory.worker_of(flat, self.device) for name, flat in flats.items()} | dict(workers or {})
        places = find_places(layout, slices or {}) if places is None else places
        if cut := next((place for place in places.values() if place.splits_coding_group), None):
            name = cut.tile.names[0] if cut.tile is not None else ""
            raise StateError(
                f"the local slice of {name!r} splits a tile of the run, which is not supported on a GPU: publish "
                "with a grid that has borders there",
                tensor=name,
            )
        self._tiles = {ordinal: place_of(place) for ordinal, place in places.items()}  # in the local tensors
        tiles = list(layout.tiles)
        for ordinal, tile in self._tiles.items():
            if tile.kept is not None:
                tiles[ordinal] = replace(tiles[ordinal], kept=tile.kept)
        tied = {f"{name}, tied": other for name, others in (copies or {}).items() for other in others}
        memory.check_reach({**flats, **tied}, self.device)
        self.piles = make_piles(tiles, self._tiles, works_on)
        holding = [memory.worker_of(other, self.device) for other in tied.values()]
        self.devices = list(dict.fromkeys((self.device, *(pile.device for pile in self.piles), *holding)))
        self._pile_of = {tile.ordinal: pile for pile in self.piles for tile in pile.tiles}
        self.tensors = Tensors(flats, object())  # they do not move: see `WeightState.is_attached_to`
        self._written: dict[tuple[Pile, int], WriteAddresses] = {}  # by pile, and the number of the memory of a tensor
        self.stream: DeviceStream | None = None  # used only for a publisher's base
        self.readers: list[Point] = []  # ends of comparisons with it: nothing is written before them
        super().__init__(layout, flats, copies, slices, places)

    @staticmethod
    def views(source: Any) -> Mapping[str, DeviceView]:
        views, ties = memory.view(source)
        return {**views, **{alias: views[name] for alias, name in ties.items()}}

    @classmethod
    def addresses(cls, source: Any) -> Mapping[str, int]:
        tensors = ((name, found) for name, found in named(source) if isinstance(found, torch.Tensor))
        return {name: found.data_ptr() for name, found in tensors}  # 0 for those without weights

    @staticmethod
    def span(flat: torch.Tensor) -> tuple[int, int]:
        return flat.data_ptr(), flat.data_ptr() + flat.numel() * flat.element_size()

    @staticmethod
    def equal(a: torch.Tensor, b: torch.Tensor) -> bool:
        return torch.equal(a, b.to(a.device))

    # Reading

    def block(self, tile: Tile, number: int) -> Bits:
        """Copy one block to the host."""
        with self.aside():
            bits = self._read(tile, number)
            copied = bits.clone() if bits.device.type == "cpu" else bits
            return to_host(copied)[0].view(tile.tensor.kind.bits)

    def _read(self, tile: Tile, number: int) -> torch.Tensor:
        """A block, as a view or a copy; groups of a bundle that are not local are zeros."""
        place = self._tiles[tile.ordinal]
        if place.pieces:
            pile = self._pile_of[tile.ordinal].part([tile.ordinal])
            assert pile.pieces is not None
            with memory.on(pile.device):
                return pile.pieces.gather(self.tensors, tile.tensor.kind.itemsize)[: tile.size]
        flat = self.tensors[place.tensor.name]
        return flat[self._where(flat, tile, number, min(BLOCK, tile.size - number * BLOCK))]

    def _where(self, flat: torch.Tensor, tile: Tile, number: int, size: int) -> "slice | torch.Tensor":
        """Where the weights of a block lie in a tensor."""
        place, begin = self._tiles[tile.ordinal], number * BLOCK
        if place.contiguous:
            return slice(place.start + begin, place.start + begin + size)
        return torch.from_numpy(place.flat_indices(np.arange(begin, begin + size))).to(flat.device)

    def amended_block(self, tile: Tile, number: int, changes: Changes) -> Bits:
        bits = self.block(tile, number)
        pile = self._pile_of[tile.ordinal]
        i = pile.index[tile.ordinal]
        first, last = pile.first_block[i : i + 2].tolist()
        if not tile.groups:
            first, last = first + number, first + number + 1
        with self.aside():
            for run in changes:
                if run.pile is pile:
                    (starts,) = to_host(run.starts[first : last + 1])
                    begin, end = starts[0], starts[-1]
                    if begin < end:
                        bits = bits.copy()
                        where, new = to_host(run.positions[begin:end], run.new[begin:end])
                        at = pile.host_begins[first:last] - number * BLOCK
                        bits[where + np.repeat(at, np.diff(starts))] = new.view(bits.dtype)
        return bits

    def aside(self) -> AbstractContextManager[None]:
        """Launch the work inside in a stream that neither delays the trainer nor waits for it."""
        return self.stream() if self.stream is not None else nullcontext()

    def batches(self) -> Iterable[Sequence[Tile]]:
        return (pile.tiles for pile in self.piles)

    def count_tiles(self, tiles: Sequence[Tile]) -> Mapping[int, Sum]:
        pile = self._pile_of[tiles[0].ordinal].part([tile.ordinal for tile in tiles])
        with memory.on(pile.device):
            return count_pile(pile, self.tensors)

    # Patches

    def load_history(self, history: History | DeviceHistory) -> DeviceHistory:
        return history if isinstance(history, DeviceHistory) else DeviceHistory.of(history, self.device)

    def decode(
        self, versions: Sequence[Sequence[Body]], after: Changes, history: DeviceHistory | None
    ) -> VersionChanges:
        assert not after, "a state on a device takes patches one by one"
        (bodies,) = versions
        runs: list[PileChanges] = []
        cuts: dict[int, int] = {}
        touched = [entry.tile for body in bodies for entry in body.index.entries if entry.tile in self.places]
        located = cache(lambda pile: pile.locate(self.tensors))  # nothing is written meanwhile
        with memory.on(self.device):
            checks: list[GroupChecks] = []
            hot: dict[Pile, HotWeights] = {}
            for body in bodies:
                opened = decode.open_part(body.index, body.sections, self._wanted, history)
                for pile, decoded in self._decode(opened, history, located):
                    runs += decoded.runs
                    checks.append(decoded.checks)
                    if history is not None and decoded.hot.pile is pile and pile in self._small:
                        hot[pile] = decoded.hot.without_list()
                    del decoded  # frees memory before the next pile is decoded
                for pile, numbers in self._by_pile([tile for tile, *_ in opened.plain]):
                    with memory.on(pile.device):
                        runs += decode.decode_plain(pile, [opened.plain[n] for n in numbers], located(pile))
                cuts.update(opened.cuts)
            moving, remembering = begin_moves(runs), None
            if history is not None:
                remembering = self.begin_remember(history, cuts, runs, set(touched), hot, located)
            by_block = moving()
            for one in checks:
                one.verify(by_block)
            by = digest_changes(by_block)
            later = remembering() if remembering is not None else None
            counted = later.digest() if later is not None and later.tiles and self.whole else None
        moved = {ordinal: by.get(ordinal, Sum(0, 0)) for ordinal in touched}
        return VersionChanges(runs, [moved], later, [counted])

    @cached_property
    def _small(self) -> set[Pile]:
        """The piles that are the only one of a dtype on their device: for others, less is kept in memory at a time."""
        keys = [(pile.kind, pile.device) for pile in self.piles]
        return {pile for pile, key in zip(self.piles, keys, strict=True) if keys.count(key) == 1}

    @cached_property
    def _wanted(self) -> Mapping[int, Tile]:
        """The tiles of a part to decode, by ordinal: for a complete state all, so that every entry is checked."""
        return dict(enumerate(self.layout.tiles)) if self.whole else self.tiles

    def _decode(
        self,
        opened: OpenedPayloads,
        memories: DeviceHistory | None,
        located: Callable[[Pile], PileAddresses],
    ) -> Iterator[tuple[Pile, DecodedTiles]]:
        """Decode the tiles that are coded against their old weights; for each pile and table."""
        for number, coded in opened.coded.items():
            table = opened.tables[number]
            known = memories if memories is not None and table.frequencies.shape[1] > 1 else DeviceHistory()
            for pile, numbers in self._by_pile(coded.tiles):
                with memory.on(pile.device):
                    some = coded.part(np.array(numbers)) if len(numbers) < len(coded.tiles) else coded
                    yield pile, decode.decode_coded(pile, some, table, located(pile), known)

    def pile_of(self, ordinal: int) -> Pile:
        """The pile of a local tile."""
        return self._pile_of[ordinal]

    def parts(self, ordinals: Iterable[int]) -> list[tuple[Pile, Pile]]:
        """The piles of some local tiles, each with the pile of only these tiles, in order."""
        return parts_of(self._pile_of, ordinals)

    def _by_pile(self, tiles: Sequence[Tile]) -> Iterable[tuple[Pile, list[int]]]:
        """The piles of some tiles, and the numbers of those in each."""
        found: dict[Pile, list[int]] = {}
        for n, tile in enumerate(tiles):
            found.setdefault(self._pile_of[tile.ordinal], []).append(n)
        return found.items()

    def begin_remember(
        self,
        memories: DeviceHistory,
        cuts: Mapping[int, int],
        runs: Changes,
        touched: set[int],
        hot: Mapping[Pile, HotWeights] | None = None,
        located: Callable[[Pile], PileAddresses] | None = None,
    ) -> Callable[[], DeviceHistory]:
        """Begin to compute the history after changes of these tiles. Returns a function that waits for it.

        cuts: of those tiles that were coded with a history.

        hot: the hot weights that are already known; they are used if they have these cuts and the history was looked
        up, which a patch coded without a history does not do. located: the addresses of piles.
        """

        def find() -> Iterator[HotWeights]:
            """One pile after the other, to limit memory."""
            for pile in self.piles:
                new = np.array([cuts.get(ordinal, 0) for ordinal in pile.index], np.int64)
                then = np.where([n in touched for n in pile.index], np.maximum(memories.cuts(pile), new), 0)
                if not then.any():
                    continue
                one = (hot or {}).get(pile)
                if one is None or (one.cuts != then).any() or one.remembers != (memories.index > 0):
                    with memory.on(pile.device):
                        weights = located(pile) if located else pile.locate(self.tensors)
                        one = find_hot(pile, weights, then, memories)()
                yield one

        return begin_advance(memories, memories.index + 1, find(), runs)

    def no_changes(self) -> Changes:
        return ()

    def inverse(self, changes: Changes) -> Changes:
        return [run.inverse() for run in changes]

    def compose(self, first: Changes, then: Changes) -> Changes:
        if not (first and then):
            return first or then
        with self.aside():
            return compose(first, then)

    def count_digest_changes(self, changes: Changes) -> Mapping[int, Sum]:
        return digest_changes(block_moves(changes))

    def count_changed(self, changes: Changes) -> int:
        return sum(run.count for run in changes)

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Wait until nothing else runs on the device; for a publisher's base, until no comparison reads it."""
        if self.stream is not None:
            with self.stream(self.readers):
                yield
            self.readers.clear()
            return
        memory.wait(self.devices)
        try:
            yield
        finally:
            memory.wait(self.devices)

    def write(self, changes: Changes) -> None:
        for run in changes:
            with memory.on(run.pile.device):
                for n in range(self.memories_of(run.pile)):
                    run.write(self._addresses_of(run.pile, n))

    def memories_of(self, pile: Pile) -> int:
        """The most memories that a tensor of a pile has: those tied to it have their own."""
        if not self.copies:
            return 1
        names = {name for place in pile.places for name in place.names}
        return max(1 + len(self.copies.get(name, ())) for name in names)

    def _addresses_of(self, pile: Pile, n: int) -> WriteAddresses:
        """The addresses of the n-th memory of each tensor, or of its last."""
        if (known := self._written.get((pile, n))) is None:
            first = pile.first_gathered
            flats = [self.memory(place.tensor.name, n) for place in pile.places[:first]]
            at = np.array([flat.data_ptr() for flat in flats], np.int64)
            pieces = np.zeros(0, np.int64)
            if pile.pieces is not None:
                some = [self.memory(name, n) for name in pile.pieces.names]
                pieces = pile.pieces.addresses(some, pile.kind.itemsize)
            known = WriteAddresses(to_device(at, pile.device), to_device(pieces, pile.device))
            self._written[pile, n] = known
        return known

    def memory(self, name: str, n: int) -> torch.Tensor:
        """The n-th memory of a tensor, or its last."""
        others = self.copies.get(name, ())
        found: torch.Tensor = others[min(n, len(others)) - 1] if n and others else self.flats[name]
        return found

    # Anchors

    def write_blocks(self, blocks: Sequence[WholeBlock]) -> None:
        for _ in self._write_decoded(blocks):
            pass

    def take_blocks(self, blocks: Sequence[WholeBlock]) -> list[BlockSums]:
        return [found for some, here in self._write_decoded(blocks) for found in self._sums_of(some, here)]

    def _write_decoded(
        self, blocks: Sequence[WholeBlock]
    ) -> Iterator[tuple[Sequence[WholeBlock], Sequence[torch.Tensor]]]:
        """Decode and write some blocks at a time; yield them, with their weights on the device."""
        with memory.on(self.device):
            for begin in range(0, len(blocks), TOGETHER):
                some = blocks[begin : begin + TOGETHER]
                _, here = self._bring_up(some)
                for block, bits in zip(some, here, strict=True):
                    self._write_block(block.tile, block.number, bits)
                yield some, here

    def check_blocks(self, blocks: Sequence[WholeBlock], staged: StagedBlocks | None) -> list[BlockSums]:
        out: list[BlockSums] = []
        with memory.on(self.device):
            for begin in range(0, len(blocks), TOGETHER):
                some = blocks[begin : begin + TOGETHER]
                decoded, here = self._bring_up(some)
                found = self._sums_of(some, here)
                for block, weights, bits, sums in zip(some, decoded, here, found, strict=True):
                    if staged is not None and not self._has(block, bits):
                        staged.add(block, weights, sums.all)
                out += found
        return out

    def _bring_up(self, blocks: Sequence[WholeBlock]) -> tuple[list[Bits], list[torch.Tensor]]:
        """Decode blocks on the host, and copy each to the device once."""
        decoded = spread(WholeBlock.decode, blocks)
        return decoded, [to_stream(bits, self.device) for bits in decoded]

    def _has(self, block: WholeBlock, bits: torch.Tensor) -> bool:
        """Whether writing a block would change nothing; False for a bundle, which is not compared."""
        place = self._tiles[block.tile.ordinal]
        if place.pieces:
            return False
        flats = [self.memory(place.tensor.name, n) for n in range(self._copies_of(place))]
        runs = [flat[self._where(flat, block.tile, block.number, block.size)] for flat in flats]
        return all(torch.equal(run, bits.to(run.device)) for run in runs)

    def _copies_of(self, place: Tile) -> int:
        """The most memories that a tensor of a tile has."""
        return 1 + max(len(self.copies.get(name, ())) for name in place.names)

    def _sums_of(self, blocks: Sequence[WholeBlock], here: Sequence[torch.Tensor]) -> list[BlockSums]:
        in_part = [n for n, block in enumerate(blocks) if self._tiles[block.tile.ordinal].kept is not None]
        local = [self._kept_of(blocks[n].tile, here[n]) for n in in_part]
        counted = count_blocks([*blocks, *(blocks[n] for n in in_part)], [*here, *local], self.device)
        sums = [Sum(*both) for both in to_host(counted)[0].view(np.uint64).reshape(-1, 2).tolist()]
        of_local = dict(zip(in_part, sums[len(blocks) :], strict=True))
        return [BlockSums(sums[n], of_local.get(n, sums[n])) for n in range(len(blocks))]

    def _kept_of(self, tile: Tile, bits: torch.Tensor) -> torch.Tensor:
        """The weights of a bundle, with zeros for groups that are not local."""
        out = torch.zeros_like(bits)
        for n in self._tiles[tile.ordinal].kept or ():
            out[tile.groups[n] : tile.groups[n + 1]] = bits[tile.groups[n] : tile.groups[n + 1]]
        return out

    def _write_block(self, tile: Tile, number: int, bits: torch.Tensor) -> None:
        """Write a block of a tile into all the memory that its tensors have."""
        place = self._tiles[tile.ordinal]
        for n in range(self._copies_of(place)):
            if not place.pieces:
                flat = self.memory(place.tensor.name, n)
                flat[self._where(flat, tile, number, bits.numel())] = bits.to(flat.device)
                continue
            places = [rectangle(self.memory(piece.tensor.name, n), piece) for piece in place.pieces]
            begins = piece_begins(replace(tile, kept=place.kept)).tolist()
            runs = [bits[at : at + to.numel()].view(to.shape) for at, to in zip(begins, places, strict=True)]
            torch._foreach_copy_(places, runs)


def backend_of(state: WeightState) -> DeviceBackend:
    """The memory of a state that is on a GPU."""
    assert isinstance(state.backend, DeviceBackend)
    return state.backend


def count_pile(pile: Pile, flats: Mapping[str, torch.Tensor]) -> dict[int, Sum]:
    """Count the digests of a pile's tiles from all their weights."""
    return count_located(pile, pile.locate(flats))


def count_located(pile: Pile, weights: PileAddresses) -> dict[int, Sum]:
    """The same for weights that are located already."""
    return dict(as_sums(pile, begin_count(pile, weights)()[0]))


def begin_count(pile: Pile, weights: PileAddresses) -> Callable[[], list[NDArray[Any]]]:
    """Begin to count them. Returns a function that waits for the two sums of each tile."""
    sums = torch.zeros(2 * len(pile.tiles), dtype=torch.int64, device=pile.device)
    _count(pile.indices, weights.at, sums)
    return fetch(sums)


def count_blocks(blocks: Sequence[WholeBlock], weights: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Count the digests of blocks of tiles, given their weights on the device: two sums for each."""
    sums = torch.zeros((len(blocks), 2), dtype=torch.int64, device=device)
    widths = np.array([block.tile.tensor.kind.itemsize for block in blocks])
    for wide in np.unique(widths).tolist():
        chosen = np.flatnonzero(widths == wide)
        some = [blocks[n] for n in chosen.tolist()]
        begins = np.array([block.number * BLOCK for block in some], np.int64)
        sizes = np.array([block.size for block in some], np.int64)
        indices = BlockIndices([block.tile for block in some], np.arange(len(some)), begins, sizes, device)
        at = to_stream(np.array([weights[n].data_ptr() for n in chosen.tolist()], np.int64), device)
        counted = torch.zeros((len(some), 2), dtype=torch.int64, device=device)
        _count(indices, at, counted)
        sums[to_stream(chosen, device)] = counted
    return sums.view(-1)


def _count(indices: BlockIndices, at: torch.Tensor, sums: torch.Tensor) -> None:
    """Add to the two sums of each tile those of the weights of its blocks, given where these are."""
    words, others = indices.runs
    unit = min(indices.itemsize, 2)
    each, warps = 64, 8 // unit  # chunks that a program sums up, and its warps
    if count := words.block.numel():
        cuda.recount[(count, -(-words.chunks // each))](
            words.addresses(at), words.rows, device_key_planes(indices.device, unit), sums,
            UNIT=unit, PER=each, WARPS=warps, num_warps=warps,
        )  # fmt: skip
    if count := others.block.numel():
        cuda.recount_any[(count, min(others.chunks, 64))](
            others.addresses(at), others.rows, device_keys(indices.device), sums, ITEM=indices.itemsize, SPAN=1024
        )
