"""Does GRPO learn the same with a vLLM server that follows by patches as with one that reloads every checkpoint?

    python -m benchmarks grpo --vllm .venv-vllm/bin/python          # with TRL's Python; 8 to 14 minutes

The run of examples/grpo_vllm.py, twice with the same seeds, in FP32 and on CPUs. With `reload` the trainer saves a
checkpoint before each rollout, which vLLM's own `reload_weights` reads while the server is paused; `patches` is what
the example does. Cases:

- in place: a model whose output matrix is its own. Both servers keep weights as they are loaded, as they do on a GPU
  (PULSE_VLLM_PLAIN_WEIGHTS=1); patches are written into live parameters. In FP32, and rounded to BF16 for the server.
- mirror: the same model, in servers that pack weights for oneDNN, as vLLM does on a CPU by default. The server that
  reloads runs without pulsesync.
- tied: as mirror, with a tied output matrix, whose packed copy vLLM does not make again when it reloads.

For each rollout the trainer computes the log-probabilities of the sampled tokens again, with the weights that the
server should have. The difference from the server's own shows whether a rollout is on-policy; the difference from those
of the previous step's weights is what an outdated server would show. Results are printed only if all rollouts by
patches were on-policy within BOUND.
"""

import argparse
import copy
import hashlib
import json
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")  # of rollout_func
os.environ.setdefault("OMP_NUM_THREADS", "1")  # both processes share the cores, and threads that wait for another spin

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback, TrainerCallback
from trl import GRPOTrainer

from benchmarks.engines.vllm_server import ANSWER_S, Server, reload, say
from benchmarks.harness.needs import MissingError
from benchmarks.harness.report import json_line, provenance, shown, table
from examples.grpo_vllm import Generator, even_numbers, largest_difference, make_model, numbers, settings
from pulsesync.integrations.huggingface import PulseCallback
from pulsesync.integrations.vllm import VllmServer

QUICK = ("--steps", "3", "--seeds", "1", "--cases", "in place")
BOUND = 5e-5  # of log-probabilities
PLAIN = {"PULSE_VLLM_PLAIN_WEIGHTS": "1"}
RELOADS = {"VLLM_SERVER_DEV_MODE": "1"}
WAYS = ("reload", "patches")


@dataclass(frozen=True)
class Case:
    name: str
    dtypes: tuple[str, ...] = ("FP32",)
    seeds: int | None = 1  # None: as many as were asked for
    tied: bool = False
    plain: bool = False

    def environment(self, way: str) -> dict[str, str]:
        packed = {"VLLM_PLUGINS": ""} if way == "reload" else {}
        return {**(RELOADS if way == "reload" else {}), **(PLAIN if self.plain else packed)}


CASES = [Case("in place", ("FP32", "BF16"), None, plain=True), Case("mirror"), Case("tied", tied=True)]


@dataclass
class Arm:
    """One training: lists have an entry for each step, that is for each rollout and the sync before it."""

    case: str
    dtype: str
    seed: int
    way: str
    rewards: list[float] = field(default_factory=list)
    tokens: list[str] = field(default_factory=list)  # hashes of what was sampled
    weights: list[str] = field(default_factory=list)  # hashes of the trainer's, before the step
    sync_bytes: list[int] = field(default_factory=list)  # the first is an anchor, by patches
    pause_s: list[float] = field(default_factory=list)
    sync_s: list[float] = field(default_factory=list)  # from the request for a rollout until the server has the weights
    publish_s: list[float] = field(default_factory=list)  # of the trainer at the end of the step, before that
    changed: list[float] = field(default_factory=list)  # which part of the weights
    off_policy: list[float] = field(default_factory=list)  # largest difference of log-probabilities in a rollout
    lagging: list[float] = field(default_factory=list)  # the same, from the weights of the step before
    rounding: list[float] = field(default_factory=list)  # the same, from the trainer's weights as they are


# -- servers -------------------------------------------------------------------------------------------------------


@contextmanager
def servers(case: Case, python: str, model: Path, folder: Path) -> Iterator[dict[str, Server]]:
    """Both servers of a case; the one that does not generate waits without work."""
    with ExitStack() as stack:
        found = {}
        for way in WAYS:
            flags = ["--generation-config", "vllm"]
            flags += ["--middleware", "pulsesync.integrations.vllm.Routes"] if way == "patches" else []
            log = folder / f"{case.name}_{way}.log".replace(" ", "_")
            server = Server(model, log, flags, case.environment(way), name=None, python=python, wait=False)
            found[way] = stack.enter_context(server)
        for server in found.values():
            server.wait()
        yield found


# -- how a server gets the weights -----------------------------------------------------------------------------------


