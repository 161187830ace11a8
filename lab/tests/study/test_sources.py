"""Recordings from what people have: files, runs, checkpoints."""

import tracemalloc
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from lab.tests.recordings import made
from pulsesync.errors import FormatError, LimitError, MissingLinkError, NotFoundError, StateError
from pulsesync.format import layout as layouts
from pulsesync.publish.publisher import Publisher
from pulsesync.run import keys
from pulsesync.store import MemoryStore
from pulsesync_lab.study.recording import Recording, RecordingHeader, WatchedTensor
from pulsesync_lab.study.report.findings import full_bytes
from pulsesync_lab.study.sources import MeasureSettings, kind_of, open_recording, open_recordings
from pulsesync_lab.study.versions import Versions
from tests.hostile import forge
from tests.runs import SHAPES, Training, publish_steps

STEPS = 6


def changed(before: Mapping[str, Any], after: Mapping[str, Any]) -> tuple[int, ...]:
    """By tensor, in the order of names."""
    pairs = ((before[name].view(np.uint16), after[name].view(np.uint16)) for name in sorted(before))
    return tuple(int(np.count_nonzero(a != b)) for a, b in pairs)


def train(store: MemoryStore, **options: Any) -> list[tuple[int, ...]]:
    """Publish a run, and return what changed in each of its steps."""
    states = publish_steps(store, STEPS + 1, **options)
    return [changed(a, b) for a, b in pairwise(states)]


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


def measure(store: MemoryStore, **more: Any) -> Recording:
    return open_recordings(["memory://x"], MeasureSettings(open=lambda _: store, **more))["memory://x"]


# Runs


def test_replaying_a_run_counts_what_changed(store: MemoryStore) -> None:
    counts = train(store)
    recording = measure(store)
    assert [step.changed for step in recording.steps] == counts
    assert [step.step for step in recording.steps] == [1, 2, 3, 4, 5, 6]
    assert {tensor.name: tensor.shape for tensor in recording.header.tensors} == SHAPES


def test_a_run_whose_anchor_cannot_hold_its_weights_takes_no_memory_for_them(store: MemoryStore) -> None:
    version = forge.sample("big.anchor").version.copy()
    tensor = {"dtype": "BF16", "name": "main", "shape": [1 << 27]}
    forge.new_layout(version, {"bundles": [], "format": layouts.FORMAT, "tensors": [tensor], "ties": {}})
    (part,) = version.parts
    assert isinstance(part, forge.Part)
    part.place([(0, 0, bytes(16), forge.Dense([forge.Plane(b"x")]))])
    for key, data in version.objects().items():
        store.put(key, data)
    tracemalloc.start()
    try:
        with pytest.raises(LimitError, match="cannot contain"):
            measure(store)
        assert tracemalloc.get_traced_memory()[1] < 1 << 26
    finally:
        tracemalloc.stop()


def test_real_bytes_are_those_of_the_parts(store: MemoryStore) -> None:
    train(store, codec="gap")
    versions = Versions(store, None)
    real = [step.sizes["gap"].real for step in measure(store).steps]
    assert real == [record.size_bytes for record in versions.records if record.base]


@pytest.mark.usefixtures("a_tile_for_each_tensor")
@pytest.mark.parametrize("codec", ["gap", "context", "auto"])
def test_headers_alone_give_the_same_counts(store: MemoryStore, codec: str) -> None:
    counts = train(store, codec=codec)
    recording = measure(store, headers=True)
    assert [step.changed for step in recording.steps] == counts
    assert [tensor.name for tensor in recording.header.tensors] == sorted(SHAPES)


def test_headers_say_which_counts_are_only_bounds(store: MemoryStore) -> None:
    train(store, codec="dense")
    step = measure(store, headers=True).steps[0]
    assert step.facts["dense"] == step.all_changed > 0


def test_headers_predict_nothing(store: MemoryStore) -> None:
    train(store)
    assert {size.predicted for step in measure(store, headers=True).steps for size in step.sizes.values()} == {None}


def mixed(factor: float = 1.0) -> dict[str, Any]:
    """Mostly BF16, and some weights in FP32 whose change BF16 does not see."""
    fine = np.full(2000, factor, np.float32)
    return {"big": np.ones(5000, ml_dtypes.bfloat16), "fine": fine, "counts": np.arange(3)}


def test_of_a_run_in_several_dtypes_it_is_told_what_is_cast(store: MemoryStore) -> None:
    with Publisher(store) as publisher:
        for n in range(2):
            publisher.publish(mixed(1 + n * 2.0**-20), step=n)
    replayed, counted = measure(store), measure(store, headers=True)
    assert ([step.all_changed for step in replayed.steps], counted.steps[0].all_changed) == ([0], 2000)
    assert (replayed.header.dtype, replayed.header.facts["cast"]) == ("BF16", {"fine": "F32"})
    assert counted.header.facts["dtypes"] == {"fine": "F32", "counts": "I64"}
    assert [full_bytes(one) for one in (replayed, counted)] == [18_000, 18_024]


