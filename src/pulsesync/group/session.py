"""One sync of a group, from the first bucket to the verdict.

Sources encode and send, receivers decode, all beside each other; then every rank knows whether all are ready to commit.
Nothing here changes a weight or a base, except that a receiver which is late is brought to the version that the others
hold. Whatever goes wrong with bytes at one rank, it takes part in every message to the end and says so in the verdict;
only a group that breaks ends it at once.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pulsesync.core import digest
from pulsesync.core.threads import finish
from pulsesync.core.types import Bits, Sum, Tile
from pulsesync.errors import FormatError, GroupError, VerificationError
from pulsesync.group import messages
from pulsesync.group.bundles import BundlePlan, LocalBundles, bytes_of
from pulsesync.group.collective import Collective
from pulsesync.group.cost_model import Method
from pulsesync.group.messages import TRAILER, Bucket, SpareBuffers, SyncTimes
from pulsesync.state.host import HostState

AHEAD = 2  # buckets that are encoded before they are sent
_END, _UNKNOWN, _FAULT = 0, -1, -2  # in place of a length: no more, not encoded yet, could not be

Job = tuple[Method, Sequence[Tile]]  # a bucket to be encoded


@dataclass(frozen=True)
class RankVersion:
    """A version, as a rank holds it."""

    version: int
    digest: str
    sums: Mapping[int, Sum]  # of all bundles, held here or not

    @property
    def name(self) -> str:
        return f"{self.version}:{self.digest}"


@dataclass
class SyncSession:
    """A sync in progress, on one rank."""

    team: Collective
    sources: Sequence[int]
    wire: BundlePlan
    held: LocalBundles  # the live weights of this rank
    state: HostState  # a source's copy of what it last sent, or a receiver's live weights
    bucket_weights: int
    spare: SpareBuffers = field(default_factory=SpareBuffers)
    clock: SyncTimes = field(default_factory=SyncTimes)
    faults: list[Exception] = field(default_factory=list)
    made: list[Bucket] = field(default_factory=list)  # what was sent or received
    waits_s: list[float] = field(default_factory=list)  # for the buckets of each source, as it seemed here
    starved_s: float = 0.0  # in which this source had nothing to send
    sent_bytes: int = 0

    @property
    def sends(self) -> bool:
        return self.team.rank in self.sources

    @property
    def sums(self) -> dict[int, Sum]:
        """The digests that bundles have after it, of those that were in it."""
        return {ordinal: sum_ for bucket in self.made for ordinal, sum_ in bucket.sums.items()}

    # Those who are late

    def bring(self, late: Sequence[int], base: RankVersion) -> RankVersion | None:
        """Bring late receivers to the version that the others hold, from the sources' copies of it: to them alone.

        Returns that version as this rank now holds it; None if it does not.
        """
        got: list[Bucket] = []
        sums: dict[int, Sum] = {}
        for place, rank in enumerate(self.sources):
            for tiles in messages.cut(self.wire, self.wire.owned_by(place), self.bucket_weights):
                to = [one for one in late if one in self.wire.holders[tiles[0].ordinal]]
                if rank == self.team.rank and to:
                    self.team.send_(messages.raw(self.state, tiles, self.clock, base.sums).message, rank, to)
                elif self.team.rank in to:
                    message = np.empty(messages.raw_size(tiles), np.uint8)
                    self.team.send_(message, rank, to)
                    with self._faults():
                        got.append(self._read(message, place, {}))
                sums |= self._tell_sums(tiles, base.sums, rank)  # to all: nobody waits for longer than one bucket
        if self.team.rank not in late:
            return base
        if self.faults:
            return None
        with self._faults():
            self.check(sums, base.digest)
            if any(sums[ordinal] != sum_ for bucket in got for ordinal, sum_ in bucket.sums.items()):
                raise VerificationError("a bundle is not that of the version", version=base.version)
            whole = {ordinal: bits for bucket in got for ordinal, bits in bucket.whole.items()}
            finish(lambda: self.state.load_tiles(whole, {n: sums[n] for n in whole}))
            return RankVersion(base.version, base.digest, sums)
        return None

    def _tell_sums(self, tiles: Sequence[Tile], sums: Mapping[int, Sum], rank: int) -> dict[int, Sum]:
        data = np.zeros(16 * len(tiles), np.uint8)
        if rank == self.team.rank:
            data[:] = np.frombuffer(b"".join(sums[tile.ordinal].to_bytes() for tile in tiles), np.uint8)
        self.team.broadcast_(data, rank)
        return {tile.ordinal: Sum.from_bytes(data[16 * n : 16 * n + 16].tobytes()) for n, tile in enumerate(tiles)}

    # Buckets

    def run(self, jobs: Sequence[Job], before: Mapping[int, Sum]) -> None:
        """Send the buckets of these jobs, and take those of the other sources."""
        ahead = _Prefetcher([lambda job=job: self._encode(job) for job in jobs])  # type: ignore[misc]
        decoder = ThreadPoolExecutor(1, thread_name_prefix="pulse-decode")
        reading: list[Future[Bucket]] = []
        try:
            for place, rank in enumerate(self.sources):
                length = self._tell_length(self._next_length(ahead) if rank == self.team.rank else 0, rank)
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
                with self._faults():
                    self.made.append(future.result())
        finally:
            ahead.close()
            decoder.shutdown(cancel_futures=True)

    def _encode(self, job: Job) -> Bucket | None:
        method, tiles = job
        if method == "dense":
            return messages.raw(self.held, tiles, self.clock, spare=self.spare)
        return messages.encode(self.state, self.held, tiles, method, self.clock)

    def _next_length(self, ahead: "_Prefetcher") -> int:
        with self._faults():
            bucket = ahead.peek()
            return bucket.message.size if bucket else _END
        return _FAULT

    def _tell_length(self, length: int, rank: int) -> int:
        """Tell the others how long this source's next message is, or be told by one."""
        number = np.array([length], np.int64)
        self.team.broadcast_(number.view(np.uint8), rank)
        return int(number[0])

    def _send(self, ahead: "_Prefetcher", length: int) -> None:
        rank = self.team.rank
        while length > 0:
            bucket = ahead.take()
            assert bucket is not None
            following = self._next_length(ahead) if ahead.ready() else _UNKNOWN
            bucket.message[-TRAILER:].view(np.int64)[0] = following
            self.team.broadcast_(bucket.message, rank)
            self.sent_bytes += bucket.message.nbytes
            self.made.append(bucket)
            if following == _UNKNOWN:
                began = time.perf_counter()
                following = self._next_length(ahead)
                self.starved_s += time.perf_counter() - began
                self._tell_length(following, rank)
            length = following

    def _receive(self, rank: int, length: int) -> Iterator[Bits]:
        most = 2 * bytes_of(self.wire.owned_by(self.sources.index(rank))) + (1 << 26)
        while length not in (_END, _FAULT):
            if not TRAILER < length <= most:
                raise GroupError(f"the group is out of step: rank {rank} sends {length} bytes", rank=self.team.rank)
            message = self.spare.take(length)
            self.team.broadcast_(message, rank)
            yield message
            length = int(message[-TRAILER:].copy().view(np.int64)[0])
            if length == _UNKNOWN:
                length = self._tell_length(0, rank)

    def _read(self, message: Bits, place: int, before: Mapping[int, Sum]) -> Bucket:
        bucket = messages.read(message, self.wire.layout, None if self.sends else self.state, before, self.clock)
        if any(self.wire.owners[ordinal] != place for ordinal in bucket.sums):
            raise FormatError(f"rank {self.sources[place]} sent what is not its own")
        return bucket

    # The verdict

    def check(self, sums: Mapping[int, Sum], expected: str | None = None) -> str:
        """The digest of these sums, if there is one of every bundle. Raises: FormatError, VerificationError."""
        if missing := next((tile for tile in self.wire.layout.tiles if tile.ordinal not in sums), None):
            raise FormatError(f"bundle {missing.tensor.name} did not come")
        actual = digest.state_digest(self.wire.layout.tiles, sums)
        if expected is not None and actual != expected:
            raise VerificationError("what came is not the version it should be", expected=expected, actual=actual)
        return actual

    def conclude(self, base: RankVersion | None, version: int) -> RankVersion:
        """The version that this sync leads to, as far as this rank can tell; what it cannot is among the faults."""
        seen: set[int] = set()
        with self._faults():
            for bucket in self.made:
                if not seen.isdisjoint(bucket.sums):
                    raise FormatError("two buckets hold the same bundle")
                seen |= bucket.sums.keys()
            sums = {**(base.sums if base else {}), **self.sums}
            return RankVersion(version, self.check(sums), sums)
        return RankVersion(version, "", {})

    def _faults(self) -> "FailureCollector":
        return FailureCollector(self.faults)


class FailureCollector:
    """Keeps what goes wrong at one rank until all can be told of it; a broken group is not for keeping."""

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
    """Work done in order on a thread, some of it before it is asked for. What comes to nothing is left out."""

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
        """The next that came to something; None at the end. Raises: what stopped it."""
        while self._futures:
            if (bucket := self._futures[0].result()) is not None:
                return bucket
            self._futures.popleft()
            self._refill()
        return None

    def take(self) -> Bucket | None:
        bucket = self.peek()
        if bucket is not None:
            self._futures.popleft()
            self._refill()
        return bucket

    def close(self) -> None:
        self._executor.shutdown(cancel_futures=True)
