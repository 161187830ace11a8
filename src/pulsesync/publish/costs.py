"""How versions and anchors are coded: chosen by the speed of the link and of the cores.

The codecs with the fewest bytes take the most time. On a slow link the bytes decide, on a fast one the time. Both ends
are assumed to be equal: a worker decodes as long as the trainer encodes, and fetches as long as the trainer sends. The
times are measured on the last versions and on a sample of the current one; a choice depends on these figures only.
"""

import hashlib
import logging
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from statistics import median
from typing import Literal

import numpy as np

from pulsesync.core.threads import default_threads
from pulsesync.core.types import Tile
from pulsesync.format.codecs import gap, step
from pulsesync.format.patch import AnchorCodec, CodecName
from pulsesync.format.weights import Changes
from pulsesync.group.cost_model import KEPT

LINK_BYTES = 1 << 20  # bytes that must be uploaded before the link's speed counts as known
RECENT_BYTES = 1 << 26  # bytes of uploads after which earlier ones count less and less
PACKED_BYTES = 1 << 26  # bytes of weights that must be packed before anchors may be written as `raw`
VERSIONS = 8  # the last versions, of whose figures the median is used
WORTH_S = 0.01  # seconds of a version at each end: saving less than that does not justify more bytes
SAMPLES, SAMPLE_CHANGES = 16, 1 << 12  # blocks of a version on which `step` is tried, and changes of each

