"""Buckets: what travels between ranks is checked before any of it counts, whatever the bytes are."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pulsesync.core.types import Bits
from pulsesync.errors import FormatError, VerificationError
from pulsesync.group import messages
from pulsesync.group.bundles import BundlePlan, LocalBundles, agree, describe_shards
from pulsesync.group.cost_model import Method
from pulsesync.group.host_weights import HostReceiverWeights, HostSourceWeights
from pulsesync.group.messages import TRAILER, Bucket, SyncTimes
from pulsesync.state.host import HostBackend
from pulsesync.state.sharding import shards_of

METHODS: list[Method] = ["dense", "plain", "gap", "coded"]


class Ends:
    """A source and a receiver that hold the same, and what the source changed since."""

    def __init__(self, seed: int = 0, density: float = 0.05) -> None:
        rng = np.random.default_rng(seed)
        old = {f"t{n}": (rng.standard_normal(700) * 0.02).astype(np.float32).view(np.uint32) >> 16 for n in range(5)}
        self.old = {name: bits.astype(np.uint16) for name, bits in old.items()} | {"odd": np.arange(7, dtype=np.uint8)}
        self.new = {name: bits.copy() for name, bits in self.old.items()}
        for bits in self.new.values():
            at = rng.random(bits.size) < density
            bits[at] ^= 1
        source, receiver = shards_of(self.new), shards_of(self.old)
        self.wire: BundlePlan = agree([describe_shards(source), describe_shards(receiver)], [0])
        tiles = self.wire.layout.tiles
        self.held = LocalBundles(self.wire, tiles, source)
        self.source = HostSourceWeights(self.wire, tiles, shards_of({n: bits.copy() for n, bits in self.old.items()}))
        before = self.source.encode(tiles, "dense", SyncTimes())
        assert before is not None
        self.source.write_whole([before], before.sums)
        self.source.bind(self.wire, source)
        self.sums = before.sums
        self.receiver = HostReceiverWeights(self.wire, tiles, receiver, before.sums)

    def message(self, method: Method) -> Bits:
        bucket = self.source.encode(self.wire.layout.tiles, method, SyncTimes())
        assert bucket is not None
        message: Bits = bucket.message
        return message

    def read(self, message: Bits) -> Bucket:
        return self.receiver.read(message, self.sums, SyncTimes())


@pytest.mark.parametrize("method", METHODS)
def test_a_bucket_brings_what_was_sent(method: Method) -> None:
    ends = Ends()
    got = ends.read(ends.message(method))
    for tile in ends.wire.layout.tiles:
        bits = got.whole.get(tile.ordinal)
        if bits is None:
            bits = ends.receiver.state.block(tile, 0).copy()
            for (ordinal, _), block in got.changes.items():
                if ordinal == tile.ordinal:
                    bits[block.positions] = block.new
        assert np.array_equal(bits, ends.held.block(tile, 0))
        if tile.ordinal in got.sums:
            bundles = {t.tensor.name: ends.held.block(t, 0) for t in ends.wire.layout.tiles}
            assert got.sums[tile.ordinal] == HostBackend(ends.wire.layout, bundles).count()[tile.ordinal]


@pytest.mark.parametrize("method", METHODS)
@given(data=st.data())
def test_no_changed_byte_gets_through(method: Method, data: st.DataObject) -> None:
    ends = Ends()
    message = ends.message(method)
    good = ends.read(message)
    at = data.draw(st.integers(0, message.size - TRAILER - 1))
    message[at] ^= data.draw(st.integers(1, 255))
    try:
        got = ends.read(message)
    except (FormatError, VerificationError):
        return
    # only what is between weights, and means nothing, may differ
    assert method in ("dense", "plain")
    assert all(np.array_equal(got.whole[n], good.whole[n]) for n in good.whole)
    assert got.sums == good.sums


@pytest.mark.parametrize("method", METHODS)
@given(data=st.data())
def test_no_cut_or_stretched_message_gets_through(method: Method, data: st.DataObject) -> None:
    ends = Ends()
    message = ends.message(method)
    end = data.draw(st.integers(0, message.size - 1))
    short = np.concatenate([message[:end], np.zeros(data.draw(st.integers(0, 40)), np.uint8)])
    if short.size == message.size:
        return
    with pytest.raises((FormatError, VerificationError)):
        ends.read(short)


def test_a_table_in_which_all_weights_changed_is_not_too_long() -> None:
    ends = Ends()
    for bits in ends.new.values():
        bits ^= 1
    assert ends.message("plain").size <= messages.longest(ends.wire, ends.wire.layout.tiles)


@pytest.mark.parametrize("count", [0, 1, 2**63, 2**64 - 1])
def test_a_raw_bucket_cannot_promise_more_tiles_than_it_has_bytes_for(count: int) -> None:
    ends = Ends()
    message = ends.message("dense")
    message[8:16] = np.frombuffer(count.to_bytes(8, "little"), np.uint8)
    with pytest.raises(FormatError, match="a table of"):
        ends.read(message)


def test_a_patch_for_other_weights_is_refused() -> None:
    ends = Ends()
    message = ends.message("coded")
    other = Ends(seed=1)
    with pytest.raises((FormatError, VerificationError)):
        other.read(message)
