"""How many steps go into one version: rules without I/O or clock.

A patch over k steps is smaller than k patches, because the same weights change again; but it is k steps late. Therefore
every step is published while the link is fast enough, and steps are coalesced where sending takes more than a share of
their time.
"""

from collections import deque
from dataclasses import dataclass
from typing import Literal

from pulsesync.core.arguments import whole

Every = int | Literal["auto"]

SHARE = 0.5  # share of the time between versions that sending one may take: the rest is for anchors, and for retries
WINDOW = 8  # versions that the estimates are based on
GROWTH = 0.65  # bytes(k) = bytes(1) * k ** GROWTH, until versions of two sizes were measured; from the recorded run


@dataclass(frozen=True)
class SentVersion:
    """A version that was sent: steps in it, and how long encoding and sending took."""

    steps: int
    seconds: float


class Cadence:
    """Decides, step by step, whether to publish now. Not safe for two threads.

    every: a fixed number of steps, or "auto". max_behind: the most steps that "auto" puts into a version.
    """

    def __init__(self, every: Every = 1, max_behind: int = 16) -> None:
        if every != "auto":
            every = whole("publish_every", every, 1, what="'auto' or a number of steps")
        self.every, self.max_behind = every, whole("max_behind", max_behind, 1, what="a number of steps")
        self.waiting = 0  # steps since the last version
        self.lowest_skipped: int | None = None  # the lowest of these that was skipped
        self._sent: deque[SentVersion] = deque(maxlen=WINDOW)
        self._steps_s: deque[float] = deque(maxlen=WINDOW)
        self._last_call: float | None = None
        self._agreed: deque[tuple[int, int]] = deque(maxlen=WINDOW)  # calls after which a target applies, and that

    def step(self, now_s: float, call: int = 0) -> bool:
        """Count a step of the trainer; return whether to publish it."""
        if self._last_call is not None:
            self._steps_s.append(now_s - self._last_call)
        self._last_call = now_s
        self.waiting += 1
        # A rank that lags uses the target that the others used for the same call.
        agreed = next((target for after_call, target in reversed(self._agreed) if call > after_call), None)
        return self.waiting >= (self.target() if agreed is None else agreed)

    def agree(self, target: int, after_call: int) -> None:
        """Use this target from the next call on, as all ranks of a team do, whatever each of them measures."""
        self._agreed.append((after_call, target))

    def skip(self, step: int) -> None:
        """Note that the version of this step is skipped: the next one contains it."""
        self.lowest_skipped = step if self.lowest_skipped is None else min(step, self.lowest_skipped)

    def published(self) -> int:
        """Note that a version with all waiting steps is being sent; return how many are in it besides the last."""
        coalesced, self.waiting, self.lowest_skipped = max(0, self.waiting - 1), 0, None
        return coalesced

    def sent(self, sent: SentVersion) -> None:
        """Note how long a version took that was committed."""
        self._sent.append(sent)

    def target(self) -> int:
        if self.every != "auto":
            return self.every
        if not self._sent or not self._steps_s:
            return 1
        step_s = sorted(self._steps_s)[len(self._steps_s) // 2]
        for k in range(1, self.max_behind):
            if self.predict_s(k) <= SHARE * k * step_s:
                return k
        return self.max_behind

    def predict_s(self, steps: int) -> float:
        """Predict how long it takes to send a version of this many steps, from the time that the last ones took."""
        estimates = sorted(sent.seconds * (steps / sent.steps) ** GROWTH for sent in self._sent)
        middle: float = estimates[len(estimates) // 2]
        return middle
