"""What is known of a model, from its weights and from its config.json."""

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from pulsesync.errors import FormatError, NotFoundError, UnsupportedError
from pulsesync_lab.study.measure.buffers import LARGEST
from pulsesync_lab.study.predict import models
from pulsesync_lab.study.predict.models import largest_normal, normal_classes, read_model, scale_of, shapes_of

QWEN_7B = {
    "model_type": "qwen2",
    "hidden_size": 3584,
    "vocab_size": 152064,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "intermediate_size": 18944,
    "tie_word_embeddings": False,
}
LLAMA_1B = {
    "model_type": "llama",
    "hidden_size": 2048,
    "vocab_size": 128256,
    "num_hidden_layers": 16,
    "head_dim": 64,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 8192,
    "tie_word_embeddings": True,
}
QWEN3_MOE = {
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "vocab_size": 151936,
    "num_hidden_layers": 48,
    "head_dim": 128,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "tie_word_embeddings": False,
}
MIXTRAL = {
    "model_type": "mixtral",
    "hidden_size": 4096,
    "vocab_size": 32000,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "num_local_experts": 8,
}
GEMMA3_1B = {
    "model_type": "gemma3_text",
    "hidden_size": 1152,
    "vocab_size": 262144,
    "num_hidden_layers": 26,
    "head_dim": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "intermediate_size": 6912,
}


@pytest.mark.parametrize(
    ("config", "weights"),
    [
        (QWEN_7B, 7_615_616_512),
        (LLAMA_1B, 1_235_814_400),
        (QWEN3_MOE, 30_532_122_624),
        (MIXTRAL, 46_702_792_704),
        (GEMMA3_1B, 999_885_952),
    ],
)
def test_shapes_add_up_to_the_published_number_of_weights(config: dict[str, Any], weights: int) -> None:
    assert sum(int(np.prod(shape)) for shape in shapes_of(config)) == weights


