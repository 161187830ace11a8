"""The recorder: every number is compared with an oracle that keeps all states, and the training stays undisturbed."""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lab.tests.study import oracle
from pulsesync.errors import FormatError, PulseError, StateError
from pulsesync.state.sharding import Placed
from pulsesync_lab.study import Recorder, Recording
from pulsesync_lab.study.measure import choosing, counting_torch
from pulsesync_lab.study.measure.buffers import TorchBuffers
from pulsesync_lab.study.measure.holdings import FLOATS
from pulsesync_lab.study.recording import Step
from tests.backends import use_kernels
from tests.forked import Forked
from tests.processes import Fleet, fleet, group
from tests.tiers import slow

__all__ = ["fleet"]

SHAPES = {"embed": (40, 24), "norm": (24,), "layer.weight": (9, 7, 5), "scale": ()}
EXACT = ("changed", "again", "same_way", "up", "units", "by_class", "weights_by_class")


@contextmanager
def counted_by(way: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Count with numba, with numpy, or with torch as on a GPU."""
    with use_kernels("reference" if way == "numpy" else "cpu"), monkeypatch.context() as patched:
        if way == "torch":
            patched.setattr(
                choosing, "buffers_and_counting", lambda device: (TorchBuffers(device, on_host=False), counting_torch)
            )
        yield


def as_torch(states: list[oracle.State]) -> list[Any]:
    return [{name: torch.from_numpy(np.array(w)) for name, w in state.items()} for state in states]


def held_in(dtype: str, states: list[oracle.State], way: str) -> list[Any]:
    if way != "torch":
        return [{name: w.astype(oracle.FLOATS[dtype]) for name, w in state.items()} for state in states]
    kind = getattr(torch, FLOATS[dtype])
    return [{name: w.to(kind) for name, w in state.items()} for state in as_torch(states)]


def told(step: Step) -> dict[str, Any]:
    return {name: getattr(step, name) for name in EXACT}


QUICK = [("numba", "BF16"), ("numba", "F8_E4M3"), ("numba", "F32"), ("numpy", "BF16"), ("torch", "BF16")]


@pytest.mark.parametrize(
    ("way", "dtype"),
    QUICK + [slow(*case) for case in product(("numba", "numpy", "torch"), oracle.FLOATS) if case not in QUICK],
)
def test_every_count_of_every_step_is_what_the_oracle_says(
    way: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    states = oracle.adam_like(1, 6, SHAPES, lr=3e-2 if dtype in oracle.LARGEST else 3e-5)
    contrast = tuple(oracle.FLOATS)
    if dtype in oracle.LARGEST:  # the weights are stored in this dtype: finer values are not known
        states = [{n: w.astype(oracle.FLOATS[dtype]).astype(np.float32) for n, w in one.items()} for one in states]
        contrast = tuple(d for d in contrast if oracle.MANTISSA[d] <= oracle.MANTISSA[dtype])
    with counted_by(way, monkeypatch):
        recorder = Recorder(dtype=dtype, contrast=tuple(oracle.FLOATS), windows=(1, 2, 4))
        fed = held_in(dtype, states, way) if dtype in oracle.LARGEST else as_torch(states) if way == "torch" else states
        steps = [recorder.feed(state) for state in fed]
    assert steps[0] is None
    for n, step in enumerate(steps[1:], start=1):
        assert step is not None
        assert step.step == n - 1
        assert told(step) == oracle.step(states[: n + 1], dtype)
        assert step.windows == {k: oracle.since(states[: n + 1], k, dtype) for k in (1, 2, 4) if k <= n}
        expected = {d: oracle.since(states[: n + 1], 1, d, states[0]) for d in contrast}
        assert step.contrast == expected
        predicted = step.sizes["plain"].predicted
        assert predicted is not None
        assert predicted >= 4 * step.all_changed
        assert step.sizes["plain"].real is None
    assert recorder.recording.size == sum(w.size for w in states[0].values())


def test_long_windows_slide(monkeypatch: pytest.MonkeyPatch) -> None:
    states = oracle.adam_like(2, 40, {"w": (64, 5)})
    recorder = Recorder(contrast=())
    for n, state in enumerate(states):
        step = recorder.feed(state)
        if n in (31, 32, 33, 40):
            assert step is not None
            assert step.windows == {k: oracle.since(states[: n + 1], k, "BF16") for k in (1, 2, 4, 8, 16, 32) if k <= n}


@pytest.mark.parametrize("way", ["numba", "numpy", "torch"])
def test_awkward_bits_are_compared_like_others(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    values = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 1e-45, -1e-40, 1.0], np.float32)
    if way == "torch":
        values[4] = 3.0  # torch writes NaN in another way than numpy
    states = [{"w": np.repeat(values, 8)}, {"w": np.tile(values, 8)}, {"w": np.repeat(values, 8)}]
    with counted_by(way, monkeypatch):
        recorder = Recorder()
        steps = [recorder.feed(state) for state in (as_torch(states) if way == "torch" else states)]
    for n in (1, 2):
        assert told(steps[n]) == oracle.step(states[: n + 1], "BF16")  # type: ignore[arg-type]
    assert steps[1].contrast["F32"] == (8 * 7,)  # type: ignore[union-attr]


def test_tensors_larger_than_a_chunk_are_counted_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pulsesync_lab.study.measure.buffers.NumpyBuffers.chunk", 100)
    states = oracle.adam_like(3, 2, {**SHAPES, "empty": (0, 4)})
    recorder = Recorder()
    steps = [recorder.feed(state) for state in states]
    assert told(steps[2]) == oracle.step(states, "BF16")  # type: ignore[arg-type]


# Hooks


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(37, 24)
        self.up = torch.nn.Linear(24, 40)
        self.head = torch.nn.Linear(24, 37, bias=False)
        self.head.weight = self.embed.weight
        self.unused = torch.nn.Parameter(torch.ones(5))
        self.frozen = torch.nn.Parameter(torch.ones(3), requires_grad=False)
        with torch.no_grad():
            for weight in self.parameters():
                weight.mul_(0.1)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        up: torch.Tensor = self.up(self.embed(tokens))
        head: torch.Tensor = self.head(self.embed(tokens))
        return up.square().mean() + head.square().mean()


def train(
    steps: int, recorder: Recorder | None = None, seed: int = 0, make: Any = torch.optim.AdamW, **options: Any
) -> tuple[Net, list[oracle.State], list[oracle.State], Any]:
    """Train a net; return it, its states and gradients, and what the random numbers after it are."""
    torch.manual_seed(seed)
    net = Net()
    names = {name: p for name, p in net.named_parameters() if p.requires_grad}
    optimizer = make(
        [
            {"params": [net.up.weight, net.frozen]},
            {"params": [p for name, p in names.items() if name != "up.weight"], "lr": 1e-3},
        ],
        lr=1e-4,
        **options,
    )
    if recorder is not None:
        recorder.attach(optimizer, net)
    order = ["up.weight", *(name for name in names if name != "up.weight")]
    states = [{name: names[name].detach().numpy().copy() for name in order}]
    slopes = []
    for _ in range(steps):
        loss = net(torch.randint(0, 12, (4, 9)))
        optimizer.zero_grad()
        loss.backward()
        grads = {n: names[n].grad for n in order}
        slopes.append({n: np.zeros(names[n].shape) if g is None else g.numpy() for n, g in grads.items()})
        optimizer.step()
        states.append({name: names[name].detach().numpy().copy() for name in order})
    return net, states, slopes, torch.rand(3)


@pytest.mark.parametrize("way", ["numba", "torch"])
def test_hooks_see_what_the_optimizer_did(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with counted_by(way, monkeypatch):
        recorder = Recorder(contrast=("F32", "F16"))
        _, states, slopes, _ = train(5, recorder)
        recording = recorder.close()
    assert [t.name for t in recording.header.tensors] == list(states[0])
    assert len(recording.steps) == 5
    fed = Recorder(contrast=("F32", "F16"))
    for n, state in enumerate(states):
        by_hand = fed.feed(state)
        if by_hand is None:
            continue
        step = recording.steps[n - 1]
        assert told(step) == oracle.step(states[: n + 1], "BF16") == told(by_hand)
        assert step.windows == by_hand.windows
        assert step.contrast == by_hand.contrast
        assert step.gradients == tuple(int((g != 0).sum()) for g in slopes[n - 1].values())
        assert step.lr == 1e-4
        rates = {name: np.float32(1e-4 if name == "up.weight" else 1e-3) for name in state}  # of its group
        moves = np.concatenate([((state[name] - states[n - 1][name]) / rates[name]).reshape(-1) for name in state])
        keys = np.floor(2 * np.log2(np.abs(moves[moves != 0])).astype(np.float64))
        assert sum(step.moved.values()) == moves.size == recording.header.sampled
        assert step.moved[-254] == moves.size - keys.size > 0
        far = sum(k * c for k, c in step.moved.items() if k != -254)
        assert abs(far - keys.sum()) <= 3  # a rounded logarithm at an edge
    facts = recording.header.facts
    assert facts["optimizer"] == "AdamW"
    assert facts["betas"] == [0.9, 0.999]
    assert facts["masters"] == "F32"
    assert facts["torch"] == torch.__version__


@pytest.mark.parametrize("make", [torch.optim.AdamW, torch.optim.SGD])
def test_a_run_is_the_same_with_and_without_it(make: Any) -> None:
    recorder = Recorder(encode_every=2)
    net, _, _, after = train(4, recorder, make=make)
    other, _, _, after_too = train(4, make=make)
    assert len(recorder.recording.steps) == 4
    for (name, a), (_, b) in zip(net.named_parameters(), other.named_parameters(), strict=True):
        assert torch.equal(a.view(torch.int32), b.view(torch.int32)), name
        assert (a.grad is None) == (b.grad is None)
        assert a.grad is None or b.grad is None or torch.equal(a.grad, b.grad)
    assert torch.equal(after, after_too)


def test_what_happens_to_weights_before_the_first_step_is_not_counted() -> None:
    net = Net()
    optimizer = torch.optim.SGD(net.up.parameters(), lr=0.0)
    recorder = Recorder().attach(optimizer, net)
    with torch.no_grad():
        net.up.weight += 1
    optimizer.step()
    assert recorder.recording.steps[0].all_changed == 0
    assert recorder.recording.steps[0].gradients == (0, 0)


def test_closures_names_of_the_optimizer_and_letting_go() -> None:
    weight = torch.nn.Parameter(torch.ones(8, 3).T)  # not contiguous
    optimizer = torch.optim.SGD([("mine", weight)], lr=0.1)

    def closure() -> torch.Tensor:
        weight.grad = torch.ones_like(weight)
        return weight.sum()

    with Recorder().attach(optimizer) as recorder:
        optimizer.step(closure)
    optimizer.step(closure)
    (step,) = recorder.recording.steps
    assert step.changed == (24,)
    assert [tensor.name for tensor in recorder.recording.header.tensors] == ["mine"]


def test_weights_held_in_bf16_have_no_masters() -> None:
    weight = torch.nn.Parameter(torch.full((100,), 0.5, dtype=torch.bfloat16))
    optimizer = torch.optim.SGD([weight], lr=1e-3)
    recorder = Recorder().attach(optimizer)
    weight.grad = torch.ones_like(weight)
    optimizer.step()  # a thousandth of 1 is less than half a unit of 0.5 downwards, which is 2^-10
    weight.grad *= 2
    optimizer.step()
    assert [step.changed for step in recorder.recording.steps] == [(100,), (100,)]
    assert recorder.recording.header.contrast == ("F8_E4M3",)  # what finer ones would have done nobody knows
    assert set(recorder.recording.steps[1].contrast) == {"F8_E4M3"}
    assert recorder.recording.steps[1].moved == {}
    assert recorder.recording.header.facts["masters"] == "BF16"


def test_weights_that_are_rounded_after_each_step_have_no_masters_if_so_told() -> None:
    recorder = Recorder(facts={"masters": "BF16"})
    train(2, recorder)
    header = recorder.recording.header
    assert header.facts["masters"] == "BF16"
    assert header.contrast == ("F8_E4M3",)
    assert recorder.recording.steps[1].moved == {}


def test_of_f16_weights_nothing_finer_is_told_and_of_a_mixture_everything() -> None:
    for kinds, expected in (((np.float16,), ("F16", "F8_E4M3")), ((np.float16, np.float32), ("F16", "F8_E4M3", "F32"))):
        recorder = Recorder()
        for n in range(2):
            recorder.feed({kind.__name__: np.full(4, n, kind) for kind in kinds})
        assert recorder.recording.header.contrast == expected


def test_updates_over_several_steps_are_not_told_in_learning_rates() -> None:
    recorder = Recorder(every=2)
    train(4, recorder)
    assert [step.moved for step in recorder.recording.steps] == [{}, {}]


def test_a_group_that_stands_still_has_no_updates_to_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    for way in ("numba", "numpy", "torch"):
        one, two = torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.ones(5))
        groups: list[dict[str, Any]] = [{"params": [one], "lr": 0.0}, {"params": [two]}]
        optimizer = torch.optim.SGD(groups, lr=0.5)
        with counted_by(way, monkeypatch):
            recorder = Recorder().attach(optimizer)
            one.grad, two.grad = torch.ones(3), torch.ones(5)
            optimizer.step()
        assert recorder.recording.steps[0].moved == {0: 5}


class NoRate(torch.optim.Optimizer):
    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    def step(self, closure: Any = None) -> Any:
        with torch.no_grad():
            for weight in self.param_groups[0]["params"]:
                weight -= weight.grad


def test_an_optimizer_without_a_learning_rate_is_recorded() -> None:
    weight = torch.nn.Parameter(torch.ones(4))
    optimizer = NoRate([weight])
    recorder = Recorder().attach(optimizer)
    weight.grad = torch.ones(4)
    optimizer.step()
    (step,) = recorder.recording.steps
    assert (recorder.fault, step.changed, step.lr, step.moved) == (None, (4,), None, {})


@pytest.mark.parametrize("how", ["added", "unfrozen"])
def test_parameters_that_come_later_are_a_fault(how: str) -> None:
    one, two = torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.ones(3), requires_grad=False)
    optimizer = torch.optim.SGD([one] if how == "added" else [one, two], lr=0.5)
    recorder = Recorder().attach(optimizer)
    one.grad = torch.ones(3)
    optimizer.step()
    two.requires_grad_(True)
    if how == "added":
        optimizer.add_param_group({"params": [two]})
    with pytest.warns(RuntimeWarning, match="1 parameters were added or unfrozen"):
        optimizer.step()
    assert isinstance(recorder.fault, StateError)
    assert len(recorder.close().steps) == 1


def test_a_note_that_is_no_number_does_not_end_a_run() -> None:
    weight = torch.nn.Parameter(torch.ones(4))
    recorder = Recorder().attach(torch.optim.SGD([weight], lr=1.0))
    with pytest.warns(RuntimeWarning, match="a note could not be recorded"):
        recorder.note(loss=torch.ones(3))
    assert recorder.fault is None


@pytest.mark.parametrize("how", ["deleted", "cut"])
def test_a_file_that_was_lost_does_not_end_a_run(how: str, tmp_path: Path) -> None:
    path = tmp_path / "study.jsonl"
    weight = torch.nn.Parameter(torch.ones(4))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    with Recorder(path).attach(optimizer) as recorder:
        weight.grad = torch.ones(4)
        optimizer.step()
        if how == "deleted":
            path.unlink()
        else:
            path.write_text("")
    with pytest.raises((FormatError, FileNotFoundError)):
        recorder.close()


def test_sparse_gradients_are_read() -> None:
    table = torch.nn.Embedding(10, 4, sparse=True)
    torch.nn.init.constant_(table.weight, 0.1)
    optimizer = torch.optim.SparseAdam(table.parameters(), lr=1e-2)
    recorder = Recorder().attach(optimizer, table)
    table(torch.tensor([1, 3])).sum().backward()
    optimizer.step()
    assert recorder.recording.steps[0].gradients == (8,)
    assert recorder.recording.steps[0].changed == (8,)


def test_a_fault_in_a_hook_is_a_warning_and_training_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    net = Net()
    optimizer = torch.optim.SGD(net.up.parameters(), lr=0.1)
    recorder = Recorder(tmp_path / "a" / "study.jsonl").attach(optimizer, net)

    def full(*_: Any) -> None:
        raise OSError("no space left")

    monkeypatch.setattr("pulsesync_lab.study.measure.writing.RecordingWriter.add", full)
    before = net.up.weight.detach().clone()
    net(torch.arange(9)).backward()
    with pytest.warns(RuntimeWarning, match="recording stopped: OSError"):
        optimizer.step()
    optimizer.step()
    assert not torch.equal(before, net.up.weight)
    assert isinstance(recorder.fault, OSError)
    assert recorder.close().steps == ()


# Less than everything


def test_a_sample_alone_tells_of_the_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    states = oracle.adam_like(4, 3, {"a": (300, 40), "b": (77,)})
    recorder = Recorder(whole=False, sample=3000)
    steps = [recorder.feed(state) for state in states]
    header = recorder.recording.header
    assert [t.size for t in header.tensors] == [t.sampled for t in header.tensors]
    assert 1500 < header.size <= 3002
    strides = recorder._meters[0].strides
    thin = [
        {name: w.reshape(-1)[s.start :: s.step] for s, (name, w) in zip(strides, state.items(), strict=True)}
        for state in states
    ]
    assert told(steps[3]) == oracle.step(thin, "BF16")  # type: ignore[arg-type]
    assert steps[3].windows[2] == oracle.since(thin, 2, "BF16")  # type: ignore[union-attr]


def test_a_sample_beside_the_whole_is_about_right() -> None:
    states = oracle.adam_like(5, 4, {"a": (500, 300), "b": (200, 300)})
    recorder = Recorder(sample=30_000)
    step = [recorder.feed(state) for state in states][-1]
    assert step is not None
    assert told(step) == oracle.step(states, "BF16")
    share = step.all_changed / recorder.recording.size
    assert sum(step.windows[1]) / recorder.recording.header.sampled == pytest.approx(share, rel=0.1)


def test_with_every_steps_in_between_are_told_as_one() -> None:
    states = oracle.adam_like(6, 7, SHAPES)
    recorder = Recorder(every=3)
    steps = [recorder.feed(state, loss=n) for n, state in enumerate(states)]
    assert [n for n, step in enumerate(steps) if step is not None] == [3, 6]
    assert told(steps[6]) == oracle.step(states[0:7:3], "BF16")  # type: ignore[arg-type]
    assert steps[6].step == 5  # type: ignore[union-attr]
    assert steps[6].facts == {"loss": 6}  # type: ignore[union-attr]
    recorder = Recorder(every=2)
    _, states, _, _ = train(5, recorder)
    assert [step.step for step in recorder.recording.steps] == [1, 3]
    assert told(recorder.recording.steps[1]) == oracle.step(states[0:5:2], "BF16")


# Sizes


def test_real_patches_are_made_when_asked() -> None:
    states = oracle.adam_like(7, 4, {"a": (700, 300), "b": (64,)}, lr=1e-5)
    recorder = Recorder(encode_every=1)
    step = [recorder.feed(state) for state in states][-1]
    assert step is not None
    assert set(step.sizes) == {"plain", "gap", "context", "history", "dense"}
    real = {codec: size.real for codec, size in step.sizes.items()}
    assert real["plain"] == 6 * step.all_changed
    assert real["history"] < real["context"] < real["gap"] < real["dense"]  # type: ignore[operator]
    thinner = Recorder(encode_every=2)
    steps = [thinner.feed(state) for state in states]
    assert [None if s is None else s.sizes["gap"].real for s in steps][1::2] == [None, None]
    assert steps[4].sizes["gap"].real == real["gap"]  # type: ignore[union-attr]
    assert steps[4].sizes["history"].real is None  # type: ignore[union-attr]


def test_hot_weights_are_those_below_the_cheapest_cut() -> None:
    states = oracle.adam_like(9, 2, {"a": (700, 300)}, lr=1e-7)
    recorder = Recorder()
    step = [recorder.feed(state) for state in states][-1]
    assert step is not None
    counted, total = step.weights_by_class, sum(step.weights_by_class.values())

    def cost(cut: int) -> int:
        hot = sum(64 * ((n + 32) // 64) for c, n in counted.items() if c < cut)
        return hot + 1024 * sum(n for c, n in step.by_class.items() if c >= cut)

    cut = min(range(257), key=cost)
    assert step.hot == sum(n for c, n in counted.items() if c < cut) / total
    assert 0.01 < step.hot < 0.99


# Files


def test_a_file_says_the_same_and_can_be_read_at_any_time(tmp_path: Path) -> None:
    states = oracle.adam_like(8, 3, SHAPES)
    path = tmp_path / "new" / "study.jsonl"
    in_memory, recorder = Recorder(facts={"seed": 8}), Recorder(path, facts={"seed": 8})
    for n, state in enumerate(states):
        recorder.note(reward=np.float32(0.5), loss=torch.tensor(2.0))
        in_memory.note(reward=0.5, loss=2.0)
        recorder.feed(state)
        in_memory.feed(state)
        if n:
            assert len(Recording.read(path).steps) == n  # as one would find it after a crash
    a, b = recorder.close(), in_memory.close()
    assert a.header == b.header
    assert a.header.facts["seed"] == 8
    assert [told(s) for s in a.steps] == [told(s) for s in b.steps]
    assert a.steps[0].facts == {"reward": 0.5, "loss": 2.0}
    assert recorder.close() == a
    with pytest.raises(PulseError, match="already exists"):
        Recorder(path)
    with pytest.raises(PulseError, match="cannot write"):
        Recorder(path / "below.jsonl")


def test_a_second_recorder_on_a_file_is_refused_at_once(tmp_path: Path) -> None:
    path = tmp_path / "study.jsonl"
    first = Recorder(path)
    with pytest.raises(PulseError, match="already exists"):
        Recorder(path)
    assert first.close().steps == ()
    assert not path.exists()  # nothing was recorded
    Recorder(path).close()


@pytest.mark.parametrize("dtype", ["F8_E4M3", "F8_E5M2"])
def test_fp8_takes_weights_that_are_held_in_it(dtype: str) -> None:
    with pytest.raises(StateError, match=r"'a' is F32, which would need a scale .* and contrast="):
        Recorder(dtype=dtype).feed({"a": np.ones(4, np.float32)})
    mixed = {"w": np.ones(40, oracle.FLOATS[dtype]), "norm": np.ones(4, np.float32)}
    assert Recorder(dtype=dtype).feed(mixed) is None


def test_what_cannot_be_is_refused_at_once() -> None:
    with pytest.raises(ValueError, match="got 'I8'"):
        Recorder(contrast=("I8",))
    with pytest.raises(ValueError, match="at least 1"):
        Recorder(every=0)
    with pytest.raises(ValueError, match="needs whole=True"):
        Recorder(whole=False, encode_every=1)
    with pytest.raises(TypeError, match="a fact must be"):
        Recorder().note(what=object())
    for nothing in ({}, {"a": np.arange(4)}):
        with pytest.raises(StateError, match="nothing to compare"):
            Recorder().feed(nothing)
    with pytest.raises(StateError, match="must be a tensor"):
        Recorder().feed({"a": "text"})
    with pytest.raises(StateError, match="expected a module"):
        Recorder().feed(3)
    with pytest.raises(StateError, match="all of numpy or all of torch"):
        Recorder().feed({"a": torch.ones(2), "b": np.ones(2)})


def test_a_recorder_is_for_one_run() -> None:
    net = Net()
    optimizer = torch.optim.SGD(net.up.parameters(), lr=0.1)
    recorder = Recorder().attach(optimizer, net)
    with pytest.raises(PulseError, match="one optimizer only"):
        recorder.attach(torch.optim.SGD(net.embed.parameters(), lr=0.1), net)
    recorder.close()
    with pytest.raises(PulseError, match="closed"):
        recorder.feed(net)


@pytest.mark.parametrize(
    ("later", "said"),
    [
        ({"a": np.ones(4)}, "'b' is no longer there"),
        ({"a": np.ones(4), "b": np.ones(2), "c": np.ones(1)}, "'c' was not there before"),
        ({"a": np.ones(4), "b": np.ones(3)}, r"'b' had shape \(2,\) before and has \(3,\) now"),
    ],
)
def test_a_state_with_other_tensors_is_refused(later: Any, said: str) -> None:
    recorder = Recorder()
    recorder.feed({"a": np.ones(4), "b": np.ones(2)})
    with pytest.raises(StateError, match=said):
        recorder.feed(later)


def test_modules_are_fed_with_ties_once_and_without_what_is_no_float() -> None:
    net = Net()
    net.register_buffer("count", torch.tensor(3))
    recorder = Recorder()
    recorder.feed(net, step=10)
    with torch.no_grad():
        net.embed.weight += 1
    step = recorder.feed(net, step=20, reward=1)
    names = [tensor.name for tensor in recorder.recording.header.tensors]
    assert sorted(names) == ["embed.weight", "frozen", "unused", "up.bias", "up.weight"]
    assert step is not None
    assert (step.step, step.facts, step.all_changed) == (20, {"reward": 1}, 37 * 24)


def test_arrays_need_no_torch() -> None:
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "import numpy as np\nfrom pulsesync_lab.study import Recorder\n"
        "r = Recorder(); r.feed({'a': np.ones(9)}); print(r.feed({'a': np.ones(9) * 2}).changed)"
    )
    with Forked(code, kernels=True) as process:
        assert process.wait(60) == 0, process.stderr.read()
        assert process.stdout.read() == "(9,)\n"


def held_in_copies(rank: int, size: int, folder: str, out: str) -> list[str]:
    with group(folder, "one", rank, size):
        weight = torch.nn.Parameter(torch.ones(4))
        optimizer = torch.optim.SGD([weight], lr=1.0)
        with Recorder(out).attach(optimizer) as recorder:
            weight.grad = torch.ones(4)
            optimizer.step()
        return [tensor.name for tensor in recorder.recording.header.tensors]


def test_a_rank_that_holds_nothing_but_copies_writes_its_header_alone(fleet: Fleet, tmp_path: Path) -> None:
    assert fleet.run(held_in_copies, 2, out=str(tmp_path / "study.jsonl")) == [["group0.0"], []]
    parts = [Recording.read(tmp_path / f"study-rank{rank}.jsonl") for rank in range(2)]
    assert [(part.header.facts["rank"], part.header.facts["ranks"]) for part in parts] == [(0, 2), (1, 2)]
    assert parts[1].steps == ()
    joined = Recording.join(parts)
    assert (joined.header.tensors, joined.steps) == (parts[0].header.tensors, parts[0].steps)
    with pytest.raises(FormatError, match="rank 1 of 2 ranks is missing"):
        Recording.join(parts[:1])


def test_other_devices_are_counted_in_torch() -> None:
    buffers, module = choosing.buffers_and_counting("meta")
    assert module is counting_torch
    assert not buffers.on_host  # type: ignore[union-attr]


# Shards


def sharded(rank: int, size: int, folder: str, out: str) -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor, Replicate

    with group(folder, "one", rank, size):
        torch.manual_seed(0)
        net = Net()
        fully_shard(net.up, mesh=init_device_mesh("cpu", (size,)))  # both ranks have all other parameters in full
        parameters = [p for p in net.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(parameters, lr=1e-4)
        with Recorder(out, contrast=("F16", "F32")).attach(optimizer, net):
            for step in range(4):
                torch.manual_seed(step)  # the same on every rank: gradients need no sum
                optimizer.zero_grad()
                net(torch.randint(0, 37, (4, 9))).backward()
                optimizer.step()
        copies = Recorder(Path(out).with_name("copies.jsonl"))
        mesh = init_device_mesh("cpu", (size,))
        for n in range(3):
            whole, part = torch.full((4,), float(n)), torch.full((2, 3), float(n))
            everywhere = DTensor.from_local(whole.clone(), mesh, [Replicate()])
            copies.feed({"a": whole, "b": everywhere, "c": Placed(part, (4, 3), rows=(2 * rank, 2 * rank + 2))})
        return copies.close().steps[-1].changed


def unsharded() -> Recording:
    torch.manual_seed(0)
    net = Net()
    optimizer = torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], lr=1e-4)
    with Recorder(contrast=("F16", "F32")).attach(optimizer, net) as recorder:
        for step in range(4):
            torch.manual_seed(step)
            optimizer.zero_grad()
            net(torch.randint(0, 37, (4, 9))).backward()
            optimizer.step()
        return recorder.close()


def test_what_the_ranks_of_a_sharded_run_record_adds_up(fleet: Fleet, tmp_path: Path) -> None:
    assert fleet.run(sharded, 2, out=str(tmp_path / "study.jsonl")) == [(4, 4, 6), (6,)]  # copies by the first alone
    parts = [Recording.read(tmp_path / f"study-rank{rank}.jsonl") for rank in range(2)]
    assert parts[1].size == 20 * 24 + 20  # its half of the one layer that is sharded, and no copies
    joined, alone = Recording.join(parts), unsharded()
    order = [[t.name for t in joined.header.tensors].index(t.name) for t in alone.header.tensors]
    assert {t.name: (t.shape, t.size) for t in joined.header.tensors} == {
        t.name: (t.shape, t.size) for t in alone.header.tensors
    }
    assert len(joined.steps) == len(alone.steps) == 4
    for ours, theirs in zip(joined.steps, alone.steps, strict=True):
        for name in (*EXACT[1:], "moved"):
            assert getattr(ours, name) == getattr(theirs, name), name
        for a, b in [
            (ours.changed, theirs.changed),
            (ours.gradients, theirs.gradients),
            *((ours.windows[k], theirs.windows[k]) for k in theirs.windows),
            *((ours.contrast[d], theirs.contrast[d]) for d in theirs.contrast),
        ]:
            assert tuple(a[n] for n in order) == b
