"""The snippets of docs/integrations/other_trainers.md: all compile, and the files among them publish and export.

The trainers themselves are not here. What a hook receives is replaced by the smallest object that has the attributes
which the snippet reads; pulsesync, torch and safetensors are real.
"""

import asyncio
import re
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pulsesync import Publisher, Subscriber, SyncReport
from tests.integrations.delta_writer import EngineCheckpoint, flat, write_checkpoint, write_delta

torch = pytest.importorskip("torch")
import safetensors.torch  # noqa: E402 - needs torch

PAGE = Path(__file__).parents[2] / "docs" / "integrations" / "other_trainers.md"
SNIPPETS = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
FILES = {match[1]: text for text in SNIPPETS if (match := re.match(r"# (pulse_\w+)\.py, ", text))}
Load = Callable[..., Any]


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Load]:
    """Return a function that runs a file of the page as a module, with a run in a temporary folder."""
    made: list[ModuleType] = []

    def load(name: str, rank: int = 0) -> ModuleType:
        monkeypatch.setattr(torch.distributed, "get_rank", lambda: rank)
        module = ModuleType(name)
        exec(compile(FILES[name], f"{PAGE.name}: {name}.py", "exec"), module.__dict__)
        assert module.RUN == "s3://bucket/run"  # what a user replaces
        module.RUN = str(tmp_path / "run")  # type: ignore[attr-defined]
        made.append(module)
        return module

    yield load
    for module in made:
        for name in ("publisher", "importer"):
            if (left := getattr(module, name, None)) is not None:
                left.close()


def make_model() -> Any:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 4)).bfloat16()
    model.config = SimpleNamespace(to_json_string=lambda: '{"model_type": "test"}')
    return model


def change(model: Any) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.view(-1)[0] += 1


def follow(location: Path, like: dict[str, Any]) -> tuple[SyncReport, dict[str, Any]]:
    weights = {name: torch.zeros_like(tensor.detach()) for name, tensor in like.items()}
    return Subscriber(str(location)).sync(weights, wait_s=30), weights


def assert_followed(location: Path, expected: dict[str, Any], version: int) -> None:
    report, weights = follow(location, expected)
    assert report.version == version
    for name, tensor in expected.items():
        assert torch.equal(weights[name].view(torch.int16), tensor.detach().view(torch.int16)), name


def parameters_of(model: Any) -> dict[str, Any]:
    return dict(model.named_parameters())


# The page


@pytest.mark.parametrize("text", SNIPPETS, ids=lambda text: text.splitlines()[0][:60])
def test_a_snippet_compiles(text: str) -> None:
    compile(text, str(PAGE), "exec")


def test_every_file_and_every_line_that_calls_one_is_on_the_page() -> None:
    assert sorted(FILES) == sorted(
        f"pulse_{name}" for name in ("openrlhf", "slime", "engine", "skyrl", "nemo", "prime")
    )
    for name, function in re.findall(r'__import__\("(\w+)"\)\.(\w+)', PAGE.read_text()):
        assert re.search(rf"^(def|class) {function}\b", FILES[name], re.MULTILINE)
    for name, function in re.findall(r"-(?:path|hook) (pulse_\w+)\.(\w+)", PAGE.read_text()):
        assert f"def {function}(" in FILES[name]


# The files


class GatheredParameters:
    """As DeepSpeed's: the parameter is whole inside."""

    whole = 0

    def __init__(self, parameters: list[Any]) -> None:
        assert len(parameters) == 1

    def __enter__(self) -> None:
        GatheredParameters.whole += 1

    def __exit__(self, *_: object) -> None:
        GatheredParameters.whole -= 1


@pytest.mark.parametrize("zero_stage", [2, 3])
def test_openrlhf(tmp_path: Path, load: Load, zero_stage: int, monkeypatch: pytest.MonkeyPatch) -> None:
    deepspeed: Any = ModuleType("deepspeed")
    deepspeed.zero = SimpleNamespace(GatheredParameters=GatheredParameters)
    monkeypatch.setitem(sys.modules, "deepspeed", deepspeed)
    model = make_model()
    args = SimpleNamespace(ds=SimpleNamespace(zero_stage=zero_stage, tensor_parallel_size=1))
    trainer = SimpleNamespace(
        actor=SimpleNamespace(model=SimpleNamespace(module=model)), strategy=SimpleNamespace(args=args)
    )
    hook = load("pulse_openrlhf")
    hook.publish(trainer)
    change(model)
    hook.publish(trainer)
    hook.publisher.flush()
    assert_followed(tmp_path / "run", parameters_of(model), 1)
    load("pulse_openrlhf", rank=1).publish(trainer)  # another rank gathers, and publishes nothing
    assert_followed(tmp_path / "run", parameters_of(model), 1)
    args.ds.tensor_parallel_size = 2
    with pytest.raises(NotImplementedError):
        hook.publish(trainer)


def states(count: int) -> list[dict[str, np.ndarray[Any, Any]]]:
    return [{"w": (np.arange(40) + (np.arange(40) % 7 == n) * n).astype(np.float32)} for n in range(count)]


