"""Read the shape of a model from its configuration.

Llama, Mistral, Qwen2, Qwen3, their MoE models, Mixtral, Gemma 2, Gemma 3 (text), Phi-3, DeepSeek-V2 and V3.

    model = ModelShape.from_config(config)  # a config.json, as a mapping or as transformers has it

A family whose tensors have Llama's names is one line of data. `runtime` maps the tensors of such a model to those of an
inference engine.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pulsesync.errors import StateError

__all__ = ["LatentShape", "ModelShape"]

_FAMILIES: dict[str, dict[str, Any]] = {  # what their configurations do not contain
    "llama": {},
    "mistral": {},
    "qwen2": {"qkv_bias": True},
    "qwen3": {"qk_norm": True},
    "qwen2_moe": {"qkv_bias": True},
    "qwen3_moe": {"qk_norm": True},
    "mixtral": {"moe": "block_sparse_moe", "expert_names": ("w1", "w3", "w2")},
    "gemma2": {"mlp_norms": True},
    "gemma3_text": {"mlp_norms": True, "qk_norm": True},
    "phi3": {"fused_checkpoint": True},
    "deepseek_v2": {"shared": "shared_experts"},
    "deepseek_v3": {"shared": "shared_experts"},
}
_DEFAULTS: dict[str, dict[str, Any]] = {  # the defaults of transformers for numbers that a config.json leaves out
    "gemma2": {"head_dim": 256, "tie_word_embeddings": True},
    "gemma3_text": {"head_dim": 256, "tie_word_embeddings": True},
}
_NOT_MAPPED = {
    "gpt_oss": "engines keep the transpose of the matrices that its checkpoint has for all experts together",
    "gemma3": "it has a vision tower; a checkpoint of only the language model has the type 'gemma3_text'",
}


@dataclass(frozen=True)
class LatentShape:
    """The dimensions of multi-head latent attention (MLA), as DeepSeek-V2 and V3 have it.

    Args:
        q_rank: Width of compressed queries; 0 if they are not compressed.
        kv_rank: Width of compressed keys and values.
        nope: Width of the part of a query head without positions.
        rope: Width of the part with positions.
        value: Width of a value head.
    """

    q_rank: int
    kv_rank: int
    nope: int
    rope: int
    value: int


@dataclass(frozen=True)
class ModelShape:
    """The dimensions of a Llama-like model, and the names of its experts in a checkpoint; `from_config` reads them.

    Args:
        layers: Number of layers.
        hidden: Width of the residual stream.
        heads: Number of attention heads.
        kv_heads: Number of key and value heads.
        head_dim: Width of a head.
        intermediate: Width of the MLP, in layers without experts.
        vocab: Rows of the embedding.
        qkv_bias: Whether the query, key and value projections have biases.
        o_bias: Whether the output projection of the attention has one.
        mlp_bias: Whether the projections of the MLP have them.
        qk_norm: Whether queries and keys are normalised.
        tied: Whether the embedding is the output matrix too.
        lm_head: Whether the checkpoint has lm_head.weight; one with tied weights may or may not.
        experts: Number of experts, in layers with experts.
        expert_intermediate: Width of an expert.
        dense_layers: Layers without experts, in a model that has some.
        moe: Name of the module of a layer that has its experts.
        expert_names: Names of an expert's gate, up and down projections.
        shared_intermediate: Width of a shared expert, which every token uses; 0 if there is none.
        shared: The name of the shared expert; with the default name it has a gate, as in Qwen2-MoE.
        router_bias: Whether the router has e_score_correction_bias, as in DeepSeek-V3.
        mlp_norms: Whether there are norms before and after the MLP in addition to those of the attention, as in Gemma.
        fused_checkpoint: Whether the checkpoint itself has qkv_proj and gate_up_proj, as that of Phi-3.
        latent: The dimensions of its latent attention, which replaces the usual one.

    Raises:
        ValueError: the checkpoint has no lm_head.weight, and the weights are not tied.
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    tied: bool = False
    lm_head: bool = True
    experts: int = 0
    expert_intermediate: int = 0
    dense_layers: frozenset[int] = frozenset()
    moe: str = "mlp"
    expert_names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    shared_intermediate: int = 0
    shared: str = "shared_expert"
    router_bias: bool = False
    mlp_norms: bool = False
    fused_checkpoint: bool = False
    latent: LatentShape | None = None

    def __post_init__(self) -> None:
        if not self.lm_head and not self.tied:
            raise ValueError("lm_head=False needs tied=True: without tied weights a checkpoint has lm_head.weight")

    @classmethod
    def from_config(cls, config: Any, lm_head: bool | None = None) -> "ModelShape":
        """Read a config.json, as a mapping or as transformers has it.

        lm_head: whether the run has a tensor or a tie of that name. If it is not given, a model with tied weights has
        none, as transformers saves it; a run published from a live module has both names.

        Raises:
            StateError: this family (`model_type`) is not supported, or cannot be mapped.
        """
        given: Mapping[str, Any] = config if isinstance(config, Mapping) else config.to_dict()
        family = str(given.get("model_type"))
        if family not in _FAMILIES:
            why = f" ({_NOT_MAPPED[family]})" if family in _NOT_MAPPED else ""
            raise StateError(f"models of type {family!r} are not supported{why}; supported are {', '.join(_FAMILIES)}")
        c = _DEFAULTS.get(family, {}) | {key: value for key, value in given.items() if value is not None}
        tied, bias = bool(c.get("tie_word_embeddings", False)), bool(c.get("attention_bias", False))
        numbers: dict[str, Any] = {
            "layers": c["num_hidden_layers"],
            "hidden": c["hidden_size"],
            "heads": c["num_attention_heads"],
            "kv_heads": c.get("num_key_value_heads") or c["num_attention_heads"],
            "head_dim": c.get("head_dim") or c["hidden_size"] // c["num_attention_heads"],
            "intermediate": c["intermediate_size"],
            "vocab": c["vocab_size"],
            "qkv_bias": bias,
            "o_bias": bias,
            "mlp_bias": bool(c.get("mlp_bias", False)),
            "tied": tied,
            "lm_head": not tied if lm_head is None else lm_head,
        }
        said = {"qkv_bias": bool(c["qkv_bias"])} if "qkv_bias" in c else {}
        deepseek = _deepseek_numbers(c) if family.startswith("deepseek") else {}
        return cls(**numbers | _expert_numbers(c) | _FAMILIES[family] | deepseek | said)


