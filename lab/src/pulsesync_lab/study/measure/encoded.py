"""The real sizes of patches, by codec: they are encoded and discarded.

This is the work of a publisher, once for each codec, on the host; two copies of all weights pass through its memory.
"""

from collections.abc import Mapping, Sequence

from pulsesync.core.types import Bits, Sum, TensorSpec
from pulsesync.format import layout as layouts
from pulsesync.format import patch
from pulsesync.format.history import MAX_INDEX, History

State = Mapping[str, Bits]


class Encoder:
    """Encodes every patch that it is given. Given all patches of a run, it tracks the history for codec `history`."""

    def __init__(self, tensors: Sequence[TensorSpec], all_of_them: bool) -> None:
        self._layout = layouts.make(tensors)
        self._item = tensors[0].kind.itemsize if tensors else 0
        self._history = History() if all_of_them else None

    def sizes(self, old: State, new: State) -> dict[str, int]:
        """Bytes by codec of the patch from old to new; "dense" is all weights."""
        layout, nothing = self._layout, {tile.ordinal: Sum(0, 0) for tile in self._layout.tiles}
        tiles = [tile for tile in layout.tiles if tile.size]
        gap = patch.encode(layout, tiles, old, new, nothing, codec="gap")
        changed = sum(one.changed for one in gap.patches)
        out = {"plain": changed * (4 + self._item), "gap": len(gap.data)}
        out["context"] = len(patch.encode(layout, tiles, old, new, nothing, codec="context").data)
        if self._history is not None:
            before = self._history if self._history.index < MAX_INDEX else History()
            part = patch.encode(layout, tiles, old, new, nothing, codec="history", history=before)
            self._history = before.after(part.patches, old)
            out["history"] = len(part.data)
        out["dense"] = len(patch.encode_whole(layout, tiles, new, nothing).data)
        return out
