"""What share of a step of reinforcement learning does sync take, when trainer and worker are on one GPU?

    python -m pulsesync_lab.demo.smollm2 DIR
    python -m benchmarks gpu_rl --model DIR [--steps 30] [--warm 5] [--store FOLDER] [--json FILE]
    python -m benchmarks gpu_rl --config qwen2.5-1.5b --prompts 64 [...]          # random, made on the GPU
    python -m benchmarks gpu_rl --tiny --steps 4 --warm 2 --prompts 8             # a trial; on a CPU some seconds

GRPO on a language model that learns to add (pulsesync_lab.demo.language), all in one process: a trainer with FP32
master weights, and workers with their own BF16 weights. A step consists of rollouts by a worker, learning, and the
update of the worker's weights. Arms take turns in the same run, in blocks of the same number of steps:

    `copy`    worker.copy_(trainer) on the device: the cheapest sync there is, possible only in one process on one GPU
    `sync`    publish(wait=False), wait for the commit, Subscriber.sync: through a store, as between two machines, in
              lock-step, so that no part of it overlaps with rollouts or learning
    `behind`  the same, but the worker generates with the weights of the previous step: encoding and sending overlap
              with the next step's rollouts and learning (`--arms copy sync behind`)

A block begins with an update of its worker, which is not counted. After every block the worker's weights are compared
bit for bit with the trainer's, cast to BF16, and the subscriber recomputes its digest. A phase ends when the CUDA
stream of rollouts and learning has finished its work; work that continues in the background after that is counted in
the phase that it delays.

With --config the model has the shapes of a real one and random weights. Such a model never gets a sum right, and GRPO
learns nothing from samples that are all wrong, so the reward is different: the share of a completion's tokens with even
ids. Completions of untrained policies differ in it, hence nearly every sample has an advantage. Rollouts, advantages,
loss and optimizer are the same as with a checkpoint, and so is the work of a step; whether the policy gets better at
adding is not measured.
"""

import argparse
import ctypes
import gc
import resource
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from benchmarks.gpu.rl_report import ARMS, Measured, Step, Version, report
from benchmarks.harness.report import json_line, provenance
from benchmarks.harness.save import write
from pulsesync import Publisher, PublishReport, Subscriber
from pulsesync_lab.demo import grpo
from pulsesync_lab.demo.grpo import Rollouts
from pulsesync_lab.demo.language import ANSWER, LanguageModel, transformers

QUICK = ("--tiny", "--steps", "2", "--warm", "1", "--block", "1", "--prompts", "4", "--lessons", "30")
SHARED_MEMORY = Path("/dev/shm")
COMPILED: list[str] = []  # names of the kernels that Triton compiled or loaded from its cache, by its own hook
LAUNCHES = 1000  # small operations that measure the host's speed before learning
CONFIGURATIONS = {  # for --config
    "qwen2.5-1.5b": {
        "vocab_size": 151_936,
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_hidden_layers": 28,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
    },
    "trial": {  # the same in small, for a machine without a GPU
        "vocab_size": 1000,
        "hidden_size": 64,
        "intermediate_size": 192,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    },
}


# -- time and memory -------------------------------------------------------------------------------------------------


class Collector:
    """Seconds that Python's garbage collector has taken since the process began."""

    def __init__(self) -> None:
        self.seconds = self._began = 0.0
        gc.callbacks.append(self._note)

    def _note(self, phase: str, _info: dict[str, int]) -> None:
        if phase == "start":
            self._began = time.perf_counter()
        else:
            self.seconds += time.perf_counter() - self._began


COLLECTOR = Collector()


