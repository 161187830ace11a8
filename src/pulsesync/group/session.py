"""One sync of a group, from the first bucket to the verdict.

Sources encode and send, receivers decode, all concurrently; then every rank knows whether all are ready to commit.
Nothing here changes a weight or a source's copy, except that a late receiver gets the version of the others. If bytes
are bad on one rank, it still takes part in every message and reports the error in the verdict; only a failure of the
group ends the sync at once.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from pulsesync.core import digest
from pulsesync.core.threads import finish
from pulsesync.core.types import Sum, Tile
from pulsesync.errors import FormatError, GroupError, VerificationError
from pulsesync.group import messages, peers
from pulsesync.group.collective import Collective
from pulsesync.group.messages import TRAILER, Bucket, Message, SyncTimes, Table
from pulsesync.group.peers import GroupEnd, Job, RankVersion, ReceiverEnd, SourceEnd

AHEAD = 2  # buckets that are encoded before they are sent
_END, _UNKNOWN, _FAULT = 0, -1, -2  # in place of a length: no more messages, not encoded yet, cannot be encoded


@dataclass
class SyncSession:
    """A sync in progress, on one rank."""

    team: Collective
    sources: Sequence[int]
    end: GroupEnd
    clock: SyncTimes = field(default_factory=SyncTimes)
    faults: list[Exception] = field(default_factory=list)
    buckets: list[Bucket] = field(default_factory=list)  # what was sent or received
    waits_s: list[float] = field(default_factory=list)  # for the buckets of each source, as measured on this rank
    starved_s: float = 0.0  # time in which this source had nothing to send
    sent_bytes: int = 0

    # Late receivers

    def send_version(self, late: Sequence[int], name: str) -> None:
        """Send late receivers only the version of the other ranks, from the sources' copies of it.

        A receiver for which this fails has no version, and the reason is among the faults.
        """
        got: list[Bucket] = []
        sums: dict[int, Sum] = {}
        end, wire, known = self.end, self.end.wire, self._sums_before()
        for place, rank in enumerate(self.sources):
            for tiles in messages.cut(wire, wire.owned_by(place), peers.BUCKET_WEIGHTS):
                to = [one for one in late if one in wire.holders[tiles[0].ordinal]]
                if rank == self.team.rank and to:
                    self.team.send_(self._saved(tiles, known), rank, to)
                elif self.team.rank in to:
                    message = self._room(Table.of_whole(wire, tiles).size)
                    self.team.send_(message, rank, to)
                    with FailureCollector(self.faults):
                        got.append(self._read(message, place, {}))
                # With all ranks, so that none waits for more than one bucket.
                sums |= self._share_sums(tiles, known, rank)
        if self.team.rank not in late or self.faults:
            return
        with FailureCollector(self.faults):
            version = RankVersion(int(name.partition(":")[0]), self._digest(sums), sums)
            received = {ordinal: sum_ for bucket in got for ordinal, sum_ in bucket.sums.items()}
            if version.name != name or received != {ordinal: sums[ordinal] for ordinal in received}:
                raise VerificationError(
                    f"digest mismatch: the received weights are not version {name} of the other ranks; weights "
                    "unchanged"
                )
            finish(lambda: end.weights.write_whole(got, {n: sums[n] for bucket in got for n in bucket.whole}))
            end.at = version

    def _saved(self, tiles: Sequence[Tile], known: Mapping[int, Sum]) -> Message:
        """These tiles as they were last sent. If that fails, a message that every receiver rejects."""
        assert isinstance(self.end, SourceEnd)
        with FailureCollector(self.faults):
            return self.end.weights.saved(tiles, self.clock, known).message
        return np.zeros(Table.of_whole(self.end.wire, tiles).size, np.uint8)

    def _sums_before(self) -> Mapping[int, Sum]:
        return self.end.at.sums if self.end.at else {}

    def _share_sums(self, tiles: Sequence[Tile], sums: Mapping[int, Sum], rank: int) -> dict[int, Sum]:
        data = np.zeros(16 * len(tiles), np.uint8)
        if rank == self.team.rank:
            data[:] = np.frombuffer(b"".join(sums[tile.ordinal].to_bytes() for tile in tiles), np.uint8)
        self.team.broadcast_(data, rank)
        return {tile.ordinal: Sum.from_bytes(data[16 * n : 16 * n + 16].tobytes()) for n, tile in enumerate(tiles)}

    # Buckets

    def run(self, jobs: Sequence[Job]) -> None:
        """Send the buckets of these jobs, and receive those of the other sources."""
        before = self._sums_before()
        ahead = _Prefetcher([partial(self._encode, job) for job in jobs])
        decoder = ThreadPoolExecutor(1, thread_name_prefix="pulse-decode")
        reading: list[Future[Bucket]] = []
        try:
            for place, rank in enumerate(self.sources):
                length = self._share_length(self._next_length(ahead) if rank == self.team.rank else 0, rank)
                began = time.perf_counter()
                with self.clock.timed("wire"):
                    if rank == self.team.rank:
                        self._send(ahead, length)
                    else:
                        reading += [
                            decoder.submit(self._read, message, place, before)
                            for message in self._receive(rank, length)
                            if not self.faults
                        ]
                self.waits_s.append(time.perf_counter() - began)
            for future in reading:
                with FailureCollector(self.faults):
                    self.buckets.append(future.result())
        finally:
            ahead.close()
            decoder.shutdown(cancel_futures=True)

    def _encode(self, job: Job) -> Bucket | None:
        method, tiles = job
        assert isinstance(self.end, SourceEnd)
        return self.end.weights.encode(tiles, method, self.clock)

    def _next_length(self, ahead: "_Prefetcher") -> int:
        with FailureCollector(self.faults):
            bucket = ahead.peek()
            return bucket.message.nbytes if bucket else _END
        return _FAULT

    def _share_length(self, length: int, rank: int) -> int:
        """Send how long this source's next message is, or receive it from another source."""
        number = np.array([length], np.int64)
        self.team.broadcast_(number.view(np.uint8), rank)
        return int(number[0])

    def _send(self, ahead: "_Prefetcher", length: int) -> None:
        rank = self.team.rank
        while length > 0:
            bucket = ahead.take()
            following = self._next_length(ahead) if ahead.ready() else _UNKNOWN
            messages.write_next(bucket.message, following)
            self.team.broadcast_(bucket.message, rank)
            self.sent_bytes += bucket.message.nbytes
            self.buckets.append(self.end.sent(bucket))
            if following == _UNKNOWN:
                began = time.perf_counter()
                following = self._next_length(ahead)
                self.starved_s += time.perf_counter() - began
                self._share_length(following, rank)
            length = following

    def _receive(self, rank: int, length: int) -> Iterator[Message]:
        most = messages.longest(self.end.wire, self.end.wire.owned_by(self.sources.index(rank)))
        while length not in (_END, _FAULT):
            if not TRAILER < length <= most:
                raise self.team.failure(
                    f"the group is out of step: rank {rank} reports a message of {length} bytes, and {TRAILER + 1} to "
                    f"{most} are allowed; form a new group and call regroup"
                )
            message = self._room(length)
            self.team.broadcast_(message, rank)
            yield message
            length = messages.read_next(message)
            if length == _UNKNOWN:
                length = self._share_length(0, rank)

    def _room(self, size: int) -> Message:
        """Memory for a message that will be received; of other sources' messages a source needs only the digests."""
        if isinstance(self.end, ReceiverEnd):
            with FailureCollector(self.faults):
                return self.end.weights.room(size, self.team.device)
        return np.empty(size, np.uint8)

    def _read(self, message: Message, place: int, before: Mapping[int, Sum]) -> Bucket:
        end, wire = self.end, self.end.wire
        if isinstance(end, ReceiverEnd):
            try:
                bucket = end.weights.read(message, before, self.clock)
            except KeyError as e:
                raise FormatError(
                    f"rank {self.sources[place]} sent changes of a bundle of which this rank has no version"
                ) from e
        else:
            bucket = Bucket(messages.NOTHING, {}, 0, {}, messages.read_sums(message, wire))
        if any(wire.owners[ordinal] != place for ordinal in bucket.sums):
            raise FormatError(f"rank {self.sources[place]} sent a bundle that another source owns")
        return bucket

    # The verdict

    def _digest(self, sums: Mapping[int, Sum]) -> str:
        """The digest of these sums, if there is one of every bundle. Raises: FormatError."""
        layout = self.end.wire.layout
        if missing := next((tile for tile in layout.tiles if tile.ordinal not in sums), None):
            raise FormatError(f"no source sent bundle {missing.tensor.name}")
        return digest.state_digest(layout.tables, (sums[tile.ordinal] for tile in layout.tiles))

    def conclude(self, version: int) -> RankVersion:
        """The version that this sync leads to; if this rank does not know it, the reason is among the faults."""
        after: dict[int, Sum] = {}
        with FailureCollector(self.faults):
            for bucket in self.buckets:
                if not after.keys().isdisjoint(bucket.sums):
                    raise FormatError("two buckets have the same bundle")
                after |= bucket.sums
            sums = {**self._sums_before(), **after}
            return RankVersion(version, self._digest(sums), sums)
        return RankVersion(version, "", {})