@pytest.mark.usefixtures("a_tile_for_each_tensor")
def test_headers_need_no_anchor(store: MemoryStore) -> None:
    counts = train(store)
    for entry in list(store.list("anchors/")):
        store.delete(entry.key)
    assert [step.changed for step in measure(store, headers=True).steps] == counts
    with pytest.raises(MissingLinkError, match="no anchor"):
        measure(store)


def test_of_a_run_only_the_newest_steps_are_looked_at(store: MemoryStore) -> None:
    counts = train(store)
    assert [step.changed for step in measure(store, limit=2).steps] == counts[-2:]


def test_a_version_that_is_gone_is_passed_over(store: MemoryStore) -> None:
    counts = train(store)
    store.delete(keys.manifest_key(0))  # the root; its anchor is still there
    assert [step.changed for step in measure(store).steps] == counts[1:]


def test_a_place_without_a_run_says_so(store: MemoryStore) -> None:
    with pytest.raises(NotFoundError, match="no version is published"):
        measure(store)


def test_progress_is_told_for_every_version(store: MemoryStore) -> None:
    train(store)
    told: list[tuple[int, int, str]] = []
    measure(store, progress=lambda *one: told.append(one))
    assert told == [(n + 1, 7, f"version {n}") for n in range(7)]


# Checkpoints


def save(folder: Path, training: Training, dtype: Any = ml_dtypes.bfloat16) -> None:
    folder.mkdir(parents=True)
    save_file({name: array.astype(dtype) for name, array in training.weights.items()}, folder / "model.safetensors")


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, list[tuple[int, ...]]]:
    training, counts = Training(), []
    for n in (1, 2, 10):
        before = {name: array.copy() for name, array in training.weights.items()}
        training.step()
        save(tmp_path / "ck" / f"checkpoint-{n}", training)
        counts.append(changed(before, training.weights))
    return tmp_path / "ck", counts[1:]


def test_a_folder_of_checkpoints_is_in_the_order_of_their_numbers(saved: tuple[Path, list[tuple[int, ...]]]) -> None:
    folder, counts = saved
    recording = open_recording([str(folder)])
    assert [step.step for step in recording.steps] == [2, 10]
    assert [step.changed for step in recording.steps] == counts
    assert recording.steps[0].facts["checkpoint"] == "checkpoint-2"


def test_checkpoints_that_are_named_stay_in_that_order(saved: tuple[Path, list[tuple[int, ...]]]) -> None:
    folder, counts = saved
    places = [str(folder / name) for name in ("checkpoint-10", "checkpoint-2/model.safetensors")]
    recording = open_recording(places)
    assert [step.step for step in recording.steps] == [1]
    assert [step.changed for step in recording.steps] == counts[1:]


def test_files_in_one_folder_are_checkpoints_too(tmp_path: Path) -> None:
    training = Training()
    for n in (9, 10):
        save_file(dict(training.weights), tmp_path / f"step_{n}.safetensors")
        training.step()
    assert [step.step for step in open_recording([str(tmp_path)]).steps] == [10]


def test_checkpoints_in_fp32_are_cast(tmp_path: Path) -> None:
    base = np.linspace(0.01, 1, 500, dtype=np.float32).astype(ml_dtypes.bfloat16).astype(np.float32)
    for n, factor in enumerate((1.0, 1 + 2.0**-11, 1 + 2.0**-7)):  # too small to be seen in BF16; then a unit or two
        save_file({"w": base * np.float32(factor)}, tmp_path / f"step_{n}.safetensors")
    recording = open_recording([str(tmp_path)])
    assert recording.header.dtype == "BF16"
    assert [step.all_changed for step in recording.steps] == [0, 500]
    assert sum(recording.steps[0].contrast["F32"]) == 500
    (half,) = open_recordings([str(tmp_path)], MeasureSettings("F16")).values()
    assert (half.header.dtype, half.header.contrast) == ("F16", ("BF16", "F8_E4M3", "F32"))
    assert half.steps[0].all_changed > 400


def test_checkpoints_of_other_tensors_are_refused(saved: tuple[Path, list[tuple[int, ...]]]) -> None:
    folder, _ = saved
    save_file({"norm": np.zeros(50, ml_dtypes.bfloat16)}, folder / "checkpoint-10" / "model.safetensors")
    with pytest.raises(StateError, match=r"layer\.0\.weight"):
        open_recording([str(folder)])


def test_of_checkpoints_in_several_dtypes_it_is_told_what_is_cast(tmp_path: Path) -> None:
    for n in range(2):
        save_file(mixed(1 + n * 2.0**-20), tmp_path / f"step_{n}.safetensors")
    recording = open_recording([str(tmp_path)])
    assert recording.header.facts["cast"] == {"fine": "F32"}
    assert full_bytes(recording) == 18_000


