"""What all trainers hold alike, and how a round moves it on."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from pulsesync.core.digest import count_tile
from pulsesync.core.types import TensorSpec
from pulsesync.errors import ChecksumError, FormatError
from pulsesync.format import layout as layouts
from pulsesync.format.layout import load_json
from pulsesync.loco.gate import F32, SparseVector
from pulsesync.loco.outer import SGD, mean_of

FORMAT = "pulse-loco-state/1-draft"
MAX_HEAD_BYTES = 1 << 20
MAX_TRAINERS = 1 << 12  # of a round
# Of an update, and of the mean of a round: 1.1e12. A value beyond it means that a trainer has diverged. Momentum moves
# weights by lr / (1 - momentum) times the mean in the end, which stays finite for any product up to 2^88, and squares
# of 2^46 values (the largest tensor) have a finite sum. A power of two: no rounding leads a mean of values beyond it.
LARGEST_UPDATE = np.float32(2**40)


class Contribution(NamedTuple):
    """That a trainer took part in a round, and with which payload."""

    round: int
    payload: str  # its id


@dataclass(frozen=True, eq=False)
class Outcome:
    """A round as it was decided: who took part, and the sum of what they sent. The same for every trainer."""

    members: Mapping[str, str]  # trainer -> id of its payload, in the order in which they were added up
    total: F32
    taken: SparseVector | None = None  # what was taken from a trainer of this one's name, if it is at hand


@dataclass(frozen=True, eq=False)
class SharedState:
    """A fragment's shared state. A joiner copies it from a peer or a store; never written, only replaced."""

    layout: str  # id of the fragment's tensors
    theta: F32
    momentum: F32
    round: int = 0  # rounds that led here
    parts: Mapping[str, Contribution] = field(default_factory=dict)  # of each trainer, the last

    @cached_property
    def digest(self) -> str:
        """Equal for equal weights, momentum and round, bit for bit: O(all)."""
        h = hashlib.sha256(f"pulse loco 1 {self.layout} {self.round}\n".encode())
        for name, values in (("theta", self.theta), ("momentum", self.momentum)):
            tile = layouts.make([TensorSpec(name, "F32", (values.size,))]).tiles[0]
            h.update(count_tile(tile, values.view(np.uint32)).to_bytes())
        return h.hexdigest()

    def resolve(self, decided: Outcome, outer: SGD) -> tuple[Outcome, "SharedState"]:
        """Return a decided round as it counts, and the state that it leads to.

        A round is empty, which means that it has no members and the weights stay as they are, in two cases. If the
        updates diverge, only the round's number changes. If they do not, and weights or momentum would overflow, the
        momentum has grown too large: it becomes zero, so that the next round can succeed. This depends on nothing but
        the decision and the shared state, so all trainers agree on it.
        """
        trainers = max(len(decided.members), 1)
        empty = Outcome({}, np.zeros_like(self.theta))
        if diverges(mean_of(decided.total, trainers)):
            return empty, replace(self, round=self.round + 1)
        theta, momentum = outer.step(self.theta, self.momentum, decided.total, trainers)
        if not (np.isfinite(theta).all() and np.isfinite(momentum).all()):
            return empty, replace(self, round=self.round + 1, momentum=np.zeros_like(self.momentum))
        took_part = {trainer: Contribution(self.round + 1, payload) for trainer, payload in decided.members.items()}
        return decided, SharedState(self.layout, theta, momentum, self.round + 1, {**self.parts, **took_part})

    def to_bytes(self) -> bytes:
        """All of it: a line that describes it, then weights and momentum, FP32, little-endian."""
        head = {
            "format": FORMAT,
            "layout": self.layout,
            "round": self.round,
            "size": self.theta.size,
            "parts": {name: list(part) for name, part in sorted(self.parts.items())},
            "digest": self.digest,
        }
        body = self.theta.astype("<f4").tobytes() + self.momentum.astype("<f4").tobytes()
        return _line({**head, "sha256": _seal(head, body)}) + body

    @classmethod
    def from_bytes(cls, data: bytes | memoryview, like: "SharedState") -> "SharedState":
        """Read what `to_bytes` wrote, of a state with the same tensors as another.

        Raises:
            FormatError: it is not one, or of other tensors; ChecksumError: it is damaged.
        """
        view = memoryview(data)
        line, newline, _ = bytes(view[:MAX_HEAD_BYTES]).partition(b"\n")
        head = load_json(line, "a shared state")
        known = {"format", "layout", "round", "digest", "parts", "size", "sha256"}
        if not newline or set(head) != known or head["format"] != FORMAT:
            raise FormatError("this is no shared state")
        body, sha256 = view[len(line) + 1 :], head.pop("sha256")
        if _seal(head, body) != sha256:
            raise ChecksumError("a shared state is damaged")
        if head["layout"] != like.layout or head["size"] != like.theta.size or len(body) != 8 * like.theta.size:
            raise FormatError(f"the shared state has layout {head['layout']}, and this model has {like.layout}")
        theta, momentum = np.frombuffer(body, "<f4").astype(np.float32).reshape(2, -1)
        if not (np.isfinite(theta).all() and np.isfinite(momentum).all()):
            raise FormatError("a shared state holds what is no number")
        if type(head["round"]) is not int or head["round"] < 0 or not isinstance(head["parts"], dict):
            raise FormatError("a shared state has no round")
        parts = {name: read_part(part) for name, part in head["parts"].items()}
        state = cls(head["layout"], theta, momentum, head["round"], parts)
        if state.digest != head["digest"]:
            raise ChecksumError("a shared state has another digest than it says", expected=head["digest"])
        return state


def diverges(values: F32) -> bool:
    """Whether an update, or the mean of several, has a value that is not finite or is beyond LARGEST_UPDATE."""
    return not bool((np.abs(values) <= LARGEST_UPDATE).all())  # NaN compares as False


def _line(head: Mapping[str, object]) -> bytes:
    return json.dumps(head, sort_keys=True).encode() + b"\n"


def _seal(head: Mapping[str, object], body: bytes | memoryview) -> str:
    """The hash of what a head says and of what follows it."""
    h = hashlib.sha256(_line(head))
    h.update(body)
    return h.hexdigest()


def read_part(value: object) -> Contribution:
    """Raises: FormatError, for what is none."""
    if not isinstance(value, list | tuple) or [type(item) for item in value] != [int, str] or value[0] < 0:
        raise FormatError("who took part in a round is told by its number and the payload's id")
    return Contribution(*value)
