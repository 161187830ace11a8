"""Trainer and worker, end to end, over a folder."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from pulsesync import Slice
from pulsesync.errors import FormatError, StateError
from pulsesync.format import patch
from pulsesync.run import keys
from pulsesync.store import LocalStore
from pulsesync.testing import mutate, random_bits
from tests.publishers import Publisher
from tests.readers import Subscriber
from tests.runs import SHAPES, Training, equal, kept, publish_steps, version, worker


@pytest.fixture
def folder(tmp_path: Path) -> str:
    return str(tmp_path / "run")


@pytest.mark.parametrize("codec", ["auto", "history", "context", "gap", "dense"])
def test_a_worker_follows_a_trainer_bit_for_bit(folder: str, codec: patch.CodecName) -> None:
    training, held, sub = Training(), worker(), Subscriber(folder)
    with Publisher(folder, codec=codec) as pub:
        for step in range(6):
            report = pub.publish(training.weights, step=step)
            assert sub.sync(held).version == report.version == step
            assert equal(held, training.weights)
            sub.verify()
            training.step()


def test_every_dtype_travels(folder: str) -> None:
    rng = np.random.default_rng(0)
    types = [np.bool_, np.uint8, np.int8, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2, np.uint16, np.int16]
    types += [np.float16, ml_dtypes.bfloat16, np.uint32, np.int32, np.float32, np.uint64, np.int64, np.float64]
    shapes = [(), (0,), (3, 5), (200,), (2, 3, 4)]
    state = {
        f"{np.dtype(dtype).name}{shape}": random_bits(rng, np.dtype(f"u{np.dtype(dtype).itemsize}").type, shape).view(
            dtype
        )
        for dtype in types
        for shape in shapes
    }
    held = {name: np.zeros_like(array) for name, array in state.items()}
    sub = Subscriber(folder)
    with Publisher(folder) as pub:
        for density in (0.0, 0.1, 1.0):
            for array in state.values():
                bits = array.reshape(-1).view(f"u{array.itemsize}")
                bits[...] = mutate(rng, bits, density)
            pub.publish(state)
            sub.sync(held)
            assert all(held[name].tobytes() == state[name].tobytes() for name in state)


def test_a_grid_of_tiles_travels(folder: str) -> None:
    training, held, sub = Training(), worker(), Subscriber(folder)
    with Publisher(folder, grid={"layer.*": (3, 2)}, min_tile=100) as pub:
        for _ in range(4):
            pub.publish(training.weights)
            sub.sync(held)
            assert equal(held, training.weights)
            training.step()
    assert sub.state is not None
    assert len(sub.state.layout.tiles) == 9


def test_a_run_goes_on_over_epochs(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    training, held, sub = Training(), worker(), Subscriber(folder, epoch_patches=3)
    places = []
    with Publisher(folder, epoch_patches=3) as pub:
        for _ in range(9):
            pub.publish(training.weights)
            sub.sync(held)
            assert equal(held, training.weights)
            assert sub.position is not None
            places.append((sub.position.epoch, sub.position.index))
            training.step()
    assert places == [(0, 0), (0, 1), (0, 2), (0, 3), (1, 1), (1, 2), (1, 3), (2, 1), (2, 2)]


def test_a_late_worker_takes_all_versions_at_once(folder: str) -> None:
    states = publish_steps(folder, 6)
    held = worker()
    report = Subscriber(folder).sync(held)
    assert (report.version, report.path, report.applied) == (5, ("anchor", *["patch"] * 5), 6)
    assert equal(held, states[5])


def test_a_worker_that_restarts_with_any_weights_catches_up(folder: str) -> None:
    training, held = Training(), worker()
    with Publisher(folder) as pub:
        for _ in range(3):
            pub.publish(training.weights)
            Subscriber(folder).sync(held)
            assert equal(held, training.weights)
            training.step()
            held["norm"][7] = 3.0


def test_nothing_new_is_nothing_to_do(folder: str) -> None:
    publish_steps(folder, 1)
    sub, held = Subscriber(folder), worker()
    sub.sync(held)
    report = sub.sync(held)
    assert (report.version, report.path, report.changed) == (0, (), 0)
    assert report.fetched_bytes == len(LocalStore(folder).get(keys.manifest_key(0)))  # is it still the same run?


def test_publishing_without_a_change_makes_a_small_version(folder: str) -> None:
    training, held = Training(), worker()
    with Publisher(folder) as pub:
        pub.publish(training.weights)
        report = pub.publish(training.weights)
    assert (report.version, report.changed, report.density) == (1, 0, 0.0)
    assert report.payload_bytes < 1000
    assert Subscriber(folder).sync(held).path == ("anchor", "patch")
    assert equal(held, training.weights)


def test_reports_count_what_happened(folder: str) -> None:
    a, held = {"w": np.zeros(1000, np.float32)}, {"w": np.ones(1000, np.float32)}
    sub = Subscriber(folder)
    with Publisher(folder) as pub:
        first = pub.publish(a)
        assert (first.version, first.changed, first.total, first.full_bytes) == (0, 1000, 1000, 4000)
        sub.sync(held)
        a["w"][:7] = 2
        second, synced = pub.publish(a, step=3), sub.sync(held)
    assert (second.step, second.changed, second.density, second.coalesced) == (3, 7, 0.007, 0)
    assert (synced.step, synced.path, synced.changed, synced.replanned) == (3, ("patch",), 7, 0)
    local = LocalStore(folder).get(keys.manifest_key(0))  # is read again: is it still the same run?
    assert synced.fetched_bytes == second.payload_bytes + len(local)
    assert synced.digest == sub.verify()


def test_an_anchor_counts_every_weight_that_it_writes(folder: str) -> None:
    weights = {"w": np.ones((10, 100), np.float32), "x": np.ones(5, np.float32)}
    with Publisher(folder) as pub:
        pub.publish(weights)
    blank = {name: np.zeros_like(array) for name, array in weights.items()}
    report = Subscriber(folder).sync(blank)
    assert (report.path, report.changed) == (("anchor",), 1005)
    report = Subscriber(folder).sync(blank)
    assert (report.path, report.changed) == (("start",), 0)
    part = Subscriber(folder, slices={"w": Slice(rows=(2, 5)), "x": None})
    report = part.sync({"w": np.zeros((3, 100), np.float32)})
    assert (report.path, report.changed) == (("anchor",), 300)


def test_the_first_report_counts_its_anchor(folder: str) -> None:
    weights = {"w": random_bits(np.random.default_rng(0), np.uint16, (5000,)).view(np.float16)}
    with Publisher(folder) as pub:
        report = pub.publish(weights)
        assert 0 < pub.anchor_bytes < report.payload_bytes
    assert report.payload_bytes < sum(path.stat().st_size for path in Path(folder).rglob("*") if path.is_file())


def test_a_worker_in_another_process_agrees(folder: str) -> None:
    publish_steps(folder, 3)
    program = (
        "import sys, numpy as np, ml_dtypes; from pulsesync import Subscriber;"
        f"held = {{n: np.zeros(s, ml_dtypes.bfloat16) for n, s in {SHAPES!r}.items()}};"
        "sub = Subscriber(sys.argv[1]); sub.sync(held); print(sub.verify())"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1] / "src")}
    found = subprocess.run(
        [sys.executable, "-c", program, folder], env=environment, capture_output=True, text=True, check=True
    )
    assert found.stdout.strip() == version(LocalStore(folder), 2).digest


def test_the_publisher_keeps_a_copy_of_its_own(folder: str) -> None:
    weights, held, sub = {"w": np.zeros(5, np.float32)}, {"w": np.zeros(5, np.float32)}, Subscriber(folder)
    with Publisher(folder) as pub:
        pub.publish(weights)
        weights["w"] += 1
        assert pub.publish(weights).changed == 5
        weights["w"] += 1
        sub.sync(held)
    assert held["w"].tolist() == [1.0] * 5


def test_a_grid_takes_numbers_of_pieces_and_borders(folder: str) -> None:
    weights = {name: np.zeros((8, 6), np.float32) for name in ("even", "borders", "mixed", "whole")}
    grid: dict[str, Any] = {"even": (2, 3), "borders": ([1, 5], [4]), "mixed": (4, [3])}
    sub, held = Subscriber(folder), {n: w + 1 for n, w in weights.items()}
    with Publisher(folder, grid=grid, min_tile=1) as pub:
        pub.publish(weights)
        sub.sync(held)
        for flat in weights.values():
            flat += np.arange(48, dtype=np.float32).reshape(8, 6)
        pub.publish(weights)
        sub.sync(held)
    sub.verify()
    assert equal(held, weights)
    (layout,) = (Path(folder) / "layouts").iterdir()
    cuts = {t["name"]: (t.get("rows"), t.get("columns")) for t in json.loads(layout.read_bytes())["tensors"]}
    assert cuts == {"even": ([4], [2, 4]), "borders": ([1, 5], [4]), "mixed": ([2, 4, 6], [3]), "whole": (None, None)}


def test_borders_outside_a_tensor_are_refused(folder: str) -> None:
    with Publisher(folder, grid={"w": ([9], 1)}) as pub, pytest.raises(FormatError, match="'w'"):
        pub.publish({"w": np.zeros((4, 4), np.float32)})


def test_a_worker_that_lacks_a_tensor_is_refused_by_name(folder: str) -> None:
    publish_steps(folder, 1)
    held = worker()
    del held["norm"]
    with pytest.raises(StateError, match="norm"):
        Subscriber(folder).sync(held)


def test_a_worker_whose_tensors_are_tied_and_the_runs_are_not_is_refused(folder: str) -> None:
    with Publisher(folder) as pub:
        pub.publish({"a": np.zeros(4, np.float32), "b": np.ones(4, np.float32)})
    memory, sub = np.zeros(4, np.float32), Subscriber(folder)
    with pytest.raises(StateError):
        sub.sync({"a": memory, "b": memory})


# -- torch ---------------------------------------------------------------------------------------------------------


def models() -> tuple[Any, Any, Any]:
    torch = pytest.importorskip("torch")

    class Model(torch.nn.Module):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.embed = torch.nn.Embedding(20, 16)
            self.hidden = torch.nn.Linear(16, 16)
            self.norm = torch.nn.BatchNorm1d(16)
            self.head = torch.nn.Linear(16, 20, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, tokens: Any) -> Any:
            return self.head(self.norm(self.hidden(self.embed(tokens))))

    torch.manual_seed(0)
    return torch, Model().to(torch.bfloat16), Model().to(torch.bfloat16)


def test_a_torch_model_follows_another_while_it_learns(folder: str) -> None:
    torch, trained, served = models()
    optimizer = torch.optim.SGD(trained.parameters(), lr=0.05)
    sub = Subscriber(folder)
    with Publisher(folder) as pub:
        for step in range(4):
            pub.publish(trained, step=step)
            sub.sync(served)
            theirs, ours = trained.state_dict(), served.state_dict()
            for name in theirs:
                mine, yours = ours[name].reshape(-1), theirs[name].reshape(-1)
                assert torch.equal(mine.view(torch.uint8), yours.view(torch.uint8)), name
            assert served.head.weight.data_ptr() == served.embed.weight.data_ptr()
            sub.verify()
            loss = torch.nn.functional.cross_entropy(trained(torch.arange(20)), torch.arange(20).flip(0))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        trained.eval()
        pub.publish(trained)
    sub.sync(served.eval())
    assert torch.equal(trained(torch.arange(20)), served(torch.arange(20)))


def test_a_state_dict_made_anew_for_every_sync_goes_on_where_it_was(folder: str) -> None:
    torch, trained, served = models()
    sub = Subscriber(folder)
    with Publisher(folder) as pub:
        for _ in range(3):
            pub.publish(trained.state_dict())
            assert sub.sync(served.state_dict()).applied == 1
            with torch.no_grad():
                trained.hidden.weight += 1


def test_a_model_whose_tensors_were_replaced_is_followed_in_its_new_memory(folder: str) -> None:
    torch, trained, served = models()
    sub = Subscriber(folder)
    with Publisher(folder) as pub:
        pub.publish(trained)
        sub.sync(served)
        served.hidden.weight.data = torch.zeros_like(served.hidden.weight)
        with torch.no_grad():
            trained.hidden.weight += 1
        pub.publish(trained)
    assert sub.sync(served).path == ("anchor", "patch")
    assert torch.equal(trained.hidden.weight, served.hidden.weight)


def test_two_runs_side_by_side_do_not_meet(tmp_path: Path) -> None:
    first, second = publish_steps(str(tmp_path / "a"), 3), publish_steps(str(tmp_path / "b"), 3, Training(seed=1))
    one, other = worker(), worker()
    Subscriber(str(tmp_path / "a")).sync(one)
    Subscriber(str(tmp_path / "b")).sync(other)
    assert equal(one, first[2])
    assert equal(other, second[2])
    assert not equal(one, kept(other))


def test_reports_print_as_a_sentence(tmp_path: Path) -> None:
    weights = {"w": np.arange(1000, dtype=np.float32)}
    with Publisher(str(tmp_path)) as publisher:
        first = publisher.publish(weights, step=3)
        assert str(first).startswith("version 0, step 3: all 1,000 weights, ")
        weights["w"][:7] += 1
        assert str(publisher.publish(weights, step=4)).startswith("version 1, step 4: 7 of 1,000 weights changed, ")
    local = {"w": np.zeros(1000, dtype=np.float32)}
    subscriber = Subscriber(str(tmp_path))
    report = subscriber.sync(local)
    assert str(report).startswith("version 1, step 4: 1 anchor + 1 patch, ")
    assert " bytes, all weights written in " in str(report)
    assert f"digest {report.digest[:8]} verified" in str(report)
    assert str(subscriber.sync(local)) == "version 1, step 4: nothing new"
