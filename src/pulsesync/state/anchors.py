"""Anchors, loaded into live weights: the blocks that differ are staged until all of the anchor is checked."""

from collections.abc import Callable, Iterable, Mapping, Sequence

from pulsesync.core.types import Sum
from pulsesync.errors import BaseMismatchError, FormatError, VerificationError
from pulsesync.format import patch
from pulsesync.format.body import Body
from pulsesync.format.manifest import Manifest
from pulsesync.format.patch import WholeBlock
from pulsesync.state.backend import BlockSums
from pulsesync.state.claims import check_claim
from pulsesync.state.staging import StagedBlocks
from pulsesync.state.weights import WeightState


class AnchorLoader:
    """Checks anchors, and writes all the weights of one. If writing fails halfway, `torn` of the state stays True."""

    def __init__(self, state: WeightState) -> None:
        self._state, self._backend = state, state.backend

    def check_whole(
        self, manifest: Manifest, parts: Iterable[Body], staged: StagedBlocks | None = None
    ) -> dict[int, Sum]:
        """Decode the parts of an anchor as they arrive, and check and return the digests of its tiles.

        No weight is written; blocks that differ from the weights are staged if `staged` is given.

        Raises: FormatError: or a subclass, for bad bytes; VerificationError: the weights are not those of the record;
        StoreError: the disk is full, or failed.
        """
        return self._take_whole(manifest, parts, lambda blocks: self._backend.check_blocks(blocks, staged))

    def load_whole(self, staged: StagedBlocks, sums: Mapping[int, Sum]) -> None:
        """Write an anchor that was checked into the weights, which have not changed since.

        Raises: StoreError: the disk failed; VerificationError: it returned other weights than those staged;
        SupersededError: as `WeightState.commit`.
        """
        with self._state.lock:
            check_claim(self._state)
            with self._backend.exclusive():
                self._state.torn = bool(staged.blocks)
                self._backend.write_blocks(staged.blocks)
            self._state.begin_at(sums)

    def join_whole(self, manifest: Manifest, parts: Iterable[Body]) -> None:
        """Write the parts of an anchor into the weights as they arrive, and check them in the same pass.

        For weights that are not in use: if this fails halfway, they must not be used. Raises: as `check_whole`.
        """
        with self._state.lock:
            with self._backend.exclusive():
                self._state.torn = True
                sums = self._take_whole(manifest, parts, self._backend.take_blocks)
            self._state.begin_at(sums)

    def rewrite(self, write: Callable[[], None]) -> None:
        """Call a function that writes all weights, and count their digests afterwards."""
        with self._state.lock:
            with self._backend.exclusive():
                self._state.torn = True
                write()
            self._state.begin_at(self._backend.count())

    def _take_whole(
        self, manifest: Manifest, parts: Iterable[Body], take: Callable[[Sequence[WholeBlock]], Sequence[BlockSums]]
    ) -> dict[int, Sum]:
        """Check the parts of an anchor, of which `take` decodes and counts blocks; return the digests of its tiles."""
        state, layout, version = self._state, self._state.layout, manifest.version
        if manifest.layout != layout.id:
            raise BaseMismatchError(
                f"the anchor of version {version} has the layout {manifest.layout[:12]}, and the local weights have "
                f"{layout.id[:12]}",
                expected=manifest.layout,
                actual=layout.id,
            )
        sums = self._backend.zero_sums()
        seen: set[int] = set()
        for body in parts:
            in_index = {entry.tile: entry.sum for entry in body.index.entries if entry.tile in state.places}
            if any(not layout.tiles[entry.tile].size for entry in body.index.entries):
                raise FormatError(f"the anchor of version {version} lists a tile that has no weights")
            if not seen.isdisjoint(in_index):
                raise FormatError(f"two parts of the anchor of version {version} contain the same tile")
            seen |= in_index.keys()
            counted = dict.fromkeys(in_index, Sum(0, 0))
            blocks = list(patch.anchor_blocks(body.index, body.sections, layout, state.places))
            for block, found in zip(blocks, take(blocks), strict=True):
                counted[block.tile.ordinal] += found.all
                sums[block.tile.ordinal] += found.local
            if counted != in_index:
                raise VerificationError(
                    "digest mismatch: a decoded tile of the anchor differs from its index", version=version
                )
        if seen != state.places.keys():
            raise FormatError(f"the anchor of version {version} does not contain all tiles")
        if state.whole and (actual := state.digest_of(sums)) != manifest.digest:
            raise VerificationError(
                "digest mismatch: the decoded anchor differs from the manifest", expected=manifest.digest, actual=actual
            )
        return sums