@dataclass
class Clock:
    """For each phase of a step: its seconds, what the host did in it, and the peak of the GPU's memory."""

    device: torch.device
    seconds: dict[str, float] = field(default_factory=dict)
    peak_bytes: dict[str, int] = field(default_factory=dict)
    host: dict[str, dict[str, float]] = field(default_factory=dict)
    _then: float = 0.0
    _spent: dict[str, float] = field(default_factory=dict)

    def start(self) -> None:
        self._spent = self._host(self._memory())
        self._reset()
        self._then = time.perf_counter()

    def lap(self, phase: str, settle: bool = True) -> None:
        """End a phase. With settle=False, work that the GPU has not finished yet counts in the next phase."""
        if settle and self.device.type == "cuda":
            torch.cuda.current_stream().synchronize()
        now = time.perf_counter()
        self.seconds[phase], self._then = now - self._then, now
        memory = self._memory()
        if memory:
            self.peak_bytes[phase] = memory["allocated_bytes.all.peak"]
        spent = self._host(memory)
        self.host[phase] = {what: max(0.0, spent[what] - self._spent[what]) for what in spent}
        self._spent = spent
        self._reset()

    def _memory(self) -> dict[str, int]:
        return torch.cuda.memory_stats() if self.device.type == "cuda" else {}

    def _host(self, memory: dict[str, int]) -> dict[str, float]:
        """What the process has spent so far, to explain phases that take longer than they should."""
        main = time.thread_time()
        switches = resource.getrusage(resource.RUSAGE_THREAD)
        return {
            "main_s": main,  # CPU time of the thread that generates and learns
            "others_s": time.process_time() - main,  # CPU time of all others: backward passes, the publisher
            "preempted": float(switches.ru_nivcsw),  # times that this thread had to leave its core
            "collector_s": COLLECTOR.seconds,
            "allocations": float(memory.get("num_device_alloc", 0)),  # by the driver, which are slow
        }

    def _reset(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()


def allocated(device: torch.device) -> int:
    """Bytes of live tensors on the GPU; 0 on a CPU."""
    gc.collect()
    return torch.cuda.memory_allocated() if device.type == "cuda" else 0


def current_core() -> int:
    """The core that this thread runs on. After a wait, a thread may continue on another one, farther from the GPU."""
    return int(ctypes.CDLL(None).sched_getcpu())


def time_launches(device: torch.device) -> float:
    """Seconds for a number of small operations: how fast the host is at this moment, whichever arm is measured.

    Learning launches some thousands of small kernels for each piece of a batch, and its speed is limited by the host,
    not by the GPU. A shared machine is slower at times, for several steps in a row and in any arm.
    """
    number = torch.zeros(1, device=device)
    began = time.perf_counter()
    for _ in range(LAUNCHES):
        number.add_(1.0)
    if device.type == "cuda":
        torch.cuda.current_stream().synchronize()
    return time.perf_counter() - began


# -- the arms --------------------------------------------------------------------------------------------------------


def in_bf16(policy: nn.Module) -> nn.Module:
    """A copy with BF16 weights. Buffers are not cast: engines keep the frequencies of rotary embeddings in FP32."""
    for weight in policy.parameters():
        weight.data = weight.data.bfloat16()
    return policy.requires_grad_(False)


@torch.no_grad()
def copy_weights(trainer: nn.Module, worker: nn.Module) -> None:
    for own, weight in zip(worker.parameters(), trainer.parameters(), strict=True):
        own.copy_(weight)


def check_bits(trainer: nn.Module, worker: nn.Module) -> None:
    held = worker.state_dict()
    for name, weight in trainer.state_dict().items():
        same = torch.equal(weight.bfloat16().view(torch.int16), held[name].view(torch.int16))
        assert same, f"{name} is not the trainer's"


class Copied:
    """A worker that gets the weights by copy_."""

    name, lead = "copy", 0

    def __init__(self, trainer: nn.Module, worker: nn.Module) -> None:
        self.trainer, self.worker = trainer, worker

    def catch_up(self, step: int) -> None:
        copy_weights(self.trainer, self.worker)

    def follow(self, step: int, clock: Clock) -> dict[str, Any]:
        copy_weights(self.trainer, self.worker)
        clock.lap("copy")
        return {}

    def check(self) -> float:
        check_bits(self.trainer, self.worker)
        return 0.0


class Synced:
    """A worker that is updated by patches, in lock-step."""

    name, lead = "sync", 0

    def __init__(
        self,
        trainer: nn.Module,
        worker: nn.Module,
        publisher: Publisher,
        subscriber: Subscriber,
        versions: list[Version],
    ) -> None:
        self.trainer, self.worker, self.publisher, self.subscriber = trainer, worker, publisher, subscriber
        self.versions = versions  # every one that was published, also those that are not counted

    def catch_up(self, step: int) -> None:
        sent = self.publisher.publish(self.trainer, step=step)
        self.subscriber.sync(self.worker)
        self._note(sent)
        self.publisher.flush()

    def follow(self, step: int, clock: Clock) -> dict[str, Any]:
        future = self._publish(step, clock)
        return self._sync(future, clock)

    def _publish(self, step: int, clock: Clock) -> Future[PublishReport]:
        future = self.publisher.publish(self.trainer, step=step, wait=False)
        clock.lap("publish", settle=False)
        return future

    def _sync(self, future: Future[PublishReport], clock: Clock) -> dict[str, Any]:
        sent = future.result()
        clock.lap("commit", settle=False)
        got = self.subscriber.sync(self.worker)
        clock.lap("sync")
        assert (got.version, got.step) == (sent.version, sent.step), f"{sent} was published, {got} was found"
        self._note(sent)
        return {"published": asdict(sent), "synced": asdict(got)}

    def _note(self, sent: PublishReport) -> None:
        place = self.subscriber.position
        assert place is not None
        assert place.version == sent.version, f"{sent} was published, the worker is at {place}"
        self.versions.append(
            Version(
                self.name,
                place.version,
                sent.step,
                place.epoch,
                place.index,
                sent.changed,
                sent.total,
                sent.payload_bytes,
                sent.codec,
            )
        )

    def check(self) -> float:
        """Compare the bits, and recompute the digest; return the seconds that the latter took."""
        check_bits(self.trainer, self.worker)
        began = time.perf_counter()
        actual = self.subscriber.verify(self.worker)
        took = time.perf_counter() - began
        assert actual == self.publisher.digest, "the digests differ"
        return took


class Behind(Synced):
    """A worker that syncs the version of the previous step, which was encoded and committed during this step."""

    name, lead = "behind", 1  # steps of a block that are not counted: in the first there is nothing to wait for
    _future: Future[PublishReport] | None = None

    def follow(self, step: int, clock: Clock) -> dict[str, Any]:
        done = self._sync(self._future, clock) if self._future else {}
        self._future = self._publish(step, clock)
        return done

    def check(self) -> float:
        assert self._future is not None
        sent = self._future.result()
        self._future = None
        self.subscriber.sync(self.worker)
        self._note(sent)
        return super().check()


Arm = Copied | Synced


def open_publisher(store: str, keep: Literal["device", "host"], device: torch.device) -> Publisher:
    return Publisher(store, cast="BF16", keep=keep if device.type == "cuda" else None)


# -- the run ---------------------------------------------------------------------------------------------------------


class Training:
    """A policy that learns, step by step, from the rollouts of an arm's worker."""

    def __init__(self, game: LanguageModel, trainer: nn.Module, lr: float, prompts: int) -> None:
        self.game, self.trainer, self.prompts, self.number = game, trainer, prompts, 0
        self.optimizer = torch.optim.AdamW(trainer.parameters(), lr=lr, weight_decay=0.0, fused=True)

    def step(self, arm: Arm) -> Step:
        clock = Clock(self.game.device)
        clock.start()
        rollouts = self.game.play(arm.worker, self.prompts, self.number)
        clock.lap("play")
        launches_s, core = time_launches(self.game.device), current_core()
        clock.start()  # the small operations are not counted
        self.game.learn(self.trainer, self.optimizer, rollouts)
        clock.lap("learn")
        self.number += 1
        done = arm.follow(self.number, clock)
        taught = int(grpo.advantages(rollouts.rewards, self.game.group).count_nonzero())
        reward = float(rollouts.rewards.mean())
        measured = (clock.seconds, clock.peak_bytes, clock.host, launches_s, core)
        return Step(arm.name, self.number, *measured, reward, taught, **done)

    def block(self, arm: Arm, steps: int) -> tuple[list[Step], float]:
        """Take steps with one arm and check its weights; return the steps, and the seconds that the check took."""
        before = len(COMPILED)
        arm.catch_up(self.number)
        if self.game.device.type == "cuda":
            torch.cuda.synchronize()
        taken = [self.step(arm) for _ in range(arm.lead + steps)][arm.lead :]
        checked_s = arm.check()
        tell(f"{arm.name}: {taken[-1].number} steps, reward {taken[-1].reward:.3f}, {taken[-1].total_s:.3f} s a step")
        if encoded := [f"{1e3 * step.published['encode_s']:.0f}" for step in taken if step.published]:
            tell(f"    encoded in {' '.join(encoded)} ms; Triton compiled {len(COMPILED) - before} kernels")
        return taken, checked_s


def turns(arms: list[Arm], steps: int, block: int) -> Iterator[tuple[Arm, int]]:
    """Arms and numbers of steps. The order is reversed in every other round, so that drift affects all arms alike."""
    for number, first in enumerate(range(0, steps, block)):
        for arm in arms if number % 2 == 0 else reversed(arms):
            yield arm, min(block, steps - first)


def run(options: argparse.Namespace, folder: str, store: str) -> Measured:
    game = open_game(options, folder)
    trainer = game.policy()
    if options.tiny:
        teach(game, trainer, options.lessons)
    copied = Copied(trainer, in_bf16(game.policy()))
    worker = in_bf16(game.policy())
    training = Training(game, trainer, options.lr, options.prompts)
    found = Measured(sum(weight.numel() for weight in trainer.parameters()))
    found.before, _ = training.block(copied, options.warm)
    held = allocated(game.device)
    copy_weights(trainer, worker)  # both begin with a base checkpoint: no anchor has to be fetched
    with open_publisher(store, options.keep, game.device) as publisher:
        ends = (trainer, worker, publisher, Subscriber(store), found.versions)
        arms = [arm for arm in (copied, Synced(*ends), Behind(*ends)) if arm.name in options.arms]
        for arm in arms[1:]:
            training.block(arm, options.warm)
        found.kept_bytes = allocated(game.device) - held
        for arm, steps in turns(arms, options.steps, options.block):
            taken, checked_s = training.block(arm, steps)
            found.steps += taken
            found.checks_s += [checked_s] if isinstance(arm, Synced) else []
    return found


# -- models that are made --------------------------------------------------------------------------------------------

MARKS = ["<end>", "<pad>", "<sys>", "<user>", "<bot>", "<unk>"]
SYMBOLS = {symbol: i for i, symbol in enumerate([*MARKS, *"0123456789", "+", "?", " ", "="])}


class RandomModel(LanguageModel):
    """A model with random weights, generated on the device; its folder has a configuration and a tokenizer only."""

    def load(self) -> nn.Module:
        configuration = transformers().AutoConfig.from_pretrained(self.folder, local_files_only=True)
        torch.manual_seed(0)
        with self.device:
            model: nn.Module = transformers().AutoModelForCausalLM.from_config(
                configuration, dtype=torch.float32, attn_implementation="eager"
            )
        return model


class EvenTokens(RandomModel):
    """The same, with a reward in which untrained completions differ: the share of tokens with even ids."""

    def play(self, policy: nn.Module, prompts: int, seed: int) -> Rollouts:
        played = super().play(policy, prompts, seed)
        counted = self.counted(played.tokens)
        even = (played.tokens[:, -ANSWER:] % 2 == 0) & counted
        return replace(played, rewards=even.sum(dim=1) / counted.sum(dim=1))


def open_game(options: argparse.Namespace, folder: str) -> LanguageModel:
    if options.model:
        return LanguageModel(folder, options.group, options.device)
    write_tokenizer(folder)
    configure(options).save_pretrained(folder)
    return (RandomModel if options.tiny else EvenTokens)(folder, options.group, options.device)


def configure(options: argparse.Namespace) -> Any:
    """The configuration of a generated model: a small Llama, or one of the shapes above."""
    alike = {
        "max_position_embeddings": 128,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": SYMBOLS["<end>"],
        "pad_token_id": SYMBOLS["<pad>"],
    }
    if options.config:
        return transformers().Qwen2Config(**CONFIGURATIONS[options.config], **alike)
    return transformers().LlamaConfig(
        vocab_size=len(SYMBOLS),
        hidden_size=options.width,
        intermediate_size=3 * options.width,
        num_hidden_layers=options.layers,
        num_attention_heads=options.width // 16,
        num_key_value_heads=options.width // 32,
        **alike,
    )


def write_tokenizer(folder: str) -> None:
    """A tokenizer of single characters. The model may have a larger vocabulary, the rest of which it never uses."""
    import tokenizers

    letters = tokenizers.Tokenizer(tokenizers.models.WordLevel(SYMBOLS, unk_token="<unk>"))
    letters.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex("."), behavior="isolated")
    letters.decoder = tokenizers.decoders.Fuse()
    letters.add_special_tokens(MARKS)
    template = "{% for m in messages %}{% if m.role == 'user' %}<user>{{ m.content }}{% endif %}{% endfor %}<bot>"
    transformers().PreTrainedTokenizerFast(
        tokenizer_object=letters, eos_token="<end>", pad_token="<pad>", unk_token="<unk>", chat_template=template
    ).save_pretrained(folder)