def _expert_numbers(c: Mapping[str, Any]) -> dict[str, Any]:
    step, dense = c.get("decoder_sparse_step") or 1, set(c.get("mlp_only_layers") or ())
    layers = range(c["num_hidden_layers"])
    return {
        "experts": c.get("num_experts") or c.get("num_local_experts") or 0,
        "expert_intermediate": c.get("moe_intermediate_size") or c["intermediate_size"],
        "shared_intermediate": c.get("shared_expert_intermediate_size") or 0,
        "dense_layers": frozenset(n for n in layers if n in dense or (n + 1) % step),
    }


def _deepseek_numbers(c: Mapping[str, Any]) -> dict[str, Any]:
    step, first = c.get("moe_layer_freq") or 1, c.get("first_k_dense_replace") or 0
    width = c.get("moe_intermediate_size") or 0
    widths = (c[name] for name in ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
    latent = LatentShape(c.get("q_lora_rank") or 0, *widths)
    return {
        "experts": c.get("n_routed_experts") or 0,
        "expert_intermediate": width,
        "shared_intermediate": width * (c.get("n_shared_experts") or 0),
        "dense_layers": frozenset(n for n in range(c["num_hidden_layers"]) if n < first or n % step),
        "router_bias": c.get("topk_method") == "noaux_tc",
        "latent": latent,
        "head_dim": latent.nope + latent.rope,
        "qkv_bias": False,
        "o_bias": False,
    }
