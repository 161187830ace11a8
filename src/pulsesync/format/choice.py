"""Which codec a tile is written with: the requested one, or the smallest of those worth trying.

A payload coded against old weights is used as it is unless it is poor; so most tiles cost one comparison here, and
their changes may stay in any memory.
"""

from collections.abc import Mapping, Sequence

from pulsesync.core.threads import spread
from pulsesync.core.types import Codec, Tile
from pulsesync.format import index
from pulsesync.format.codecs import dense, gap, raw, step
from pulsesync.format.diff import TileChanges
from pulsesync.format.index import FrequencyTable
from pulsesync.format.predict import PREDICTING, CodedTile, Pieces
from pulsesync.format.weights import Overlay, Weights

POOR_BITS = 12  # bits per change above which a payload coded against old weights is compared with `gap` and `step`
FEW = 4096  # up to this number of changes in a part, tables may not pay off: `gap` and `step` are tried as well
SAMPLE = 1 << 16  # first weights or changes of a tile on which a codec is tried that is seldom the smallest
MANY = 1 << 18  # from this number of changes on, threads pay off: fewer are short numpy calls, which threads slow down


def choose(
    diffs: Sequence[TileChanges], old: Weights, shared: list[FrequencyTable], coded: Mapping[int, CodedTile], codec: str
) -> tuple[list[FrequencyTable], list[CodedTile]]:
    """Choose how each tile is written; return the tables that are still needed, and the choices.

    Payloads coded against old weights are given by ordinal; a tile without one gets another codec.

    Blocks and old weights are read only where `dense` or `xor` is tried, positions and values where `gap` or `step` is.
    """
    chosen = _settle_all(diffs, old, coded, codec)
    if codec == "auto" and sum(d.changed for d in diffs) <= FEW:
        shared, chosen = _without_tables_if_smaller(diffs, shared, chosen)
    if not any(choice.codec in PREDICTING for choice in chosen):
        shared = []
    return shared, chosen


def _settle_all(
    diffs: Sequence[TileChanges], old: Weights, coded: Mapping[int, CodedTile], codec: str
) -> list[CodedTile]:
    """The choice for each tile; threads are used only if there is much to try."""

    def is_settled(diff: TileChanges) -> bool:
        found = coded.get(diff.tile.ordinal)
        if found is None or codec != "auto":
            return found is not None
        return not (_is_poor(diff, found) or _is_near_dense(diff, found) or _has_mostly_changed(diff))

    todo = [diff for diff in diffs if not is_settled(diff)]
    is_short = codec not in ("dense", "xor") and sum(diff.changed for diff in todo) < MANY
    tried = spread(lambda d: _settle(d, old, coded.get(d.tile.ordinal), codec), todo, 1 if is_short else None)
    by_tile = {**coded, **{diff.tile.ordinal: choice for diff, choice in zip(todo, tried, strict=True)}}
    return [by_tile[diff.tile.ordinal] for diff in diffs]


def _settle(diff: TileChanges, old: Weights, coded: CodedTile | None, codec: str) -> CodedTile:
    """The requested codec, or `gap` where the dtype has no exponent to code against; for "auto", the smallest.

    `step` is replaced by `dense` where it would need more bytes than the weights themselves.

    `gap` and `step` are tried only where prediction failed (weights set to one value, say), `xor` only where most
    weights change or the others come near `dense`, and `dense` only where they do. Where a run changes all its weights
    in every version, most of these attempts are in vain, so they begin with a sample.
    """
    if codec in ("dense", "xor"):
        return _dense_after(diff, old) if codec == "dense" else _xor(diff, old)
    if codec == "step" and diff.tile.tensor.kind.exponent_shift is not None:
        stepped = _step(diff)
        return _smaller(stepped, _dense_after(diff, old)) if stepped.size > diff.tile.size_bytes else stepped
    if codec != "auto":
        return coded or _gap(diff)
    best = coded or _sparse(diff)
    if coded and _is_poor(diff, coded):
        best = _sparse_if_smaller(diff, best)
    if _is_near_dense(diff, best):
        best = _smaller(best, _dense_after(diff, old))
    if _is_near_dense(diff, best) or _has_mostly_changed(diff):
        best = _xor_if_smaller(diff, old, best)
    return best