def teach(game: LanguageModel, policy: Any, lessons: int) -> None:
    """Train random weights on correct answers: they never get a sum right, and never learn from GRPO."""
    lr = 3e-3 * 64 / policy.config.hidden_size  # wide models learn at smaller steps
    optimizer = torch.optim.AdamW(policy.parameters(), lr=lr, weight_decay=0.0)
    for lesson in range(lessons):
        shown = game.show(2, lesson)
        game.climb(policy, optimizer, shown, shown.rewards, lambda now, then, better: now * better)


# -- the command -----------------------------------------------------------------------------------------------------


def count_compilations() -> None:
    from triton import knobs

    knobs.runtime.jit_post_compile_hook = lambda *, fn, **_: COMPILED.append(fn.name)


def tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def arguments(parser: argparse.ArgumentParser) -> None:
    model = parser.add_mutually_exclusive_group(required=True)
    model.add_argument("--model", metavar="DIR", help="a Hugging Face checkpoint")
    model.add_argument(
        "--config", choices=list(CONFIGURATIONS), help="random weights of these shapes, and a simpler reward"
    )
    model.add_argument("--tiny", action="store_true", help="a small generated model, trained on sums first")
    parser.add_argument("--width", type=int, default=64, help="of the --tiny model, a multiple of 32")
    parser.add_argument("--layers", type=int, default=2, help="of --tiny; width 64 and 2 layers are 100,000 weights")
    parser.add_argument("--lessons", type=int, default=300, help="of --tiny: steps on correct answers before")
    parser.add_argument("--steps", type=int, default=30, help="counted steps of each arm")
    parser.add_argument("--warm", type=int, default=5, help="steps of each arm before those, not counted")
    parser.add_argument("--block", type=int, default=5, help="steps of an arm in a row")
    parser.add_argument("--arms", nargs="+", choices=list(ARMS), default=["copy", "sync"])
    parser.add_argument("--prompts", type=int, default=128)
    parser.add_argument("--group", type=int, default=16)
    parser.add_argument("--lr", type=float, default=3e-6)
    parser.add_argument(
        "--keep", choices=["device", "host"], default="device", help="where the publisher keeps its copy"
    )
    parser.add_argument("--store", metavar="FOLDER", help="where to publish; default: in shared memory")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every step to this file")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")


