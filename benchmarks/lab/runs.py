"""Small models that are really trained, so that forecasts can be compared with the bytes that they send.

    measured = train(Run("llama", width=256, layers=4, vocabulary=4096))
    measured.weights_by_class, measured.changed, measured.sent      # the start; then one number for each step

No downloads are needed. Language models are two families of transformers in plain torch, with the usual initialisation
or with torch's, on the source text of Python's standard library (real, structured text that every machine with Python
has). A run may be pretrained first, so that the measured steps begin from trained weights, as in reinforcement
learning. "demo" is the pretrained policy that pulsesync ships, which learns to add. Every step is published as the next
version of one run, and all bytes that it adds to the store are counted.
"""

import json
import math
import multiprocessing
import re
import sysconfig
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from copy import deepcopy
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

import ml_dtypes
import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from pulsesync.publish.publisher import Publisher
from pulsesync.store import MemoryStore
from pulsesync_lab.study.experiments import loop
from pulsesync_lab.study.experiments.arm import Algorithm, Arm
from pulsesync_lab.study.experiments.learners import make_learner
from pulsesync_lab.study.experiments.optimizers import make_optimizer
from pulsesync_lab.study.predict.models import classes_of

PRETRAINING_RATE = 1e-3


@dataclass(frozen=True)
class Run:
    """One training run. `pretraining` steps of AdamW come first and are not measured; a fresh optimizer follows."""

    family: Literal["gpt2", "llama", "demo"]
    width: int = 160
    layers: int = 4
    vocabulary: int = 256  # 256: bytes; more: words
    start: Literal["normal", "torch"] = "normal"  # standard deviation 0.02 and zero biases; or torch's own defaults
    pretraining: int = 0
    algorithm: Algorithm = "sft"
    optimizer: Literal["adamw", "sgd", "lion", "muon"] = "adamw"
    lr: float = 3e-6
    betas: tuple[float, float] = (0.9, 0.999)
    masters: bool = True
    steps: int = 30
    rows: int = 4  # in a batch
    length: int = 64  # tokens in a row

    @property
    def trained(self) -> bool:
        """Whether the measured steps begin from trained weights."""
        return self.family == "demo" or self.pretraining > 0

    @property
    def start_only(self) -> "Run":
        """The settings that determine the weights before the first step."""
        return Run(
            self.family,
            self.width,
            self.layers,
            self.vocabulary,
            self.start,
            self.pretraining,
            rows=self.rows,
            length=self.length,
        )

    @property
    def name(self) -> str:
        if self.family == "demo":
            return f"demo policy, {self.algorithm.upper()}"
        begin = f"pretrained {self.pretraining} steps" if self.pretraining else f"random ({self.start})"
        return f"{self.family} {self.width}x{self.layers}, vocabulary {self.vocabulary}, {begin}"

    @property
    def arm(self) -> Arm:
        return Arm(
            self.name,
            algorithm=self.algorithm,
            optimizer=self.optimizer,
            lr=self.lr,
            betas=self.betas,
            masters="fp32" if self.masters else "rounded",
            warm_up=0,
            steps=self.steps,
            prompts=16,
            group=8,
        )


@dataclass
class Measured:
    """The initial weights of a run, and what each of its steps changed and sent."""

    tensors: int
    weights_by_class: dict[int, int]
    changed: list[float] = field(default_factory=list)  # share of the weights
    sent: list[int] = field(default_factory=list)  # bytes


def train(run: Run) -> Measured:
    """Train, and publish every step."""
    torch.manual_seed(0)
    model, steps = _demo(run) if run.family == "demo" else _language(run)
    measured = Measured(len(list(model.parameters())), histogram(_published(model).values()))
    with Publisher(MemoryStore(), anchor_every=1e9) as publisher:
        publisher.publish(_published(model))
        for _, step in zip(range(run.steps), steps, strict=False):
            step()
            report = publisher.publish(_published(model))
            measured.changed.append(report.density)
            measured.sent.append(report.payload_bytes)
    return measured


Steps = Iterator[Callable[[], object]]


def _demo(run: Run) -> tuple[nn.Module, Steps]:
    game = loop.open_game(run.arm, Path())
    policy = game.policy()
    _round(policy)
    learner = make_learner(run.arm, game, policy, make_optimizer(run.arm, policy))

    def steps() -> Steps:
        for batch in range(run.steps):
            gather = game.show if run.algorithm == "sft" else lambda prompts, seed: game.play(policy, prompts, seed)
            yield learner.prepare(gather(run.arm.prompts, batch))

    return policy, steps()


