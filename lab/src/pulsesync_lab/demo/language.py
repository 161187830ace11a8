"""A language model that learns to add: any Hugging Face checkpoint with a chat template, SmolLM2-135M-Instruct first.

Master weights are FP32. On a CPU all arithmetic is also FP32; on a GPU it is BF16 at both ends (autocast), so that a
worker, whose weights have BF16 values, loses nothing by it. Attention is the plain implementation: it yields the same
gradients every time, which fused kernels do not promise, and sequences are short.

Only tokens are sent: a prompt is padded on the left to one length, so its padding is the run of pad tokens that a row
begins with, and a completion ends with its first end token. Needs the extra llm.
"""

import re
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pulsesync.errors import PulseError
from pulsesync_lab.demo import grpo
from pulsesync_lab.demo.grpo import Rollouts

SYSTEM = "Add."
QUESTION = "What is {} + {}?"
# Beginning of the answer: without it SmolLM2-135M chats, and 0 to 1 % are correct; with it, about 8 %.
BEGUN = "{} + {} ="
SMALLEST, LARGEST = 10, 99  # of the numbers to add
ANSWER = 6  # tokens a completion may have: a space, three digits, the end, and one spare
ROWS = 64  # samples that the trainer processes at a time: the logits of one have 1.2 MB


def transformers() -> Any:
    """The package of that name. Raises: PulseError, if it is not installed."""
    try:
        return import_module("transformers")
    except ImportError as e:
        raise PulseError(f"{e.name} is not installed: pip install 'pulsesync-lab[llm]'") from e