def write_config(folder: Path, config: dict[str, Any]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_a_config_is_read_by_file_and_by_folder_and_says_what_it_assumes(tmp_path: Path) -> None:
    folder = write_config(tmp_path / "qwen", QWEN_7B | {"initializer_range": 0.03})
    model = read_model(folder)
    assert model == read_model(folder / "config.json")
    assert (model.name, model.size, model.tensors, model.assumed) == ("qwen", 7_615_616_512, 339, True)
    assert "0.03" in model.source


def test_a_model_of_text_inside_another_is_found(tmp_path: Path) -> None:
    outer = {"model_type": "gemma3", "text_config": {**GEMMA3_1B}, "vision_config": {"hidden_size": 1}}
    assert read_model(write_config(tmp_path, outer)).size == 999_885_952


def test_normal_weights_are_spread_as_normal_weights_are() -> None:
    drawn = (np.random.default_rng(0).standard_normal(1_000_000) * 0.02).astype(np.float32)
    found = np.bincount(models.classes_of(drawn), minlength=256)
    told = normal_classes(0.02, 1_000_000)
    assert sum(told.values()) == 1_000_000
    for number in range(115, 124):
        assert told[number] == pytest.approx(found[number], rel=0.05, abs=50)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    words = np.random.default_rng(0)
    matrix = (words.standard_normal((512, 512)) * 0.02).astype(np.float32)
    save_file({"matrix": matrix, "norm": np.ones(512, np.float32), "ids": np.arange(8)}, tmp_path / "model.safetensors")
    return write_config(tmp_path, QWEN_7B)


def test_a_checkpoint_is_counted_and_its_config_ignored(checkpoint: Path) -> None:
    told: list[float] = []
    model = read_model(checkpoint, progress=told.append)
    assert (model.size, model.tensors, model.assumed) == (512 * 512 + 512, 2, False)
    assert model.weights_by_class[127] == 512  # ones
    assert told[-1] == 1
    assert not model.rounded  # it is in FP32
    assert read_model(checkpoint, "F32").rounded


def test_a_sample_gives_nearly_the_same(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = read_model(checkpoint)
    monkeypatch.setattr(models, "SAMPLE", 1 << 16)
    monkeypatch.setattr(models, "RUN", 1 << 8)
    some = read_model(checkpoint / "model.safetensors")
    assert "one in 4" in some.source
    assert some.size == whole.size
    assert some.weights_by_class[121] == pytest.approx(whole.weights_by_class[121], rel=0.05)


@pytest.mark.parametrize("dtype", ["F8_E4M3", "F8_E5M2"])
def test_for_fp8_each_tensor_is_scaled_to_the_largest_value(checkpoint: Path, dtype: str) -> None:
    model = read_model(checkpoint, dtype)
    words = np.random.default_rng(0)
    matrix = (words.standard_normal((512, 512)) * 0.02).astype(np.float32)
    scale = LARGEST[dtype] / np.abs(matrix).max()
    found = np.bincount(models.classes_of((matrix * np.float32(scale)).ravel(), dtype))
    norms, matrices = sorted(model.by_scale)
    assert (norms, matrices) == pytest.approx((LARGEST[dtype], scale))
    assert model.by_scale[matrices] == {c: found[c] for c in np.flatnonzero(found)}
    assert list(model.by_scale[norms].values()) == [512]
    assert sum(model.weights_by_class.values()) == model.size == 512 * 512 + 512


def test_other_dtypes_have_no_scales(checkpoint: Path) -> None:
    assert read_model(checkpoint).by_scale == {}
    assert scale_of(np.array([0.1]), "BF16") == 1


def test_a_config_for_fp8_is_scaled_too(tmp_path: Path) -> None:
    model = read_model(write_config(tmp_path, LLAMA_1B), "F8_E4M3")
    assert model.size == 1_235_814_400
    assert min(model.by_scale) == 448  # norms of one
    assert max(model.by_scale) == pytest.approx(448 / (0.02 * 5.5), rel=0.1)
    assert model.weights_by_class[0] < 0.001 * model.size  # hardly any are subnormal


def test_the_largest_of_normal_weights_is_as_large_as_drawn_ones() -> None:
    drawn = [np.abs(np.random.default_rng(seed).standard_normal(10_000)).max() for seed in range(101)]
    assert largest_normal(10_000) == pytest.approx(float(np.median(drawn)), rel=0.03)


def test_tensors_of_about_one_scale_are_counted_together_under_their_mean(tmp_path: Path) -> None:
    tensors = {"a": np.full(300, 0.1, np.float32), "b": np.full(100, 0.09, np.float32), "c": np.zeros(7, np.float32)}
    save_file(tensors, tmp_path / "model.safetensors")
    found = sorted(read_model(tmp_path, "F8_E4M3").by_scale)
    assert found == pytest.approx([1.0, 0.75 * 4480 + 0.25 * 448 / 0.09], rel=1e-5)


def test_a_checkpoint_in_fp8_already_is_refused(tmp_path: Path) -> None:
    save_file({"a": np.ones(8, ml_dtypes.float8_e4m3fn)}, tmp_path / "model.safetensors")
    with pytest.raises(UnsupportedError, match="scales are not known"):
        read_model(tmp_path, "F8_E4M3")


def test_what_cannot_be_read_is_refused_with_a_hint(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="give a folder"):
        read_model(tmp_path / "nothing")
    with pytest.raises(NotFoundError, match="neither"):
        read_model(tmp_path)
    with pytest.raises(UnsupportedError, match="give a checkpoint instead"):
        read_model(write_config(tmp_path / "a", {"model_type": "mamba"}))
    with pytest.raises(FormatError, match="hidden_size"):
        read_model(write_config(tmp_path / "b", {"model_type": "llama"}))
    save_file({"ids": np.arange(8)}, tmp_path / "a" / "model.safetensors")
    with pytest.raises(UnsupportedError, match="quantised"):
        read_model(tmp_path / "a")