class Reload:
    """A checkpoint in a folder, and vLLM's own reload of it."""

    def __init__(self, server: Server, folder: Path, dtype: str) -> None:
        self._server, self._folder, self._dtype = server, folder, dtype
        self.callbacks: list[TrainerCallback] = []
        self.publish_s = 0.0

    def sync(self, trainer: GRPOTrainer) -> tuple[int, float]:
        model = trainer.model if self._dtype == "FP32" else copy.deepcopy(trainer.model).bfloat16()
        model.save_pretrained(self._folder)
        pause_s = reload(self._server, self._folder, "wait&clear_cache=true")
        return sum(path.stat().st_size for path in self._folder.glob("*.safetensors")), pause_s


class Patches:
    """A run that the trainer publishes, and the server that is brought to its versions."""

    def __init__(self, server: Server, folder: Path, dtype: str, mode: str) -> None:
        self._server, self._location, self._mode = VllmServer(server.url), str(folder), mode
        self.publish_s = 0.0
        patches = self

        class Timed(PulseCallback):  # type: ignore[misc]
            def on_step_end(self, *args: Any, **kwargs: Any) -> None:
                began = time.perf_counter()
                super().on_step_end(*args, **kwargs)
                patches.publish_s = time.perf_counter() - began

        self._callback = Timed(self._location, cast={} if dtype == "FP32" else "BF16")
        self.callbacks = [self._callback]

    def sync(self, trainer: GRPOTrainer) -> tuple[int, float]:
        version = self._callback.version_of(trainer.state.global_step, ANSWER_S)
        report = self._server.update(self._location, version, wait_s=ANSWER_S)
        assert (report.version, report.mode) == (version, self._mode), report
        return report.fetched_bytes, report.pause_s


# -- training --------------------------------------------------------------------------------------------------------


class Watch:
    """What the server should generate with: the weights of this step, and of the step before."""

    def __init__(self, model: Any, dtype: str) -> None:
        self.now, self.before, self._dtype = copy.deepcopy(model).eval(), copy.deepcopy(model).eval(), dtype

    def look(self, model: Any) -> float:
        """Take the weights of the model; return which part of them changed."""
        self.before.load_state_dict(self.now.state_dict())
        dtype = torch.float32 if self._dtype == "FP32" else torch.bfloat16
        self.now.load_state_dict({name: tensor.to(dtype).float() for name, tensor in model.state_dict().items()})
        pairs = list(zip(self.now.parameters(), self.before.parameters(), strict=True))
        different: int = sum(int((a.view(torch.int32) != b.view(torch.int32)).sum()) for a, b in pairs)
        return float(different / sum(a.numel() for a, _ in pairs))


def hashed(model: Any) -> str:
    return hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()[:16]


def train(arm: Arm, source: Path, way: Reload | Patches, url: str, steps: int) -> None:
    torch.manual_seed(arm.seed)
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    watch, generator = Watch(model, arm.dtype), Generator(url, arm.seed)
    generator.wait()

    def rollout(prompts: list[str], trainer: GRPOTrainer) -> dict[str, list[Any]]:
        began = time.perf_counter()
        size, pause_s = way.sync(trainer)
        arm.sync_s.append(time.perf_counter() - began)
        arm.sync_bytes.append(size)
        arm.pause_s.append(pause_s)
        arm.publish_s.append(way.publish_s)
        found = generator.generate(prompts, trainer)
        arm.changed.append(watch.look(trainer.model))
        arm.tokens.append(hashlib.sha256(json.dumps(found["completion_ids"]).encode()).hexdigest()[:16])
        arm.weights.append(hashed(trainer.model))
        arm.off_policy.append(largest_difference(found, watch.now))
        arm.lagging.append(largest_difference(found, watch.before))
        arm.rounding.append(largest_difference(found, trainer.model))
        return found

    with tempfile.TemporaryDirectory() as scratch:
        trainer = GRPOTrainer(
            model=model,
            processing_class=AutoTokenizer.from_pretrained(source),
            args=settings(scratch, steps, arm.seed),
            train_dataset=numbers(arm.seed),
            reward_funcs=even_numbers,
            rollout_func=rollout,
            callbacks=way.callbacks,
        )
        trainer.remove_callback(PrinterCallback)  # what is printed is the report
        trainer.train()
    arm.rewards = [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]


def run(case: Case, args: argparse.Namespace, folder: Path) -> list[Arm]:
    model = folder / ("tied" if case.tied else "untied")
    if not model.exists():
        make_model(model, case.tied)
    arms = []
    say(f"{case.name}: starting two servers")
    with servers(case, args.vllm, model, folder) as found:
        for dtype in case.dtypes:
            for seed in range(args.seeds if case.seeds is None else case.seeds):
                for name in WAYS:
                    arm = Arm(case.name, dtype, seed, name)
                    to = folder / f"{case.name}_{dtype}_{seed}_{name}".replace(" ", "_")
                    if name == "reload":
                        way: Reload | Patches = Reload(found[name], to, dtype)
                    else:
                        way = Patches(found[name], to, dtype, "in place" if case.plain else "mirror")
                    began = time.perf_counter()
                    train(arm, model, way, found[name].url, args.steps)
                    seconds = time.perf_counter() - began
                    say(
                        f"{case.name}, {dtype}, seed {seed}, {name}: reward {arm.rewards[0]:.2f} to "
                        f"{arm.rewards[-1]:.2f}, off-policy {max(arm.off_policy):.1e}, {seconds:.0f} s"
                    )
                    assert name == "reload" or max(arm.off_policy) <= BOUND, "a rollout by patches was off-policy"
                    arms.append(arm)
    return arms