class FailureCollector:
    """Collects the errors of one rank until they can be reported to all; a GroupError is raised at once."""

    def __init__(self, faults: list[Exception]) -> None:
        self._faults = faults

    def __enter__(self) -> None:
        pass

    def __exit__(self, _: object, fault: BaseException | None, __: Any) -> bool:
        if isinstance(fault, Exception) and not isinstance(fault, GroupError):
            self._faults.append(fault)
            return True
        return False


class _Prefetcher:
    """Buckets encoded in order on a thread, some ahead of time; work that yields no bucket is skipped."""

    def __init__(self, work: Sequence[Callable[[], Bucket | None]]) -> None:
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="pulse-encode")
        self._waiting = iter(work)
        self._futures: deque[Future[Bucket | None]] = deque()
        self._refill()

    def _refill(self) -> None:
        while len(self._futures) < AHEAD and (work := next(self._waiting, None)) is not None:
            self._futures.append(self._executor.submit(work))

    def ready(self) -> bool:
        """Whether `peek` would not have to wait."""
        while self._futures and self._futures[0].done() and not self._futures[0].exception():
            if self._futures[0].result() is not None:
                return True
            self._futures.popleft()
            self._refill()
        return not self._futures or self._futures[0].done()

    def peek(self) -> Bucket | None:
        """The next bucket; None at the end. Raises: what its work raised."""
        while self._futures:
            if (bucket := self._futures[0].result()) is not None:
                return bucket
            self._futures.popleft()
            self._refill()
        return None

    def take(self) -> Bucket:
        """The bucket that `peek` returns, which the next call does not return again."""
        if (bucket := self.peek()) is None:
            raise IndexError("take at the end of the buckets")
        self._futures.popleft()
        self._refill()
        return bucket

    def close(self) -> None:
        self._executor.shutdown(cancel_futures=True)
