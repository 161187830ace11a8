"""Merged weights are those of merge_and_unload, bit for bit, and nothing of the model is written."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest

REASON = "needs the packages of Hugging Face: make test-trl runs it"
pytest.importorskip("transformers", reason=REASON)
peft = pytest.importorskip("peft", reason=REASON)

import torch  # noqa: E402 - after what skips the module

from pulsesync import Publisher  # noqa: E402
from pulsesync.errors import StateError  # noqa: E402
from pulsesync.integrations import peft as adapters  # noqa: E402
from pulsesync.integrations.folder import HuggingFaceFolder  # noqa: E402
from pulsesync.integrations.pretrained import checkpoint_files  # noqa: E402
from tests.integrations.hf import models  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),  # PEFT's own, of tied weights and merging
    pytest.mark.filterwarnings("ignore::FutureWarning"),  # transformers', of what PEFT still uses
    pytest.mark.timeout(180),
]

ATTENTION = ["q_proj", "v_proj"]
LORA: dict[str, Any] = {"r": 4, "target_modules": ATTENTION}


def lora(model: Any, **options: Any) -> Any:
    return trained(peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", **{**LORA, **options})))


def trained(model: Any) -> Any:
    models.train_a_step(model)
    return model


def two_adapters(active: list[str]) -> Any:
    model = lora(models.llama())
    model.add_adapter("second", peft.LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["k_proj", "q_proj"]))
    model.base_model.set_adapter(active)
    return trained(model)


CASES = {
    "linear layers": lambda: lora(models.llama()),
    "all linear layers": lambda: lora(models.llama(), target_modules="all-linear"),
    "rank patterns": lambda: lora(
        models.llama(), rank_pattern={"q_proj": 2}, alpha_pattern={"v_proj": 32}, use_rslora=True
    ),
    "BF16 base, FP32 adapter": lambda: lora(models.llama().to(torch.bfloat16)),
    "BF16 base and adapter": lambda: trained(
        peft.get_peft_model(
            models.llama().to(torch.bfloat16),
            peft.LoraConfig(task_type="CAUSAL_LM", **LORA),
            autocast_adapter_dtype=False,
        )
    ),
    "modules_to_save": lambda: lora(models.llama(), modules_to_save=["lm_head", "norm"]),
    "modules_to_save, tied": lambda: lora(models.qwen2(), modules_to_save=["embed_tokens"]),
    "modules_to_save, kept tied": lambda: lora(
        models.qwen2(), modules_to_save=["embed_tokens"], ensure_weight_tying=True
    ),
    "tied head": lambda: lora(models.qwen2()),
    "tied head as target": lambda: lora(models.qwen2(), target_modules=["q_proj", "lm_head"]),
    "embeddings": lambda: lora(models.llama(), target_modules=["q_proj", "embed_tokens"]),
    "embeddings, tied": lambda: lora(models.qwen2(), target_modules=["q_proj", "embed_tokens"]),
    "bias lora_only": lambda: lora(models.qwen2(), bias="lora_only"),
    "bias all": lambda: lora(models.qwen2(), bias="all"),
    "lora_bias": lambda: lora(models.qwen2(), lora_bias=True),
    "Conv1D": lambda: lora(models.gpt2(), target_modules=["c_attn", "c_proj"], fan_in_fan_out=True),
    "DoRA": lambda: lora(models.llama(), use_dora=True),
    "DoRA of Conv1D": lambda: lora(models.gpt2(), target_modules=["c_attn"], fan_in_fan_out=True, use_dora=True),
    "trainable tokens": lambda: lora(models.qwen2(), trainable_token_indices=[3, 5]),
    "parameters of experts": lambda: lora(
        models.mixtral(), target_modules=["q_proj"], target_parameters=["mlp.experts.gate_up_proj"]
    ),
    "first of two adapters": lambda: two_adapters(["default"]),
    "second of two adapters": lambda: two_adapters(["second"]),
    "two adapters at once": lambda: two_adapters(["default", "second"]),
    "IA3": lambda: trained(
        peft.get_peft_model(
            models.llama(),
            peft.IA3Config(
                task_type="CAUSAL_LM", target_modules=[*ATTENTION, "down_proj"], feedforward_modules=["down_proj"]
            ),
        )
    ),
    "LoHa": lambda: trained(peft.get_peft_model(models.llama(), peft.LoHaConfig(r=4, target_modules=ATTENTION))),
    "LoKr": lambda: trained(peft.get_peft_model(models.llama(), peft.LoKrConfig(r=4, target_modules=ATTENTION))),
    "OFT": lambda: trained(
        peft.get_peft_model(models.llama(), peft.OFTConfig(oft_block_size=4, r=0, target_modules=ATTENTION))
    ),
    "BOFT": lambda: trained(
        peft.get_peft_model(models.llama(), peft.BOFTConfig(boft_block_size=4, target_modules=["q_proj"]))
    ),
    "HRA": lambda: trained(peft.get_peft_model(models.llama(), peft.HRAConfig(r=4, target_modules=ATTENTION))),
    "VeRA": lambda: trained(peft.get_peft_model(models.llama(), peft.VeraConfig(r=4, target_modules=["q_proj"]))),
    "tokens alone": lambda: trained(
        peft.get_peft_model(
            models.llama(), peft.TrainableTokensConfig(token_indices=[3, 5], target_modules=["embed_tokens"])
        )
    ),
}


def state_of(model: Any) -> dict[str, Any]:
    """All that could be written by a merge: weights, where they are, what is merged, and the configuration."""
    named = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
    return {
        "weights": models.all_bits(named),
        "places": {name: (id(tensor), tensor.data_ptr()) for name, tensor in named.items()},
        "merged": [list(m.merged_adapters) for m in model.modules() if hasattr(m, "merged_adapters")],
        "config": model.get_base_model().config.to_json_string(),
        "adapters": sorted(model.peft_config),
        "modules": [(name, id(module)) for name, module in model.named_modules(remove_duplicate=False)],
    }


def saved_after_merging(model: Any, folder: Path) -> dict[str, torch.Tensor]:
    copy.deepcopy(model).merge_and_unload().save_pretrained(folder)
    return models.saved_in(folder)


@pytest.mark.parametrize("case", CASES)
def test_merged_weights_are_those_of_merge_and_unload_and_the_model_is_untouched(case: str, tmp_path: Path) -> None:
    model = CASES[case]()
    before = state_of(model)
    found = adapters.merged_weights(model)
    after = state_of(model)
    assert models.differing(after.pop("weights"), before.pop("weights")) == []
    assert after == before

    reference = copy.deepcopy(model).merge_and_unload()
    if case not in ("parameters of experts",):  # whose checkpoints have other names than its modules
        assert models.differing(found, reference.state_dict()) == []
    wanted = saved_after_merging(model, tmp_path / "saved")
    aliases = {name for name in found if name not in wanted}
    assert models.differing({name: found[name] for name in found if name not in aliases}, wanted) == []
    places = {found[name].data_ptr() for name in wanted}
    assert all(found[name].data_ptr() in places for name in aliases)  # ties, which are saved once


@pytest.mark.parametrize("case", ["linear layers", "modules_to_save", "tied head", "two adapters at once"])
def test_only_what_a_merge_changes_is_made_anew(case: str) -> None:
    model = CASES[case]()
    mine = {tensor.data_ptr() for tensor in model.state_dict().values()}
    anew = {name for name, tensor in adapters.merged_weights(model).items() if tensor.data_ptr() not in mine}
    assert anew == {name for name in anew if any(part in name for part in ("q_proj", "k_proj", "v_proj"))}
    assert len(anew) >= 4


def test_a_step_after_a_merge_is_in_the_next_merge(tmp_path: Path) -> None:
    model = lora(models.llama())
    first = models.all_bits(adapters.merged_weights(model))
    models.train_a_step(model)
    second = adapters.merged_weights(model)
    assert [name for name in first if not torch.equal(first[name], models.bits(second[name]))]
    assert models.differing(second, saved_after_merging(model, tmp_path)) == []


def test_a_compiled_model_is_merged_under_the_same_names() -> None:
    model = lora(models.llama())
    wanted = adapters.merged_weights(model)
    assert models.differing(adapters.merged_weights(torch.compile(model, backend="eager")), wanted) == []


def test_a_config_says_that_embeddings_are_not_tied_any_more_where_a_merge_unties_them() -> None:
    model = CASES["modules_to_save, tied"]()
    reference = copy.deepcopy(model).merge_and_unload()
    assert reference.config.tie_word_embeddings is False
    assert json.loads(checkpoint_files(adapters.merged_model(model))["config.json"])["tie_word_embeddings"] is False
    assert model.get_base_model().config.tie_word_embeddings is True


@pytest.mark.parametrize(
    ("config", "method"),
    [
        (lambda: peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4), "PROMPT_TUNING"),
        (lambda: peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4), "PREFIX_TUNING"),
        (lambda: peft.LNTuningConfig(task_type="CAUSAL_LM", target_modules=["norm"]), "LN_TUNING"),
    ],
)
def test_a_method_that_cannot_be_merged_is_refused_by_name(config: Any, method: str) -> None:
    model = peft.get_peft_model(models.llama(), config())
    with pytest.raises(StateError, match=f"method {method}, which cannot be merged"):
        adapters.merged_weights(model)


def test_a_model_without_adapters_or_with_those_of_transformers_is_refused() -> None:
    model = models.llama()
    with pytest.raises(StateError, match="expected a PeftModel, got LlamaForCausalLM"):
        adapters.merged_weights(model)
    assert not adapters.is_peft(model)
    model.add_adapter(peft.LoraConfig(**LORA))
    assert adapters.is_peft(model)
    with pytest.raises(StateError, match="added by transformers"):
        adapters.merged_weights(model)


# Adapters alone


ALONE = [
    "linear layers",
    "rank patterns",
    "modules_to_save",
    "tied head",
    "embeddings",
    "bias lora_only",
    "DoRA",
    "Conv1D",
    "IA3",
    "LoHa",
]


@pytest.mark.parametrize("case", ALONE)
def test_adapter_weights_are_those_that_peft_saves(case: str, tmp_path: Path) -> None:
    model = CASES[case]()
    weights, files = adapters.adapter_weights(model)
    model.save_pretrained(tmp_path)
    assert models.differing(weights, models.saved_in(tmp_path)) == []
    assert files == {"adapter_config.json": (tmp_path / "adapter_config.json").read_bytes()}
    assert not model.peft_config["default"].inference_mode


def test_an_adapter_is_chosen_by_name_where_several_are_active(tmp_path: Path) -> None:
    model = two_adapters(["default", "second"])
    with pytest.raises(StateError, match="2 active adapters"):
        adapters.adapter_weights(model)
    with pytest.raises(StateError, match="no adapter 'third'; it has 'default', 'second'"):
        adapters.adapter_weights(model, "third")
    weights, _ = adapters.adapter_weights(model, "second")
    model.save_pretrained(tmp_path)
    assert models.differing(weights, models.saved_in(tmp_path / "second")) == []


@pytest.mark.parametrize("case", ["linear layers", "rank patterns", "modules_to_save", "DoRA"])
def test_a_followed_run_of_an_adapter_is_a_folder_that_peft_loads(case: str, tmp_path: Path) -> None:
    model = CASES[case]()
    _, files = adapters.adapter_weights(model)
    with (
        Publisher(str(tmp_path / "run"), files=files) as publisher,
        HuggingFaceFolder(str(tmp_path / "run"), tmp_path / "folder") as folder,
    ):
        for _ in range(3):
            publisher.publish(adapters.adapter_weights(model)[0])
            flip = folder.update()
            assert flip is not None
            assert flip.missing == ()
            current = (tmp_path / "folder" / "current").resolve()
            assert sorted(path.name for path in current.iterdir() if path.suffix in (".safetensors", ".json")) == [
                "adapter_config.json",
                "adapter_model.safetensors",
                "pulse.json",
            ]
            loaded = peft.PeftModel.from_pretrained(models.llama(), current)
            assert models.differing(peft.get_peft_model_state_dict(loaded), adapters.adapter_weights(model)[0]) == []
            models.train_a_step(model)
