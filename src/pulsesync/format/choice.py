"""Which codec a tile is written with: the one asked for, or the smallest of those worth trying.

What was coded against old weights is taken as it is, but where that went badly; so most tiles cost a comparison here,
and their changes may lie anywhere.
"""

from collections.abc import Mapping, Sequence

from pulsesync.core.threads import spread
from pulsesync.core.types import Codec, Tile
from pulsesync.format import index
from pulsesync.format.codecs import dense, gap, raw
from pulsesync.format.diff import TileChanges
from pulsesync.format.index import FrequencyTable
from pulsesync.format.predict import CodedTile
from pulsesync.format.weights import Overlay, Weights

POOR_BITS = 12  # bits a change beyond which a payload coded against old weights is compared with `gap`
FEW = 4096  # changes of a part up to which tables may not pay: `gap` is tried as well
MANY = 1 << 18  # changes from which threads are worth beginning: fewer are short steps of numpy, which they slow down


def choose(
    diffs: Sequence[TileChanges],
    old: Weights,
    shared: list[FrequencyTable],
    coded: Mapping[int, CodedTile],
    codec: str,
    threads: int | None,
) -> tuple[list[FrequencyTable], list[CodedTile]]:
    """Choose how each tile is written; return the tables that are still needed, and the choices.

    What was coded against old weights is given by ordinal; a tile that is missing there has `gap` or `dense`.

    Blocks and old weights are asked for only where `dense` is tried, positions and values where `gap` is.
    """
    chosen = _settle_all(diffs, old, coded, codec, threads)
    if codec == "auto" and sum(d.changed for d in diffs) <= FEW:
        shared, chosen = _without_tables_if_smaller(diffs, shared, chosen)
    if all(choice.codec in (Codec.GAP, Codec.DENSE, Codec.RAW) for choice in chosen):
        shared = []
    return shared, chosen


def _settle_all(
    diffs: Sequence[TileChanges], old: Weights, coded: Mapping[int, CodedTile], codec: str, threads: int | None
) -> list[CodedTile]:
    """The choice for each tile; threads are begun only where much is to be tried."""

    def is_settled(diff: TileChanges) -> bool:
        found = coded.get(diff.tile.ordinal)
        return found is not None and (codec != "auto" or not (_is_poor(diff, found) or _is_near_dense(diff, found)))

    todo = [diff for diff in diffs if not is_settled(diff)]
    if codec != "dense" and sum(diff.changed for diff in todo) < MANY:
        threads = 1
    tried = spread(lambda d: _settle(d, old, coded.get(d.tile.ordinal), codec), todo, threads)
    by_tile = {**coded, **{diff.tile.ordinal: choice for diff, choice in zip(todo, tried, strict=True)}}
    return [by_tile[diff.tile.ordinal] for diff in diffs]


def _settle(diff: TileChanges, old: Weights, coded: CodedTile | None, codec: str) -> CodedTile:
    """The codec asked for, `gap` where the dtype has no exponent to code against; or, for "auto", the smallest.

    `gap` is tried only where prediction failed (weights set to one value, say), and `dense` only where the others come
    near it.
    """
    if codec == "dense":
        return _dense_after(diff, old)
    best = coded or _gap(diff)
    if codec == "auto" and coded and _is_poor(diff, coded):
        best = min(best, _gap(diff), key=lambda c: c.size)
    if codec == "auto" and _is_near_dense(diff, best):
        best = min(best, _dense_after(diff, old), key=lambda c: c.size)
    return best


def _is_poor(diff: TileChanges, coded: CodedTile) -> bool:
    return 8 * coded.size > POOR_BITS * diff.changed


def _is_near_dense(diff: TileChanges, coded: CodedTile) -> bool:
    return 2 * coded.size > diff.tile.size * diff.tile.tensor.kind.itemsize


def _gap(diff: TileChanges) -> CodedTile:
    return CodedTile(Codec.GAP, gap.encode(diff.positions(), diff.values()))


def _dense_after(diff: TileChanges, old: Weights) -> CodedTile:
    return _whole(diff.tile, Overlay(old, {(diff.tile.ordinal, block.number): block for block in diff.blocks}))


def _whole(tile: Tile, state: Weights) -> CodedTile:
    """A tile as `dense`; as `raw` where that is not smaller."""
    packed = dense.encode(state.block(tile, n) for n in range(tile.block_count))
    if len(packed) < tile.size * tile.tensor.kind.itemsize:
        return CodedTile(Codec.DENSE, packed)
    plain = b"".join(piece for n in range(tile.block_count) for piece in raw.encode_block(state.block(tile, n)))
    return CodedTile(Codec.RAW, plain)


def _without_tables_if_smaller(
    diffs: Sequence[TileChanges], shared: list[FrequencyTable], chosen: list[CodedTile]
) -> tuple[list[FrequencyTable], list[CodedTile]]:
    """Tiny patches do not pay for tables: take `gap` throughout where it is smaller with everything counted."""
    plain = []
    for diff, best in zip(diffs, chosen, strict=True):
        without = best if best.codec == Codec.GAP else _gap(diff)
        plain.append(best if best.codec in (Codec.DENSE, Codec.RAW) and best.size < without.size else without)
    size = sum(c.size for c in chosen) + len(index.build(shared, []))
    return ([], plain) if sum(c.size for c in plain) < size else (shared, chosen)