ASKED, UNMEASURED = "as asked for", "nothing was measured yet"
AnchorCodecChoice = Literal["auto", "dense", "raw"]
Method = Literal["smallest", "step"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class CodecChoice:
    """How something is coded, and why."""

    codec: str  # "smallest": each tile by the codec that makes it smallest
    reason: str

    def __str__(self) -> str:
        return f"{self.codec}: {self.reason}"


@dataclass(eq=False, repr=False)
class LinkSpeed:
    """The speed of the link to the store, and from there to workers: given by the caller, or measured on uploads.

    Safe for several threads. Older uploads count less and less.
    """

    given: float | None = None  # bits per second; None: it is measured
    is_local: bool = False  # the store is on this machine, so uploads do not show the speed of the workers' link
    _sent_bytes: float = 0.0
    _sent_s: float = 0.0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def sent(self, size_bytes: int, took_s: float) -> None:
        with self._lock:
            if self._sent_bytes > RECENT_BYTES:
                self._sent_bytes, self._sent_s = self._sent_bytes / 2, self._sent_s / 2
            self._sent_bytes, self._sent_s = self._sent_bytes + size_bytes, self._sent_s + took_s

    @property
    def bytes_per_s(self) -> float | None:
        """The speed; None if it is not known."""
        if self.given is not None:
            return self.given / 8
        with self._lock:
            if self.is_local or self._sent_bytes < LINK_BYTES:
                return None
            return self._sent_bytes / max(self._sent_s, 1e-9)

    def __str__(self) -> str:
        """The link, as the reason of a choice names it."""
        speed = self.bytes_per_s
        if speed is not None:
            return f"a link of {8e-6 * speed:,.0f} Mbit/s" + ("" if self.given is None else ", as given")
        if self.is_local:
            return "the workers' link is not known: the store is local, and link= was not given"
        return "the link is not known: less than 1 MiB was uploaded"


@dataclass(frozen=True)
class CodingCost:
    """The cost of coding one change."""

    seconds: float
    size_bytes: float

    def at(self, bytes_per_s: float) -> float:
        """Return the seconds of a change at one end: to code it, and to send its bytes."""
        return self.seconds + self.size_bytes / bytes_per_s


def choose_method(
    last: Method, changes: int, smallest: CodingCost | None, step: CodingCost, link: LinkSpeed
) -> CodecChoice:
    """Choose how the versions of an epoch are coded, of which the first has this many changes: "smallest" or "step".

    If both take the same time to within `WORTH_S`, the one with fewer bytes is chosen. Otherwise the method of the
    epoch before is kept, unless it takes `KEPT` times as long as the other: the figures of a method that is not used
    are less certain.

    last: how the versions of the epoch before were coded. smallest: the cost of the codecs with the fewest bytes; None:
    no version was coded with them.
    """
    speed = link.bytes_per_s
    if smallest is None:
        return CodecChoice("smallest", UNMEASURED)
    if speed is None:
        return CodecChoice("smallest", str(link))
    smallest_s, step_s = changes * smallest.at(speed), changes * step.at(speed)
    chosen: Method = last
    if abs(smallest_s - step_s) < WORTH_S or step_s > KEPT * smallest_s:
        chosen = "smallest"
    elif smallest_s > KEPT * step_s:
        chosen = "step"
    return CodecChoice(
        chosen,
        f"{changes:,} changes take {smallest_s:.3f} s as smallest and {step_s:.3f} s as step at each end, with "
        f"{8 * smallest.size_bytes:.2f} and {8 * step.size_bytes:.2f} bits a change over {link}",
    )


@dataclass(frozen=True)
class StepTrial:
    """A version on which `step` was tried: the number of its changes, and the cost of a sample of them."""

    changes: int
    cost: CodingCost


class PatchCosts:
    """How the versions of a run are coded: as requested, or, for "auto", by measured costs. For one thread.

    The choice is made at the first version of an epoch, so that history is kept throughout an epoch or not at all.
    """

    def __init__(self, codec: CodecName, link: LinkSpeed) -> None:
        self.codec, self.link = codec, link
        self.choice = CodecChoice("smallest", UNMEASURED) if codec == "auto" else CodecChoice(codec, ASKED)
        self._costs: dict[str, deque[CodingCost]] = {}  # of the last versions, by codec

    def begin_epoch(self, trial: StepTrial | None) -> None:
        """Choose the codec of the epoch that a version begins; trial: None if `step` always takes longest."""
        if self.codec != "auto" or (trial is not None and not trial.changes):
            return
        chosen = CodecChoice("smallest", "weights on a GPU are coded there, which takes less time than `step`")
        if trial is not None:
            known = self._recent("step")
            step = CodingCost(known.seconds if known else trial.cost.seconds, trial.cost.size_bytes)
            last: Method = "step" if self.choice.codec == "step" else "smallest"
            chosen = choose_method(last, trial.changes, self._recent("smallest"), step, self.link)
        if chosen.codec != self.choice.codec:
            logger.info("From now on, versions are coded as %s.", chosen)
        self.choice = chosen

    def coded(self, choice: CodecChoice, changes: int, size_bytes: int, took_s: float) -> None:
        """Note the cost of a version with this many changes, which was coded by a choice."""
        if changes:
            costs = self._costs.setdefault(choice.codec, deque(maxlen=VERSIONS))
            costs.append(CodingCost(took_s / changes, size_bytes / changes))

    def _recent(self, method: Method) -> CodingCost | None:
        if not (costs := self._costs.get(method)):
            return None
        return CodingCost(median(cost.seconds for cost in costs), median(cost.size_bytes for cost in costs))


def try_step(tiles: Sequence[Tile], changes: Changes) -> StepTrial:
    """Measure `step` on a sample of a version's blocks."""
    keys = sorted(changes)
    tried, size_bytes, began = 0, 0, time.thread_time()  # CPU time of this thread: others may be busy
    for key in keys[:: max(1, -(-len(keys) // SAMPLES))]:
        block = changes[key]
        where, old, new = block.positions[:SAMPLE_CHANGES], block.old[:SAMPLE_CHANGES], block.new[:SAMPLE_CHANGES]
        has_steps = tiles[key[0]].tensor.kind.exponent_shift is not None
        at = where.astype(np.int64)
        size_bytes += len(step.encode(at, old, new) if has_steps else gap.encode(at, new))
        tried += where.size
    cost = CodingCost((time.thread_time() - began) / max(tried, 1), size_bytes / max(tried, 1))
    return StepTrial(sum(block.positions.size for block in changes.values()), cost)


class AnchorCosts:
    """How tiles of anchors are written: as `dense`, or as `raw` where the link is faster than packing them.

    It is `raw` if encoding and sending a byte of weights then takes less time, by the speed of the link, of packing the
    last weights, and of hashing on this machine.
    """

    def __init__(self, codec: AnchorCodecChoice = "auto", link: LinkSpeed | None = None) -> None:
        self.codec, self.link = codec, link or LinkSpeed()
        self.choice = CodecChoice("dense", UNMEASURED) if codec == "auto" else CodecChoice(codec, ASKED)
        self._plain_bytes, self._packed_bytes, self._packed_s = 0.0, 0.0, 0.0
        self._lock = threading.Lock()

    def packed(self, plain_bytes: int, packed_bytes: int, took_s: float) -> None:
        """Note that weights were encoded as a `dense` part."""
        with self._lock:
            self._plain_bytes += plain_bytes
            self._packed_bytes += packed_bytes
            self._packed_s += took_s

    def choose(self) -> AnchorCodec:
        if self.codec != "auto":
            return self.codec
        link = self.link.bytes_per_s
        if link is None:
            self.choice = CodecChoice("dense", str(self.link))
            return "dense"
        with self._lock:
            if self._plain_bytes < PACKED_BYTES:
                return "dense"
            ratio, packing = self._packed_bytes / self._plain_bytes, self._plain_bytes / max(self._packed_s, 1e-9)
        hashing = hash_rate()
        dense_s, raw_s = 1 / packing + ratio / link, 1 / hashing + 1 / link
        chosen: AnchorCodec = "raw" if raw_s < dense_s else "dense"
        self.choice = CodecChoice(
            chosen,
            f"a GB of weights takes {1e9 * dense_s:.2f} s as dense and {1e9 * raw_s:.2f} s as raw, encoded at "
            f"{packing / 1e9:.2f} and {hashing / 1e9:.2f} GB/s and sent over {self.link}",
        )
        return chosen


@cache
def hash_rate() -> float:
    """Return the bytes per second of SHA-256 on all cores of this process."""
    data, began = bytes(1 << 22), time.perf_counter()
    hashlib.sha256(data)
    return default_threads() * len(data) / max(time.perf_counter() - began, 1e-9)
