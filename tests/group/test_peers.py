"""The two ends of a group, in one process: what an end remembers, what it forgets, and whose memory it uses."""

from collections.abc import Sequence
from unittest.mock import patch

import numpy as np
import pytest

from pulsesync.core import digest
from pulsesync.core.types import Bits
from pulsesync.errors import VerificationError
from pulsesync.group import peers
from pulsesync.group.bundles import agree, describe_shards
from pulsesync.group.cost_model import CostModel, Method
from pulsesync.group.host_weights import HostReceiverWeights, HostSourceWeights
from pulsesync.group.messages import Bucket, SyncTimes
from pulsesync.group.peers import GroupEnd, Job, LocalModel, RankVersion, ReceiverEnd, SourceEnd, addresses_of
from pulsesync.state.sharding import Placed, shards_of

Model = dict[str, np.ndarray]
LARGE = 1 << 18  # weights of a tensor that has a bundle and a bucket of its own


class Joined:
    """A source and a receiver that have joined. A sync hands the messages over, instead of sending them."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng(0)
        sizes = {"large.0": LARGE, "large.1": LARGE, "small.0": 3000, "small.1": 500}
        self.sent: Model = {name: self.rng.integers(0, 1 << 16, n, np.uint16) for name, n in sizes.items()}
        self.received: Model = {name: np.zeros_like(array) for name, array in self.sent.items()}
        source, receiver = (LocalModel(shards_of(model), (), None) for model in (self.sent, self.received))
        self.wire = agree([describe_shards(source.shards), describe_shards(receiver.shards)], [0])
        self.source = SourceEnd(self.wire, self.wire.owned_by(0), source)
        self.receiver = ReceiverEnd(self.wire, self.wire.local_to(1), receiver)

    @property
    def sends(self) -> HostSourceWeights:
        assert isinstance(self.source.weights, HostSourceWeights)
        return self.source.weights

    @property
    def receives(self) -> HostReceiverWeights:
        assert isinstance(self.receiver.weights, HostReceiverWeights)
        return self.receiver.weights

    def host(self, which: str) -> HostSourceWeights | HostReceiverWeights:
        return self.sends if which == "source" else self.receives

    def plan(self, method: Method = "coded", bucket_weights: int = LARGE) -> tuple[list[Job], str]:
        with patch.object(peers, "BUCKET_WEIGHTS", bucket_weights):
            return self.source.plan(method, CostModel())

    def sync(self, method: Method = "coded", jobs: Sequence[Job] | None = None) -> str:
        """Change some weights and sync them, by a method or in these buckets; return how that was planned."""
        for array in self.sent.values():
            array[self.rng.integers(0, array.size, 20)] ^= 1
        planned = self.plan(method)
        base, clock = self.source.at, SyncTimes()
        before = base.sums if base else {}
        made, got = list[Bucket](), list[Bucket]()
        for one, tiles in planned[0] if jobs is None else jobs:
            bucket = self.source.weights.encode(tiles, one, clock)
            if bucket is not None:
                arrived = self.receives.room(bucket.message.size, None)
                arrived[:] = bucket.message
                made.append(bucket)
                got.append(self.receiver.weights.read(arrived, before, clock))
        sums = {**before, **{ordinal: sum_ for bucket in got for ordinal, sum_ in bucket.sums.items()}}
        after = digest.state_digest(self.wire.layout.tables, sums.values())
        point = RankVersion((base.version if base else 0) + 1, after, sums)
        self.source.commit(made, point)
        self.receiver.commit(got, point)
        return planned[1]

    def end(self, which: str) -> GroupEnd:
        return self.source if which == "source" else self.receiver

    def weights(self, which: str) -> list[Bits]:
        """What an end has of the last sync: the copy of a source, the live weights of a receiver."""
        tiles, state = self.wire.layout.tiles, self.host(which).state
        assert [tile.block_count for tile in tiles] == [1, 1, 1]
        return [state.block(tile, 0).copy() for tile in tiles]


def copied(model: Model) -> Model:
    return {name: array.copy() for name, array in model.items()}


def same(a: list[Bits], b: list[Bits]) -> bool:
    return len(a) == len(b) and all(np.array_equal(one, other) for one, other in zip(a, b, strict=True))


BOTH = pytest.mark.parametrize("which", ["source", "receiver"])


@BOTH
def test_an_end_returns_to_the_version_where_its_last_sync_began(which: str) -> None:
    pair = Joined()
    pair.sync()
    first, weights, end = pair.end(which).at, pair.weights(which), pair.end(which)
    assert first is not None
    pair.sync()
    assert not same(pair.weights(which), weights)
    end.reach(first.name)
    assert end.at == first
    assert end.before is None
    assert same(pair.weights(which), weights)


def test_ends_that_returned_to_a_version_sync_from_there() -> None:
    pair = Joined()
    pair.sync()
    first = pair.source.at
    assert first is not None
    pair.sync()
    for end in (pair.source, pair.receiver):
        end.reach(first.name)
    assert pair.sync() == "coded"
    assert all(np.array_equal(pair.sent[name], pair.received[name]) for name in pair.sent)


@BOTH
def test_an_end_that_cannot_reach_a_version_is_at_none_and_its_weights_are_untouched(which: str) -> None:
    pair = Joined()
    pair.sync()
    pair.sync()
    weights, end = pair.weights(which), pair.end(which)
    end.reach("1:not the digest of that version")
    assert end.at is None
    assert end.before is None
    assert same(pair.weights(which), weights)
    assert pair.plan()[1] == ("full" if which == "source" else "coded")


@BOTH
def test_an_end_stays_at_the_version_it_is_at(which: str) -> None:
    pair = Joined()
    pair.sync()
    pair.sync()
    end, at = pair.end(which), pair.end(which).at
    assert at is not None
    end.reach(at.name)
    assert end.at is at
    assert end.before is not None


@BOTH
def test_a_sync_of_whole_tiles_cannot_be_rolled_back(which: str) -> None:
    pair = Joined()
    pair.sync()
    assert pair.end(which).before is None
    pair.sync()
    assert pair.end(which).before is not None
    pair.sync("dense")
    assert pair.end(which).before is None


def test_a_source_whose_tensors_moved_keeps_its_copy_and_sends_what_changed() -> None:
    pair = Joined()
    pair.sync()
    pair.sent = copied(pair.sent)
    pair.source.attach(shards_of(pair.sent))
    assert pair.source.joined
    assert pair.sync() == "coded"
    assert all(np.array_equal(pair.sent[name], pair.received[name]) for name in pair.sent)


def test_a_receiver_whose_tensors_moved_is_at_no_version_and_uses_the_new_memory() -> None:
    pair = Joined()
    pair.sync()
    left, pair.received = pair.received, {name: np.zeros_like(array) for name, array in pair.received.items()}
    before = copied(left)
    pair.receiver.attach(shards_of(pair.received))
    assert pair.receiver.joined
    assert (pair.receiver.at, pair.receiver.before) == (None, None)
    pair.source.reach("")
    assert pair.sync() == "full"
    assert all(np.array_equal(pair.sent[name], pair.received[name]) for name in pair.sent)
    assert all(np.array_equal(left[name], before[name]) for name in left)


@BOTH
def test_an_end_that_brings_other_parts_of_a_model_must_join_again(which: str) -> None:
    pair = Joined()
    pair.sync()
    end, weights = pair.end(which), pair.weights(which)
    known, wire = end.weights, end.wire
    end.attach(shards_of({"small.0": Placed(np.zeros(1500, np.uint16), (3000,), rows=(0, 1500))}))
    assert not end.joined
    assert (end.weights, end.wire) == (known, wire)
    assert same(pair.weights(which), weights)


@BOTH
def test_an_end_that_is_bound_again_keeps_its_version(which: str) -> None:
    pair = Joined()
    pair.sync()
    pair.sync()
    end, at, sums = pair.end(which), pair.end(which).at, dict(pair.host(which).state.sums)
    end.joined = False  # as in a new group
    end.bind(pair.wire, end.shards)
    assert end.joined
    assert end.at is at
    assert pair.host(which).state.sums == sums
    assert pair.sync() == "coded"


def test_a_source_that_always_sends_all_keeps_no_copy_and_uses_the_memory_of_its_messages_again() -> None:
    pair = Joined()
    used = []
    for _ in range(3):
        assert pair.sync("dense") == "dense"
        assert not pair.source.has_weights
        assert pair.sends.messages == []
        used.append({id(message) for some in pair.sends.spare._free.values() for message in some})
    assert len(used[0]) == 3
    assert used[0] == used[1] == used[2]


def test_a_source_keeps_a_message_as_long_as_a_tile_of_its_copy_lies_in_it() -> None:
    pair = Joined()
    pair.sync(jobs=pair.plan(bucket_weights=1 << 30)[0])
    ((message, tiles),) = pair.sends.messages
    assert tiles == {0, 1, 2}
    first, *others = pair.wire.layout.tiles
    pair.sync(jobs=[("dense", [first]), ("coded", others)])
    assert pair.sends.messages[0] == (message, {1, 2})
    assert pair.sends.spare.take(message.size) is not message
    pair.sync(jobs=[("dense", [tile]) for tile in pair.wire.layout.tiles])
    assert pair.sends.spare.take(message.size) is message
    assert all(kept is not message for kept, _ in pair.sends.messages)


def test_a_receiver_keeps_the_memory_of_whole_tiles_for_one_more_sync() -> None:
    pair = Joined()
    pair.sync(jobs=pair.plan(bucket_weights=1 << 30)[0])
    ((size, (message,)),) = pair.receives.spare._free.items()
    assert message.size == size
    pair.sync("coded")
    assert pair.receives.spare._free == {}


def test_a_receiver_finds_weights_that_were_written_by_something_else() -> None:
    pair = Joined()
    pair.sync()
    assert pair.receiver.at is not None
    pair.receiver.verify(pair.receiver.at)
    pair.received["large.1"][7] ^= 1
    with pytest.raises(VerificationError, match=r"weights of large.1 are not those last pulled: something else wrote"):
        pair.receiver.verify(pair.receiver.at)


def test_addresses_change_when_a_tensor_or_its_part_is_replaced() -> None:
    array = np.zeros((4, 6), np.uint16)
    first = addresses_of({"a": array, "b": Placed(array[:2], (4, 6), rows=(0, 2))})
    assert addresses_of({"a": array, "b": Placed(array[:2], (4, 6), rows=(0, 2))}) == first
    for name, other in {
        "another array": {"a": array.copy(), "b": Placed(array[:2], (4, 6), rows=(0, 2))},
        "another shape": {"a": array.reshape(6, 4), "b": Placed(array[:2], (4, 6), rows=(0, 2))},
        "another dtype": {"a": array.view(np.int16), "b": Placed(array[:2], (4, 6), rows=(0, 2))},
        "other rows": {"a": array, "b": Placed(array[:2], (4, 6), rows=(2, 4))},
        "another name": {"c": array, "b": Placed(array[:2], (4, 6), rows=(0, 2))},
    }.items():
        assert addresses_of(other) != first, name


def test_a_tensor_is_not_taken_for_its_transpose() -> None:
    square = np.arange(16, dtype=np.uint16).reshape(4, 4)
    assert addresses_of({"a": square}) != addresses_of({"a": square.T})
