"""Compare the tiles of a base with those of a source, one pile at a time."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice

from pulsesync.device.changes import PileChanges, compose, find_changes, join, on_whole
from pulsesync.device.pile import Pile, PileAddresses
from pulsesync.device.source import DeviceSource
from pulsesync.device.state import DeviceBackend
from pulsesync.device.streamed import BasePiece, cut


@dataclass(frozen=True)
class PilePair:
    """The same tiles in a base and in a source: masters, rounded to BF16 as they are read, apart from the others."""

    here: Pile
    alike: "Sequence[AlikeTiles]"

    @classmethod
    def of(cls, here: Pile, there: Pile, dtypes: Mapping[str, str]) -> "PilePair":
        masters: list[int] = []  # ordinals
        others: list[int] = []
        for place in there.places:
            alike = bool(dtypes) and all(dtypes.get(name) == "BF16" for name in place.names)
            (masters if alike else others).append(place.ordinal)
        kinds = [(some, some is masters) for some in (masters, others) if some]
        return cls(here, [AlikeTiles(here.part(some), there.part(some), cast) for some, cast in kinds])


@dataclass(frozen=True)
class AlikeTiles:
    """Tiles of a pile that are compared at once: in a base and in a source, and whether the source has masters."""

    here: Pile
    there: Pile
    cast: bool

    @cached_property
    def pieces(self) -> list[BasePiece]:
        """The pieces of the base, to be copied to the device one after the other."""
        return cut(self.here)


def compare_pile(
    pair: PilePair, source: DeviceSource, find: Callable[[AlikeTiles, PileAddresses], PileChanges]
) -> PileChanges:
    """Compare the tiles of a pile with the source."""
    found = [find(one, one.there.locate(source.tensors, itemsize=4 if one.cast else None)) for one in pair.alike]
    if len(found) == 1:
        return found[0]
    runs = [on_whole(run, pair.here) for run in found]
    return next(iter(compose(runs, ())), runs[0])


def find_at_once(one: AlikeTiles, new: PileAddresses, backend: DeviceBackend) -> PileChanges:
    return find_changes(one.here, one.here.locate(backend.tensors), new, one.cast)


def find_in_pieces(
    one: AlikeTiles, new: PileAddresses, arriving: Iterator[tuple[BasePiece, PileAddresses]]
) -> PileChanges:
    found = []
    for piece, old in islice(arriving, len(one.pieces)):
        # Triton compiles another kernel for a table at an odd address.
        there = replace(new, at=new.at[piece.blocks].clone())
        found.append(find_changes(piece.pile, old, there, one.cast))
    return join(one.here, found)
