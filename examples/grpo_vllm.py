"""GRPO with TRL, whose rollouts come from a vLLM server that has the trainer's weights of the same step.

    python examples/grpo_vllm.py runs/grpo --model runs/tiny

and, once runs/tiny exists, in a second terminal, with vLLM and pulsesync in a separate environment:

    vllm serve runs/tiny --middleware pulsesync.integrations.vllm.Routes

(on a CPU add `--dtype float32 --enforce-eager --max-model-len 256`). The trainer makes a tiny random model in runs/tiny
if nothing is there, and waits for the server. The policy learns to write even numbers. The three lines marked with
PULSE, and their imports, are all that is added to a trainer that generates with a server. The third brings the server
to the weights of the step before each rollout, so that rollouts are on-policy. Without it, `pulse follow runs/grpo
--vllm http://127.0.0.1:8000` in a third terminal updates the server as versions arrive; rollouts may then lag behind.

To show that rollouts are on-policy, the trainer computes the log-probabilities of all sampled tokens again. Ends with

    30 steps: log-probabilities of server and trainer differ by at most 1e-06; the reward went from 0.49 to 0.91
"""

import argparse
import json
import os
import random
import tempfile
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer

from pulsesync.integrations.huggingface import PulseCallback
from pulsesync.integrations.vllm import VllmServer

START_S = 600.0  # how long to wait for the server
ANSWER_S = 120.0
GROUP, PROMPTS_A_STEP, LENGTH = 8, 4, 16


