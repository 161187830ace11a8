"""How many steps go into one version: rules without I/O or clock.

A patch over k steps is smaller than k patches, because the same weights move again; but it is k steps late. So: publish
every step while the link can bear it, and coalesce steps where sending takes more than a share of their time.
"""

from collections import deque
from dataclasses import dataclass
from typing import Literal

Every = int | Literal["auto"]

SHARE = 0.5  # of the time between versions that sending one may take: the rest is for anchors, and for catching up
WINDOW = 8  # versions that the estimates look back on
GROWTH = (
    0.65  # bytes(k) = bytes(1) * k ** GROWTH, until versions of two sizes say otherwise; measured on the recorded run
)


@dataclass(frozen=True)
class SentVersion:
    """A version that was sent: steps in it, and how long encoding and sending took."""

    steps: int
    seconds: float


class Cadence:
    """Decides, step by step, whether to publish now. Not safe for two threads.

    every: a fixed number of steps, or "auto". longest: steps that a version may be behind the trainer at most.
    """

    def __init__(self, every: Every = 1, longest: int = 16) -> None:
        if every != "auto" and (not isinstance(every, int) or isinstance(every, bool) or every < 1):
            raise ValueError(f"publish_every is a number of steps, at least 1, or 'auto', not {every!r}")
        if longest < 1:
            raise ValueError(f"a version must be allowed to be at least 1 step behind, not {longest!r}")
        self.every, self.longest = every, longest
        self.waiting = 0  # steps since the last version
        self._sent: deque[SentVersion] = deque(maxlen=WINDOW)
        self._steps_s: deque[float] = deque(maxlen=WINDOW)
        self._last_call: float | None = None
        self._agreed: deque[tuple[int, int]] = deque(maxlen=WINDOW)  # calls after which a target holds, and that target

    def step(self, now_s: float, call: int = 0) -> bool:
        """Count a step of the trainer; return whether it is to be published."""
        if self._last_call is not None:
            self._steps_s.append(now_s - self._last_call)
        self._last_call = now_s
        self.waiting += 1
        return self.waiting >= self._target_at(call)

    def agree(self, target: int, after_call: int) -> None:
        """Ranks that publish together all use this target from the next call on: whatever they measure themselves."""
        self._agreed.append((after_call, target))

    def _target_at(self, call: int) -> int:
        """A rank that is behind the others uses the target that they used for the same call."""
        return next((target for after_call, target in reversed(self._agreed) if call > after_call), self.target())

    def published(self) -> int:
        """A version with all waiting steps is on its way; return how many are in it besides the last."""
        coalesced, self.waiting = max(0, self.waiting - 1), 0
        return coalesced

    def sent(self, sent: SentVersion) -> None:
        """Take note of a version that was committed."""
        self._sent.append(sent)

    def target(self) -> int:
        """Steps that the next version should have."""
        if self.every != "auto":
            return self.every
        if not self._sent or not self._steps_s:
            return 1
        step_s = sorted(self._steps_s)[len(self._steps_s) // 2]
        for k in range(1, self.longest):
            if self.predict_s(k) <= SHARE * k * step_s:
                return k
        return self.longest

    def predict_s(self, steps: int) -> float:
        """How long a version of so many steps would take to send, by what the last ones took."""
        estimates = sorted(sent.seconds * (steps / sent.steps) ** GROWTH for sent in self._sent)
        middle: float = estimates[len(estimates) // 2]
        return middle
