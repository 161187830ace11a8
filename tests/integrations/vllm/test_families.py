"""The map from checkpoints to engines, compared with vLLM's model classes, which load checkpoints of transformers.

Small models of every family are saved by transformers and loaded by vLLM's `load_weights`, on one rank and on two; then
another checkpoint is written through the map, and every tensor compared with those of a model that has loaded it. Of
the families whose weights an engine on a CPU leaves as they were, real engines are compared by log-probabilities.
"""

import json
import os
import subprocess
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

if find_spec("vllm") is None or find_spec("transformers") is None:
    pytest.skip("vLLM is not installed: the maps of its models are UNTESTED here; run make test-vllm", True)

ROOT = Path(__file__).parents[3]
LIMIT_S = (
    400  # for each of three fixtures; measured: 85 seconds of CPU for all, and up to 127 for one on a busy machine
)

Config = dict[str, Any]
Found = dict[str, Any]

SMALL: Config = {
    "num_hidden_layers": 3,
    "hidden_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "vocab_size": 150,  # 192 with padding
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MOE: Config = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
GEMMA: Config = {"head_dim": 64, "tie_word_embeddings": True, "query_pre_attn_scalar": 32}
MLA: Config = {
    "num_key_value_heads": 4,
    "q_lora_rank": 48,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 24,
    "n_routed_experts": 6,
    "n_shared_experts": 2,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
CONFIGS: dict[str, Config] = {
    "llama": SMALL | {"model_type": "llama"},
    "llama-bias": SMALL | {"model_type": "llama", "attention_bias": True, "mlp_bias": True},
    "mistral": SMALL | {"model_type": "mistral"},
    "qwen2": SMALL | {"model_type": "qwen2", "tie_word_embeddings": True},
    "qwen3": SMALL | {"model_type": "qwen3", "head_dim": 64},
    "gemma2": SMALL | GEMMA | {"model_type": "gemma2"},
    "gemma3_text": SMALL | GEMMA | {"model_type": "gemma3_text"},
    "phi3": SMALL | {"model_type": "phi3"},
    "qwen2_moe": SMALL | MOE | {"model_type": "qwen2_moe", "shared_expert_intermediate_size": 48},
    "qwen3_moe": SMALL | MOE | {"model_type": "qwen3_moe", "head_dim": 64, "mlp_only_layers": [1]},
    "mixtral": SMALL | {"model_type": "mixtral", "num_local_experts": 6, "num_experts_per_tok": 2},
    "deepseek_v2": SMALL | MLA | {"model_type": "deepseek_v2", "q_lora_rank": None},  # the Lite model's
    "deepseek_v2-q": SMALL | MLA | {"model_type": "deepseek_v2"},
    "deepseek_v3": SMALL | MLA | {"model_type": "deepseek_v3", "topk_method": "noaux_tc"},
}
# Without experts, which a CPU repacks, and of the widths that its latent attention has kernels for.
NO_EXPERTS: Config = {
    "first_k_dense_replace": 3,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
}
ENGINES: dict[str, Config] = {
    **{f"{name}-engine": CONFIGS[name] for name in ("gemma2", "gemma3_text", "phi3")},
    **{f"{name}-engine": CONFIGS[name] | NO_EXPERTS for name in ("deepseek_v2", "deepseek_v3")},
}
EXPERTS = [name for name, c in CONFIGS.items() if {"num_experts", "num_local_experts", "n_routed_experts"} & c.keys()]
DENSE = [name for name in CONFIGS if name not in EXPERTS]
LATENT = [name for name in CONFIGS if "kv_lora_rank" in CONFIGS[name]]


def save(config: Config, folder: Path, seed: int) -> None:
    """A checkpoint of random weights, as transformers saves it."""
    import torch

    transformers = import_module("transformers")
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**config))
    rng = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in [*model.named_parameters(), *model.named_buffers()]:
            if "inv_freq" not in name and "embed_scale" not in name:
                weight.copy_(torch.randn(weight.shape, generator=rng) / 4)
    model.save_pretrained(folder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("families")
    for name, config in CONFIGS.items():
        save(config, path / name, 0)
        save(config, path / name / "next", 1)
    split = [[name, name, False] for name in [*EXPERTS, *DENSE]]  # vLLM makes its groups with the first
    spread = [[f"{name}-spread", name, True] for name in EXPERTS]
    (path / "jobs.json").write_text(json.dumps({"1": split, "2": [*split, *spread]}))
    return path


def run(folder: Path, commands: list[list[str]]) -> None:
    """Run programs of this folder side by side, and wait for all of them."""
    settings = {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_PLUGINS": "",
        "VLLM_DIST_IDENT": (ident := f"pulse-{uuid4().hex}"),
        "OMP_NUM_THREADS": "1",
    }
    logs = [folder / f"{len(commands)}-{n}.log" for n in range(len(commands))]
    processes = []
    for (program, *arguments), log in zip(commands, logs, strict=True):
        command = [sys.executable, "-m", f"tests.integrations.vllm.{program}", str(folder), *arguments]
        with log.open("wb") as out:
            environment = os.environ | settings
            processes.append(subprocess.Popen(command, cwd=ROOT, env=environment, stdout=out, stderr=subprocess.STDOUT))
    try:
        for process, log in zip(processes, logs, strict=True):
            assert process.wait(LIMIT_S) == 0, log.read_text()[-3000:]
    finally:
        for process in processes:
            process.kill()
            process.wait()
        for left in Path("/dev/shm").glob(f"{ident}*"):  # where vLLM's ranks met; they leave it as it is
            left.unlink()


def run_ranks(folder: Path, world: int) -> list[Found]:
    """What each rank of a fleet found, by name of the job."""
    run(folder, [["family_rank", str(rank), str(world)] for rank in range(world)])
    return [json.loads((folder / f"{world}-{rank}.json").read_text()) for rank in range(world)]


@pytest.fixture(scope="module")
def one(folder: Path) -> Found:
    return run_ranks(folder, 1)[0]


@pytest.fixture(scope="module")
def two(folder: Path) -> list[Found]:
    return run_ranks(folder, 2)


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Found:
    path = tmp_path_factory.mktemp("engines")
    for name, config in ENGINES.items():
        save(config, path / name, 0)
        save(config, path / name / "next", 1)
    run(path, [["family_engine", *ENGINES]])
    found: Found = json.loads((path / "engines.json").read_text())
    return found


@pytest.mark.timeout(2 * LIMIT_S)
@pytest.mark.parametrize("family", list(CONFIGS))
def test_a_model_that_vllm_has_loaded_holds_its_checkpoint_where_the_map_says(family: str, one: Found) -> None:
    assert one[family]["loaded"] == ""
    assert one[family]["elsewhere"] == []


@pytest.mark.timeout(2 * LIMIT_S)
@pytest.mark.parametrize("family", list(CONFIGS))
def test_a_checkpoint_written_through_the_map_gives_what_vllm_loads_of_it(family: str, one: Found) -> None:
    assert one[family]["differ"] == []


@pytest.mark.timeout(2 * LIMIT_S)
@pytest.mark.parametrize("family", [name for name in CONFIGS if name != "phi3"])
def test_both_ranks_of_two_hold_their_part_and_are_written_through_the_map(family: str, two: list[Found]) -> None:
    for found in two:
        assert found[family]["loaded"] == ""
        assert (found[family]["elsewhere"], found[family]["differ"]) == ([], [])


@pytest.mark.timeout(2 * LIMIT_S)
@pytest.mark.parametrize("family", EXPERTS)
def test_experts_that_are_spread_over_two_ranks_are_on_one_of_them(family: str, two: list[Found]) -> None:
    first, second = (found[f"{family}-spread"] for found in two)
    assert (first["loaded"], second["loaded"]) == ("", "")
    assert (first["differ"], second["differ"]) == ([], [])
    assert first["elsewhere"]
    assert second["elsewhere"]
    assert not {*first["elsewhere"]} & {*second["elsewhere"]}


@pytest.mark.timeout(2 * LIMIT_S)
def test_a_checkpoint_with_fused_tensors_is_refused_on_two_ranks(two: list[Found]) -> None:
    assert all("without tensor parallelism" in found["phi3"]["loaded"] for found in two)


@pytest.mark.timeout(2 * LIMIT_S)
@pytest.mark.parametrize("family", LATENT)
def test_what_latent_attention_derives_from_kv_b_proj_follows_a_write(family: str, one: Found) -> None:
    assert one[family]["derived"] == 2 * CONFIGS[family]["num_hidden_layers"]  # and none of them is among "differ"


@pytest.mark.timeout(2 * LIMIT_S)
@pytest.mark.parametrize("family", DENSE)
def test_dense_models_are_mapped_after_their_weights_were_processed_too(family: str, one: Found) -> None:
    assert one[family]["processed"] == ""


@pytest.mark.timeout(2 * LIMIT_S)
@pytest.mark.parametrize("family", EXPERTS)
def test_experts_that_a_cpu_has_repacked_are_found_out(family: str, one: Found) -> None:
    assert "are not at the position that the map names" in one[family]["processed"]


@pytest.mark.timeout(2 * LIMIT_S)
@pytest.mark.parametrize("family", list(ENGINES))
def test_an_engine_that_was_written_through_the_map_computes_what_a_fresh_one_does(family: str, engines: Found) -> None:
    before, after, fresh = (engines[family][when] for when in ("before", "after", "fresh"))
    assert max(abs(a - b) for a, b in zip(before, after, strict=True)) > 0.1
    assert max(abs(a - b) for a, b in zip(after, fresh, strict=True)) <= 5e-5
