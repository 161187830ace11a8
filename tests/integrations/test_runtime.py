"""The map from checkpoints to engines, compared with tensors that are fused and split here by independent code."""

import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pulsesync import Publisher, Subscriber
from pulsesync.core.types import TensorSpec
from pulsesync.errors import StateError
from pulsesync.format import layout as layouts
from pulsesync.format import patch
from pulsesync.integrations.runtime import (
    EngineRank,
    LatentShape,
    ModelShape,
    check_loaded,
    for_subscriber,
    fused,
    grid,
    place,
    runtime_tensors,
)
from pulsesync.state.sharding import Placed, shards_of
from pulsesync.state.slices import Slice
from tests.tiers import slow

torch = pytest.importorskip("torch", reason="torch is not installed: the map to runtime tensors is UNTESTED")
F = torch.nn.functional

Config = dict[str, Any]
Tensors = dict[str, Any]

SMALL: Config = {
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "vocab_size": 150,  # 192 with padding: of 8 ranks the last has nothing but padding
    "tie_word_embeddings": False,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}
MOE: Config = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "norm_topk_prob": True}
MLA: Config = {
    "num_hidden_layers": 3,
    "num_key_value_heads": 8,
    "q_lora_rank": 12,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 4,
    "qk_rope_head_dim": 2,
    "v_head_dim": 6,
    "n_routed_experts": 6,
    "n_shared_experts": 2,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
GEMMA: Config = {"head_dim": 8, "tie_word_embeddings": True, "rope_parameters": None}
CONFIGS: dict[str, Config] = {
    "llama": SMALL | {"model_type": "llama", "head_dim": 8},  # heads together are wider than the model
    "llama-bias": SMALL | {"model_type": "llama", "attention_bias": True, "mlp_bias": True},
    "mistral": SMALL | {"model_type": "mistral", "head_dim": None, "sliding_window": None},
    "qwen2": SMALL | {"model_type": "qwen2", "tie_word_embeddings": True},
    "qwen3": SMALL | {"model_type": "qwen3", "head_dim": 8},
    "qwen2_moe": SMALL
    | MOE
    | {"model_type": "qwen2_moe", "shared_expert_intermediate_size": 24, "qkv_bias": True, "decoder_sparse_step": 1},
    "qwen3_moe": SMALL
    | MOE
    | {"model_type": "qwen3_moe", "head_dim": 8, "num_hidden_layers": 3, "mlp_only_layers": [1]},
    "mixtral": SMALL | {"model_type": "mixtral", "num_local_experts": 6, "num_experts_per_tok": 2},
    "gemma2": SMALL | GEMMA | {"model_type": "gemma2"},
    "gemma3_text": SMALL | GEMMA | {"model_type": "gemma3_text"},
    "phi3": SMALL | {"model_type": "phi3", "pad_token_id": 0},
    "deepseek_v2": SMALL | MLA | {"model_type": "deepseek_v2", "q_lora_rank": None},
    "deepseek_v3": SMALL | MLA | {"model_type": "deepseek_v3", "topk_method": "noaux_tc"},
}
FLEETS: dict[str, list[EngineRank]] = {
    "one": [EngineRank()],
    "tp2": [EngineRank.vllm(n, 2) for n in range(2)],
    "tp4": [EngineRank.vllm(n, 4) for n in range(4)],  # two ranks to a KV head
    "tp8": [EngineRank.vllm(n, 8) for n in range(8)],
    "ep2": [EngineRank.vllm(n, 2, expert_parallel=True) for n in range(2)],
    "ep4": [EngineRank.vllm(n, 4, expert_parallel=True) for n in range(4)],  # 2, 2, 1 and 1 experts
    "dp2": [EngineRank.vllm(n, 2, dp=d, dp_size=2, expert_parallel=True) for d in range(2) for n in range(2)],
    "ep2tp2": [EngineRank.sglang(n, 4, ep_size=2) for n in range(4)],
}


def shapes(c: Config) -> dict[str, tuple[int, ...]]:
    """The tensors of a checkpoint, as Hugging Face names them."""
    h, vocab, kind = c["hidden_size"], c["vocab_size"], c["model_type"]
    heads, kv = c["num_attention_heads"], c["num_key_value_heads"]
    d = c.get("head_dim") or h // heads
    out: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, h), "model.norm.weight": (h,)}
    if not c["tie_word_embeddings"]:
        out["lm_head.weight"] = (vocab, h)

    def linear(name: str, rows: int, columns: int, bias: bool = False) -> None:
        out[f"{name}.weight"] = (rows, columns)
        if bias:
            out[f"{name}.bias"] = (rows,)

    def mlp(at: str, width: int, names: tuple[str, str, str], bias: bool = False) -> None:
        linear(f"{at}.{names[0]}", width, h, bias)
        linear(f"{at}.{names[1]}", width, h, bias)
        linear(f"{at}.{names[2]}", h, width, bias)

    def latent(at: str, query: int, rank: int, value: int) -> None:
        if compressed := c["q_lora_rank"]:
            linear(f"{at}.q_a_proj", compressed, h)
            out[f"{at}.q_a_layernorm.weight"] = (compressed,)
        linear(f"{at}.q_b_proj" if compressed else f"{at}.q_proj", heads * query, compressed or h)
        linear(f"{at}.kv_a_proj_with_mqa", rank + c["qk_rope_head_dim"], h)
        out[f"{at}.kv_a_layernorm.weight"] = (rank,)
        linear(f"{at}.kv_b_proj", heads * (c["qk_nope_head_dim"] + value), rank)
        linear(f"{at}.o_proj", h, heads * value)

    usual = ("gate_proj", "up_proj", "down_proj")
    for n in range(c["num_hidden_layers"]):
        at = f"model.layers.{n}"
        out[f"{at}.input_layernorm.weight"] = out[f"{at}.post_attention_layernorm.weight"] = (h,)
        bias = c.get("attention_bias", False)
        if kind.startswith("deepseek"):
            latent(f"{at}.self_attn", c["qk_nope_head_dim"] + c["qk_rope_head_dim"], c["kv_lora_rank"], c["v_head_dim"])
        else:
            if kind == "phi3":
                linear(f"{at}.self_attn.qkv_proj", (heads + 2 * kv) * d, h)
            else:
                for name, rows in (("q_proj", heads), ("k_proj", kv), ("v_proj", kv)):
                    linear(f"{at}.self_attn.{name}", rows * d, h, bias or kind.startswith("qwen2"))
            linear(f"{at}.self_attn.o_proj", h, heads * d, bias)
        if kind.startswith(("qwen3", "gemma3")):
            out[f"{at}.self_attn.q_norm.weight"] = out[f"{at}.self_attn.k_norm.weight"] = (d,)
        if kind.startswith("gemma"):
            out[f"{at}.pre_feedforward_layernorm.weight"] = out[f"{at}.post_feedforward_layernorm.weight"] = (h,)
        if kind == "phi3":
            linear(f"{at}.mlp.gate_up_proj", 2 * c["intermediate_size"], h)
            linear(f"{at}.mlp.down_proj", h, c["intermediate_size"])
        elif kind.startswith("deepseek") and n >= c["first_k_dense_replace"]:
            linear(f"{at}.mlp.gate", c["n_routed_experts"], h)
            if kind == "deepseek_v3":
                out[f"{at}.mlp.gate.e_score_correction_bias"] = (c["n_routed_experts"],)
            for e in range(c["n_routed_experts"]):
                mlp(f"{at}.mlp.experts.{e}", c["moe_intermediate_size"], usual)
            mlp(f"{at}.mlp.shared_experts", c["n_shared_experts"] * c["moe_intermediate_size"], usual)
        elif kind == "mixtral":
            linear(f"{at}.block_sparse_moe.gate", c["num_local_experts"], h)
            for e in range(c["num_local_experts"]):
                mlp(f"{at}.block_sparse_moe.experts.{e}", c["intermediate_size"], ("w1", "w3", "w2"))
        elif kind.endswith("_moe") and n not in c.get("mlp_only_layers", ()):
            linear(f"{at}.mlp.gate", c["num_experts"], h)
            for e in range(c["num_experts"]):
                mlp(f"{at}.mlp.experts.{e}", c["moe_intermediate_size"], usual)
            if kind == "qwen2_moe":
                mlp(f"{at}.mlp.shared_expert", c["shared_expert_intermediate_size"], usual)
                linear(f"{at}.mlp.shared_expert_gate", 1, h)
        else:
            mlp(f"{at}.mlp", c["intermediate_size"], usual, c.get("mlp_bias", False))
    return out


