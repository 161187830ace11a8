"""What tests of whole runs need: weights in training, a store that is watched, squashes made by hand."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np

from pulsesync.core.types import Codec
from pulsesync.errors import StoreError
from pulsesync.format import manifest as manifests
from pulsesync.format import patch, signature
from pulsesync.format.epochs import EPOCH_PATCHES
from pulsesync.format.manifest import BaseRef, Manifest, PartRef, RecordKind
from pulsesync.format.signature import SigningKey
from pulsesync.run import keys
from pulsesync.run.bodies import fetch_body
from pulsesync.run.reader import RunReader
from pulsesync.store import MemoryStore, ObjectEntry, Store, WrappedStore
from pulsesync.testing import AdamUpdates
from tests.publishers import Publisher
from tests.readers import Subscriber

SHAPES = {"layer.0.weight": (60, 50), "layer.1.weight": (50, 7), "norm": (50,)}


class Training:
    """BF16 weights under Adam, in the same arrays all the time."""

    def __init__(self, seed: int = 0) -> None:
        self.updates = AdamUpdates(SHAPES, seed=seed, scale=0.01)
        self.weights = {name: bits.view(ml_dtypes.bfloat16) for name, bits in self.updates.state().items()}

    def step(self) -> None:
        for name, bits in self.updates.step().items():
            self.weights[name].view(np.uint16)[...] = bits


def worker() -> dict[str, Any]:
    return {name: np.zeros(shape, ml_dtypes.bfloat16) for name, shape in SHAPES.items()}


def kept(weights: Mapping[str, Any]) -> dict[str, Any]:
    """A copy."""
    return {name: array.copy() for name, array in weights.items()}


def equal(a: Mapping[str, Any], b: Mapping[str, Any]) -> bool:
    """Whether two states are the same, bit for bit."""
    return a.keys() == b.keys() and all(
        a[name].dtype == b[name].dtype and a[name].shape == b[name].shape and a[name].tobytes() == b[name].tobytes()
        for name in a
    )


class Watched(WrappedStore):
    """A store that notes what is asked of it and lets a test interfere: before and after calls, and in what is read."""

    def __init__(self, store: Store | None = None) -> None:
        super().__init__(store or MemoryStore())
        self.gets: list[tuple[str, int, int | None]] = []
        self.writes: list[str] = []
        self.before: Callable[[str, str], object] = lambda verb, key: None
        self.after: Callable[[str, str], object] = lambda verb, key: None
        self.received: Callable[[str, bytes], bytes] = lambda key, data: data

    def got(self, prefix: str) -> list[str]:
        """The keys below a prefix that were read, as often as they were."""
        return [key for key, _, _ in self.gets if key.startswith(prefix)]

    def fetched(self, prefix: str) -> list[str]:
        """The same, without looks at a single byte, which only ask whether an object is there."""
        return [key for key, begin, end in self.gets if key.startswith(prefix) and end != begin + 1]

    def get(self, key: str, begin: int = 0, end: int | None = None) -> bytes:
        self.gets.append((key, begin, end))
        self.before("get", key)
        data = self.received(key, self.store.get(key, begin, end))
        self.after("get", key)
        return data

    def put(self, key: str, data: bytes | memoryview) -> None:
        self.writes.append(key)
        self.before("put", key)
        self.store.put(key, data)
        self.after("put", key)

    def create(self, key: str, data: bytes) -> None:
        self.writes.append(key)
        self.before("create", key)
        self.store.create(key, data)
        self.after("create", key)

    def list(self, prefix: str) -> Iterator[ObjectEntry]:
        self.before("list", prefix)
        return self.store.list(prefix)

    def fail_at(self, *prefixes: str) -> None:
        """From now on every call for such a key fails; without prefixes, none does."""
        self.before = (lambda verb, key: down(key) if key.startswith(prefixes) else None) if prefixes else _nothing


def _nothing(verb: str, key: str) -> None:
    pass


def down(key: str) -> None:
    raise StoreError("the line is down", key=key)


def publish_steps(location: Any, steps: int, training: Training | None = None, **options: Any) -> list[dict[str, Any]]:
    """Publish this many versions of a training, wait for their anchors, and return the weights of each."""
    training = training or Training()
    states = []
    with Publisher(location, **options) as pub:
        for step in range(steps):
            if step:
                training.step()
            pub.publish(training.weights, step=step)
            pub.flush()
            states.append(kept(training.weights))
    return states


def record(store: Store, key: str) -> Manifest:
    return manifests.parse(store.get(key))


def version(store: Store, number: int) -> Manifest:
    return record(store, keys.manifest_key(number))


def parts_of(store: Store, key: str) -> list[str]:
    """The keys of the parts that a record names; those that stand in it have none."""
    return [keys.part_key(part.id) for part in record(store, key).parts if part.data is None]


def codecs_of(store: Store, key: str) -> set[Codec]:
    """The codecs of all tiles that the parts of a record have, also of those that stand in it."""
    found = record(store, key)
    layout = RunReader(store, None).layout(found.layout)
    bodies = [fetch_body(store, part, layout, None)[0] for part in found.parts]
    return {entry.codec for body in bodies for entry in body.index.entries}


def versions(store: Store) -> list[int]:
    return [int(entry.key.rpartition("/")[2]) for entry in store.list("manifests/")]


def make_squash(
    store: Store, level: int, number: int, key: SigningKey | None = None, epoch_patches: int = EPOCH_PATCHES
) -> Manifest:
    """Write the squashed patch of 2^level epochs by following the run to both ends."""
    first = epoch_patches * (number << level)
    last = epoch_patches * ((number + 1) << level)
    old, new, ends = worker(), worker(), []
    for held, to in ((old, first), (new, last)):
        sub = Subscriber(store, epoch_patches=epoch_patches)
        sub.sync(held, version=to)
        assert sub.state is not None
        ends.append(sub.state)
    part = patch.encode(ends[0].layout, ends[0].layout.tiles, ends[0], ends[1], ends[0].sums, codec="context")
    store.put(keys.part_key(part.id), part.data)
    squash = replace(
        version(store, last),
        kind=RecordKind.SQUASH,
        base=BaseRef(first, ends[0].digest),
        parts=(PartRef(part.id, len(part.data)),),
        history=None,
    )
    data = squash.build()
    store.create(keys.squash_key(level, number), signature.sign(data, key) if key else data)
    return squash