def main(given: argparse.Namespace) -> None:
    options = given
    if min(options.steps, options.warm, options.block) < 1:
        raise SystemExit("steps are counted from 1")
    options.arms = sorted({"copy", *options.arms}, key=list(ARMS).index)
    options.command = f"python -m benchmarks {' '.join(sys.argv[1:])}"
    origin = provenance("torch", "transformers", "triton")
    cuda = options.device == "cuda"
    if cuda:
        count_compilations()
    origin["machine"]["device"] = torch.cuda.get_device_name() if cuda else "no GPU"
    with ExitStack() as stack:
        shared = SHARED_MEMORY if SHARED_MEMORY.is_dir() else None
        store = options.store or stack.enter_context(tempfile.TemporaryDirectory(prefix="pulse-bench-", dir=shared))
        folder = options.model or stack.enter_context(tempfile.TemporaryDirectory(prefix="pulse-model-"))
        if not cuda and not options.model:
            torch.set_num_threads(1)  # two threads on a shared core would wait for each other at every small operation
        found = run(options, folder, store)
    asked = {name: value for name, value in vars(options).items() if name not in ("json", "store", "model")}
    fields = {"bench": "gpu_rl", "options": asked, **origin, **report(found, options, origin)}
    print(json_line(fields))
    if options.json:
        every: dict[str, Sequence[Any]] = {
            "before": found.before,
            "steps": found.steps,
            "published_versions": found.versions,
        }
        listed = {what: [asdict(one) for one in some] for what, some in every.items()}
        write(options.json, [{**fields, **listed}])
