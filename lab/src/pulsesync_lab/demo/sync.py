"""The transfer of weights from trainer to workers: by PULSESync, or full weights each time, for comparison.

Both methods have the same interface: `publish` makes a version of the BF16 values of weights, `fetch` brings a policy
to a version.
"""

import hashlib
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from pulsesync.errors import ChecksumError, NotFoundError, NothingPublishedError, VerificationError
from pulsesync.publish.publisher import Publisher
from pulsesync.run.subscriber import Subscriber
from pulsesync.store import Store, ThrottledStore, open_store
from pulsesync_lab.demo.settings import DemoSettings

HEAD = "full/head"


@dataclass(frozen=True)
class PublishedVersion:
    """A version that was published."""

    version: int
    digest: str
    changed: int | None  # weights; unknown if all are sent
    total: int
    size_bytes: int
    full_bytes: int
    seconds: float

    def facts(self) -> dict[str, object]:
        return asdict(self)


@dataclass(frozen=True)
class ReceivedVersion:
    """A version that a worker now has."""

    version: int
    digest: str
    fetched_bytes: int
    seconds: float
    pause_s: float  # in which the weights were written


class WeightSender(Protocol):
    """The trainer's end."""

    def publish(self, weights: Mapping[str, Tensor], step: int, last: bool) -> PublishedVersion:
        """Make a version, or, unless it is the last, leave the step for a later version."""

    def close(self) -> None: ...


class WeightReceiver(Protocol):
    """A worker's end. It has the BF16 values; the policy gets them in the dtype in which it computes."""

    def fetch(self, policy: nn.Module, version: int | None) -> ReceivedVersion | None:
        """Bring a policy to a version, or to the newest; None if there is none yet."""

    def recount(self) -> str:
        """Count the digest of the weights. Raises: VerificationError, if it is not that of the version."""


def sender(settings: DemoSettings, spool: str) -> WeightSender:
    store = open_store(settings.store)
    return PulseSender(store, spool, settings.publish_every) if settings.sync == "pulse" else FullSender(store)


def receiver(settings: DemoSettings, cache: str) -> WeightReceiver:
    store = open_store(settings.read or settings.store)
    if settings.link is not None:
        store = ThrottledStore(store, settings.link)
    return PulseReceiver(store, cache) if settings.sync == "pulse" else FullReceiver(store)


def values(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Weights as they are published."""
    return {name: weight.detach().to("cpu", torch.bfloat16) for name, weight in weights.items()}


def _give(policy: nn.Module, weights: dict[str, Tensor]) -> None:
    with torch.no_grad():
        for name, weight in policy.state_dict().items():
            weight.copy_(weights[name])


class PulseSender:
    """A Publisher that casts the FP32 masters."""

    def __init__(self, store: Store, spool: str, publish_every: int) -> None:
        self._publisher = Publisher(store, spool=spool, cast="BF16", publish_every=publish_every)
        self._last: PublishedVersion | None = None

    def publish(self, weights: Mapping[str, Tensor], step: int, last: bool) -> PublishedVersion:
        began = time.perf_counter()
        report = self._publisher.publish({k: v.cpu() for k, v in weights.items()}, step=step, now=last)
        if report.version is None:  # it is part of a later version
            assert self._last is not None
            return self._last
        self._last = PublishedVersion(
            report.version,
            self._publisher.digest or "",
            report.changed,
            report.total,
            report.payload_bytes,
            report.full_bytes,
            time.perf_counter() - began,
        )
        return self._last

    def close(self) -> None:
        self._publisher.close()


class PulseReceiver:
    """A Subscriber, and its tensors."""

    def __init__(self, store: Store, cache: str) -> None:
        self._subscriber = Subscriber(store, cache=cache)
        self._weights: dict[str, Tensor] = {}

    def fetch(self, policy: nn.Module, version: int | None) -> ReceivedVersion | None:
        began = time.perf_counter()
        if not self._weights:
            # If these are a published start, as the base checkpoint is, it starts there.
            self._weights = values(policy.state_dict())
        try:
            report = self._subscriber.sync(self._weights, version=version)
        except NothingPublishedError:
            return None
        if report.path:
            _give(policy, self._weights)
        pause = report.apply_s
        return ReceivedVersion(report.version, report.digest, report.fetched_bytes, time.perf_counter() - began, pause)

    def recount(self) -> str:
        return self._subscriber.verify(self._weights)


class FullSender:
    """All weights, every time: one object per version, and a hint to the newest."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._version = _newest(store)

    def publish(self, weights: Mapping[str, Tensor], step: int, last: bool) -> PublishedVersion:
        began = time.perf_counter()
        data = _bytes(values(weights))
        self._version += 1
        self._store.put(_key(self._version), data)
        self._store.put(HEAD, str(self._version).encode())
        total = len(data) // 2
        return PublishedVersion(
            self._version,
            hashlib.sha256(data).hexdigest(),
            None,
            total,
            len(data),
            len(data),
            time.perf_counter() - began,
        )

    def close(self) -> None:
        pass


class FullReceiver:
    """Fetches whole versions."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._weights: dict[str, Tensor] = {}
        self._got: ReceivedVersion | None = None

    def fetch(self, policy: nn.Module, version: int | None) -> ReceivedVersion | None:
        began = time.perf_counter()
        wanted = _newest(self._store) if version is None else version
        if wanted < 0:
            return None
        if self._got is not None and self._got.version == wanted:
            return self._got
        data = self._store.get(_key(wanted))
        weights = values(policy.state_dict())
        if len(data) != sum(2 * weight.numel() for weight in weights.values()):
            raise ChecksumError(f"version {wanted} has {len(data)} bytes, which is not the size of this policy")
        at = 0
        for _, weight in sorted(weights.items()):
            bits = torch.frombuffer(bytearray(data[at : at + 2 * weight.numel()]), dtype=torch.bfloat16)
            weight.copy_(bits.view(weight.shape))
            at += 2 * weight.numel()
        fetched = time.perf_counter()
        _give(policy, weights)
        self._weights = weights
        ended = time.perf_counter()
        self._got = ReceivedVersion(wanted, hashlib.sha256(data).hexdigest(), len(data), ended - began, ended - fetched)
        return self._got

    def recount(self) -> str:
        assert self._got is not None
        actual = hashlib.sha256(_bytes(self._weights)).hexdigest()
        if actual != self._got.digest:
            raise VerificationError(
                "digest mismatch: the weights are not those of the version", expected=self._got.digest, actual=actual
            )
        return actual


def _key(version: int) -> str:
    return f"full/{version:016d}"


def _newest(store: Store) -> int:
    try:
        return int(store.get(HEAD, 0, 32))
    except NotFoundError:
        return -1


def _bytes(weights: dict[str, Tensor]) -> bytes:
    return b"".join(weight.contiguous().view(torch.uint8).numpy().tobytes() for _, weight in sorted(weights.items()))
