"""Checkpoints and folders on mapped memory, against the safetensors library and transformers themselves."""

import json
import os
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from pulsesync import Publisher
from pulsesync.core.types import DTYPES, TensorSpec
from pulsesync.errors import FormatError, LimitError, NotFoundError, PulseError, UnsupportedError
from pulsesync.format import layout as layouts
from pulsesync.integrations.folder import HuggingFaceFolder
from pulsesync.state import checkpoint_files as files
from pulsesync.state.checkpoint_files import TensorFolder, open_checkpoint, plan_files
from pulsesync.state.views import new_tensors, view_bits

torch = pytest.importorskip("torch", reason="torch is not installed: nothing here is checked against it")
from safetensors.torch import load_file as load_torch  # noqa: E402
from safetensors.torch import save_file as save_torch  # noqa: E402


def weights(seed: int = 0) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    return {
        "a.weight": rng.normal(size=(12, 8)).astype(ml_dtypes.bfloat16),
        "b.bias": rng.normal(size=(7,)).astype(np.float32),
        "c.count": np.array(5, np.int64),
        "d.none": np.zeros((0, 4), np.float16),
        "e.flags": rng.integers(0, 2, 9).astype(bool),
    }


def as_torch(arrays: dict[str, Any]) -> dict[str, Any]:
    def one(array: Any) -> Any:
        if array.dtype == ml_dtypes.bfloat16:
            return torch.from_numpy(array.view(np.int16).copy()).view(torch.bfloat16)
        return torch.from_numpy(np.array(array))

    return {name: one(array) for name, array in arrays.items()}


def same_bits(a: Any, b: Any) -> bool:
    """Compare two states of any kind by name, dtype, shape and bits."""
    (left, _), (right, _) = view_bits(a), view_bits(b)
    return left.keys() == right.keys() and all(
        left[n].spec == right[n].spec and np.array_equal(left[n].flat, right[n].flat) for n in left
    )


def test_a_file_is_opened_as_it_was_saved_and_without_a_copy(tmp_path: Path) -> None:
    save_torch(as_torch(weights()), tmp_path / "x.safetensors")
    opened = open_checkpoint(tmp_path / "x.safetensors")
    assert same_bits(opened.tensors, weights())
    assert not opened.tensors["a.weight"].flags.owndata
    assert not opened.tensors["a.weight"].flags.writeable


def test_a_private_checkpoint_can_be_written_and_its_file_stays(tmp_path: Path) -> None:
    save_torch(as_torch(weights()), tmp_path / "x.safetensors")
    open_checkpoint(tmp_path / "x.safetensors", private=True).tensors["b.bias"][...] = 0
    assert same_bits(open_checkpoint(tmp_path / "x.safetensors").tensors, weights())


