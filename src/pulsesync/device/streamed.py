"""A base in pinned host memory that is read piece by piece, while the trainer computes.

The copy engine brings a piece into one of two buffers on the device while the one before it is compared in the other.
So the bus is always busy and no multiprocessor waits for it; kernels that read the base over the bus would delay those
of the trainer.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import torch

from pulsesync.device.memory import INTEGERS, DeviceStream, Point, StreamPoint, empty, starts_of, to_device
from pulsesync.device.pile import Pile, PileAddresses, stretch

PIECE = 1 << 28  # bytes of a buffer; there are two


class BasePiece:
    """Consecutive blocks of a pile, from number `first` on: where they lie in the base, and where in a buffer."""

    def __init__(self, pile: Pile, first: int) -> None:
        self.pile, self.blocks = pile, slice(first, first + pile.blocks)
        wide, ends = pile.kind.itemsize, pile.host_begins + pile.host_sizes
        self._begins = pile.host_begins[pile.first_block[:-1]]  # in the tile
        self._ends = ends[pile.first_block[1:] - 1]
        starts = starts_of(-(-(self._ends - self._begins) // 8) * 8)  # in the buffer: kernels read words of eight bytes
        self._starts, self.size_bytes = starts[:-1], int(starts[-1]) * wide
        self._offsets = ((self._starts - self._begins)[pile.tile_of] + pile.host_begins) * wide
        self._located: dict[int, torch.Tensor] = {}  # by address of a buffer

    def copy(self, flats: Mapping[str, torch.Tensor], buffer: torch.Tensor) -> None:
        """Launch the copies of the base into a buffer."""
        run = buffer[: self.size_bytes].view(INTEGERS[self.pile.kind.itemsize])
        borders = np.stack((self._starts, self._begins, self._ends), axis=1).tolist()
        for place, (start, begin, end) in zip(self.pile.places, borders, strict=True):
            weights = stretch(flats[place.tensor.name], place, begin, end)
            run[start : start + end - begin].copy_(weights, non_blocking=True)

    def located(self, buffer: torch.Tensor) -> PileAddresses:
        """The blocks in a buffer."""
        begin = buffer.data_ptr()
        if begin not in self._located:
            self._located[begin] = to_device(self._offsets + begin, self.pile.device)
        return PileAddresses(self._located[begin], (buffer,))


def cut(pile: Pile) -> list[BasePiece]:
    """The pieces of a pile, in order."""
    parts = _split(pile, PIECE)
    firsts = starts_of(np.array([part.blocks for part in parts])).tolist()
    return [BasePiece(part, first) for part, first in zip(parts, firsts, strict=False)]


def _split(pile: Pile, size_bytes: int) -> list[Pile]:
    """The blocks of a pile as piles of at most this many bytes, in order; a block and a bundle are not split."""
    cuts: list[dict[int, list[int]]] = []  # of each: which blocks of a tile, by the tile's number
    room = 0
    of_tiles = np.split(pile.host_sizes * pile.kind.itemsize, pile.first_block[1:-1])
    for i, (tile, of_tile) in enumerate(zip(pile.tiles, of_tiles, strict=True)):
        sizes = of_tile.tolist()
        numbers = list(range(len(sizes)))
        for together in [numbers] if tile.groups else [[n] for n in numbers]:
            size = sum(sizes[n] for n in together)
            if size > room or not cuts:
                cuts.append({})
                room = size_bytes
            cuts[-1].setdefault(i, []).extend(together)
            room -= size
    return [pile] if len(cuts) == 1 else [_some(pile, some) for some in cuts]


def _some(pile: Pile, blocks: Mapping[int, Sequence[int]]) -> Pile:
    """The pile of some blocks of tiles, by the tile's number; of a bundle all blocks."""
    tiles = [
        pile.tiles[i] if pile.tiles[i].groups else replace(pile.tiles[i], kept=tuple(some))
        for i, some in blocks.items()
    ]
    return Pile(tiles, [pile.places[i] for i in blocks], pile.device)


class BaseStream:
    """Copies the pieces of a base to a device. For one thread at a time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # Kernels that read a piece are short, and would otherwise wait for every large kernel of the trainer
        self._copies, self._reads = DeviceStream(device), DeviceStream(device, first=True)
        self._buffers: list[torch.Tensor] = []  # two, once they are needed

    @contextmanager
    def after(self, point: Point) -> Iterator[None]:
        """Launch the work inside in the stream that reads pieces, after a point, and wait for its end."""
        with self._copies(), self._reads([point]):
            yield

    def buffered(
        self, pieces: Sequence[BasePiece], flats: Mapping[str, torch.Tensor]
    ) -> Iterator[tuple[BasePiece, PileAddresses]]:
        """Each piece in a buffer, valid for launches in this stream (`after`) before the next piece is requested."""
        buffers = self._room_for(max(piece.size_bytes for piece in pieces))
        ready: Point = StreamPoint(self._device)  # the memory may have had another use in this stream
        free = [ready, ready]

        def copy(n: int) -> Point:
            with self._copies.launches([free[n % 2]]):
                pieces[n].copy(flats, buffers[n % 2])
                return StreamPoint(self._device)

        arrived = copy(0)
        for n, piece in enumerate(pieces):
            here = arrived
            if n + 1 < len(pieces):
                arrived = copy(n + 1)
            self._reads.follow([here])
            yield piece, piece.located(buffers[n % 2])
            free[n % 2] = StreamPoint(self._device)

    def _room_for(self, size_bytes: int) -> list[torch.Tensor]:
        """The two buffers, which are kept so that the addresses of pieces in them can be cached."""
        if not self._buffers or self._buffers[0].numel() < size_bytes:
            self._buffers = [empty(size_bytes, torch.uint8, self._device) for _ in range(2)]
        return self._buffers