def test_checkpoints_without_tensors_are_refused(tmp_path: Path) -> None:
    for n in range(2):
        save_file({}, tmp_path / f"step_{n}.safetensors")
    with pytest.raises(StateError, match=r"step_0\.safetensors has no tensors"):
        open_recording([str(tmp_path)])


def test_one_checkpoint_is_not_enough(saved: tuple[Path, list[tuple[int, ...]]]) -> None:
    with pytest.raises(NotFoundError, match="two checkpoints at least"):
        open_recording([str(saved[0] / "checkpoint-1")])


def test_a_folder_of_nothing_says_what_could_be_there(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="no checkpoints, no run and no recording"):
        open_recording([str(tmp_path)])


# Recorded files


def test_a_recorded_file_is_read(tmp_path: Path) -> None:
    made().write(tmp_path / "study.jsonl")
    assert open_recording([str(tmp_path / "study.jsonl")]) == made()


def test_a_folder_gives_the_recordings_in_it_and_nothing_else(tmp_path: Path) -> None:
    made().write(tmp_path / "study.jsonl")
    (tmp_path / "steps.jsonl").write_text('{"step": 1}\n')
    assert open_recording([str(tmp_path)]) == made()


def test_the_files_of_ranks_are_added_up(tmp_path: Path) -> None:
    whole = made()
    for rank in range(2):
        mine = slice(2 * rank, 2 * rank + 2)
        tensors = whole.header.tensors[mine]
        steps = tuple(
            replace(one, changed=one.changed[mine], windows={}, contrast={}, gradients=()) for one in whole.steps
        )
        Recording(replace(whole.header, tensors=tensors), steps).write(tmp_path / f"study-rank{rank}.jsonl")
    places = [str(tmp_path / f"study-rank{rank}.jsonl") for rank in range(2)]
    joined = open_recording(places)
    assert [step.changed for step in joined.steps] == [step.changed for step in whole.steps]
    assert joined.size == whole.size


def test_one_rank_alone_is_not_taken_for_the_run(tmp_path: Path) -> None:
    whole = made()
    facts = {**whole.header.facts, "rank": 0, "ranks": 2}
    Recording(replace(whole.header, facts=facts), whole.steps).write(tmp_path / "study-rank0.jsonl")
    with pytest.raises(FormatError, match="1"):
        open_recording([str(tmp_path / "study-rank0.jsonl")])


def test_the_sum_of_ranks_beside_them_is_not_added_to_it(tmp_path: Path) -> None:
    for name in ("study", "study-rank0", "study-rank1"):
        made().write(tmp_path / f"{name}.jsonl")
    found = open_recordings([str(tmp_path)])
    whole = str(tmp_path / "study.jsonl")
    assert {name: recording.size for name, recording in found.items()} == {whole: 4000, f"{whole}, ranks": 8000}


def test_a_file_that_is_named_twice_is_read_once(tmp_path: Path) -> None:
    made().write(tmp_path / "study.jsonl")
    assert open_recording([str(tmp_path), str(tmp_path / "study.jsonl")]) == made()


def test_files_of_different_runs_stay_apart(tmp_path: Path) -> None:
    for name in ("one", "two"):
        made().write(tmp_path / f"{name}.jsonl")
    places = [str(tmp_path / f"{name}.jsonl") for name in ("one", "two")]
    assert list(open_recordings(places)) == places
    with pytest.raises(ValueError, match="expected one run, but found 2"):
        open_recording(places)


def test_of_a_recording_only_the_newest_steps_are_taken(tmp_path: Path) -> None:
    made().write(tmp_path / "study.jsonl")
    (found,) = open_recordings([str(tmp_path / "study.jsonl")], MeasureSettings(limit=1)).values()
    assert [step.step for step in found.steps] == [2]


def test_places_of_different_kinds_are_refused(tmp_path: Path) -> None:
    made().write(tmp_path / "study.jsonl")
    with pytest.raises(ValueError, match="recorded files and runs"):
        open_recordings([str(tmp_path / "study.jsonl"), "s3://bucket/run"])
    with pytest.raises(ValueError, match="got nothing"):
        open_recordings([])


def test_a_file_that_is_no_recording_is_refused(tmp_path: Path) -> None:
    (tmp_path / "steps.jsonl").write_text('{"step": 1}\n')
    with pytest.raises(FormatError):
        open_recording([str(tmp_path / "steps.jsonl")])
    with pytest.raises(NotFoundError):
        open_recording([str(tmp_path / "absent.jsonl")])


def test_kinds_are_told_by_what_is_there(tmp_path: Path) -> None:
    (tmp_path / "run" / "manifests").mkdir(parents=True)
    Recording(RecordingHeader("BF16", (WatchedTensor("w", (1,), 1, 1),)), ()).write(tmp_path / "a.jsonl")
    told = {str(tmp_path / "run"): "runs", "https://host/run": "runs", str(tmp_path / "a.jsonl"): "recorded files"}
    assert {place: kind_of(place) for place in told} == told
    assert kind_of(str(tmp_path)) == "recorded files"
    assert kind_of(str(tmp_path / "absent")) == "checkpoints"