# -- report ----------------------------------------------------------------------------------------------------------


def equal_until(some: list[Any], others: list[Any]) -> int:
    """How many entries are equal from the first on."""
    return next((n for n, (a, b) in enumerate(zip(some, others, strict=True)) if a != b), len(some))


def same(one: list[Any], other: list[Any]) -> str:
    n = equal_until(one, other)
    return f"all {n}" if n == len(one) else f"first {n} of {len(one)}"


def pairs_of(arms: list[Arm]) -> list[tuple[Arm, Arm]]:
    """Training by reload and by patches, of the same case, dtype and seed."""
    return list(zip(arms[::2], arms[1::2], strict=True))


def equality(arms: list[Arm]) -> str:
    head = [
        "case, dtype, seed",
        "rewards equal",
        "tokens equal",
        "trainer's weights equal",
        "reward, first",
        "last: reload",
        "patches",
    ]
    rows = [
        [
            f"{a.case}, {a.dtype}, {a.seed}",
            same(a.rewards, b.rewards),
            same(a.tokens, b.tokens),
            same(a.weights, b.weights),
            f"{a.rewards[0]:.4f}",
            f"{a.rewards[-1]:.4f}",
            f"{b.rewards[-1]:.4f}",
        ]
        for a, b in pairs_of(arms)
    ]
    return table(head, rows)


def policy(arms: list[Arm]) -> str:
    head = [
        "case, dtype, seed",
        "sync",
        "off-policy by, at most",
        "a step behind: at least",
        "from FP32 weights, at most",
    ]
    rows = [
        [
            f"{arm.case}, {arm.dtype}, {arm.seed}",
            arm.way,
            f"{max(arm.off_policy):.1e}",
            f"{min(arm.lagging[1:]):.1e}",
            f"{max(arm.rounding):.1e}",
        ]
        for arm in arms
    ]
    return table(head, rows)


def costs(arms: list[Arm]) -> str:
    """Of all syncs but the first of each training; median (20th-80th percentile)."""
    groups: dict[tuple[str, str, str], list[Arm]] = {}
    for arm in arms:
        groups.setdefault((arm.case, arm.dtype, arm.way), []).append(arm)

    def milliseconds(some: list[Arm], what: str) -> str:
        return shown([value for arm in some for value in getattr(arm, what)[1:]], 1e3, 0)

    head = ["case, dtype", "sync", "bytes", "first sync, bytes", "weights changed", "pause ms", "sync ms", "publish ms"]
    rows = []
    for (case, dtype, way), some in groups.items():
        rows.append(
            [
                f"{case}, {dtype}",
                way,
                f"{int(np.median([size for arm in some for size in arm.sync_bytes[1:]])):,}",
                f"{some[0].sync_bytes[0]:,}",
                f"{np.median([part for arm in some for part in arm.changed[1:]]):.1%}",
                *(milliseconds(some, what) for what in ("pause_s", "sync_s", "publish_s")),
            ]
        )
    return table(head, rows)


def curves(arms: list[Arm]) -> str:
    """Rewards by step: one column for both methods if they are equal at every step, otherwise one for each."""
    columns = []
    for pair in pairs_of(arms):
        for arm in pair[:1] if pair[0].rewards == pair[1].rewards else pair:
            way = "both" if pair[0].rewards == pair[1].rewards else arm.way
            columns.append([f"{arm.case}, {arm.dtype}, {arm.seed}: {way}", *(f"{x:.4f}" for x in arm.rewards)])
    rows = [[str(n + 1), *row] for n, row in enumerate(zip(*(column[1:] for column in columns), strict=True))]
    return table(["step", *(column[0] for column in columns)], rows)


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--vllm", default=".venv-vllm/bin/python", help="Python of an environment with vLLM and pulsesync"
    )
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--seeds", type=int, default=2, help="seeds of the case in place; the others have one")
    parser.add_argument("--cases", nargs="+", choices=[case.name for case in CASES], default=[c.name for c in CASES])


def main(given: argparse.Namespace) -> None:
    if not Path(given.vllm).exists():
        raise MissingError(f"the Python of an environment with vLLM at {given.vllm}, which `make test-vllm` makes")
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        arms = [arm for case in CASES if case.name in given.cases for arm in run(case, given, Path(folder))]
    print(f"GRPO, {given.steps} steps; load of the machine at the start: {load:.1f}\n")
    print(equality(arms) + "\n")
    print(policy(arms) + "\n")
    print(costs(arms) + "\n")
    print(curves(arms) + "\n")
    fields = {"steps": given.steps, "load": load, "arms": [asdict(arm) for arm in arms]}
    print(json_line({**provenance("torch", "transformers", "trl"), **fields}))
