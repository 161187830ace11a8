"""The state that all trainers share, and how a round changes it."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pulsesync.errors import ChecksumError, FormatError
from pulsesync.format.json_reader import load_json
from pulsesync.loco.gate import SparseVector
from pulsesync.loco.outer_step import LARGEST_UPDATE, OuterRule, Trend
from pulsesync.loco.vectors import Vector, kernels_of, vectors_of

FORMAT = "pulse-loco-state/1"
MAX_HEAD_BYTES = 1 << 20
MAX_TRAINERS = 1 << 12  # in a round, and in `SharedState.parts`
TREND_TYPES: dict[str, str] = {"F32": "<f4", "I8": "i1"}


class Contribution(NamedTuple):
    """The round that a trainer took part in, and its payload."""

    round: int
    payload: str  # its id


@dataclass(frozen=True, eq=False)
class Outcome:
    """A round as it was decided: its members, and the sum of their updates. The same for every trainer."""

    members: Mapping[str, str]  # trainer -> id of its payload, in the order in which they are added up
    total: Vector
    taken: SparseVector | None = None  # the update of a trainer with this name, if it is in memory


@dataclass(frozen=True, eq=False)
class RoundResult:
    """The effect of a decided round: an empty one has no members."""

    members: Mapping[str, str]  # trainer -> id of its payload
    moved: int  # entries that the round has changed
    after: "SharedState"


@dataclass(frozen=True, eq=False)
class SharedState:
    """A fragment's shared state. A joiner copies it from a peer or a store; never written, only replaced."""

    layout: str  # id of the fragment's tensors
    theta: Vector
    trend: Trend
    round: int = 0  # number of rounds so far
    parts: Mapping[str, Contribution] = field(default_factory=dict)  # each trainer's last; see MAX_TRAINERS

    def last_round_of(self, trainer: str) -> int:
        """The last round that a trainer took part in, or may have, if `parts` no longer lists it."""
        if trainer in self.parts:
            return self.parts[trainer].round
        return min(part.round for part in self.parts.values()) if len(self.parts) == MAX_TRAINERS else 0

    @cached_property
    def digest(self) -> str:
        """Equal for equal weights, trend and round, bit for bit: O(all)."""
        h = hashlib.sha256(f"pulse loco 2 {self.layout} {self.round}\n".encode())
        for name, values in (("theta", self.theta), ("trend", self.trend)):
            h.update(kernels_of(values).count(name, values).to_bytes())
        return h.hexdigest()

    def resolve(self, decided: Outcome, rule: OuterRule) -> RoundResult:
        """Return the effect of a decided round, with the state after it. Overwrites the memory of the sum.

        A round is empty, which means that it has no members and the weights are unchanged, in two cases. If the updates
        diverge, only the round's number changes. If they do not, and weights or momentum would overflow, the trend
        becomes zero too, so that a shared momentum that has grown too large does not stop the next round. This depends
        only on the decision and the shared state, so all trainers agree on it.
        """
        step = rule.step(self.theta, self.trend, decided.total, max(len(decided.members), 1))
        number = self.round + 1
        if not step.largest_mean <= LARGEST_UPDATE:  # NaN compares as False
            return RoundResult({}, 0, replace(self, round=number))
        if not step.finite:
            nothing = rule.first_trend(len(self.theta), vectors_of(self.theta))
            return RoundResult({}, 0, replace(self, round=number, trend=nothing))
        took_part = {trainer: Contribution(number, payload) for trainer, payload in decided.members.items()}
        parts = _newest({**self.parts, **took_part})
        after = SharedState(self.layout, step.theta, step.trend, number, parts)
        return RoundResult(decided.members, step.moved, after)

    def to_bytes(self) -> bytes:
        """All of it: a line that describes it, then weights (FP32) and trend (FP32 or int8), little-endian."""
        head = {
            "format": FORMAT,
            "layout": self.layout,
            "round": self.round,
            "size": len(self.theta),
            "trend": _trend_type(self.trend),
            "parts": {name: list(part) for name, part in sorted(self.parts.items())},
            "digest": self.digest,
        }
        v = vectors_of(self.theta)
        theta, trend = v.fetch(self.theta), v.fetch(self.trend)
        body = theta.astype("<f4").tobytes() + trend.astype(trend.dtype.newbyteorder("<")).tobytes()
        return _line({**head, "sha256": _seal(head, body)}) + body

    @classmethod
    def from_bytes(cls, data: bytes | memoryview, like: "SharedState") -> "SharedState":
        """Read what `to_bytes` wrote; like: a state with the same tensors and trend. Raises: FormatError."""
        view = memoryview(data)
        line, newline, _ = bytes(view[:MAX_HEAD_BYTES]).partition(b"\n")
        head = load_json(line, "a shared state")
        if not newline or head.get("format") != FORMAT:
            raise FormatError(
                f"expected a shared state of format {FORMAT}, but found {str(head.get('format'))[:60]!r}: trainers "
                "that meet must run the same version of pulsesync"
            )
        if set(head) != {"format", "layout", "round", "digest", "parts", "size", "trend", "sha256"}:
            raise FormatError("the first line of a shared state does not have the expected fields")
        body, sha256 = view[len(line) + 1 :], head.pop("sha256")
        if _seal(head, body) != sha256:
            raise ChecksumError("a shared state is damaged: its bytes do not match the hash in its first line")
        if head["layout"] != like.layout or head["size"] != len(like.theta):
            raise FormatError(
                f"expected a shared state of this model's layout, {like.layout}; found layout {head['layout']}"
            )
        if head["trend"] != _trend_type(like.trend) or len(body) != like.theta.nbytes + like.trend.nbytes:
            raise FormatError(f"expected a trend of type {_trend_type(like.trend)}; found {head['trend']}")
        theta = np.frombuffer(body[: like.theta.nbytes], "<f4").astype(np.float32)
        trend = read_trend(np.frombuffer(body[like.theta.nbytes :], TREND_TYPES[head["trend"]]), like.trend)
        v = vectors_of(like.theta)
        if not np.isfinite(theta).all():
            raise FormatError("a shared state has weights that are not finite")
        if type(head["round"]) is not int or head["round"] < 0 or not isinstance(head["parts"], dict):
            raise FormatError("the first line of a shared state has no valid round or parts")
        parts = {name: read_part(part) for name, part in head["parts"].items()}
        state = cls(head["layout"], v.to_backend(theta), trend, head["round"], parts)
        if state.digest != head["digest"]:
            raise ChecksumError("a shared state does not have the digest in its first line", expected=head["digest"])
        return state