def test_weights_between_their_places_are_copied(tmp_path: Path) -> None:
    header = json.dumps({"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}).encode()
    header += b" " * ((1 - len(header)) % 8)
    data = np.array([1, 2], np.float32)
    (tmp_path / "x").write_bytes(len(header).to_bytes(8, "little") + header + data.tobytes())
    (array,) = open_checkpoint(tmp_path / "x").tensors.values()
    assert array.flags.aligned
    assert array.tolist() == [1, 2]


def test_a_folder_of_shards_is_one_checkpoint_with_its_companions(tmp_path: Path) -> None:
    first, second = {"a": np.ones(3)}, {"b": np.zeros((2, 2), np.float32)}
    save_file(first, tmp_path / "model-00001-of-00002.safetensors")
    save_file(second, tmp_path / "model-00002-of-00002.safetensors")
    names = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (tmp_path / files.INDEX).write_text(json.dumps({"weight_map": names}))
    taken = [
        "config.json",
        "generation_config.json",
        "tokenizer.model",
        "merges.txt",
        "vocab.txt",
        "chat_template.jinja",
    ]
    left = [
        "optimizer.bin",
        "modeling.py",
        "tokenizer.py",
        "trainer_state.json",
        "pulse.json",
        "README.md",
        ".config.json~",
    ]
    for name in (*taken, *left):
        (tmp_path / name).write_text(name)
    (tmp_path / "tokenizers").mkdir()
    opened = open_checkpoint(tmp_path)
    assert same_bits(opened.tensors, first | second)
    assert opened.files == {name: name.encode() for name in taken}


def damaged(path: Path, name: str, value: Any) -> None:
    table = {"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}
    table["w"][name] = value
    header = json.dumps(table).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [
        ("shape", [3], FormatError),
        ("shape", [-2], FormatError),
        ("shape", 2, FormatError),
        ("data_offsets", [0, 16], FormatError),
        ("data_offsets", [4, 12], FormatError),
        ("data_offsets", [0], FormatError),
        ("dtype", "F4", UnsupportedError),
        ("dtype", None, UnsupportedError),
    ],
)
def test_a_header_that_is_wrong_is_refused(tmp_path: Path, name: str, value: Any, error: type[PulseError]) -> None:
    damaged(tmp_path / "x", name, value)
    with pytest.raises(error):
        open_checkpoint(tmp_path / "x")


@pytest.mark.parametrize("data", [b"", b"abc", bytes(8), b"\xff" * 64, (9).to_bytes(8, "little") + b'{"w": 1}x'])
def test_what_is_no_safetensors_file_is_refused(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "x").write_bytes(data)
    with pytest.raises(FormatError):
        open_checkpoint(tmp_path / "x")


def test_folders_without_one_checkpoint_are_refused(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="no safetensors file"):
        open_checkpoint(tmp_path)
    for name in ("x.safetensors", "y.safetensors"):
        save_file({"w": np.ones(2)}, tmp_path / name)
    with pytest.raises(NotFoundError, match="no index"):
        open_checkpoint(tmp_path)
    with pytest.raises(NotFoundError):
        open_checkpoint(tmp_path / "z")
    index = tmp_path / files.INDEX
    index.write_text(json.dumps({"weight_map": {"w": "x.safetensors", "v": "y.safetensors"}}))
    with pytest.raises(FormatError, match="in two files"):
        open_checkpoint(tmp_path)
    index.write_text(json.dumps({"weight_map": {"w": "x.safetensors", "v": "x.safetensors"}}))
    with pytest.raises(FormatError, match="no file has"):
        open_checkpoint(tmp_path)
    index.write_text(json.dumps({"weight_map": {"w": "../x.safetensors"}}))
    with pytest.raises(FormatError, match="not in its folder"):
        open_checkpoint(tmp_path)


def test_a_companion_that_is_too_large_is_refused(tmp_path: Path) -> None:
    save_file({"w": np.ones(2)}, tmp_path / "model.safetensors")
    with (tmp_path / "tokenizer.json").open("wb") as file:
        file.truncate((1 << 28) + 1)
    with pytest.raises(LimitError):
        open_checkpoint(tmp_path)


def test_files_that_are_made_hold_every_dtype_and_load_with_safetensors(tmp_path: Path) -> None:
    layout = layouts.make(TensorSpec(f"t.{dtype}", dtype, (3, 5)) for dtype in DTYPES)
    plan = plan_files(layout)
    TensorFolder.create(tmp_path, plan)
    assert TensorFolder.fits(tmp_path, plan)
    folder = TensorFolder(tmp_path, plan)
    rng = np.random.default_rng(0)
    for array in folder.arrays.values():
        array.reshape(-1).view(np.uint8)[...] = rng.integers(0, 2, array.nbytes, np.uint8)
    folder.flush()
    loaded = load_torch(tmp_path / "model.safetensors")
    assert {name: str(view.spec.dtype) for name, view in view_bits(loaded)[0].items()} == {
        spec.name: spec.dtype for spec in layout.tensors
    }
    assert same_bits(loaded, folder.arrays)


def test_large_layouts_are_cut_into_shards_with_an_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "SHARD_BYTES", 400)
    layout = layouts.make(TensorSpec(f"t{n}", "BF16", (100,)) for n in range(5))
    plan = plan_files(layout)
    assert [shard.name for shard in plan.shards] == [f"model-0000{n}-of-00003.safetensors" for n in (1, 2, 3)]
    assert plan.index
    assert json.loads(plan.index)["metadata"] == {"total_size": 1000}
    TensorFolder.create(tmp_path, plan)
    (tmp_path / files.INDEX).write_bytes(plan.index)
    assert same_bits(open_checkpoint(tmp_path).tensors, new_tensors(layout.tensors))


def test_a_folder_fits_only_its_own_plan(tmp_path: Path) -> None:
    plans = [plan_files(layouts.make([TensorSpec(name, "F32", (4,))])) for name in "xy"]
    assert not TensorFolder.fits(tmp_path, plans[0])
    TensorFolder.create(tmp_path, plans[0])
    assert [TensorFolder.fits(tmp_path, plan) for plan in plans] == [True, False]
    folder = TensorFolder(tmp_path, plans[0])
    assert folder.in_place
    TensorFolder.create(tmp_path, plans[0])
    assert not folder.in_place


def test_a_file_that_was_truncated_is_not_in_place(tmp_path: Path) -> None:
    plan = plan_files(layouts.make([TensorSpec("x", "F32", (4,))]))
    TensorFolder.create(tmp_path, plan)
    folder, (shard,) = TensorFolder(tmp_path, plan), plan.shards
    os.truncate(tmp_path / shard.name, shard.size - 1)  # the same file, but to write to its last page is a bus error
    assert not folder.in_place


@pytest.mark.parametrize(
    ("names", "kept"),
    [
        (["lm_head.weight", "model.embed_tokens.weight"], "model.embed_tokens.weight"),
        (["decoder.embed_tokens.weight", "lm_head.weight", "shared.weight"], "shared.weight"),
        (["lm_head.weight", "transformer.wte.weight"], "transformer.wte.weight"),
        (["x.weight", "y.weight"], "x.weight"),
    ],
)
def test_of_tied_tensors_the_one_is_kept_that_loaders_look_for(names: list[str], kept: str) -> None:
    first, *others = sorted(names)
    layout = layouts.make([TensorSpec(first, "BF16", (2, 2))], dict.fromkeys(others, first))
    (shard,) = plan_files(layout).shards
    assert set(json.loads(shard.head[8:])) == {"__metadata__", kept}


def test_a_full_disk_is_said_before_anything_is_mapped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(PulseError, match="No space left"):
        TensorFolder.create(tmp_path, plan_files(layouts.make([TensorSpec("w", "F32", (4,))])))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Any:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed: from_pretrained UNTESTED")
    transformers.logging.disable_progress_bar()
    config = transformers.LlamaConfig(
        vocab_size=96,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
        dtype="bfloat16",
    )
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config).to(torch.bfloat16)


