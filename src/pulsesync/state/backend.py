"""What a memory of live weights must be able to do: `state.host` in host memory, `device.state` on a GPU.

A backend has the tensors and the verbs. What is known of the weights, and every rule of the transaction, is outside of
it: `state.weights`, `state.patches` and `state.anchors`.
"""

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar, NamedTuple, TypeAlias

from pulsesync.core.types import Bits, Sum, Tile
from pulsesync.errors import PulseError
from pulsesync.format.body import Body
from pulsesync.format.history import History
from pulsesync.format.layout import Layout
from pulsesync.format.patch import WholeBlock
from pulsesync.state.slices import TileStorage, find_places
from pulsesync.state.staging import StagedBlocks

# Each backend has its own types for these, which only the backend and its callers of the same kind look into.
Flat: TypeAlias = Any  # a tensor as it is read and written: an array of integers, or a torch tensor
Delta: TypeAlias = Any  # changes of weights: positions, old bits and new bits
EpochHistory: TypeAlias = Any  # the history of an epoch, a `HistoryLookup`


@dataclass(frozen=True)
class Transition:
    """The step from the live weights to others, ready to be committed."""

    changes: Delta
    sums: Mapping[int, Sum]  # after it, of all local tiles
    history: EpochHistory  # after it
    changed: int  # how many weights it changes
    position: object | None = None  # of the weights in their run after it, as the caller says


@dataclass(frozen=True)
class VersionChanges:
    """The changes of consecutive versions, each decoded against the weights that the one before it yields."""

    changes: Delta  # of all of them, and of the changes that they were decoded after
    digest_changes: Sequence[Mapping[int, Sum]]  # for each version: of the tiles in it, by ordinal
    history: EpochHistory | None  # after the last; None if none was given
    history_digests: Sequence[str | None]  # for each version: of the history after it, if the weights are whole
    fault: PulseError | None = None  # of the first version that cannot be decoded; the lists end before it


class BlockSums(NamedTuple):
    """The digests of one block of a tile."""

    all: Sum
    local: Sum  # counting weights that are not local as zeros