class LanguageModel:
    """Adding numbers of two digits with a checkpoint: reward 1 if the first integer of a completion is correct, else 0.

    Raises: PulseError, if the folder has no checkpoint whose tokenizer has a chat template and an end token.
    """

    def __init__(self, folder: str, group: int, device: str) -> None:
        if not (Path(folder) / "config.json").exists():
            raise PulseError(f"{folder} has no checkpoint: it contains no config.json")
        self.folder, self.group, self.device = folder, group, torch.device(device)
        self._tokenizer = transformers().AutoTokenizer.from_pretrained(folder, local_files_only=True)
        if self._tokenizer.chat_template is None or self._tokenizer.eos_token_id is None:
            raise PulseError(f"the tokenizer in {folder} has no chat template or no end token")
        self._end = int(self._tokenizer.eos_token_id)
        pad = self._tokenizer.pad_token_id
        self._pad = self._end if pad is None else int(pad)
        # One for all shards, so that they can be joined. The longest prompt has the longest number twice.
        self._width = max(len(self._encode(number, number)) for number in range(SMALLEST, LARGEST + 1))

    def load(self) -> nn.Module:
        """The checkpoint's model, with FP32 weights."""
        model: nn.Module = transformers().AutoModelForCausalLM.from_pretrained(
            self.folder, dtype=torch.float32, attn_implementation="eager", local_files_only=True
        )
        return model

    def policy(self) -> nn.Module:
        model = self.load().to(self.device)
        with torch.no_grad():
            for weight in model.parameters():
                weight.copy_(weight.bfloat16())
        _name_once(model)
        return model

    def play(self, policy: nn.Module, prompts: int, seed: int) -> Rollouts:
        generator = torch.Generator(self.device).manual_seed(seed)
        drawn = torch.randint(SMALLEST, LARGEST + 1, (prompts, 2), generator=generator, device=self.device).tolist()
        asked = torch.tensor([self._prompt(*numbers) for numbers in drawn], device=self.device)
        with self._arithmetic():
            completed, likely = self._complete(policy, asked, generator)
        texts = self._tokenizer.batch_decode(completed, skip_special_tokens=True)
        right = [sum(numbers) for numbers in drawn for _ in range(self.group)]
        rewards = torch.tensor([float(first_integer(text) == sum_) for text, sum_ in zip(texts, right, strict=True)])
        tokens = torch.cat([asked.repeat_interleave(self.group, dim=0), completed], dim=1)
        return Rollouts(tokens.cpu(), likely.cpu(), rewards)

    def show(self, prompts: int, seed: int) -> Rollouts:
        """A batch for supervised learning: as many samples as in a rollout, each with its own prompt, all correct."""
        generator = torch.Generator().manual_seed(seed)
        drawn = torch.randint(SMALLEST, LARGEST + 1, (prompts * self.group, 2), generator=generator).tolist()
        tokens = torch.tensor([self._prompt(*numbers) + self._right(sum(numbers)) for numbers in drawn])
        return Rollouts(tokens, torch.zeros(len(tokens), ANSWER), torch.ones(len(tokens)))

    def learn(self, policy: nn.Module, optimizer: torch.optim.Optimizer, rollouts: Rollouts) -> float:
        """Take one step; return the loss: the mean over all tokens up to the end token of each completion."""
        better = grpo.advantages(rollouts.rewards, self.group)
        return float(self.climb(policy, optimizer, rollouts, better, grpo.clipped))

    def climb(
        self, policy: nn.Module, optimizer: torch.optim.Optimizer, rollouts: Rollouts, better: Tensor, gain: grpo.Gain
    ) -> Tensor:
        """Take one step to increase a gain, as above.

        Samples without advantage, as in a group in which all did equally well, are left out.
        """
        tokens, then = rollouts.tokens.to(self.device), rollouts.log_probabilities.to(self.device)
        better = better.to(self.device)
        counted = self.counted(tokens)
        total = counted.sum()
        optimizer.zero_grad()
        value = torch.zeros((), device=self.device)
        teaching = better.nonzero()[:, 0]
        for first in range(0, len(teaching), ROWS):
            rows = teaching[first : first + ROWS]
            now = self.log_probabilities(policy, tokens[rows])
            part = -(gain(now, then[rows], better[rows, None]) * counted[rows]).sum() / total
            part.backward()
            value += part.detach()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), grpo.LARGEST_NORM)
        optimizer.step()
        return value

    def log_probabilities(self, policy: nn.Module, tokens: Tensor) -> Tensor:
        """Log-probabilities of the last ANSWER tokens, each given those before it: (samples, ANSWER).

        Those after an end are meaningless.
        """
        seen = self._seen(tokens)[:, :-1]
        with self._arithmetic():
            logits = policy(
                input_ids=tokens[:, :-1],
                attention_mask=seen,
                position_ids=_places(seen),
                use_cache=False,
                logits_to_keep=ANSWER,
            ).logits
        chosen: Tensor = logits.float().log_softmax(dim=-1).gather(-1, tokens[:, -ANSWER:, None])[..., 0]
        return chosen

    def counted(self, tokens: Tensor) -> Tensor:
        """Which tokens of the completions count: those up to and including the first end token, (samples, ANSWER)."""
        ends = tokens[:, -ANSWER:] == self._end
        return ends.cumsum(dim=1) - ends.long() == 0

    @torch.no_grad()
    def _complete(self, policy: nn.Module, asked: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Sample at temperature 1: tokens and their log-probabilities, each (samples, ANSWER); after an end pad and 0.

        A prompt is read once for its whole group.
        """
        seen = self._seen(asked)
        out = policy(input_ids=asked, attention_mask=seen, position_ids=_places(seen), use_cache=True, logits_to_keep=1)
        cache, logits = out.past_key_values, out.logits.repeat_interleave(self.group, dim=0)
        cache.batch_repeat_interleave(self.group)
        seen = seen.repeat_interleave(self.group, dim=0)
        completed = torch.full((len(seen), ANSWER), self._pad, device=self.device)
        likely = torch.zeros(len(seen), ANSWER, device=self.device)
        going = torch.ones(len(seen), 1, dtype=torch.bool, device=self.device)
        for place in range(ANSWER):
            scores = logits[:, -1].float().log_softmax(dim=-1)
            chosen = torch.multinomial(scores.exp(), 1, generator=generator).where(going, self._pad)
            completed[:, place] = chosen[:, 0]
            likely[:, place] = scores.gather(1, chosen).where(going, 0.0)[:, 0]
            going = going & (chosen != self._end)
            if place == ANSWER - 1 or not going.any():
                break
            seen = torch.cat([seen, torch.ones_like(going)], dim=1)
            logits = policy(
                input_ids=chosen,
                attention_mask=seen,
                position_ids=_places(seen)[:, -1:],
                past_key_values=cache,
                use_cache=True,
            ).logits
        return completed, likely

    def _arithmetic(self) -> torch.autocast:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type != "cpu")

    def _seen(self, tokens: Tensor) -> Tensor:
        """False for the padding that a row begins with."""
        return (tokens != self._pad).cumsum(dim=1) > 0

    def _prompt(self, a: int, b: int) -> list[int]:
        encoded = self._encode(a, b)
        if len(encoded) > self._width or encoded[0] == self._pad:
            raise PulseError(f"the tokenizer in {self.folder} makes prompts that cannot be padded on the left")
        return [self._pad] * (self._width - len(encoded)) + encoded

    def _right(self, total: int) -> list[int]:
        """The completion with a sum and an end token, padded to ANSWER tokens."""
        tokens: list[int] = self._tokenizer(f" {total}", add_special_tokens=False)["input_ids"]
        if len(tokens) >= ANSWER:
            raise PulseError(
                f"the tokenizer in {self.folder} encodes {total} in {len(tokens)} tokens; an answer can have "
                f"{ANSWER - 1} at most"
            )
        return [*tokens, self._end, *[self._pad] * (ANSWER - 1 - len(tokens))]

    def _encode(self, a: int, b: int) -> list[int]:
        chat = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": QUESTION.format(a, b)}]
        text = self._tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        encoded: list[int] = self._tokenizer(text + BEGUN.format(a, b), add_special_tokens=False)["input_ids"]
        return encoded


def first_integer(text: str) -> int | None:
    found = re.search(r"-?\d+", text)
    return int(found[0]) if found else None


def _places(seen: Tensor) -> Tensor:
    """The position of each token, not counting the padding before it."""
    return (seen.cumsum(dim=1) - 1).clamp(min=0)


def _name_once(model: nn.Module) -> None:
    """Keep a weight that has two names, as tied embeddings have, as a parameter of the first module that has it.

    For the others it is a plain attribute. No hook is needed, so that the weights are read without `state_dict`.
    """
    seen: set[nn.Parameter] = set()
    for module in model.modules():
        for name, weight in list(module.named_parameters(recurse=False)):
            if weight in seen:
                delattr(module, name)
                module.__dict__[name] = weight
            seen.add(weight)