def _language(run: Run) -> tuple[nn.Module, Steps]:
    model = deepcopy(_begin(run.start_only))
    _round(model)
    optimizer = make_optimizer(run.arm, model)
    batches = _batches(run.vocabulary, run.rows, run.length, seed=1)
    return model, (lambda tokens=tokens: _step(model, optimizer, tokens) for tokens in batches)


@cache
def _begin(run: Run) -> nn.Module:
    """The model that a run begins with, pretrained; several runs may share it."""
    torch.manual_seed(0)
    model = _FAMILIES[run.family](run)
    optimizer = torch.optim.AdamW(model.parameters(), lr=PRETRAINING_RATE, betas=(0.9, 0.95), weight_decay=0.1)
    batches = _batches(run.vocabulary, run.rows, run.length, seed=0)
    for step, tokens in zip(range(run.pretraining), batches, strict=False):
        left = max(1 - step / run.pretraining, 0.1)
        optimizer.param_groups[0]["lr"] = PRETRAINING_RATE * min((step + 1) / 20, left)
        _step(model, optimizer, tokens)
    return model


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, tokens: Tensor) -> None:
    optimizer.zero_grad()
    logits = model(tokens[:, :-1])
    functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


@torch.no_grad()
def _round(model: nn.Module) -> None:
    """Round the weights, as if they were loaded from a checkpoint in BF16."""
    for weight in model.parameters():
        weight.copy_(weight.bfloat16())


def _published(model: nn.Module) -> dict[str, Any]:
    return {
        name: weight.detach().bfloat16().view(torch.int16).numpy().view(ml_dtypes.bfloat16)
        for name, weight in model.named_parameters()
    }


def histogram(arrays: Iterable[Any]) -> dict[int, int]:
    """How many weights of some BF16 arrays have which exponent."""
    total: Any = sum(np.bincount(classes_of(array.reshape(-1)), minlength=256) for array in arrays)
    return {int(c): int(total[c]) for c in np.flatnonzero(total)}


# Text


@cache
def _tokens(vocabulary: int) -> Tensor:
    """The top-level modules of the standard library, in the order of their names."""
    text = "".join(
        path.read_text("utf-8", "replace") for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    )
    if vocabulary == 256:
        return torch.from_numpy(np.frombuffer(text.encode(), np.uint8).astype(np.int64))
    words = re.findall(r"\w+|[^\w\s]|\s+", text)
    known = {word: number for number, (word, _) in enumerate(Counter(words).most_common(vocabulary - 1), 1)}
    return torch.tensor([known.get(word, 0) for word in words])


def _batches(vocabulary: int, rows: int, length: int, seed: int) -> Iterator[Tensor]:
    tokens, words = _tokens(vocabulary), torch.Generator().manual_seed(seed)
    while True:
        begins = torch.randint(0, len(tokens) - length - 1, (rows,), generator=words)
        yield torch.stack([tokens[begin : begin + length + 1] for begin in begins.tolist()])


# Models


class _Attention(nn.Module):
    def __init__(self, run: Run, bias: bool, rotary: bool) -> None:
        super().__init__()
        self.heads, self.rotary = max(2, run.width // 64), rotary
        self.qkv = nn.Linear(run.width, 3 * run.width, bias=bias)
        self.out = nn.Linear(run.width, run.width, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1))
        if self.rotary:
            q, k = _rotate(q), _rotate(k)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return out


def _rotate(x: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    angles = torch.arange(x.shape[-2])[:, None] * 10000 ** -(torch.arange(half) / half)
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()], -1)


class _GPT2Layer(nn.Module):
    def __init__(self, run: Run) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(run.width), nn.LayerNorm(run.width)
        self.attention = _Attention(run, bias=True, rotary=False)
        self.up, self.out = nn.Linear(run.width, 4 * run.width), nn.Linear(4 * run.width, run.width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.before(x))
        out: Tensor = x + self.out(functional.gelu(self.up(self.between(x))))
        return out