class StateBackend(ABC):
    """The tensors of one process, in the layout of a run, and how they are read, counted, decoded and written.

    Args:
        layout: Of the run.
        flats: The tensors by canonical name.
        copies: By canonical name, tied tensors that have memory of their own.
        places: Where its tiles lie in the tensors; all of each tensor is there if this is not given.
    """

    overlays: ClassVar[bool]  # whether a patch can be prepared over a transition that is not committed yet
    widens: ClassVar[bool]  # whether BF16 tensors of a run can be FP32 tensors in the model

    def __init__(
        self,
        layout: Layout,
        flats: Mapping[str, Flat],
        copies: Mapping[str, Sequence[Flat]] | None = None,
        places: Mapping[int, TileStorage] | None = None,
    ) -> None:
        self.layout, self.flats, self.copies = layout, dict(flats), dict(copies or {})
        self.places: Mapping[int, TileStorage] = find_places(layout, {}) if places is None else places
        self.whole = all(tile.ordinal in self.places or not tile.size for tile in layout.tiles) and all(
            place.whole for place in self.places.values()
        )

    @cached_property
    def tiles(self) -> Mapping[int, Tile]:
        """The local tiles by ordinal; a tile of which only some groups are local has their numbers."""
        return {n: replace(self.layout.tiles[n], kept=place.tile.kept) for n, place in self.places.items()}

    # Tensors

    @staticmethod
    @abstractmethod
    def views(source: Any) -> Mapping[str, Any]:
        """The tensors of a source under all their names, tied ones too."""

    @classmethod
    def addresses(cls, source: Any) -> Mapping[str, int]:
        """Where the tensors of a source are, by name."""
        return {name: view.address for name, view in cls.views(source).items()}

    @staticmethod
    @abstractmethod
    def span(flat: Flat) -> tuple[int, int]:
        """The addresses at which weights begin and end."""

    @staticmethod
    @abstractmethod
    def equal(a: Flat, b: Flat) -> bool:
        """Whether two tensors have the same bits."""

    # Reading and counting

    @abstractmethod
    def block(self, tile: Tile, number: int) -> Bits:
        """Read a block of a tile. The result must not be written; it may be a view."""

    @abstractmethod
    def amended_block(self, tile: Tile, number: int, changes: Delta) -> Bits:
        """Read a block as it is after some changes, in memory of its own."""

    @abstractmethod
    def count_tiles(self, tiles: Sequence[Tile]) -> Mapping[int, Sum]:
        """Count the digests of local tiles of a batch; of a partly local tile, as if the rest were zeros."""

    @abstractmethod
    def count_digest_changes(self, changes: Delta) -> Mapping[int, Sum]:
        """How changes change the digests of tiles, by ordinal; also of tiles that they leave as they are."""

    def batches(self) -> Iterable[Sequence[Tile]]:
        """The local tiles, in groups that are counted together."""
        return ([tile] for tile in self.layout.tiles if tile.ordinal in self.places)

    def count(self) -> dict[int, Sum]:
        """Count the digests of all local tiles."""
        sums = self.zero_sums()
        for tiles in self.batches():
            sums.update(self.count_tiles(tiles))
        return sums

    def zero_sums(self) -> dict[int, Sum]:
        """A sum for each tile in the digest: of complete weights, also for tiles that have none."""
        return {tile.ordinal: Sum(0, 0) for tile in self.layout.tiles if self.whole or tile.ordinal in self.places}

    def find_differing_tie(self, names: Collection[str] | None = None) -> str | None:
        """The first tensor, of these or of all, from which one that is tied to it differs."""
        for name, others in self.copies.items():
            if (names is None or name in names) and any(not self.equal(self.flats[name], other) for other in others):
                return name
        return None

    # Patches

    @abstractmethod
    def load_history(self, history: History) -> EpochHistory:
        """A history in host memory, in the form of this backend."""

    @abstractmethod
    def decode(self, versions: Sequence[Sequence[Body]], after: Delta, history: EpochHistory | None) -> VersionChanges:
        """Decode the local tiles of consecutive versions; the first applies to the weights after the given changes.

        All are patches of one epoch. A backend that cannot prepare patches over each other is given one version, and no
        changes. The given changes may be modified and returned.

        Raises: StateError: a local slice splits a tile. Bad bytes may be raised if there is one version; for a version
        that follows another they are always its `fault`.
        """

    @abstractmethod
    def no_changes(self) -> Delta:
        """The changes of a transition that changes nothing."""

    @abstractmethod
    def inverse(self, changes: Delta) -> Delta:
        """The changes that undo these."""

    @abstractmethod
    def compose(self, first: Delta, then: Delta) -> Delta:
        """Two sets of changes, one after the other, as one."""

    @abstractmethod
    def count_changed(self, changes: Delta) -> int:
        """How many weights changes change."""

    @abstractmethod
    def write(self, changes: Delta) -> None:
        """Write the new bits of changes into their tensors, and into those tied to them."""

    def exclusive(self) -> AbstractContextManager[None]:
        """A context in which weights may be written: nothing reads them. In host memory the caller ensures that."""
        return nullcontext()

    # Anchors

    @abstractmethod
    def write_blocks(self, blocks: Sequence[WholeBlock]) -> None:
        """Decode blocks of an anchor and write the local weights into their tensors, and into those tied to them.

        Raises: FormatError: one is broken; StoreError, VerificationError: one cannot be read from disk, or has changed.
        """

    @abstractmethod
    def take_blocks(self, blocks: Sequence[WholeBlock]) -> Sequence[BlockSums]:
        """The same, and return the digests of each."""

    @abstractmethod
    def check_blocks(self, blocks: Sequence[WholeBlock], staged: StagedBlocks | None) -> Sequence[BlockSums]:
        """Decode blocks of an anchor and return the digests of each. Those that differ from the weights are staged.

        Raises: FormatError: one is broken; StoreError: the disk is full, or failed.
        """
