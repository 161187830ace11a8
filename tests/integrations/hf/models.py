"""Tiny random models and a tokenizer of Hugging Face, made without the Hub, and what is compared with them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

WORDS = ["<pad>", "<eos>", "<unk>", *"abcdefghijklmnopqrstuvwxyz"]
SIZES = {
    "vocab_size": 32,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": None,
}


def tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({word: n for n, word in enumerate(WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    made = PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", padding_side="left"
    )
    made.chat_template = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
    return made


def llama(seed: int = 0, **sizes: Any) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(**{**SIZES, "tie_word_embeddings": False, **sizes}))


def qwen2(seed: int = 0, **sizes: Any) -> Any:
    """With tied embeddings, and biases in the attention."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(seed)
    return Qwen2ForCausalLM(Qwen2Config(**{**SIZES, "tie_word_embeddings": True, **sizes}))


def gpt2(seed: int = 0) -> Any:
    """With Conv1D, whose weights are transposed, and tied embeddings."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(seed)
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=32, n_embd=32, n_layer=2, n_head=2, n_positions=64, bos_token_id=1, eos_token_id=1)
    )


def mixtral(seed: int = 0) -> Any:
    """A mixture of experts: checkpoints have a tensor for each expert, modules one for all of them."""
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(seed)
    return MixtralForCausalLM(MixtralConfig(**{**SIZES, "num_local_experts": 4}))


def rows(count: int = 16) -> list[dict[str, Any]]:
    """Sequences to train on."""
    generator = torch.Generator().manual_seed(3)
    made = []
    for _ in range(count):
        ids = torch.randint(3, 29, (8,), generator=generator).tolist()
        made.append({"input_ids": ids, "labels": list(ids), "attention_mask": [1] * 8})
    return made


def train_a_step(model: Any, rate: float = 0.05) -> None:
    """Change what is trainable, as an optimizer would, by noise that depends on nothing but the seed."""
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter += rate * torch.randn(parameter.shape, generator=generator).to(parameter.dtype)


def bits(tensor: Tensor) -> Tensor:
    tensor = tensor.detach().contiguous()
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.view(integers[tensor.element_size()]).clone()


def all_bits(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A copy of weights, as integers."""
    return {name: bits(tensor) for name, tensor in weights.items()}


def differing(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> list[str]:
    """The names of tensors that only one has, or whose dtype, shape or bits differ."""
    return [
        name
        for name in sorted(found.keys() | wanted.keys())
        if name not in found
        or name not in wanted
        or found[name].dtype != wanted[name].dtype
        or not torch.equal(bits(found[name]), bits(wanted[name]))
    ]


def saved_in(folder: Path) -> dict[str, Tensor]:
    """The tensors of all safetensors files of a folder."""
    found: dict[str, Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            found |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is no dictionary
    return found
