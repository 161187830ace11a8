"""Engines that are written through the map, and fresh ones: what each of them makes of the same prompt.

    python -m tests.integrations.vllm.family_engine FOLDER NAME...

FOLDER/NAME has a checkpoint and, in `next`, another one. Written to FOLDER/engines.json are the log-probabilities of an
engine that was started with the first, before and after the second was written into its weights, and those of an engine
that was started with the second.
"""

import gc
import json
import os
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

from pulsesync.integrations.runtime import EngineRank, ModelShape, place, runtime_tensors
from tests.integrations.vllm.family_rank import attention, keep_weights_as_loaded, write_

PROMPT = [3, 17, 99, 140, 5, 61, 149, 22]


def start(folder: Path) -> Any:
    return import_module("vllm").LLM(
        model=str(folder),
        skip_tokenizer_init=True,
        dtype="float32",
        attention_backend=attention(folder),
        enforce_eager=True,
        max_model_len=128,
        max_num_seqs=4,
    )


def log_probabilities(llm: Any) -> list[float]:
    """Of each token of the prompt, and of the five likeliest ones of each that is generated."""
    asked = import_module("vllm").SamplingParams(
        temperature=0, max_tokens=8, prompt_logprobs=0, logprobs=5, detokenize=False
    )
    (answer,) = llm.generate([{"prompt_token_ids": PROMPT}], asked, use_tqdm=False)
    read = [one[token].logprob for token, one in zip(PROMPT[1:], answer.prompt_logprobs[1:], strict=True)]
    return read + [value.logprob for one in answer.outputs[0].logprobs for value in one.values()]


def forget(llm: Any) -> None:
    """Let go of an engine, so that this process can start another one."""
    llm.llm_engine.engine_core.shutdown()
    gc.collect()
    import_module("vllm.distributed").cleanup_dist_env_and_memory()


def look(folder: Path) -> dict[str, list[float]]:
    llm = start(folder)
    found = {"before": log_probabilities(llm)}
    shape = ModelShape.from_config(json.loads((folder / "config.json").read_text()))
    (runtime,) = llm.apply_model(runtime_tensors)
    write_(
        place(shape, EngineRank(), runtime),
        import_module("safetensors.torch").load_file(folder / "next" / "model.safetensors"),
    )
    llm.reset_prefix_cache()
    found["after"] = log_probabilities(llm)
    forget(llm)
    del llm, runtime
    llm = start(folder / "next")
    found["fresh"] = log_probabilities(llm)
    forget(llm)
    return found


def main(folder: Path, names: list[str]) -> None:
    keep_weights_as_loaded()
    found = {name: look(folder / name) for name in names}
    (folder / "engines.json").write_text(json.dumps(found))
    os._exit(0)  # vLLM's groups and threads are not taken down one by one


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
