"""A run compiles its kernels in its first three versions, and none after that, however much changes.

Versions 0, 1 and 2 are an anchor, the first patch of an epoch, which has no history, and the second, which has one.
"""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from pulsesync.device import encode, streamed
from pulsesync.format.epochs import EPOCH_PATCHES
from pulsesync.kernels.spec import SAMPLE_PERIOD, SAMPLE_RUN
from pulsesync.publish.baseline import Keep
from pulsesync.store import MemoryStore
from tests.device.launches import OF_RUNS, Compiled, counted
from tests.device.test_baseline import Model, equal, on
from tests.publishers import Publisher
from tests.readers import Subscriber
from tests.tiers import slow

DENSITIES = [0.0005 * 400 ** (step * 5 % 8 / 7) for step in range(8)]  # from 0.05 % to 20 %, up and down
INTEGERS = {2: torch.int16, 4: torch.int32}
APART = 16  # from one small weight to the next: the interpreter's time follows how many a word of 32 has


class Trainer:
    """Tensors whose small weights, of 24 magnitudes, change; of the large ones one does in each step."""

    def __init__(self, device: str, shapes: list[tuple[torch.dtype, int]]) -> None:
        self.step, self.generator = 0, torch.Generator().manual_seed(1)
        self.weights: Model = {}
        for number, (dtype, size) in enumerate(shapes):
            weights, small = torch.ones(size), self._small(size)
            weights[small] = torch.exp2(torch.randint(-24, 0, small.shape, generator=self.generator))
            self.weights[str(number)] = weights.to(dtype).to(device)

    @staticmethod
    def _small(size: int) -> torch.Tensor:
        """Where they are: outside the samples that decide which magnitudes are tracked."""
        where = torch.arange(0, size, APART)
        return where[where % SAMPLE_PERIOD >= SAMPLE_RUN]

    def train_(self) -> None:
        """Move weights by a few units in the last place, in place."""
        density = DENSITIES[self.step % len(DENSITIES)]
        for weights in self.weights.values():
            bits, small = weights.view(INTEGERS[weights.element_size()]), self._small(weights.numel())
            count = max(1, round(density * bits.numel()))
            chosen = small[torch.randperm(small.numel(), generator=self.generator)[:count]]
            bits[chosen.to(bits.device)] += 1 + self.step % 3
            bits[self.step % SAMPLE_RUN] += 1
        self.step += 1


@pytest.fixture
def compiled(device: str) -> Iterator[list[Compiled]]:
    with on(device), counted() as found:
        yield found


def late(make: Callable[[], None], versions: int, compiled: list[Compiled]) -> list[tuple[int, Compiled]]:
    """Make versions; return what is compiled after the third, and in which version."""
    found = []
    for version in range(versions):
        before = len(compiled)
        make()
        found += [(version, one) for one in compiled[before:]]
    return [(version, one) for version, one in found if version > 2]


def follow(
    trainer: Trainer, count: int, compiled: list[Compiled], epoch_patches: int = EPOCH_PATCHES
) -> list[tuple[int, Compiled]]:
    """Publish epochs, and have a worker follow; return what is compiled late."""
    store = MemoryStore()
    subscriber = Subscriber(store, epoch_patches=epoch_patches)
    worker = {name: torch.zeros_like(weights) for name, weights in trainer.weights.items()}
    with Publisher(store, codec="history", epoch_patches=epoch_patches) as publisher:

        def make() -> None:
            publisher.publish(trainer.weights)
            subscriber.sync(worker)
            assert equal(worker, trainer.weights)
            trainer.train_()

        return late(make, 1 + count * epoch_patches, compiled)


# Two seconds: two epochs of four patches in the interpreter, at both ends.
@pytest.mark.slow
def test_neither_end_compiles_after_the_third_version(
    device: str, compiled: list[Compiled], many_lanes: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(encode, "COPIES", 1 << 15)  # so that the number of copies falls from the first patch on
    trainer = Trainer(device, [(torch.bfloat16, 601), (torch.bfloat16, 400), (torch.float16, 500)])
    assert follow(trainer, 2, compiled, epoch_patches=4) == []
    assert {one.kernel for one in compiled} == OF_RUNS


# Epochs of three patches: half a second for one and the first of the next, a second for two.
@pytest.mark.parametrize(
    ("keep", "dtype", "versions"),
    [("host", torch.bfloat16, 5), *(slow(*case, 7) for case in (("device", torch.bfloat16), ("host", torch.float32)))],
)
def test_a_publisher_compiles_nothing_after_the_third_version_wherever_its_base_is(
    keep: Keep,
    dtype: torch.dtype,
    versions: int,
    device: str,
    compiled: list[Compiled],
    many_lanes: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(encode, "COPIES", 1 << 15)
    trainer = Trainer(device, [(dtype, 500), (dtype, 100)])
    with Publisher(MemoryStore(), codec="history", keep=keep, epoch_patches=3) as publisher:

        def make() -> None:
            publisher.publish(trainer.weights)
            trainer.train_()

        assert late(make, versions, compiled) == []
    assert {one.kernel for one in compiled} >= {"compare", "decide", "encode", "remember"}


@pytest.mark.slow
def test_a_comparison_in_pieces_compiles_nothing_after_the_third_version(
    device: str, compiled: list[Compiled], many_lanes: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pieces begin at any block of a pile."""
    monkeypatch.setattr(encode, "COPIES", 1 << 15)
    monkeypatch.setattr(streamed, "PIECE", 1)
    monkeypatch.setattr("pulsesync.format.layout.SMALL", 0)  # so that each tensor is a tile
    trainer = Trainer(device, [(torch.bfloat16, 500), (torch.bfloat16, 100), (torch.bfloat16, 300)])
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))])
    with Publisher(MemoryStore(), codec="history", keep="host", epoch_patches=3) as publisher:
        publisher.hold(optimizer)

        def make() -> None:
            future = publisher.publish(trainer.weights, wait=False)
            optimizer.step()
            future.result(30)
            trainer.train_()

        assert late(make, 7, compiled) == []


@pytest.mark.gpu
@pytest.mark.timeout(600)
def test_a_gpu_compiles_nothing_after_the_third_version_of_two_epochs(
    device: str, compiled: list[Compiled], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """With full epochs, several dtypes, and nothing in Triton's cache on disk."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    shapes = [
        (torch.bfloat16, 3_000_000),
        (torch.bfloat16, 5001),  # the next begins at no word of eight bytes
        (torch.bfloat16, 700),
        (torch.float32, 300_000),
        (torch.float16, 70_000),
    ]
    assert follow(Trainer(device, shapes), 2, compiled) == []
    assert {one.kernel for one in compiled} == OF_RUNS