def _is_poor(diff: TileChanges, coded: CodedTile) -> bool:
    return 8 * coded.size > POOR_BITS * diff.changed


def _is_near_dense(diff: TileChanges, coded: CodedTile) -> bool:
    return 2 * coded.size > diff.tile.size_bytes


def _has_mostly_changed(diff: TileChanges) -> bool:
    return 2 * diff.changed > diff.tile.size


def _smaller(one: CodedTile, *others: CodedTile) -> CodedTile:
    """The smallest; the first of equals."""
    return min(one, *others, key=lambda c: c.size)


def _gap(diff: TileChanges) -> CodedTile:
    return CodedTile(Codec.GAP, [gap.encode(diff.positions(), diff.values())])


def _step(diff: TileChanges) -> CodedTile:
    return CodedTile(Codec.STEP, [step.encode(diff.positions(), diff.old_values(), diff.values())])


def _sparse(diff: TileChanges) -> CodedTile:
    """The smaller of `gap` and `step`, or `gap` where the dtype has no steps."""
    return _gap(diff) if diff.tile.tensor.kind.exponent_shift is None else _smaller(_step(diff), _gap(diff))


def _sparse_if_smaller(diff: TileChanges, best: CodedTile) -> CodedTile:
    """A tile of floats as `step` or `gap`; or best, where that is smaller or a sample of the changes predicts it."""
    positions, old, new = diff.positions()[:SAMPLE], diff.old_values()[:SAMPLE], diff.values()[:SAMPLE]
    sample = min(len(step.encode(positions, old, new)), len(gap.encode(positions, new)))
    return best if sample * diff.changed > best.size * positions.size else _smaller(best, _sparse(diff))


def _after(diff: TileChanges, old: Weights) -> Weights:
    return Overlay(old, {(diff.tile.ordinal, block.number): block for block in diff.blocks})


def _dense_after(diff: TileChanges, old: Weights) -> CodedTile:
    tile, new = diff.tile, _after(diff, old)
    return dense_or_raw(tile, [dense.encode(new.block(tile, n) for n in range(tile.block_count))], new)


def _xor(diff: TileChanges, old: Weights) -> CodedTile:
    tile, new = diff.tile, _after(diff, old)
    flipped = (old.block(tile, n) ^ new.block(tile, n) for n in range(tile.block_count))
    return CodedTile(Codec.XOR, [dense.encode(flipped)])


def _xor_if_smaller(diff: TileChanges, old: Weights, best: CodedTile) -> CodedTile:
    """The tile as `xor`; or best, where that is smaller or a sample of the weights predicts it."""
    tile, new = diff.tile, _after(diff, old)
    sample = (old.block(tile, 0) ^ new.block(tile, 0))[:SAMPLE]
    if len(dense.encode([sample])) * tile.size > best.size * sample.size:
        return best
    return _smaller(best, _xor(diff, old))


def dense_or_raw(tile: Tile, pieces: Pieces, weights: Weights) -> CodedTile:
    """A tile whole, from its pieces as `dense`; as `raw` where those are not smaller."""
    packed = CodedTile(Codec.DENSE, pieces)
    if packed.size < tile.size_bytes:
        return packed
    return CodedTile(Codec.RAW, [p for n in range(tile.block_count) for p in raw.encode_block(weights.block(tile, n))])


def _without_tables_if_smaller(
    diffs: Sequence[TileChanges], shared: list[FrequencyTable], chosen: list[CodedTile]
) -> tuple[list[FrequencyTable], list[CodedTile]]:
    """Tables do not pay off in tiny patches: leave them out where that makes the part smaller."""
    both = zip(diffs, chosen, strict=True)
    plain = [_sparse(diff) if best.codec in PREDICTING else best for diff, best in both]
    size = sum(c.size for c in chosen) + len(index.build(shared, []))
    return ([], plain) if sum(c.size for c in plain) < size else (shared, chosen)