def checkpoint(c: Config, dtype: Any = None, seed: int = 0) -> Tensors:
    rng = torch.Generator().manual_seed(seed)
    return {name: (torch.randn(s, generator=rng) / 4).to(dtype or torch.bfloat16) for name, s in shapes(c).items()}


def engine(c: Config, whole: Tensors, rank: EngineRank) -> Tensors:
    """The tensors of a rank, made from the whole checkpoint with cat, chunk and pad."""
    kv = c["num_key_value_heads"]
    tp, size = rank.tp, rank.tp_size
    share, shares = rank.expert_tp or ((0, 1) if rank.ep_size > 1 else (tp, size))
    out: Tensors = {}

    def vocabulary(tensor: Any) -> Any:
        return F.pad(tensor, (0, 0, 0, -len(tensor) % 64)).chunk(size)[tp].clone()

    def kv_heads(tensor: Any) -> Any:
        by_head = tensor.unflatten(0, (kv, -1))
        return by_head.repeat_interleave(max(size // kv, 1), 0).chunk(size)[tp].flatten(0, 1)

    def mlp(at: str) -> None:
        for kind in ("weight", "bias"):
            if f"{at}.gate_proj.{kind}" in whole:
                halves = [whole[f"{at}.{name}.{kind}"].chunk(size)[tp] for name in ("gate_proj", "up_proj")]
                out[f"{at}.gate_up_proj.{kind}"] = torch.cat(halves)
        out[f"{at}.down_proj.weight"] = whole[f"{at}.down_proj.weight"].chunk(size, 1)[tp].clone()
        if f"{at}.down_proj.bias" in whole:
            out[f"{at}.down_proj.bias"] = whole[f"{at}.down_proj.bias"].clone()

    def experts(at: str, gate: str, up: str, down: str) -> None:
        count = c.get("num_experts") or c.get("num_local_experts") or c["n_routed_experts"]
        mine = torch.arange(count).tensor_split(rank.ep_size)[rank.ep]
        of = {name: [whole[f"{at}.{int(e)}.{name}.weight"] for e in mine] for name in (gate, up, down)}
        both = (torch.stack(of[name]).chunk(shares, 1)[share] for name in (gate, up))
        out[f"{at}.w13_weight"] = torch.cat(list(both), 1)
        out[f"{at}.w2_weight"] = torch.stack(of[down]).chunk(shares, 2)[share].clone()

    for name, tensor in whole.items():
        at, _, kind = name.rpartition(".")
        if name in ("model.embed_tokens.weight", "lm_head.weight"):
            out[name] = vocabulary(tensor)
        elif at.endswith(".q_a_proj"):
            compressed = whole[name.replace("q_a_proj", "kv_a_proj_with_mqa")]
            out[name.replace("q_a_proj", "fused_qkv_a_proj")] = torch.cat([tensor, compressed])
        elif at.endswith(".kv_a_proj_with_mqa"):
            if name.replace("kv_a_proj_with_mqa", "q_a_proj") not in whole:
                out[name] = tensor.clone()
        elif at.endswith((".q_b_proj", ".kv_b_proj")) or (at.endswith(".q_proj") and "kv_lora_rank" in c):
            out[name] = tensor.chunk(size)[tp].clone()
        elif at.endswith(".q_proj"):
            k, v = (kv_heads(whole[name.replace("q_proj", other)]) for other in ("k_proj", "v_proj"))
            out[name.replace("q_proj", "qkv_proj")] = torch.cat([tensor.chunk(size)[tp], k, v])
        elif name.endswith("o_proj.weight"):
            out[name] = tensor.chunk(size, 1)[tp].clone()
        elif ".experts." in at:
            stem, _, last = at.rpartition(".experts.0.")
            names = {"w1": ("w1", "w3", "w2"), "gate_proj": ("gate_proj", "up_proj", "down_proj")}
            if last in names:
                experts(f"{stem}.experts", *names[last])
        elif at.endswith(".gate_proj"):
            if kind == "weight":
                mlp(at.removesuffix(".gate_proj"))
        elif not at.endswith((".k_proj", ".v_proj", ".up_proj", ".down_proj")) or c["model_type"] == "phi3":
            out[name] = tensor.clone()
    return out


def bits(tensor: Any) -> Any:
    return tensor.contiguous().view({2: torch.int16, 4: torch.int32}[tensor.element_size()])


def same(left: Tensors, right: Tensors) -> bool:
    return left.keys() == right.keys() and all(torch.equal(bits(left[name]), bits(right[name])) for name in left)


def rectangle(whole: Any, one: Placed) -> Any:
    flat = whole.reshape(whole.shape[0], -1)
    return flat[slice(*(one.rows or (None,))), slice(*(one.columns or (None,)))]


def mapped(c: Config, ranks: list[EngineRank]) -> bool:
    """Whether a rank has exactly one rectangle of each tensor, and no further copies of its rows or columns."""
    if c["model_type"] == "phi3":
        return ranks[0].tp_size == 1
    return ranks[0].latent or "kv_lora_rank" not in c


def split_most(c: Config) -> list[EngineRank]:
    return next(ranks for ranks in (FLEETS[name] for name in ("ep2tp2", "ep2", "one")) if mapped(c, ranks))


def fleets_of(c: Config) -> Iterator[tuple[str, list[EngineRank]]]:
    for fleet, ranks in FLEETS.items():
        if mapped(c, ranks) and (not fleet.startswith(("ep", "dp")) or ModelShape.from_config(c).experts):
            yield fleet, ranks


# -- the map -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", CONFIGS)
def test_the_weights_of_a_checkpoint_written_through_the_map_give_the_tensors_of_the_engine(family: str) -> None:
    c = CONFIGS[family]
    whole = checkpoint(c)
    for fleet, ranks in fleets_of(c):
        for rank in ranks:
            expected = engine(c, whole, rank)
            runtime = {name: torch.zeros_like(tensor) for name, tensor in expected.items()}
            for name, one in place(ModelShape.from_config(c), rank, runtime).items():
                assert one.shape == tuple(whole[name].shape), (fleet, name)
                one.tensor.copy_(rectangle(whole[name], one).reshape(one.tensor.shape))
            assert same(runtime, expected), (fleet, rank)


@pytest.mark.parametrize("family", CONFIGS)
def test_every_weight_but_padding_is_covered_once_here_and_by_equally_many_ranks_of_the_fleet(family: str) -> None:
    for fleet, ranks in fleets_of(CONFIGS[family]):
        check_coverage(fleet, CONFIGS[family], ranks)


def check_coverage(fleet: str, c: Config, ranks: list[EngineRank]) -> None:
    seen = {name: np.zeros((shape[0], math.prod(shape[1:])), np.int64) for name, shape in shapes(c).items()}
    for rank in ranks:
        runtime = {name: np.zeros(tuple(t.shape), np.int64) for name, t in engine(c, checkpoint(c), rank).items()}
        for name, one in place(ModelShape.from_config(c), rank, runtime).items():
            one.tensor[...] += 1
            rectangle(seen[name], one)[...] += 1
        for name, painted in runtime.items():
            vocabulary = name in ("model.embed_tokens.weight", "lm_head.weight")
            rows = max(0, min(len(painted), c["vocab_size"] - rank.tp * len(painted))) if vocabulary else len(painted)
            assert (painted[:rows] == 1).all(), (fleet, name)
            assert (painted[rows:] == 0).all(), (fleet, name)
    kv = c["num_key_value_heads"]
    for name, count in seen.items():
        size, replicas = ranks[0].tp_size, len(ranks) // ranks[0].tp_size
        alike = (".gate.weight", "expert_gate.weight", "o_proj.bias", "down_proj.bias", "correction_bias")
        if "norm" in name or name.endswith(alike) or "_a_proj" in name:
            expected = len(ranks)
        elif "k_proj" in name or "v_proj" in name:
            expected = max(size // kv, 1) * replicas
        else:
            expected = 1 if ".experts." in name else replicas
        assert (count == expected).all(), (fleet, name)


@pytest.mark.parametrize("library", ["torch", "numpy"])
def test_what_is_placed_are_contiguous_views_into_the_engines_own_memory(library: str) -> None:
    for c in CONFIGS.values():
        for rank in split_most(c):
            runtime = engine(c, checkpoint(c, torch.float32), rank)
            if library == "numpy":
                runtime = {name: tensor.numpy() for name, tensor in runtime.items()}
            spans = [
                (t.data_ptr(), t.data_ptr() + t.nbytes) for t in (torch.as_tensor(value) for value in runtime.values())
            ]
            for name, one in place(ModelShape.from_config(c), rank, runtime).items():
                assert isinstance(one.tensor, torch.Tensor if library == "torch" else np.ndarray)
                view = torch.as_tensor(one.tensor)
                assert view.is_contiguous(), name
                begin, end = view.data_ptr(), view.data_ptr() + view.nbytes
                assert any(low <= begin < end <= high for low, high in spans), name


def test_a_rank_that_holds_nothing_of_the_vocabulary_but_padding_is_placed_without_it() -> None:
    c = CONFIGS["llama"]
    placed = place(ModelShape.from_config(c), FLEETS["tp8"][7], engine(c, checkpoint(c), FLEETS["tp8"][7]))
    assert not {"model.embed_tokens.weight", "lm_head.weight"} & placed.keys()
    assert place(ModelShape.from_config(c), FLEETS["tp8"][6], engine(c, checkpoint(c), FLEETS["tp8"][6]))[
        "lm_head.weight"
    ].rows == (144, 150)


def test_experts_are_found_under_the_module_that_newer_vllm_puts_them_in() -> None:
    c, rank = CONFIGS["qwen3_moe"], EngineRank()
    runtime = engine(c, checkpoint(c), rank)
    newer = {name.replace(".experts.", ".experts.routed_experts."): tensor for name, tensor in runtime.items()}
    assert newer.keys() != runtime.keys()
    assert place(ModelShape.from_config(c), rank, newer).keys() == shapes(c).keys()


def test_a_second_name_for_memory_that_is_mapped_is_passed_over() -> None:
    c, rank = CONFIGS["qwen3_moe"], EngineRank()
    runtime = engine(c, checkpoint(c), rank)
    runtime["model.layers.0.mlp.experts.gate.weight"] = runtime["model.layers.0.mlp.gate.weight"].detach()
    assert place(ModelShape.from_config(c), rank, runtime).keys() == shapes(c).keys()


def test_experts_that_are_shared_may_have_deepseeks_name_and_then_no_gate() -> None:
    numbers: dict[str, Any] = {
        "layers": 1,
        "hidden": 4,
        "heads": 2,
        "kv_heads": 2,
        "head_dim": 2,
        "intermediate": 4,
        "vocab": 64,
    }
    model = ModelShape(**numbers, experts=2, expert_intermediate=2, shared_intermediate=6, shared="shared_experts")
    held = {one.name: one for one in fused(model, EngineRank.vllm(1, 2))}
    gate_up = held["model.layers.0.mlp.shared_experts.gate_up_proj.weight"]
    assert [(p.name.rpartition("mlp.")[2], p.rows) for p in gate_up.pieces] == [
        ("shared_experts.gate_proj.weight", (3, 6)),
        ("shared_experts.up_proj.weight", (3, 6)),
    ]
    assert not any("shared_expert_gate" in name for name in held)


def test_vllm_spreads_experts_over_the_ranks_of_all_replicas_and_sglang_over_groups() -> None:
    ranks = [EngineRank.vllm(tp, 2, dp=dp, dp_size=2, expert_parallel=True) for dp in range(2) for tp in range(2)]
    assert [(r.tp, r.ep, r.ep_size, r.experts_split) for r in ranks] == [
        (0, 0, 4, (0, 1)),
        (1, 1, 4, (0, 1)),
        (0, 2, 4, (0, 1)),
        (1, 3, 4, (0, 1)),
    ]
    assert EngineRank.vllm(1, 2, dp=1, dp_size=2).experts_split == (3, 4)
    assert [(r.ep, r.experts_split) for r in FLEETS["ep2tp2"]] == [(0, (0, 2)), (0, (1, 2)), (1, (0, 2)), (1, (1, 2))]
    assert EngineRank(1, 4).experts_split == (1, 4)
    assert EngineRank(1, 4, ep=1, ep_size=4).experts_split == (0, 1)


# -- Gemma, Phi-3, DeepSeek ------------------------------------------------------------------------------------------


def test_what_a_config_json_of_gemma_leaves_out_is_what_transformers_takes() -> None:
    for family in ("gemma2", "gemma3_text"):
        short = {key: value for key, value in CONFIGS[family].items() if key not in ("head_dim", "tie_word_embeddings")}
        model = ModelShape.from_config(short)
        assert (model.head_dim, model.tied, model.lm_head) == (256, True, False)
        assert not ModelShape.from_config(short | {"tie_word_embeddings": False}).tied


def test_the_layers_and_widths_of_deepseek_are_read_from_its_configuration() -> None:
    model = ModelShape.from_config(CONFIGS["deepseek_v3"] | {"num_hidden_layers": 6, "moe_layer_freq": 2})
    assert model.dense_layers == {0, 1, 3, 5}
    assert (model.experts, model.expert_intermediate, model.shared_intermediate) == (6, 16, 32)
    assert model.latent == LatentShape(q_rank=12, kv_rank=8, nope=4, rope=2, value=6)
    assert (model.router_bias, ModelShape.from_config(CONFIGS["deepseek_v2"]).router_bias) == (True, False)


def test_views_into_kv_b_proj_are_passed_over_and_copies_of_it_refused() -> None:
    c, rank = CONFIGS["deepseek_v2"], EngineRank.vllm(1, 2)
    layer = "model.layers.2.self_attn"
    runtime = engine(c, checkpoint(c), rank)
    keys, values = runtime[f"{layer}.kv_b_proj.weight"].T.view(8, 4, 10).split([4, 6], -1)
    derived = {f"{layer}.attn.W_UK_T": keys.permute(1, 2, 0), f"{layer}.attn.W_UV": values.transpose(0, 1)}
    assert (
        place(ModelShape.from_config(c), rank, runtime | derived).keys()
        == place(ModelShape.from_config(c), rank, runtime).keys()
    )
    for name, view in derived.items():
        with pytest.raises(StateError, match="map of this model does not have") as refused:
            place(ModelShape.from_config(c), rank, runtime | derived | {name: view.clone()})
        assert refused.value.tensor == name


def test_views_are_known_in_numpy_too() -> None:
    c, rank = CONFIGS["deepseek_v2"], EngineRank()
    runtime = {name: tensor.numpy() for name, tensor in engine(c, checkpoint(c, torch.float32), rank).items()}
    view = runtime["model.layers.0.self_attn.kv_b_proj.weight"].T[:, 3:]
    place(ModelShape.from_config(c), rank, runtime | {"view": view})
    with pytest.raises(StateError, match="'view'"):
        place(ModelShape.from_config(c), rank, runtime | {"view": view.copy()})


def test_what_attention_layers_derive_is_found_although_it_is_no_parameter() -> None:
    class Attention(torch.nn.Module):  # type: ignore[misc,name-defined,unused-ignore]
        def __init__(self) -> None:
            super().__init__()
            self.kv_b_proj = torch.nn.Linear(2, 3, bias=False)
            self.W_UV = self.kv_b_proj.weight.detach().T
            self.w_kc = None
            self.scale = torch.ones(1)

    found = runtime_tensors(torch.nn.Sequential(Attention()))
    assert found.keys() == {"0.kv_b_proj.weight", "0.W_UV"}


def test_an_engine_that_keeps_copies_of_latent_attention_is_refused() -> None:
    model = ModelShape.from_config(CONFIGS["deepseek_v2"])
    with pytest.raises(StateError, match=r"keeps copies of model\.layers\.0\.self_attn\.kv_b_proj"):
        list(fused(model, EngineRank.sglang(0, 1)))


def test_a_checkpoint_with_fused_tensors_is_mapped_on_one_rank_and_refused_on_several() -> None:
    model = ModelShape.from_config(CONFIGS["phi3"])
    held = {one.name: one for one in fused(model, EngineRank())}
    assert held["model.layers.1.self_attn.qkv_proj.weight"].shape == (48, 32)
    assert held["model.layers.1.mlp.gate_up_proj.weight"].shape == (96, 32)
    with pytest.raises(StateError, match="without tensor parallelism") as refused:
        list(fused(model, EngineRank.vllm(0, 2)))
    assert refused.value.tensor == "model.layers.0.self_attn.qkv_proj.weight"


def test_why_a_family_cannot_be_mapped_is_said() -> None:
    with pytest.raises(StateError, match=r"'gpt_oss' are not supported .*transpose"):
        ModelShape.from_config({"model_type": "gpt_oss"})
    with pytest.raises(StateError, match=r"'gemma3' are not supported .*vision"):
        ModelShape.from_config({"model_type": "gemma3", "text_config": {}})


# -- tied weights --------------------------------------------------------------------------------------------------


def test_tied_weights_are_placed_under_the_names_that_the_checkpoint_has() -> None:
    c, rank = CONFIGS["qwen2"], EngineRank.vllm(1, 2)
    once = engine(c, checkpoint(c), rank)
    twice = once | {"lm_head.weight": once["model.embed_tokens.weight"].detach()}
    for runtime in (once, twice):
        assert "lm_head.weight" not in place(ModelShape.from_config(c), rank, runtime)
        placed = place(ModelShape.from_config(c, lm_head=True), rank, runtime)
        assert placed["lm_head.weight"].tensor.data_ptr() == placed["model.embed_tokens.weight"].tensor.data_ptr()


def test_an_output_matrix_of_its_own_needs_a_name_in_the_checkpoint() -> None:
    c, rank = CONFIGS["qwen2"], EngineRank()
    runtime = engine(c, checkpoint(c), rank)
    runtime["lm_head.weight"] = runtime["model.embed_tokens.weight"].clone()
    with pytest.raises(StateError, match=r"tensor 'lm_head\.weight', which the map"):
        place(ModelShape.from_config(c), rank, runtime)
    placed = place(ModelShape.from_config(c, lm_head=True), rank, runtime)
    assert placed["lm_head.weight"].tensor.data_ptr() == runtime["lm_head.weight"].data_ptr()


# -- refusals ------------------------------------------------------------------------------------------------------


def spoil(runtime: Tensors, how: str) -> str:
    """Make something wrong with the tensors of an engine; return which one a complaint should name."""
    name = "model.layers.1.mlp.experts.w2_weight"
    if how == "unknown":
        runtime["model.layers.0.self_attn.rotary.inv_freq"] = torch.zeros(4)
        return "model.layers.0.self_attn.rotary.inv_freq"
    if how == "missing":
        del runtime[name]
    elif how == "shape":
        runtime[name] = runtime[name][:, :, 1:].contiguous()
    elif how == "transposed":
        runtime[name] = runtime[name].mT.contiguous()
    elif how == "strided":
        runtime[name] = F.pad(runtime[name], (0, 8))[..., :-8]
    elif how == "twice":
        runtime["model.layers.1.mlp.experts.routed_experts.w2_weight"] = runtime[name]
        return "model.layers.1.mlp.experts.routed_experts.w2_weight"
    return name


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("unknown", "map of this model does not have"),
        ("missing", "the runtime has no tensor"),
        ("shape", "has shape"),
        ("transposed", "has shape"),
        ("strided", "is not contiguous"),
        ("twice", "under two names"),
    ],
)
def test_an_engine_that_is_not_the_models_is_refused_and_the_tensor_named(how: str, message: str) -> None:
    c, rank = CONFIGS["qwen2_moe"], EngineRank.vllm(0, 2)
    runtime = engine(c, checkpoint(c), rank)
    name = spoil(runtime, how)
    with pytest.raises(StateError, match=message) as refused:
        place(ModelShape.from_config(c), rank, runtime)
    assert refused.value.tensor == name


def test_the_tensors_of_another_rank_count_are_refused() -> None:
    for family, c in CONFIGS.items():
        if not mapped(c, FLEETS["tp2"]):
            continue
        runtime = engine(c, checkpoint(c), EngineRank.vllm(0, 2))
        for wrong in (EngineRank(), EngineRank.vllm(0, 4)):
            with pytest.raises(StateError, match="has shape"):
                place(ModelShape.from_config(c), wrong, runtime)
        if "moe" in family or family == "mixtral" or "deepseek" in family:
            with pytest.raises(StateError, match="w13_weight"):
                place(ModelShape.from_config(c), EngineRank.vllm(0, 2, expert_parallel=True), runtime)


@pytest.mark.parametrize(
    ("changed", "size", "tensor"),
    [
        ({"num_attention_heads": 6}, 4, "model.layers.0.self_attn.q_proj.weight"),
        ({"num_attention_heads": 12, "num_key_value_heads": 4}, 6, "model.layers.0.self_attn.k_proj.weight"),
        ({"num_attention_heads": 12, "num_key_value_heads": 6}, 4, "model.layers.0.self_attn.k_proj.weight"),
        ({"intermediate_size": 50}, 4, "model.layers.0.mlp.gate_proj.weight"),
        ({}, 5, "model.embed_tokens.weight"),
    ],
)
def test_a_model_that_cannot_be_divided_by_the_ranks_is_refused(changed: Config, size: int, tensor: str) -> None:
    model = ModelShape.from_config(CONFIGS["llama"] | {"head_dim": 4} | changed)
    with pytest.raises(StateError, match=rf"by {size} ranks") as refused:
        list(fused(model, EngineRank(0, size, vocab_padding=60 if size == 6 else 64)))
    assert refused.value.tensor == tensor


def test_numbers_that_make_no_sense_are_refused() -> None:
    with pytest.raises(StateError, match="models of type 'gpt2' are not supported"):
        ModelShape.from_config({"model_type": "gpt2"})
    numbers: list[dict[str, Any]] = [
        {"tp": 2, "tp_size": 2},
        {"tp": -1, "tp_size": 2},
        {"ep": 1},
        {"expert_tp": (2, 2)},
    ]
    for some in numbers:
        with pytest.raises(ValueError, match="a rank must be"):
            EngineRank(**some)
    with pytest.raises(ValueError, match="multiple of ep_size"):
        EngineRank.sglang(0, 4, ep_size=3)
    with pytest.raises(ValueError, match="tied"):
        ModelShape.from_config(CONFIGS["llama"], lm_head=False)


@pytest.mark.parametrize("library", ["torch", "numpy"])
def test_an_engine_that_has_loaded_the_checkpoint_is_found_to_hold_it(library: str) -> None:
    for c in CONFIGS.values():
        whole = checkpoint(c, torch.float32)
        whole["model.norm.weight"][:2] = torch.tensor([torch.nan, -0.0])
        for rank in split_most(c):
            runtime = engine(c, whole, rank)
            if library == "numpy":
                runtime = {name: tensor.numpy() for name, tensor in runtime.items()}
            check_loaded(place(ModelShape.from_config(c), rank, runtime), whole)


def test_experts_that_a_kernel_has_swapped_or_that_are_spread_in_another_order_are_found() -> None:
    c, rank = CONFIGS["qwen3_moe"], EngineRank.vllm(1, 2, expert_parallel=True)
    whole = checkpoint(c)
    for spoiled in ("swapped", "round robin", "sign of zero"):
        runtime = engine(c, whole, rank)
        w13 = runtime["model.layers.0.mlp.experts.w13_weight"]
        if spoiled == "swapped":
            w13.copy_(w13.roll(w13.shape[1] // 2, 1))
        elif spoiled == "round robin":
            other = engine(c, whole, EngineRank.vllm(0, 2, expert_parallel=True))[
                "model.layers.0.mlp.experts.w13_weight"
            ]
            w13.copy_(torch.cat([other, w13])[1::2])
        else:
            whole["model.layers.0.mlp.experts.3.gate_proj.weight"][0, 0] = 0.0
            w13[0, 0, 0] = -0.0
        with pytest.raises(StateError, match="not at the position that the map names") as refused:
            check_loaded(place(ModelShape.from_config(c), rank, runtime), whole)
        assert refused.value.tensor == "model.layers.0.mlp.experts.3.gate_proj.weight"


def test_a_checkpoint_of_another_model_is_not_held_against_an_engine() -> None:
    c = CONFIGS["llama"]
    whole = checkpoint(c)
    placed = place(ModelShape.from_config(c), EngineRank(), engine(c, whole, EngineRank()))
    with pytest.raises(StateError, match=r"no tensor 'model\.norm\.weight'"):
        check_loaded(placed, {name: t for name, t in whole.items() if name != "model.norm.weight"})
    for other in (whole["model.norm.weight"][1:], whole["model.norm.weight"].half()):
        with pytest.raises(StateError, match="in the checkpoint"):
            check_loaded(placed, whole | {"model.norm.weight": other})


# -- the grid ------------------------------------------------------------------------------------------------------


def test_the_grid_has_the_borders_of_every_rank_it_was_given() -> None:
    cuts = grid(ModelShape.from_config(CONFIGS["qwen3_moe"]), [*FLEETS["tp2"], *FLEETS["tp4"], *FLEETS["ep2"]])
    expected = {
        "model.embed_tokens.weight": ([48, 96, 144], []),
        "lm_head.weight": ([48, 96, 144], []),
        "model.layers.*.self_attn.q_proj.weight": ([16, 32, 48], []),
        "model.layers.*.self_attn.k_proj.weight": ([8], []),
        "model.layers.*.self_attn.v_proj.weight": ([8], []),
        "model.layers.*.self_attn.o_proj.weight": ([], [16, 32, 48]),
        "model.layers.*.mlp.experts.*.gate_proj.weight": ([4, 8, 12], []),
        "model.layers.*.mlp.experts.*.up_proj.weight": ([4, 8, 12], []),
        "model.layers.*.mlp.experts.*.down_proj.weight": ([], [4, 8, 12]),
        "model.layers.*.mlp.gate_proj.weight": ([12, 24, 36], []),
        "model.layers.*.mlp.up_proj.weight": ([12, 24, 36], []),
        "model.layers.*.mlp.down_proj.weight": ([], [12, 24, 36]),
    }
    assert {name: (list(rows), list(columns)) for name, (rows, columns) in cuts.items()} == expected  # type: ignore[arg-type]


@pytest.mark.parametrize("family", CONFIGS)
def test_with_the_grid_every_part_of_every_rank_is_whole_tiles(family: str) -> None:
    c = CONFIGS[family]
    for fleet, ranks in fleets_of(c):
        cuts = grid(ModelShape.from_config(c), [*ranks, *(FLEETS["tp4"] if mapped(c, FLEETS["tp4"]) else ())])
        layout = layouts.make(
            layouts.cut(TensorSpec(name, "BF16", shape), cuts, 1 << 20) for name, shape in shapes(c).items()
        )
        for rank in ranks:
            pieces = {
                p.name: Slice(p.rows, p.columns) for one in fused(ModelShape.from_config(c), rank) for p in one.pieces
            }
            for tile in layout.tiles:
                if held := pieces.get(tile.tensor.name):
                    found = held.of(tile.tensor).place(tile)
                    assert found is None or found.whole, (fleet, tile)


def test_no_grid_is_needed_for_whole_models_and_experts_that_are_only_spread() -> None:
    model = ModelShape.from_config(CONFIGS["mixtral"])
    assert grid(model, [EngineRank()]) == {}
    assert not any("experts" in name for name in grid(model, FLEETS["ep4"]))


# -- following a run -----------------------------------------------------------------------------------------------


class Follower:
    """A rank of an engine that follows a run in its own tensors, which begin as noise."""

    def __init__(self, location: str, c: Config, whole: Tensors, rank: EngineRank, lm_head: bool | None = None) -> None:
        self.c, self.rank = c, rank
        self.runtime = {name: torch.full_like(t, 7) for name, t in engine(c, whole, rank).items()}
        if lm_head and c["tie_word_embeddings"]:
            self.runtime["lm_head.weight"] = self.runtime["model.embed_tokens.weight"]
        placed = place(ModelShape.from_config(c, lm_head), rank, self.runtime)
        self.tensors, slices = for_subscriber(placed)
        self.subscriber = Subscriber(location, slices=slices)

    def sync(self) -> tuple[str, ...]:
        return self.subscriber.sync(self.tensors).path

    def holds(self, whole: Tensors) -> bool:
        expected = engine(self.c, whole, self.rank)
        for name in ("model.embed_tokens.weight", "lm_head.weight"):
            if name in expected:  # padding is nobody's: it stays as it was
                rows = max(0, self.c["vocab_size"] - self.rank.tp * len(expected[name]))
                expected[name][rows:] = 7
        return same(self.runtime, expected)


def train_(whole: Tensors, seed: int) -> None:
    """Change about one weight of a hundred, one at least of each tensor, to any bits at all."""
    rng = torch.Generator().manual_seed(seed)
    specials = torch.tensor([0x7FC1, -0x003F, -0x8000, 0x0001], dtype=torch.int16)  # NaNs, -0.0, a subnormal
    for tensor in whole.values():
        flat = bits(tensor).view(-1)
        count = 1 + flat.numel() // 100
        at = torch.randint(flat.numel(), (count,), generator=rng)
        flat[at] = torch.randint(-(1 << 15), 1 << 15, (count,), generator=rng).to(torch.int16)
        flat[at[0]] = specials[int(torch.randint(4, (1,), generator=rng))]


@pytest.mark.parametrize(
    ("family", "codec", "cut"),
    [
        ("llama", "gap", False),
        ("qwen3_moe", "history", True),
        ("deepseek_v3", "auto", True),
        *(
            slow(family, codec, cut)
            for family, codec, cut in [
                ("llama", "auto", True),
                ("llama", "history", True),
                ("gemma3_text", "auto", True),
                ("qwen2", "auto", True),
                ("qwen2", "history", True),
                ("qwen2", "gap", False),
                ("qwen2_moe", "auto", True),
                ("qwen2_moe", "history", True),
                ("qwen2_moe", "gap", False),
                ("qwen3_moe", "auto", True),
                ("qwen3_moe", "gap", False),
                ("mixtral", "auto", True),
                ("mixtral", "history", True),
                ("mixtral", "gap", False),
            ]
        ),
    ],
)
def test_engines_of_several_layouts_follow_one_run_bit_for_bit(
    tmp_path: Path, family: str, codec: patch.CodecName, cut: bool
) -> None:
    c, location = CONFIGS[family], str(tmp_path)
    whole = checkpoint(c)
    model = ModelShape.from_config(c)
    fleets = ["tp2", "tp4", *(["ep2", "ep2tp2"] if model.experts else ["tp8"])]
    ranks = [rank for name in fleets if mapped(c, FLEETS[name]) for rank in FLEETS[name]]
    followers = [Follower(location, c, whole, rank) for rank in ranks]
    with Publisher(location, codec=codec, grid=grid(model, ranks) if cut else None) as publisher:
        for step in range(4):
            publisher.publish(whole, step=step)
            publisher.flush()
            for follower in followers:
                assert follower.sync() == (("anchor",) if step == 0 else ("patch",))
                assert follower.holds(whole), (step, follower.rank)
            train_(whole, step)


@pytest.mark.parametrize("untied", [False, True])
def test_a_run_with_tied_names_reaches_engines_that_tie_them_and_those_that_do_not(
    tmp_path: Path, untied: bool
) -> None:
    c = CONFIGS["qwen2"]
    whole = checkpoint(c)
    tied = whole | {"lm_head.weight": whole["model.embed_tokens.weight"]}
    followers = [Follower(str(tmp_path), c, whole, rank, lm_head=True) for rank in FLEETS["tp2"]]
    if untied:
        for follower in followers:
            head = follower.runtime["lm_head.weight"] = follower.runtime["lm_head.weight"].clone()
            placed = place(ModelShape.from_config(c, lm_head=True), follower.rank, follower.runtime)
            follower.tensors = for_subscriber(placed)[0]
            assert follower.tensors["lm_head.weight"].data_ptr() == head.data_ptr()
    with Publisher(str(tmp_path), grid=grid(ModelShape.from_config(c), FLEETS["tp2"])) as publisher:
        for step in range(3):
            publisher.publish(tied, step=step)
            publisher.flush()
            for follower in followers:
                follower.sync()
                runtime = dict(follower.runtime)
                head = runtime["lm_head.weight"]
                assert torch.equal(bits(head), bits(runtime["model.embed_tokens.weight"]))
                follower.runtime = {name: t for name, t in runtime.items() if name != "lm_head.weight"}
                assert follower.holds(whole)
                follower.runtime = runtime
            train_(whole, step)


def test_without_the_grid_context_coded_tiles_do_not_fit_and_nothing_is_changed(tmp_path: Path) -> None:
    c = CONFIGS["llama"]
    whole = checkpoint(c)
    follower = Follower(str(tmp_path), c, whole, EngineRank.vllm(0, 2))
    with Publisher(str(tmp_path), codec="context") as publisher:
        publisher.publish(whole, step=0)
        publisher.flush()
        follower.sync()
        before = {name: tensor.clone() for name, tensor in whole.items()}
        train_(whole, 0)
        publisher.publish(whole, step=1)
        publisher.flush()
        with pytest.raises(StateError, match="publish with a grid"):
            follower.sync()
    assert follower.holds(before)


def test_a_run_that_names_its_tensors_otherwise_is_refused(tmp_path: Path) -> None:
    c = CONFIGS["llama"]
    whole = checkpoint(c)
    follower = Follower(str(tmp_path), c, whole, EngineRank())
    with Publisher(str(tmp_path)) as publisher:
        publisher.publish({f"module.{name}": tensor for name, tensor in whole.items()}, step=0)
        publisher.flush()
        with pytest.raises(StateError, match="and the run does not"):
            follower.sync()


def test_what_a_subscriber_gets_is_what_shards_say_and_few_patterns_say_it() -> None:
    c = CONFIGS["qwen2_moe"]
    for rank in FLEETS["ep2tp2"]:
        placed = place(ModelShape.from_config(c), rank, engine(c, checkpoint(c), rank))
        tensors, slices = for_subscriber(placed)
        shards = shards_of(placed)
        assert tensors.keys() == shards.windows.keys()
        for name, window in shards.windows.items():
            assert tuple(tensors[name].shape) == window.local.shape
            assert tensors[name].data_ptr() == placed[name].tensor.data_ptr()
        assert len(slices) < len(tensors) * 2 // 3
        assert list(slices.items())[-1] == ("*", None)


def test_for_a_subscriber_layers_are_cut_alike_and_tensors_contiguous() -> None:
    weight = torch.zeros(4, 4)
    halves = {f"model.layers.{n}.w": Placed(weight[:2].clone(), (4, 4), rows=(2 * n, 2 * n + 2)) for n in range(2)}
    with pytest.raises(StateError, match="cut differently"):
        for_subscriber(halves)
    with pytest.raises(StateError, match="not contiguous"):
        for_subscriber({"w": Placed(weight[:, :2], (4, 4), columns=(0, 2))})


# -- what the tensors mean -----------------------------------------------------------------------------------------


def normed(x: Any, weight: Any, c: Config) -> Any:
    return x * (x.pow(2).mean(-1, keepdim=True) + c["rms_norm_eps"]).rsqrt() * weight


def turned(x: Any) -> Any:
    """Rotary positions, of (tokens, heads, head_dim)."""
    d = x.shape[-1]
    angle = torch.arange(len(x))[:, None] * 10000.0 ** (-torch.arange(0, d, 2) / d)[None]
    cos, sin = (torch.cat([f(angle.double())] * 2, -1)[:, None] for f in (torch.cos, torch.sin))
    return x * cos + torch.cat([-x[..., d // 2 :], x[..., : d // 2]], -1) * sin


def attended(q: Any, k: Any, v: Any) -> Any:
    """Causal attention, of (tokens, heads, head_dim); query heads come in groups of a KV head."""
    k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], 1) for t in (k, v))
    scores = torch.einsum("thd,shd->hts", q, k) / q.shape[-1] ** 0.5
    late = torch.ones(len(q), len(q), dtype=torch.bool).triu(1)
    return torch.einsum("hts,shd->thd", scores.masked_fill(late, -torch.inf).softmax(-1), v).flatten(1)


def routed(logits: Any, c: Config) -> Any:
    """Of each token, the weight of each expert."""
    chance = logits.softmax(-1)
    top = chance.topk(c["num_experts_per_tok"], -1)
    values = top.values / top.values.sum(-1, keepdim=True)
    return torch.zeros_like(chance).scatter(-1, top.indices, values)


def by_checkpoint(c: Config, w: Tensors, tokens: Any) -> Any:
    """The model's logits, from the tensors of the checkpoint."""
    x = w["model.embed_tokens.weight"][tokens]

    def mlp(x: Any, at: str, gate: str = "gate_proj", up: str = "up_proj", down: str = "down_proj") -> Any:
        inner = F.silu(x @ w[f"{at}.{gate}.weight"].T) * (x @ w[f"{at}.{up}.weight"].T)
        return inner @ w[f"{at}.{down}.weight"].T

    for n in range(c["num_hidden_layers"]):
        at = f"model.layers.{n}"
        y = normed(x, w[f"{at}.input_layernorm.weight"], c)
        q, k, v = (
            F.linear(y, w[f"{at}.self_attn.{i}_proj.weight"], w.get(f"{at}.self_attn.{i}_proj.bias")) for i in "qkv"
        )
        q, k, v = (t.unflatten(-1, (heads, -1)) for t, heads in zip((q, k, v), (8, 2, 2), strict=True))
        if f"{at}.self_attn.q_norm.weight" in w:
            q, k = (normed(t, w[f"{at}.self_attn.{i}_norm.weight"], c) for t, i in ((q, "q"), (k, "k")))
        x = x + attended(turned(q), turned(k), v) @ w[f"{at}.self_attn.o_proj.weight"].T
        y = normed(x, w[f"{at}.post_attention_layernorm.weight"], c)
        if f"{at}.mlp.gate.weight" in w:
            chosen = routed(y @ w[f"{at}.mlp.gate.weight"].T, c)
            x = x + sum(chosen[:, e, None] * mlp(y, f"{at}.mlp.experts.{e}") for e in range(c["num_experts"]))
            if f"{at}.mlp.shared_expert_gate.weight" in w:
                x = x + (y @ w[f"{at}.mlp.shared_expert_gate.weight"].T).sigmoid() * mlp(y, f"{at}.mlp.shared_expert")
        elif f"{at}.block_sparse_moe.gate.weight" in w:
            chosen = routed(y @ w[f"{at}.block_sparse_moe.gate.weight"].T, c)
            for e in range(c["num_local_experts"]):
                x = x + chosen[:, e, None] * mlp(y, f"{at}.block_sparse_moe.experts.{e}", "w1", "w3", "w2")
        else:
            x = x + mlp(y, f"{at}.mlp")
    head = w["lm_head.weight" if "lm_head.weight" in w else "model.embed_tokens.weight"]
    return normed(x, w["model.norm.weight"], c) @ head.T


def by_engine(c: Config, held: list[tuple[EngineRank, Tensors]], tokens: Any) -> Any:
    """The model's logits, from the fused tensors of all ranks: each computes with its own, and sums are all-reduced."""
    size, d = held[0][0].tp_size, c.get("head_dim") or c["hidden_size"] // c["num_attention_heads"]
    heads, kv = 8 // size, max(2 // size, 1)

    def looked_up(rank: EngineRank, w: Any) -> Any:
        local = tokens - rank.tp * len(w)
        here = (local >= 0) & (local < len(w))
        return w[local.clamp(0, len(w) - 1)] * here[:, None]

    def gated(x: Any, gate_up: Any, down: Any) -> Any:
        gate, up = (x @ gate_up.T).chunk(2, -1)
        return (F.silu(gate) * up) @ down.T

    def attention(y: Any, w: Tensors, at: str) -> Any:
        qkv = F.linear(y, w[f"{at}.qkv_proj.weight"], w.get(f"{at}.qkv_proj.bias"))
        q, k, v = (t.unflatten(-1, (-1, d)) for t in qkv.split([heads * d, kv * d, kv * d], -1))
        if f"{at}.q_norm.weight" in w:
            q, k = normed(q, w[f"{at}.q_norm.weight"], c), normed(k, w[f"{at}.k_norm.weight"], c)
        return attended(turned(q), turned(k), v) @ w[f"{at}.o_proj.weight"].T

    def feed(y: Any, rank: EngineRank, w: Tensors, at: str) -> Any:
        if f"{at}.gate_up_proj.weight" in w:
            return gated(y, w[f"{at}.gate_up_proj.weight"], w[f"{at}.down_proj.weight"])
        chosen = routed(y @ w[f"{at}.gate.weight"].T, c)
        mine = torch.arange(chosen.shape[-1]).tensor_split(rank.ep_size)[rank.ep]
        both = zip(mine, w[f"{at}.experts.w13_weight"], w[f"{at}.experts.w2_weight"], strict=True)
        out = sum(chosen[:, e, None] * gated(y, w13, w2) for e, w13, w2 in both)
        if f"{at}.shared_expert.gate_up_proj.weight" in w:
            shared = gated(y, *(w[f"{at}.shared_expert.{name}.weight"] for name in ("gate_up_proj", "down_proj")))
            out = out + (y @ w[f"{at}.shared_expert_gate.weight"].T).sigmoid() * shared
        return out

    x = sum(looked_up(rank, w["model.embed_tokens.weight"]) for rank, w in held)
    moe = "block_sparse_moe" if c["model_type"] == "mixtral" else "mlp"
    for n in range(c["num_hidden_layers"]):
        at = f"model.layers.{n}"
        x = x + sum(attention(normed(x, w[f"{at}.input_layernorm.weight"], c), w, f"{at}.self_attn") for _, w in held)
        x = x + sum(
            feed(normed(x, w[f"{at}.post_attention_layernorm.weight"], c), rank, w, f"{at}.{moe}") for rank, w in held
        )
    shards = [w["lm_head.weight" if "lm_head.weight" in w else "model.embed_tokens.weight"] for _, w in held]
    logits = [normed(x, w["model.norm.weight"], c) @ shard.T for (_, w), shard in zip(held, shards, strict=True)]
    return torch.cat(logits, -1)[:, : c["vocab_size"]]


TOKENS = [0, 47, 48, 95, 96, 149, 3, 149]  # first and last of the ranks' vocabularies


def doubled(tensors: Tensors) -> Tensors:
    return {name: tensor.double() for name, tensor in tensors.items()}


@pytest.mark.parametrize(
    ("family", "fleet"),
    [
        *((family, "tp4") for family in ("qwen2", "qwen3")),
        *((family, "ep2") for family in ("qwen2_moe", "mixtral")),
        *(slow(*pair) for pair in (("llama", "tp4"), ("qwen3_moe", "ep2"))),
        *(slow(family, "tp2") for family in ("llama", "qwen2", "qwen3")),
        *(slow(family, fleet) for family in ("qwen2_moe", "qwen3_moe", "mixtral") for fleet in ("tp4", "ep4")),
        ("qwen3_moe", "ep2tp2"),
    ],
)
def test_after_a_sync_the_ranks_together_compute_what_the_checkpoint_does(
    tmp_path: Path, family: str, fleet: str
) -> None:
    c, ranks, tokens = CONFIGS[family], FLEETS[fleet], torch.tensor(TOKENS)
    whole = checkpoint(c, torch.float32)
    followers = [Follower(str(tmp_path), c, whole, rank) for rank in ranks]
    with Publisher(str(tmp_path), grid=grid(ModelShape.from_config(c), ranks)) as publisher:
        before = None
        for step in range(2):
            publisher.publish(whole, step=step)
            publisher.flush()
            for follower in followers:
                follower.sync()
            held = [(follower.rank, doubled(follower.runtime)) for follower in followers]
            expected = by_checkpoint(c, doubled(whole), tokens)
            assert torch.allclose(by_engine(c, held, tokens), expected, rtol=1e-10, atol=1e-10)
            assert before is None or not torch.allclose(before, expected, rtol=1e-3, atol=1e-3)
            before = expected
            for tensor in whole.values():
                tensor.view(-1)[::9] *= 1.25


# -- against transformers ------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.parametrize("family", list(CONFIGS))
def test_names_numbers_and_logits_are_those_of_transformers(tmp_path: Path, family: str) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed: real names UNTESTED")
    from safetensors.torch import load_file

    c = CONFIGS[family]
    config = transformers.AutoConfig.for_model(**c, experts_implementation="eager")  # the others know no FP64
    model = transformers.AutoModelForCausalLM.from_config(config).double().eval()
    rng = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(torch.randn(weight.shape, generator=rng) / 4)
    model.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    assert {name: tuple(tensor.shape) for name, tensor in saved.items()} == shapes(c)
    on_disk = json.loads((tmp_path / "config.json").read_text())
    assert ModelShape.from_config(on_disk) == ModelShape.from_config(config) == ModelShape.from_config(c)
    if family == "llama-bias" or family.startswith(("gemma", "phi", "deepseek")):
        return  # no engine's forward pass here has its biases, norms or attention
    tokens = torch.tensor(TOKENS)
    with torch.no_grad():
        expected = model(tokens[None]).logits[0]
    for fleet in ("tp4", "ep2"):
        held = [(rank, engine(c, saved, rank)) for rank in FLEETS[fleet]]
        assert torch.allclose(by_engine(c, held, tokens), expected, rtol=1e-4, atol=1e-4)  # its norms are in FP32


# -- the page ------------------------------------------------------------------------------------------------------


def test_the_example_of_the_page_runs_as_it_stands(capsys: pytest.CaptureFixture[str]) -> None:
    page = Path(__file__, "../../../docs/integrations/runtime.md").resolve().read_text()
    (example,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    names: dict[str, Any] = {}
    exec(example, names)
    assert capsys.readouterr().out == "('anchor',) torch.Size([4, 64, 64])\n" * 2
    second = names["runtime"]["model.layers.1.mlp.experts.w13_weight"]
    gate = names["checkpoint"]["model.layers.1.mlp.experts.4.gate_proj.weight"]
    assert torch.equal(bits(second[0, :32]), bits(gate))
