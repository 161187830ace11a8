"""The policy: a transformer of 1.2 million weights, as small as one can be that adds.

Master weights and all arithmetic are FP32 (BF16 arithmetic is emulated on most CPUs); what is published, and what a
worker generates with, are the BF16 values.
"""

from importlib import resources
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from pulsesync.rl import task

WIDTH, LAYERS, HEADS = 160, 4, 4
CHECKPOINT = "policy.safetensors"


class Policy(nn.Module):
    """Causal transformer over the task's symbols; positions are learned."""

    def __init__(self) -> None:
        super().__init__()
        self.symbols = nn.Embedding(len(task.SYMBOLS), WIDTH)
        self.places = nn.Embedding(task.LENGTH, WIDTH)
        self.layers = nn.ModuleList(_Layer() for _ in range(LAYERS))
        self.norm = nn.RMSNorm(WIDTH)
        self.head = nn.Linear(WIDTH, len(task.SYMBOLS), bias=False)

    def forward(self, tokens: Tensor, seen: "Seen | None" = None) -> Tensor:
        """Logits for the token after each: (batch, length, symbols). With `seen`, tokens go on from what is in it."""
        begin = seen.length if seen else 0
        x = self.symbols(tokens) + self.places.weight[begin : begin + tokens.shape[1]]
        for number, layer in enumerate(self.layers):
            x = layer(x, seen, number)
        logits: Tensor = self.head(self.norm(x))
        return logits


class Seen:
    """What the layers have made of the tokens so far, so that the next one costs one token's work."""

    def __init__(self) -> None:
        self.layers: list[tuple[Tensor, Tensor]] = []  # keys and values: (batch, heads, length, width)

    @property
    def length(self) -> int:
        return self.layers[-1][0].shape[2] if len(self.layers) == LAYERS else 0

    def grow(self, number: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Add a layer's new keys and values to its old ones; return all."""
        if number == len(self.layers):
            self.layers.append((keys, values))
        else:
            before = self.layers[number]
            self.layers[number] = (torch.cat([before[0], keys], dim=2), torch.cat([before[1], values], dim=2))
        return self.layers[number]


class _Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.up = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.down = nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor, seen: Seen | None, number: int) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
        if seen is not None:
            k, v = seen.grow(number, k, v)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=length > 1)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, WIDTH))
        y: Tensor = x + self.down(functional.silu(self.up(self.norm2(x))))
        return y


def fresh(seed: int) -> Policy:
    """A policy that knows nothing yet."""
    torch.manual_seed(seed)
    policy = Policy()
    for weight in policy.parameters():
        if weight.ndim > 1:
            nn.init.normal_(weight, 0, 0.02)
    return policy


def pretrained(path: Path | None = None) -> Policy:
    """The policy that the package ships, or one that was saved: it gets about one sum in four right."""
    from safetensors.torch import load_file

    policy = Policy()
    with resources.as_file(resources.files("pulsesync.rl") / CHECKPOINT) as shipped:
        policy.load_state_dict({name: weight.float() for name, weight in load_file(path or shipped).items()})
    return policy


def log_probabilities(policy: nn.Module, tokens: Tensor, answer: int) -> Tensor:
    """Of the last `answer` tokens, each given those before it: (batch, answer)."""
    logits = policy(tokens[:, :-1])[:, -answer:]
    chosen: Tensor = logits.log_softmax(dim=-1).gather(-1, tokens[:, -answer:, None])[..., 0]
    return chosen


@torch.no_grad()
def complete(policy: Policy, asked: Tensor, answer: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Sample completions, token by token, at temperature 1: tokens and their log-probabilities, (batch, answer)."""
    seen, tokens = Seen(), asked
    chosen, likely = [], []
    for _ in range(answer):
        scores = policy(tokens, seen)[:, -1].log_softmax(dim=-1)
        tokens = torch.multinomial(scores.exp(), 1, generator=generator)
        chosen.append(tokens)
        likely.append(scores.gather(-1, tokens))
    return torch.cat(chosen, dim=1), torch.cat(likely, dim=1)
