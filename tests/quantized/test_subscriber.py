"""Quantised weights that follow a run: bit for bit what quantising all weights of each version gives.

Everything runs in host memory and on a device: a GPU, or Triton's interpreter where there is none.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from pulsesync import ClosedError, Publisher, StateError, Subscriber, VerificationError  # noqa: E402
from pulsesync.quantized import RECIPES, QuantizedSubscriber, quantize  # noqa: E402
from pulsesync.quantized.changes import FlatChanges  # noqa: E402
from pulsesync.state.host import HostBackend  # noqa: E402
from pulsesync.store import MemoryStore  # noqa: E402
from tests.backends import host_as_device  # noqa: E402
from tests.conftest import GPU  # noqa: E402

Tensors = dict[str, Any]
MATRICES = ("a.weight", "b.weight", "layers.0.q.weight")
BLOCKS = pytest.mark.parametrize("recipe", ["vllm-fp8-block"])
EACH_GROUP = pytest.mark.parametrize("recipe", ["vllm-fp8-tensor", "vllm-fp8-channel", "vllm-fp8-block"])


class Place:
    """Where a worker has its tensors."""

    def __init__(self, where: str) -> None:
        self.where = where

    def tensors(self, some: Tensors) -> Tensors:
        """Copies there; what has the same memory twice has it there as well."""
        moved = {tensor.data_ptr(): tensor.detach().clone().to(self.where) for tensor in some.values()}
        return {name: moved[tensor.data_ptr()] for name, tensor in some.items()}


SLOW_WITHOUT_GPU = () if GPU else pytest.mark.slow  # the interpreter takes 1 to 3 s for each of these tests


@pytest.fixture(params=["host", pytest.param("device", marks=SLOW_WITHOUT_GPU)])
def place(request: pytest.FixtureRequest) -> Iterator[Place]:
    if request.param == "host":
        yield Place("cpu")
    else:
        with on_device(request.getfixturevalue("device")) as place:
            yield place


@contextmanager
def on_device(where: str) -> Iterator[Place]:
    pytest.importorskip("triton")
    from tests.device import interpreter

    interpreter.mend()
    with host_as_device(where == "cpu"):
        yield Place(where)


class Trainer:
    """A run of a small model: matrices of odd shapes, one of them cut into tiles, and small tensors in bundles."""

    def __init__(self, place: Place, **options: Any) -> None:
        self.random = torch.Generator().manual_seed(1)
        shapes = {"a.weight": (150, 12), "b.weight": (7, 140), "layers.0.q.weight": (3, 5), "norm.weight": (70,)}
        self.weights = {name: self.draw(shape).bfloat16() for name, shape in shapes.items()}
        self.weights["bias"] = self.draw((9,))
        self.store = MemoryStore()
        self.place = place
        self.publisher = Publisher(self.store, grid={"a.weight": (2, 3)}, min_tile=1, codec="gap", **options)
        self.publish()

    def draw(self, shape: tuple[int, ...]) -> Any:
        return torch.randn(shape, generator=self.random)

    def publish(self) -> None:
        with host_as_device(False):  # from host memory: the interpreter would take seconds for a version
            self.publisher.publish(self.weights, step=0)

    def nudge(self, share: float = 0.02, by: float = 0.1) -> None:
        """Change some of the weights."""
        for name, tensor in self.weights.items():
            chosen = torch.rand(tensor.shape, generator=self.random) < share
            self.weights[name] = torch.where(chosen, tensor + by * self.draw(tensor.shape).to(tensor.dtype), tensor)
        self.publish()

    def set(self, name: str, index: tuple[int, int], value: float) -> None:
        self.weights[name][index] = value
        self.publish()

    def expected(self, recipe: str, names: Any = MATRICES) -> Tensors:
        """What the worker must have: everything quantised anew, where the worker does it."""
        return quantize(self.place.tensors(self.weights), recipe, names)

    def worker(self, recipe: str, names: Any = MATRICES) -> Tensors:
        """Tensors of a worker before its first sync."""
        return {name: torch.zeros_like(tensor) for name, tensor in self.expected(recipe, names).items()}


def assert_same(worker: Tensors, expected: Tensors) -> None:
    assert worker.keys() == expected.keys()
    for name, tensor in expected.items():
        a, b = (one.contiguous().view(-1).view(torch.uint8).cpu() for one in (worker[name], tensor))
        assert torch.equal(a, b), f"{name}: {int((a != b).sum())} of {a.numel()} bytes differ"


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_version_is_what_quantising_all_of_it_gives(recipe: str, place: Place) -> None:
    trainer = Trainer(place)
    worker = trainer.worker(recipe)
    with QuantizedSubscriber(trainer.store, recipe) as sub:
        assert sub.sync(worker).whole
        assert_same(worker, trainer.expected(recipe))
        for _ in range(3):
            trainer.nudge()
            report = sub.sync(worker)
            assert not report.whole
            assert report.version == sub.version == trainer.publisher.version
            assert_same(worker, trainer.expected(recipe))
            assert sub.verify() == report.digest == sub.digest


def test_a_device_follows_with_its_kernels(device: str) -> None:  # a second in the interpreter
    with on_device(device) as place:
        trainer = Trainer(place)
        worker = trainer.worker("vllm-fp8-block")
        with QuantizedSubscriber(trainer.store, "vllm-fp8-block") as sub:
            sub.sync(worker)
            trainer.nudge()
            assert not sub.sync(worker).whole
            assert_same(worker, trainer.expected("vllm-fp8-block"))


@EACH_GROUP
def test_only_weights_that_changed_are_quantised_where_scales_stay(recipe: str, place: Place) -> None:
    trainer = Trainer(place)
    worker = trainer.worker(recipe)
    with QuantizedSubscriber(trainer.store, recipe) as sub:
        sub.sync(worker)
        row = trainer.weights["a.weight"][5]
        smaller = row.abs() < row.abs().max()
        row[smaller] = 0.001
        trainer.publish()
        report = sub.sync(worker)
        assert (report.requantized, report.rescaled) == (int(smaller.sum()), 0)
        assert 0 < report.changed <= report.requantized
        assert_same(worker, trainer.expected(recipe))


@EACH_GROUP
def test_a_scale_follows_the_largest_weight_up_and_down(recipe: str, place: Place) -> None:
    trainer = Trainer(place)
    worker = trainer.worker(recipe)
    with QuantizedSubscriber(trainer.store, recipe) as sub:
        sub.sync(worker)
        for value in (1000.0, float("inf"), float("nan")):
            for now in (value, 2.0, 0.0):
                trainer.set("a.weight", (149, 11), now)
                report = sub.sync(worker)
                assert_same(worker, trainer.expected(recipe))
                assert now is not value or report.rescaled == 1, value
                sub.verify()


@BLOCKS
def test_groups_of_zeros_have_the_scale_of_zeros(recipe: str, place: Place) -> None:
    trainer = Trainer(place)
    worker = trainer.worker(recipe)
    with QuantizedSubscriber(trainer.store, recipe) as sub:
        sub.sync(worker)
        trainer.weights["b.weight"][:] = 0
        trainer.publish()
        sub.sync(worker)
        assert_same(worker, trainer.expected(recipe))


@BLOCKS
def test_several_versions_at_once_and_one_that_takes_changes_back(recipe: str, place: Place) -> None:
    trainer = Trainer(place)
    worker = trainer.worker(recipe)
    with QuantizedSubscriber(trainer.store, recipe) as sub:
        sub.sync(worker)
        before = {name: tensor.clone() for name, tensor in trainer.weights.items()}
        for _ in range(3):
            trainer.nudge()
        assert len(sub.sync(worker).plain.path) == 3
        assert_same(worker, trainer.expected(recipe))
        trainer.nudge()
        trainer.weights = before
        trainer.publish()
        sub.sync(worker)
        assert_same(worker, trainer.expected(recipe))


@EACH_GROUP
def test_a_roll_back_asks_no_store_and_gives_the_version_before(
    recipe: str, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = Trainer(place)
    worker = trainer.worker(recipe)
    with QuantizedSubscriber(trainer.store, recipe) as sub:
        sub.sync(worker)
        first, digest = place.tensors(worker), sub.digest
        trainer.nudge()
        trainer.set("a.weight", (0, 0), 50.0)
        sub.sync(worker)
        monkeypatch.setattr(MemoryStore, "get", None)
        assert sub.roll_back() == sub.version == 0
        assert_same(worker, first)
        assert sub.verify() == digest
        assert sub.roll_back() is None


@BLOCKS
def test_an_anchor_is_quantised_as_a_whole(recipe: str, place: Place) -> None:
    trainer = Trainer(place, anchor_every=2)
    worker = trainer.worker(recipe)
    with QuantizedSubscriber(trainer.store, recipe, undo=0) as sub:
        sub.sync(worker)
        for _ in range(2):
            trainer.nudge()
        sub.sync(worker)
        report = sub.sync(worker, version=0)  # back to where an anchor is
        assert report.whole
        assert report.plain.path == ("anchor",)
        report = sub.sync(worker)
        assert not report.whole
        assert_same(worker, trainer.expected(recipe))


@BLOCKS
def test_a_failed_commit_leaves_the_old_version_whole(
    recipe: str, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = Trainer(place)
    worker = trainer.worker(recipe)
    with QuantizedSubscriber(trainer.store, recipe) as sub:
        sub.sync(worker)
        before, digest = place.tensors(worker), sub.digest
        trainer.nudge(0.2)
        assert sub._derived is not None
        state = sub._derived.state.backend
        write, calls = type(state).write, []

        def failing(self: Any, changes: Any) -> None:
            calls.append(1)
            write(self, changes)
            if self is state and sum(1 for _ in calls) == 2:  # the mirror's is the first; then that of the tensors
                raise MemoryError

        monkeypatch.setattr(type(state), "write", failing)
        with pytest.raises(MemoryError):
            sub.sync(worker)
        assert_same(worker, before)
        assert (sub.version, sub.digest) == (0, digest)
        report = sub.sync(worker)
        assert not report.whole
        assert report.version == sub.version == 1
        assert_same(worker, trainer.expected(recipe))


@BLOCKS
def test_the_caller_is_asked_before_the_first_write(recipe: str, place: Place) -> None:
    class RefusedError(Exception):
        pass

    trainer = Trainer(place)
    worker, answers = trainer.worker(recipe), iter([False, True])

    def confirm() -> None:
        if next(answers):
            raise RefusedError

    with QuantizedSubscriber(trainer.store, recipe, confirm=confirm) as sub:
        sub.sync(worker)
        before = place.tensors(worker)
        trainer.nudge()
        with pytest.raises(RefusedError):
            sub.sync(worker)
        assert_same(worker, before)
        assert sub.version == 0


@BLOCKS
def test_what_something_else_wrote_is_found_and_made_anew(recipe: str, place: Place) -> None:
    trainer = Trainer(place)
    worker = trainer.worker(recipe)
    with QuantizedSubscriber(trainer.store, recipe) as sub:
        sub.sync(worker)
        worker["a.weight_scale_inv"].view(-1)[0] = 7
        with pytest.raises(VerificationError, match=r"other than a sync has written to 'a\.weight_scale_inv'"):
            sub.verify()
        assert sub.sync(worker).whole
        assert_same(worker, trainer.expected(recipe))
        worker["a.weight"].view(torch.uint8)[0, 0] ^= 1
        trainer.nudge()
        assert sub.sync(worker, verify=True).whole
        assert_same(worker, trainer.expected(recipe))


def test_tensors_that_share_a_scale_are_one_group(place: Place) -> None:
    """As the parts of a fused projection do, with one scale for all of it."""
    recipe, names = "vllm-fp8-tensor", ("a.weight", "b.weight")
    trainer = Trainer(place)
    worker = trainer.worker(recipe, names)
    worker["b.weight_scale"] = worker["a.weight_scale"]

    def expected() -> Tensors:
        weights = place.tensors(trainer.weights)
        fused = torch.cat([weights[name].view(-1) for name in names]).view(1, -1)
        q, scale = RECIPES[recipe].quantize(fused)
        sizes = [weights[name].numel() for name in names]
        parts = dict(zip(names, q.view(-1).split(sizes), strict=True))
        return {
            name: parts[name].view(tensor.shape) if name in parts else scale if "scale" in name else weights[name]
            for name, tensor in worker.items()
        }

    with QuantizedSubscriber(trainer.store, recipe) as sub:
        sub.sync(worker)
        assert_same(worker, expected())
        for value in (90.0, 0.5):
            trainer.nudge()
            trainer.set("b.weight", (1, 1), value)
            sub.sync(worker)
            assert_same(worker, expected())


@BLOCKS
def test_tied_tensors_can_be_quantised_under_one_name_and_plain_under_another(recipe: str, place: Place) -> None:
    trainer = Trainer(place)
    trainer.store = MemoryStore()
    trainer.publisher = Publisher(trainer.store)
    trainer.weights["head.weight"] = trainer.weights["b.weight"]
    trainer.publish()
    worker = trainer.worker(recipe, ("a.weight", "head.weight"))
    with QuantizedSubscriber(trainer.store, recipe) as sub:
        for _ in range(2):
            sub.sync(worker)
            assert_same(worker, trainer.expected(recipe, ("a.weight", "head.weight")))
            trainer.weights["b.weight"][3, 4:70] *= 3
            trainer.publish()


@BLOCKS
def test_the_mirror_can_be_in_host_memory(recipe: str, device: str) -> None:
    trainer = Trainer(Place("cpu"))
    place = Place(device)  # on a GPU, the worker's tensors are there
    worker = place.tensors(trainer.worker(recipe))
    with QuantizedSubscriber(trainer.store, recipe, plain="host") as sub:
        for _ in range(3):
            sub.sync(worker)
            assert_same(worker, quantize(place.tensors(trainer.weights), recipe, MATRICES))
            trainer.nudge()


@BLOCKS
def test_quantised_weights_can_be_published_by_the_trainer(recipe: str, place: Place) -> None:
    """Then the scales are tensors of the run, and the worker needs no recipe."""
    trainer, store = Trainer(place), MemoryStore()
    publisher = Publisher(store, codec="gap")
    worker = trainer.worker(recipe)
    with Subscriber(store) as sub:
        for _ in range(3):
            with host_as_device(False):
                publisher.publish(Place("cpu").tensors(trainer.expected(recipe)))
            sub.sync(worker)
            assert_same(worker, trainer.expected(recipe))
            trainer.nudge()


def test_what_does_not_fit_is_refused_by_name(place: Place) -> None:
    trainer = Trainer(place)
    recipe = "vllm-fp8-block"

    def refused(match: str, **others: Any) -> None:
        worker = {name: tensor for name, tensor in {**trainer.worker(recipe), **others}.items() if tensor is not None}
        with QuantizedSubscriber(trainer.store, recipe) as sub, pytest.raises(StateError, match=match):
            sub.sync(worker)

    where = {"device": place.where}
    refused("the run has tensor 'norm.weight', and this model does not", **{"norm.weight": None})
    refused("this model has tensor 'other', and the run does not", other=torch.zeros(3, **where))
    refused("scales of 'a.weight' must be a float32 tensor 'a.weight_scale_inv' of 2 × 1 numbers; it is missing",
            **{"a.weight_scale_inv": None})  # fmt: skip
    refused("it is torch.float32 \\(150, 1\\)", **{"a.weight_scale_inv": torch.zeros((150, 1), **where)})
    refused(
        "is torch.int8 in this worker and BF16 in the run",
        **{"a.weight": torch.zeros((150, 12), dtype=torch.int8, **where)},
    )
    refused("has shape \\(12, 150\\) in this worker", **{
        "a.weight": torch.zeros((12, 150), dtype=torch.float8_e4m3fn, **where),
        "a.weight_scale_inv": torch.zeros((2, 1), **where),
    })  # fmt: skip
    refused("pass its transpose", **{"a.weight": torch.zeros((12, 150), dtype=torch.float8_e4m3fn, **where).t()})
    refused("only matrices are quantised", **{"norm.weight": torch.zeros(70, dtype=torch.float8_e4m3fn, **where)})
    with QuantizedSubscriber(trainer.store, recipe) as sub, pytest.raises(StateError, match="use Subscriber instead"):
        sub.sync(place.tensors(trainer.weights))


def test_options_that_cannot_be_are_refused() -> None:
    with pytest.raises(ValueError, match="recipe must be one of 'vllm-fp8-tensor'"):
        QuantizedSubscriber(MemoryStore(), "fp8")
    with pytest.raises(ValueError, match="plain must be one of 'device', 'host'; got 'disk'"):
        QuantizedSubscriber(MemoryStore(), "vllm-fp8-block", plain="disk")
    with pytest.raises(ValueError, match="verify_every must be a number of syncs, 0 or more; got -1"):
        QuantizedSubscriber(MemoryStore(), "vllm-fp8-block", verify_every=-1)
    with pytest.raises(ValueError, match="must be names of matrices in the source; 'x' is not one"):
        quantize({"x": torch.zeros(3)}, "vllm-fp8-block", ["x"])


class TestMemoryThatIsShared:
    """Names that have one memory in the worker must have one in the run, and their scales too."""

    def refused(self, match: str, run: Tensors, worker: Tensors) -> None:
        store = MemoryStore()
        Publisher(store, codec="gap").publish(run)
        with QuantizedSubscriber(store, "vllm-fp8-channel") as sub, pytest.raises(StateError, match=match):
            sub.sync(worker)

    def test_by_tensors_that_the_run_has_apart(self) -> None:
        run = {name: torch.ones(4, 4).bfloat16() for name in ("a", "b")}
        worker = quantize({"a": run["a"], "b": run["a"]}, "vllm-fp8-channel", ["a", "b"])
        worker["b"] = worker["a"]
        self.refused("'b' and 'a' share memory in this worker, but not in the run", run, worker)

    def test_by_tensors_whose_scales_are_apart(self) -> None:
        shared = torch.ones(4, 4).bfloat16()
        worker = quantize({"a": shared, "b": shared}, "vllm-fp8-channel", ["a", "b"])
        worker["b"] = worker["a"]
        self.refused(
            "'b' and 'a' share memory in this worker, but their scales do not", {"a": shared, "b": shared}, worker
        )

    def test_by_scales_and_a_tensor_of_the_run(self) -> None:
        run = {"a": torch.ones(4, 4).bfloat16(), "a_scale": torch.ones(4)}
        worker = {"a": torch.zeros(4, 4).to(torch.float8_e4m3fn), "a_scale": torch.zeros(4)}
        self.refused("the scales of 'a' are 'a_scale', which is a tensor of the run", run, worker)


def test_scales_of_another_shape_are_refused() -> None:
    store = MemoryStore()
    Publisher(store).publish(run := {"a": torch.ones(300, 140).bfloat16()})
    worker = quantize(run, "vllm-fp8-block", ["a"])
    worker["a_scale_inv"] = worker["a_scale_inv"].t().contiguous()
    with QuantizedSubscriber(store, "vllm-fp8-block") as sub, pytest.raises(StateError, match="of 3 × 2 numbers"):
        sub.sync(worker)


HOST = Place("cpu")
BLOCK = "vllm-fp8-block"


def test_verify_every_finds_what_something_else_wrote() -> None:
    trainer = Trainer(HOST)
    worker = trainer.worker(BLOCK)
    with QuantizedSubscriber(trainer.store, BLOCK, verify_every=2) as sub:
        sub.sync(worker)
        worker["norm.weight"].zero_()
        assert sub.sync(worker).whole
        assert_same(worker, trainer.expected(BLOCK))


@pytest.mark.parametrize("by", ["sync", "verify"])
def test_what_was_quantised_from_a_damaged_mirror_is_made_anew(by: str) -> None:
    trainer = Trainer(HOST)
    worker = trainer.worker(BLOCK)
    with QuantizedSubscriber(trainer.store, BLOCK) as sub:
        sub.sync(worker)
        sub._mirror["a.weight"][3, 3] = 100.0
        worker = {name: tensor.clone() for name, tensor in worker.items()}  # other memory: quantised from the mirror
        sub.sync(worker)
        assert worker["a.weight_scale_inv"].max() > 0.1
        if by == "verify":
            with pytest.raises(VerificationError, match="something else has written to"):
                sub.verify()
        assert sub.sync(worker, verify=True).whole
        assert_same(worker, trainer.expected(BLOCK))


def test_a_roll_back_after_a_sync_that_was_refused_undoes_the_one_before() -> None:
    trainer = Trainer(HOST)
    worker, answers = trainer.worker(BLOCK), iter([None, None, KeyError])

    def confirm() -> None:
        if error := next(answers):
            raise error

    with QuantizedSubscriber(trainer.store, BLOCK, confirm=confirm) as sub:
        sub.sync(worker)
        first = HOST.tensors(worker)
        trainer.nudge()
        sub.sync(worker)
        trainer.nudge()
        with pytest.raises(KeyError):
            sub.sync(worker)
        assert sub.version == 1
        assert sub.roll_back() == sub.version == 0  # and the caller is not asked
        assert_same(worker, first)


def test_tensors_made_in_inference_mode_are_written() -> None:
    trainer = Trainer(HOST)
    with torch.inference_mode():
        worker = trainer.worker(BLOCK)
    with QuantizedSubscriber(trainer.store, BLOCK) as sub:
        for _ in range(2):
            sub.sync(worker)
            assert_same(worker, trainer.expected(BLOCK))
            trainer.nudge()


def test_groups_with_many_weights_and_a_new_scale_are_quantised_with_all_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("pulsesync.quantized.groups.CELLS", 256)
    trainer = Trainer(HOST)
    worker = trainer.worker("vllm-fp8-tensor")
    with QuantizedSubscriber(trainer.store, "vllm-fp8-tensor") as sub:
        sub.sync(worker)
        trainer.set("a.weight", (0, 0), 50.0)
        assert sub.sync(worker).whole
        assert_same(worker, trainer.expected("vllm-fp8-tensor"))
        trainer.nudge(0.001)
        assert not sub.sync(worker).whole
        assert_same(worker, trainer.expected("vllm-fp8-tensor"))


def test_a_mirror_that_fails_halfway_leaves_the_tensors_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = Trainer(HOST, anchor_every=1)
    worker = trainer.worker(BLOCK)
    with QuantizedSubscriber(trainer.store, BLOCK, undo=0) as sub:
        sub.sync(worker)
        trainer.nudge()
        sub.sync(worker)
        before = HOST.tensors(worker)
        with monkeypatch.context() as patched:
            patched.setattr(HostBackend, "write_blocks", lambda self, blocks: 1 / 0)
            with pytest.raises(VerificationError, match="the worker's tensors are unchanged: sync again") as raised:
                sub.sync(worker, version=0)
        assert not raised.value.torn
        assert_same(worker, before)
        sub.sync(worker)
        assert_same(worker, trainer.expected(BLOCK))


def test_what_is_closed_says_so_after_the_sync_that_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = Trainer(HOST)
    worker = trainer.worker(BLOCK)
    sub = QuantizedSubscriber(trainer.store, BLOCK)
    get = MemoryStore.get

    def closing(self: MemoryStore, *args: Any) -> bytes:
        sub.close()
        return get(self, *args)

    monkeypatch.setattr(MemoryStore, "get", closing)
    sub.sync(worker)
    assert_same(worker, trainer.expected(BLOCK))
    assert (sub.version, sub.digest) == (None, None)
    with pytest.raises(ClosedError, match="closed"):
        sub.sync(worker)


def test_threads_take_turns() -> None:
    trainer = Trainer(HOST)
    worker = trainer.worker(BLOCK)
    with QuantizedSubscriber(trainer.store, BLOCK) as sub, ThreadPoolExecutor(3) as pool:
        for _ in range(5):
            for done in [pool.submit(sub.sync, worker), pool.submit(sub.sync, worker, verify=True)]:
                done.result()
            sub.verify()
            assert_same(worker, trainer.expected(BLOCK))
            trainer.nudge()


def test_changes_of_any_number_of_tensors_are_sorted() -> None:
    owners = torch.tensor([(1 << 20) - 1, 131072, 5])
    some = FlatChanges(owners, torch.tensor([3, 2, 1 << 42]), *(torch.zeros(3, dtype=torch.int8) for _ in range(2)))
    assert some.sorted().owners.tolist() == [5, 131072, (1 << 20) - 1]