def make_model(folder: Path, tied: bool = False) -> None:
    """Save a small Llama with random weights, and a tokenizer whose words are the numbers below 100."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=104,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=tied,
        bos_token_id=None,
        eos_token_id=100,
        pad_token_id=101,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    words = [*map(str, range(100)), "<eos>", "<pad>", "<unk>", "<none>"]
    tokenizer = Tokenizer(WordLevel({word: n for n, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>", unk_token="<unk>"
    ).save_pretrained(folder)


def even_numbers(completions: list[str], **_: Any) -> list[float]:
    """The reward: the share of generated words that are even numbers."""
    words = [text.split() for text in completions]
    even = [sum(word.isdecimal() and int(word) % 2 == 0 for word in each) for each in words]
    return [n / max(1, len(each)) for n, each in zip(even, words, strict=True)]


class Generator:
    """Completions of a vLLM server over its OpenAI route: token ids in, token ids and their log-probabilities out.

    Every completion has its own seed, so that the same weights yield the same tokens.

    Args:
        url: The address of the server.
        seed: What the seeds of the completions are drawn from.
    """

    def __init__(self, url: str, seed: int) -> None:
        self.url, self._seeds = url, random.Random(seed)
        self._pool = ThreadPoolExecutor(GROUP * PROMPTS_A_STEP)
        self._model = ""

    def wait(self) -> None:
        """Wait until the server is ready. Raises: TimeoutError."""
        until = time.monotonic() + START_S
        while True:
            try:
                self._model = self._call("/v1/models")["data"][0]["id"]
                return
            except OSError as e:
                if time.monotonic() > until:
                    raise TimeoutError(f"no vLLM server answers at {self.url}: {e}") from e
                time.sleep(1)

    def generate(self, prompts: list[str], trainer: GRPOTrainer) -> dict[str, list[Any]]:
        """A completion for each prompt, as `rollout_func` of TRL returns them; prompts are repeated for a group.

        Raises: OSError, if the server does not answer.
        """
        prompt_ids = trainer.processing_class(prompts)["input_ids"]
        seeds = [self._seeds.getrandbits(31) for _ in prompts]
        answers = list(self._pool.map(self._complete, prompt_ids, seeds))
        return {
            "prompt_ids": prompt_ids,
            "completion_ids": [answer["token_ids"] for answer in answers],
            "logprobs": [answer["logprobs"]["token_logprobs"] for answer in answers],
        }

    def _complete(self, prompt: list[int], seed: int) -> Any:
        sampling = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "repetition_penalty": 1.0, "seed": seed}
        asked = {"prompt": prompt, "max_tokens": LENGTH, "logprobs": 0, "return_token_ids": True, **sampling}
        return self._call("/v1/completions", {"model": self._model, **asked})["choices"][0]

    def _call(self, path: str, body: dict[str, Any] | None = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=ANSWER_S) as response:
            return json.load(response)


@torch.no_grad()
def largest_difference(rollout: dict[str, list[Any]], model: Any) -> float:
    """The largest difference between the log-probabilities of a rollout and those of a model for the same tokens."""
    each = list(zip(rollout["prompt_ids"], rollout["completion_ids"], rollout["logprobs"], strict=True))
    tokens = pad_sequence([torch.tensor([*prompt, *completion]) for prompt, completion, _ in each], batch_first=True)
    # Padding is at the end, and has no effect.
    scores = model(tokens.to(model.device)).logits.float().log_softmax(-1).cpu()
    expected = scores[:, :-1].gather(2, tokens[:, 1:, None])[..., 0]
    differences = [
        (row[len(prompt) - 1 :][: len(found)] - torch.tensor(found)).abs().max()
        for row, (prompt, _, found) in zip(expected, each, strict=True)
    ]
    return float(max(differences))


def settings(scratch: str, steps: int, seed: int) -> GRPOConfig:
    return GRPOConfig(
        scratch,
        max_steps=steps,
        seed=seed,
        learning_rate=1e-3,
        lr_scheduler_type="constant",
        num_generations=GROUP,
        per_device_train_batch_size=GROUP * PROMPTS_A_STEP,
        max_completion_length=LENGTH,
        use_cpu=not torch.cuda.is_available(),
        bf16=False,  # FP32, as a server on a CPU computes; on a GPU leave this out, and `cast` of the callback
        gradient_checkpointing=False,
        dataloader_pin_memory=False,
        logging_steps=1,
        disable_tqdm=True,
        report_to=[],
        save_strategy="no",
    )


def numbers(seed: int) -> Dataset:
    """Prompts: four random numbers each."""
    drawn = random.Random(seed)
    return Dataset.from_list([{"prompt": " ".join(str(drawn.randrange(100)) for _ in range(4))} for _ in range(256)])


def main() -> None:
    parser = argparse.ArgumentParser(description="GRPO with TRL and rollouts from a vLLM server.")
    parser.add_argument("location", help="where to publish: a folder, or a URL that the server can reach, too")
    parser.add_argument("--model", type=Path, required=True, help="folder of the model; made if it does not exist")
    parser.add_argument("--server", default="http://127.0.0.1:8000", help="address of the vLLM server")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    if "://" not in given.location:
        given.location = os.path.abspath(given.location)  # the server may have been started elsewhere

    if not given.model.exists():
        make_model(given.model)
    generator = Generator(given.server, given.seed)
    generator.wait()
    differences = []

    callback = PulseCallback(given.location, cast={})  # PULSE 1: publishes every step; cast={}: in FP32

    def rollout(prompts: list[str], trainer: GRPOTrainer) -> dict[str, list[Any]]:
        step = trainer.state.global_step
        VllmServer(given.server).update(given.location, callback.version_of(step), wait_s=120)  # PULSE 3: its weights
        found = generator.generate(prompts, trainer)
        differences.append(largest_difference(found, trainer.model))
        return found

    with tempfile.TemporaryDirectory() as scratch:
        trainer = GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(given.model, dtype=torch.float32),
            processing_class=AutoTokenizer.from_pretrained(given.model),
            args=settings(scratch, given.steps, given.seed),
            train_dataset=numbers(given.seed),
            reward_funcs=even_numbers,
            rollout_func=rollout,
            callbacks=[callback],  # PULSE 2
        )
        trainer.train()
    rewards = [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]
    print(
        f"{given.steps} steps: log-probabilities of server and trainer differ by at most {max(differences):.0e}; "
        f"the reward went from {rewards[0]:.2f} to {rewards[-1]:.2f}"
    )


if __name__ == "__main__":
    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")  # of `rollout_func`
    main()