def test_slime_and_miles(tmp_path: Path, load: Load) -> None:
    steps = states(3)
    write_checkpoint(tmp_path / "base", steps[0])
    args = SimpleNamespace(hf_checkpoint=str(tmp_path / "base"))
    hook = load("pulse_slime")
    updates = tmp_path / "updates"
    updates.mkdir()
    for version in (1, 2):
        folder = write_delta(updates, version, steps[version - 1], steps[version])
        hook.publish(args, str(updates), [])  # as at the start: no version
        hook.publish(args, str(folder), [])
    weights = {"w": np.zeros(40, np.float32)}
    report = Subscriber(str(tmp_path / "run")).sync(weights)
    assert (report.version, report.step) == (2, 2)
    assert np.array_equal(flat(weights["w"]), flat(steps[2]["w"]))
    other = load("pulse_slime", rank=1)
    other.publish(args, str(folder), [])
    assert other.importer is None


def test_an_engine_of_slime_that_follows_a_run(tmp_path: Path, load: Load) -> None:
    steps = states(4)
    with Publisher(str(tmp_path / "run")) as publisher:
        for state in steps:
            publisher.publish(state)
    hook, source = load("pulse_engine"), tmp_path / "source"
    hook.fetch(f"{source}/", 1)
    ranks = [threading.Thread(target=hook.fetch, args=(str(source), 3)) for _ in range(3)]
    for thread in ranks:
        thread.start()
    for thread in ranks:
        thread.join(30)
    assert sorted(path.name for path in source.glob("weight_v*")) == [f"weight_v{n:06d}" for n in range(4)]
    write_checkpoint(tmp_path / "base", steps[0])
    engine = EngineCheckpoint(tmp_path / "base")
    engine.pull(source, 3)
    assert np.array_equal(engine.tensors["w"], flat(steps[3]["w"]))


class Sender:
    """As SkyRL's: takes an iterable of chunks."""

    handles_prefix_cache_reset = True

    def __init__(self) -> None:
        self.sent: list[Any] = []
        self.options: dict[str, Any] = {}
        self.is_closed = False

    async def send_chunks(self, chunks: Any, weight_metadata: Any = None, **options: Any) -> None:
        self.sent, self.options = list(chunks), {"weight_metadata": weight_metadata, **options}

    def teardown(self) -> None:
        self.is_closed = True


@pytest.mark.parametrize("rank", [0, 1])
def test_skyrl(tmp_path: Path, load: Load, rank: int) -> None:
    model, inner = make_model(), Sender()
    sender = load("pulse_skyrl", rank).PublishingSender(inner)
    assert sender.handles_prefix_cache_reset
    for _ in range(2):
        change(model)
        chunks = [SimpleNamespace(names=[n], tensors=[p.data]) for n, p in model.named_parameters()]
        asyncio.run(sender.send_chunks(iter(chunks), weight_metadata={"names": []}, reset_prefix_cache=True))
        assert inner.sent == chunks
        assert inner.options == {"weight_metadata": {"names": []}, "reset_prefix_cache": True}
    sender.teardown()
    assert inner.is_closed
    if rank == 0:
        assert_followed(tmp_path / "run", parameters_of(model), 1)
    else:
        assert not (tmp_path / "run").exists()


def test_nemo_rl(tmp_path: Path, load: Load) -> None:
    model, hook = make_model(), load("pulse_nemo")
    for _ in range(2):
        change(model)
        hook.publish(model.named_parameters(), 0)
    hook.publisher.flush()
    assert_followed(tmp_path / "run", parameters_of(model), 1)
    gathering, other = iter(list(model.named_parameters())), load("pulse_nemo")
    other.publish(gathering, 1)
    assert next(gathering, None) is None  # took part in every gather
    assert other.publisher is None


@contextmanager
def stand_in_for_prime_rl(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    class FileSystemWeightBroadcast:
        def _notify_orchestrator(self, save_dir: Path) -> None:
            (save_dir / "STABLE").touch()

    weights: Any = ModuleType("prime_rl.transports.weights")
    weights.FileSystemWeightBroadcast = FileSystemWeightBroadcast
    transports: Any = ModuleType("prime_rl.transports")
    transports.weights = weights
    for name, module in {"prime_rl": ModuleType("prime_rl"), "prime_rl.transports": transports}.items():
        monkeypatch.setitem(sys.modules, name, module)
    yield weights


def test_prime_rl(tmp_path: Path, load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model()
    with stand_in_for_prime_rl(monkeypatch) as weights:
        hook = load("pulse_prime")
        assert weights.FileSystemWeightBroadcast is hook.PublishingBroadcast
        for step in (11, 12):
            change(model)
            folder = tmp_path / "broadcasts" / f"step_{step}"
            folder.mkdir(parents=True)
            tensors = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
            for number, (name, tensor) in enumerate(tensors.items(), 1):
                safetensors.torch.save_file({name: tensor}, folder / f"model-{number:05d}-of-00004.safetensors")
            weights.FileSystemWeightBroadcast()._notify_orchestrator(folder)
            assert (folder / "STABLE").exists()
    hook.publisher.flush()
    report, _ = follow(tmp_path / "run", tensors)
    assert report.step == 12
    assert_followed(tmp_path / "run", tensors, 1)
