"""The policy: a transformer of 1.2 million weights, about the smallest that can add.

Master weights and all arithmetic are FP32 (BF16 arithmetic is emulated on most CPUs); what is published, and what a
worker generates with, are the BF16 values. Other shapes of it, also with experts, are for studies.
"""

from dataclasses import dataclass
from importlib import resources
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from pulsesync_lab.demo import task

CHECKPOINT = "policy.safetensors"


@dataclass(frozen=True)
class PolicyShape:
    """The shape of a policy. With experts, each token in each layer is processed by `chosen` of them."""

    width: int = 160
    layers: int = 4
    heads: int = 4
    experts: int = 0
    chosen: int = 2

    @property
    def name(self) -> str:
        """A unique name of the shape."""
        name = f"{self.width}x{self.layers}" + (f"x{self.heads}h" if self.heads != 4 else "")
        if self.experts:
            name += f"x{self.experts}e" + (f"x{self.chosen}c" if self.chosen != 2 else "")
        return name


SHIPPED = PolicyShape()


class Policy(nn.Module):
    """Causal transformer over the task's symbols; positions are learned."""

    def __init__(self, shape: PolicyShape = SHIPPED) -> None:
        super().__init__()
        self.shape = shape
        self.symbols = nn.Embedding(len(task.SYMBOLS), shape.width)
        self.places = nn.Embedding(task.LENGTH, shape.width)
        self.layers = nn.ModuleList(_Layer(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.width)
        self.head = nn.Linear(shape.width, len(task.SYMBOLS), bias=False)

    def forward(self, tokens: Tensor, seen: "KeyValueCache | None" = None) -> Tensor:
        """Logits for the token after each: (batch, length, symbols).

        With `seen`, tokens continue the sequence in it.
        """
        logits: Tensor = self.head(self.thoughts(tokens, seen))
        return logits

    def thoughts(self, tokens: Tensor, seen: "KeyValueCache | None" = None) -> Tensor:
        """The activations before the logits: (batch, length, width)."""
        begin = seen.length if seen else 0
        x = self.symbols(tokens) + self.places.weight[begin : begin + tokens.shape[1]]
        for number, layer in enumerate(self.layers):
            x = layer(x, seen, number)
        normed: Tensor = self.norm(x)
        return normed


class KeyValueCache:
    """Cached keys and values of the tokens so far, so that the next one costs one token's work."""

    def __init__(self) -> None:
        self.layers: list[tuple[Tensor, Tensor]] = []  # keys and values: (batch, heads, length, width)

    @property
    def length(self) -> int:
        """Tokens so far, between two passes through all layers."""
        return self.layers[-1][0].shape[2] if self.layers else 0

    def grow(self, number: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Add a layer's new keys and values to its old ones; return all."""
        if number == len(self.layers):
            self.layers.append((keys, values))
        else:
            before = self.layers[number]
            self.layers[number] = (torch.cat([before[0], keys], dim=2), torch.cat([before[1], values], dim=2))
        return self.layers[number]


class _Layer(nn.Module):
    def __init__(self, shape: PolicyShape) -> None:
        super().__init__()
        width, self.heads = shape.width, shape.heads
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        if shape.experts:
            self.router = nn.Linear(width, shape.experts, bias=False)
            self.experts = nn.ModuleList(_Expert(width, 4 * width // shape.chosen) for _ in range(shape.experts))
            self.chosen = shape.chosen
        else:
            self.up = nn.Linear(width, 4 * width, bias=False)
            self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor, seen: KeyValueCache | None, number: int) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        if seen is not None:
            k, v = seen.grow(number, k, v)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=length > 1)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        y: Tensor = x + self._think(self.norm2(x))
        return y

    def _think(self, x: Tensor) -> Tensor:
        if hasattr(self, "experts"):
            return self._ask_experts(x)
        thought: Tensor = self.down(functional.silu(self.up(x)))
        return thought

    def _ask_experts(self, x: Tensor) -> Tensor:
        """Compute every expert and sum the chosen ones: no waiting for the device, and no gradients for the others."""
        best, who = self.router(x).topk(self.chosen, dim=-1)
        share = torch.zeros(*x.shape[:-1], len(self.experts), dtype=x.dtype, device=x.device)
        share = share.scatter(-1, who, best.softmax(dim=-1).to(x.dtype))
        up = torch.stack([expert.up.weight for expert in self.experts])  # type: ignore[union-attr, misc]
        down = torch.stack([expert.down.weight for expert in self.experts])  # type: ignore[union-attr, misc]
        inner = functional.silu(torch.einsum("blw,ehw->bleh", x, up)) * share[..., None]
        return torch.einsum("bleh,ewh->blw", inner, down)


class _Expert(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)


def fresh(seed: int, shape: PolicyShape = SHIPPED) -> Policy:
    """An untrained policy."""
    torch.manual_seed(seed)
    policy = Policy(shape)
    for weight in policy.parameters():
        if weight.ndim > 1:
            nn.init.normal_(weight, 0, 0.02)
    return policy


def pretrained(path: Path | None = None, shape: PolicyShape = SHIPPED) -> Policy:
    """The policy that the package ships, or one that was saved: it solves about one sum in four."""
    from safetensors.torch import load_file

    policy = Policy(shape)
    with resources.as_file(resources.files("pulsesync_lab.demo") / CHECKPOINT) as shipped:
        policy.load_state_dict({name: weight.float() for name, weight in load_file(path or shipped).items()})
    return policy


def log_probabilities(policy: nn.Module, tokens: Tensor, answer: int) -> Tensor:
    """Log-probabilities of the last `answer` tokens, each given those before it: (batch, answer)."""
    logits = policy(tokens[:, :-1])[:, -answer:].float()
    chosen: Tensor = logits.log_softmax(dim=-1).gather(-1, tokens[:, -answer:, None])[..., 0]
    return chosen


@torch.no_grad()
def complete(policy: Policy, asked: Tensor, answer: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Sample completions, token by token, at temperature 1: tokens and their log-probabilities, (batch, answer).

    Prompts, policy and generator are on one device.
    """
    seen, tokens = KeyValueCache(), asked
    chosen, likely = [], []
    for _ in range(answer):
        scores = policy(tokens, seen)[:, -1].float().log_softmax(dim=-1)
        tokens = torch.multinomial(scores.exp(), 1, generator=generator)
        chosen.append(tokens)
        likely.append(scores.gather(-1, tokens))
    return torch.cat(chosen, dim=1), torch.cat(likely, dim=1)