def loaded(folder: Path) -> Any:
    transformers = pytest.importorskip("transformers")
    return transformers.AutoModelForCausalLM.from_pretrained(folder.resolve())


@pytest.mark.timeout(180)  # the first one imports transformers
@pytest.mark.filterwarnings("ignore")  # what transformers warns of is not ours
@pytest.mark.parametrize("shard_bytes", [files.SHARD_BYTES, 4000])
@pytest.mark.parametrize("from_disk", [True, False])
def test_a_model_goes_through_a_run_and_is_loaded_by_transformers(
    llama: Any, tmp_path: Path, shard_bytes: int, from_disk: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "SHARD_BYTES", shard_bytes)
    with HuggingFaceFolder(str(tmp_path / "run"), tmp_path / "weights") as folder:
        for step in range(3):
            with torch.no_grad():
                llama.model.embed_tokens.weight[step] += 1
            llama.save_pretrained(tmp_path / "saved", max_shard_size="10KB")
            checkpoint = open_checkpoint(tmp_path / "saved")
            source = checkpoint.tensors if from_disk else llama  # whose state dict has the tie under both names
            with Publisher(str(tmp_path / "run"), files=checkpoint.files) as publisher:
                publisher.publish(source, step=step)
            flip = folder.update()
            assert flip
            again = loaded(tmp_path / "weights" / "current")
            assert same_bits(again.state_dict(), llama.state_dict())
            assert again.lm_head.weight.data_ptr() == again.model.embed_tokens.weight.data_ptr()
            assert same_bits(open_checkpoint(flip.folder).tensors, checkpoint.tensors)