class _LlamaLayer(nn.Module):
    def __init__(self, run: Run) -> None:
        super().__init__()
        self.before, self.between = nn.RMSNorm(run.width), nn.RMSNorm(run.width)
        self.attention = _Attention(run, bias=False, rotary=True)
        inner = 8 * run.width // 3 // 32 * 32
        self.gate, self.up = (nn.Linear(run.width, inner, bias=False) for _ in range(2))
        self.out = nn.Linear(inner, run.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.before(x))
        inner = self.between(x)
        out: Tensor = x + self.out(functional.silu(self.gate(inner)) * self.up(inner))
        return out


class _GPT2(nn.Module):
    """Learned positions, biases, norms with biases; embeddings are the head."""

    def __init__(self, run: Run) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(run.vocabulary, run.width), nn.Embedding(run.length, run.width)
        self.layers = nn.ModuleList(_GPT2Layer(run) for _ in range(run.layers))
        self.norm = nn.LayerNorm(run.width)
        _initialise(self, run, residual=0.02 / math.sqrt(2 * run.layers))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens) + self.places.weight[: tokens.shape[1]]
        for layer in self.layers:
            x = layer(x)
        return functional.linear(self.norm(x), self.words.weight)


class _Llama(nn.Module):
    """Rotary positions, no biases, a gated feed-forward, and a head of its own."""

    def __init__(self, run: Run) -> None:
        super().__init__()
        self.words = nn.Embedding(run.vocabulary, run.width)
        self.layers = nn.ModuleList(_LlamaLayer(run) for _ in range(run.layers))
        self.norm, self.head = nn.RMSNorm(run.width), nn.Linear(run.width, run.vocabulary, bias=False)
        _initialise(self, run, residual=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens)
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def _initialise(model: nn.Module, run: Run, residual: float) -> None:
    if run.start == "torch":
        return
    for name, weight in model.named_parameters():
        if weight.ndim == 2:
            nn.init.normal_(weight, std=residual if ".out." in name else 0.02)
        elif name.endswith(".bias"):
            nn.init.zeros_(weight)


_FAMILIES: dict[str, Callable[[Run], nn.Module]] = {"gpt2": _GPT2, "llama": _Llama}

# No constant was fitted on these runs, and none was looked at before the forecast was final.
_DEMO = Run("demo", algorithm="grpo")
_BYTES = Run("gpt2", 96, 2, 256, pretraining=150)
_WORDS = Run("llama", 96, 2, 512, pretraining=150)
_TORCH = Run("gpt2", 64, 3, 512, start="torch", pretraining=150)
_TRAINED = (_DEMO, _BYTES, _WORDS, _TORCH)
_RANDOM = (
    Run("gpt2", 96, 3, 512),
    Run("gpt2", 96, 2, 256, start="torch"),
    Run("llama", 96, 2, 256, start="torch"),
    Run("llama", 96, 2, 1024),
)
HELD_OUT = (
    *(replace(run, lr=lr) for run in _TRAINED for lr in (3e-6, 1e-6, 1e-5)),
    *(replace(run, lr=lr) for run in _RANDOM for lr in (3e-6, 1e-6, 1e-5)),
    *(replace(run, optimizer="lion", betas=(0.9, 0.99)) for run in (*_TRAINED, *_RANDOM[:3])),
    *(replace(run, masters=False) for run in (*_TRAINED[1:], *_RANDOM[:3])),
    *(replace(run, betas=(0.9, 0.95)) for run in (*_TRAINED[1:], *_RANDOM[:3])),
)


SHORT = [Run("gpt2", 32, 1, 256, steps=8), Run("llama", 32, 1, 256, start="torch", pretraining=20, lr=1e-5, steps=8)]


def train_held_out(out: Path, jobs: int) -> None:
    """Train the held-out runs in some processes; write a JSON line for each."""
    by_start: dict[Run, list[Run]] = {}  # those that begin with one pretrained model go to one process
    for run in HELD_OUT:
        by_start.setdefault(run.start_only, []).append(run)
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, context, torch.set_num_threads, (1,)) as pool:
        for done in [pool.submit(train_all, runs, out) for runs in by_start.values()]:
            done.result()


def train_all(runs: list[Run], out: Path) -> None:
    for run in runs:
        facts = {"name": run.name, "trained": run.trained, "counted": True, **asdict(run)}
        line = json.dumps({"run": facts, **asdict(train(run))}) + "\n"
        with out.open("a") as file:
            file.write(line)
        print(f"{run.name}, {run.optimizer} at {run.lr:g}", flush=True)