def _newest(parts: Mapping[str, Contribution]) -> Mapping[str, Contribution]:
    """The contributions of the latest rounds: names of trainers that never return must not accumulate."""
    if len(parts) <= MAX_TRAINERS:
        return parts
    return dict(sorted(parts.items(), key=lambda item: (-item[1].round, item[0]))[:MAX_TRAINERS])


def read_trend(values: NDArray[Any], like: Trend) -> Trend:
    """Check a trend, and copy it to where `like` is. Raises: FormatError: it has another type, or invalid values."""
    wanted = np.dtype(TREND_TYPES[_trend_type(like)]).newbyteorder("=")
    if values.dtype.newbyteorder("=") != wanted or values.shape != (len(like),):
        raise FormatError(
            f"expected a trend of {len(like)} values of type {wanted}, but found {values.size} of {values.dtype}"
        )
    trend = values.astype(wanted)
    if not (np.isfinite(trend).all() if trend.dtype == np.float32 else np.isin(trend, (-1, 0, 1)).all()):
        raise FormatError("a trend has values that are not finite, or signs other than -1, 0 and 1")
    return vectors_of(like).to_backend(trend)


def _trend_type(trend: Trend) -> str:
    return "I8" if trend.dtype.itemsize == 1 else "F32"


def _line(head: Mapping[str, object]) -> bytes:
    return json.dumps(head, sort_keys=True).encode() + b"\n"


def _seal(head: Mapping[str, object], body: bytes | memoryview) -> str:
    """The hash of a header and of what follows it."""
    h = hashlib.sha256(_line(head))
    h.update(body)
    return h.hexdigest()


def read_part(value: object) -> Contribution:
    """Read a contribution. Raises: FormatError."""
    if not isinstance(value, list | tuple) or [type(item) for item in value] != [int, str] or value[0] < 0:
        raise FormatError("the contribution of a trainer must be a pair of round and payload id")
    return Contribution(*value)
