"""What share of a step of reinforcement learning does sync take, when trainer and worker are on one GPU?

    python -m pulsesync_lab.demo.smollm2 DIR
    python -m benchmarks gpu_rl --model DIR [--arms copy sync `behind`] [--profile FOLDER] [--json FILE]
    python -m benchmarks gpu_rl --config qwen2.5-1.5b --prompts 64 [...]          # random, made on the GPU
    python -m benchmarks gpu_rl --quick                   # a trial; on a CPU some seconds

GRPO on a language model that learns to add (pulsesync_lab.demo.language), all in one process: a trainer with FP32
master weights, and workers with their own BF16 weights. A step consists of rollouts by a worker, learning, and the
update of the worker's weights:

    `copy`    worker.copy_(trainer) on the device: the cheapest sync there is, possible only in one process on one GPU
    `sync`    publish(wait=False), wait for the commit, Subscriber.sync: through a store, as between two machines, in
              lock-step, so that no part of it overlaps with rollouts or learning
    `behind`  the worker generates with the weights of the previous step. Versions are encoded, sent, fetched and
              decoded during the next step, in threads; at its end `confirm` lets the sync write what it has prepared

These look for what slows a step down, and are measured only when they are named:

    `again`   as `copy`: how much two arms differ that are the same
    `frozen`  as `sync`, without Python's garbage collector
    `python`  as `copy`, and a thread runs Python for as long as a publish and a sync take: contention for the GIL
    `kernels` as `copy`, and copies on a stream of their own keep the GPU's memory busy for as long as the kernels of a
              publish and a sync do

**All arms do the same work.** The rollouts of a block of steps are recorded once. Every block of every arm then begins
with the same trainer, optimizer and worker, restored from copies on the GPU; it generates with the seeds of the
recorded steps, and learns from the recorded rollouts. So a step of an arm is compared with the same step with `copy` of
the same round. Arms take turns; neither restoring nor a first step of each block is counted. After every block the
worker's weights are compared bit for bit with the trainer's, cast to BF16, and the subscriber recomputes its digest.

A phase ends when the CUDA stream of rollouts and learning has finished its work; work that continues in the background
after that is counted in the phase that it delays. The share of a step is what its thread waits for: the call of
publish, the commit of the version, and the sync; for `behind` the latter is only the time from the end of `confirm`.

With --config the model has the shapes of a real one and random weights. Such a model never gets a sum right, and GRPO
learns nothing from samples that are all wrong, so the reward is different: the share of a completion's tokens with even
ids. Completions of untrained policies differ in it, hence nearly every sample has an advantage. Rollouts, advantages,
loss and optimizer are the same as with a checkpoint, and so is the work of a step; whether the policy gets better at
adding is not measured. More weights change where they are small; the standard deviation of each is in CONFIGURATIONS.
"""

import argparse
import ctypes
import gc
import resource
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, nullcontext
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from torch.profiler import record_function

import pulsesync
from benchmarks.gpu import rl_profile
from benchmarks.gpu.rl_report import ARMS, Measured, Step, show, summary
from benchmarks.harness.report import json_line, provenance
from benchmarks.harness.save import write
from pulsesync import Publisher, PublishReport, Subscriber, SyncReport
from pulsesync_lab.demo import grpo
from pulsesync_lab.demo.grpo import Rollouts
from pulsesync_lab.demo.language import ANSWER, LanguageModel, transformers

QUICK = ("--tiny", "--steps", "2", "--warm", "1", "--block", "1", "--prompts", "4")
SHARED_MEMORY = Path("/dev/shm")
COMPILED: list[str] = []  # names of the kernels that Triton compiled or loaded from its cache, by its own hook
STARTED = time.monotonic()
LAUNCHES = 1000  # small operations that measure the host's speed before learning
CONFIGURATIONS: dict[str, dict[str, float]] = {  # for --config: of the class LlamaConfig or Qwen2Config of transformers
    "smollm2-135m": {
        "vocab_size": 49_152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "initializer_range": 0.17,  # the standard deviation of the checkpoint's weights
    },
    "qwen2.5-1.5b": {
        "vocab_size": 151_936,
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_hidden_layers": 28,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
        "initializer_range": 0.02,  # what transformers gives; not that of the checkpoint
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
    """For each generation, how often Python's garbage collector ran since the process began, and its seconds."""

    def __init__(self) -> None:
        self.spent = {f"{what}_{generation}": 0.0 for generation in range(3) for what in ("collections", "collector_s")}
        self._began = 0.0
        gc.callbacks.append(self._note)

    def _note(self, phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            self._began = time.perf_counter()
        else:
            self.spent[f"collections_{info['generation']}"] += 1
            self.spent[f"collector_s_{info['generation']}"] += time.perf_counter() - self._began


COLLECTOR = Collector()
ALLOCATOR = {  # events of PyTorch's allocator of GPU memory, by the names of memory_stats
    "driver_allocations": "num_device_alloc",
    "driver_frees": "num_device_free",
    "retries": "num_alloc_retries",
    "waits_for_all_streams": "num_sync_all_streams",
}


@dataclass
class Clock:
    """For each phase of a step: its seconds, what the host and the allocators did in it, and the GPU's memory."""

    device: torch.device
    seconds: dict[str, float] = field(default_factory=dict)
    memory: dict[str, dict[str, int]] = field(default_factory=dict)
    host: dict[str, dict[str, float]] = field(default_factory=dict)
    windows: list[tuple[str, float, float]] = field(default_factory=list)  # of phases, by perf_counter
    _then: float = 0.0
    _spent: dict[str, float] = field(default_factory=dict)

    def start(self) -> None:
        self._spent = self._host(self._memory())
        self._reset()
        mark("")
        self._then = time.perf_counter()

    def lap(self, phase: str, settle: bool = True) -> None:
        """End a phase. With settle=False, work that the GPU has not finished yet counts in the next phase."""
        if settle and self.device.type == "cuda":
            torch.cuda.current_stream().synchronize()
        now = time.perf_counter()
        mark(phase)
        self.windows.append((phase, self._then, now))
        self.seconds[phase] = now - self._then
        memory = self._memory()
        if memory:
            sizes = ("allocated", "peak"), ("allocated", "current"), ("reserved", "peak"), ("reserved", "current")
            self.memory[phase] = {f"{what}_{when}": memory[f"{what}_bytes.all.{when}"] for what, when in sizes}
        spent = self._host(memory)
        self.host[phase] = {what: max(0.0, spent[what] - self._spent[what]) for what in spent}
        self._spent = spent
        self._reset()
        self._then = time.perf_counter()  # the notes above are not counted

    def _memory(self) -> dict[str, int]:
        return torch.cuda.memory_stats() if self.device.type == "cuda" else {}

    def _host(self, memory: dict[str, int]) -> dict[str, float]:
        """What the process has spent so far, to explain phases that take longer than they should."""
        main = time.thread_time()
        switches = resource.getrusage(resource.RUSAGE_THREAD)
        pinned: dict[str, int] = getattr(torch.cuda, "host_memory_stats", dict)() if memory else {}
        return {
            "main_s": main,  # CPU time of the thread that generates and learns
            "others_s": time.process_time() - main,  # CPU time of all others: backward passes, the publisher
            "preempted": float(switches.ru_nivcsw),  # times that this thread had to leave its core
            **COLLECTOR.spent,
            **{what: float(memory.get(name, 0)) for what, name in ALLOCATOR.items()},
            **({"pinned_allocations": float(pinned["num_host_alloc"])} if "num_host_alloc" in pinned else {}),
        }

    def _reset(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()


def mark(phase: str) -> None:
    """Note the end of a phase for a profiler, if there is one."""
    with record_function(rl_profile.MARK + phase):
        pass


def allocated(device: torch.device) -> int:
    """Bytes of live tensors on the GPU; 0 on a CPU."""
    gc.collect()
    return torch.cuda.memory_allocated() if device.type == "cuda" else 0


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


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
    wait(device)
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
    local = worker.state_dict()
    for name, weight in trainer.state_dict().items():
        same = torch.equal(weight.bfloat16().view(torch.int16), local[name].view(torch.int16))
        assert same, f"{name} is not the trainer's"


class Copied:
    """A worker that gets the weights by copy_."""

    name = "copy"

    def __init__(self, trainer: nn.Module, worker: nn.Module) -> None:
        self.trainer, self.worker = trainer, worker

    def catch_up(self, step: int) -> None:
        copy_weights(self.trainer, self.worker)

    def follow(self, step: int, clock: Clock) -> dict[str, Any]:
        copy_weights(self.trainer, self.worker)
        clock.lap("copy")
        return {}

    def finish_background(self) -> None:
        """Wait for what is still running, except for a commit."""

    def check(self) -> float | None:
        """Compare the bits; return the seconds that it took to recompute a digest, if there is one."""
        check_bits(self.trainer, self.worker)
        return None


class CopiedAgain(Copied):
    """The same: what it differs by is what the machine, and nothing that is measured, makes of it."""

    name = "again"


class CopiedBesidePython(Copied):
    """The same, and a thread that runs Python, from the end of a step on: contention for the GIL, and no GPU work."""

    name, seconds = "python", 0.0
    _thread: threading.Thread | None = None

    def follow(self, step: int, clock: Clock) -> dict[str, Any]:
        done = super().follow(step, clock)
        self._thread = threading.Thread(target=self._run, name="python")
        self._thread.start()
        return done

    def _run(self) -> None:
        until = time.perf_counter() + self.seconds
        while time.perf_counter() < until:
            sum(range(100))

    def finish_background(self) -> None:
        if self._thread is not None:
            self._thread.join()


class CopiedBesideKernels(Copied):
    """The same, and copies on a stream of their own, from the end of a step on: GPU work, and no Python."""

    name, count, size = "kernels", 0, 1 << 28

    def load(self, seconds: float) -> None:
        """Prepare as many copies as take that long."""
        device = next(self.worker.parameters()).device
        size = self.size if device.type == "cuda" else 1 << 20
        self._from, self._to = (torch.zeros(size, dtype=torch.uint8, device=device) for _ in range(2))
        self._stream = torch.cuda.Stream() if device.type == "cuda" else None
        self.count = 20
        self._launch()  # warm
        wait(device)
        began = time.perf_counter()
        self._launch()
        wait(device)
        self.count = max(1, round(seconds / (time.perf_counter() - began) * self.count))

    def _launch(self) -> None:
        with torch.cuda.stream(self._stream) if self._stream else nullcontext():
            for _ in range(self.count):
                self._to.copy_(self._from)

    def follow(self, step: int, clock: Clock) -> dict[str, Any]:
        done = super().follow(step, clock)
        self._launch()
        return done


class Boundary:
    """Where a sync in a thread waits before it writes the first weight, until the end of a step."""

    def __init__(self) -> None:
        self._prepared, self._open = threading.Event(), threading.Event()
        self._open.set()

    def confirm(self) -> None:
        self._prepared.set()
        self._open.wait()

    def close(self) -> None:
        self._prepared.clear()
        self._open.clear()

    def wait(self, sync: "Future[Any]") -> None:
        """Wait until a sync has prepared everything, or has ended."""
        sync.add_done_callback(lambda _: self._prepared.set())
        self._prepared.wait()

    def open(self) -> None:
        self._open.set()


@dataclass
class Ends:
    """The trainer and a worker, with what connects them."""

    trainer: nn.Module
    worker: nn.Module
    publisher: Publisher
    subscriber: Subscriber
    boundary: Boundary


class Synced:
    """A worker that is updated by patches, in lock-step."""

    name = "sync"

    def __init__(self, ends: Ends) -> None:
        self.ends, self.trainer, self.worker = ends, ends.trainer, ends.worker
        self.publisher, self.subscriber = ends.publisher, ends.subscriber

    def catch_up(self, step: int) -> None:
        self.publisher.publish(self.trainer, step=step)
        self.subscriber.sync(self.worker)
        self.publisher.flush()

    def follow(self, step: int, clock: Clock) -> dict[str, Any]:
        future = self.publisher.publish(self.trainer, step=step, wait=False)
        clock.lap("publish", settle=False)
        sent = future.result()
        clock.lap("commit", settle=False)
        got = self.subscriber.sync(self.worker)
        clock.lap("sync")
        return self.reported(sent, got)

    def reported(self, sent: PublishReport, got: SyncReport) -> dict[str, Any]:
        assert (got.version, got.step) == (sent.version, sent.step), f"{sent} was published, {got} was found"
        place = self.subscriber.position
        assert place is not None
        return {"published": {**asdict(sent), "epoch": place.epoch, "index": place.index}, "synced": asdict(got)}

    def finish_background(self) -> None:
        self.publisher.flush()

    def check(self) -> float | None:
        check_bits(self.trainer, self.worker)
        began = time.perf_counter()
        actual = self.subscriber.verify(self.worker)
        took = time.perf_counter() - began
        assert actual == self.publisher.digest, "the digests differ"
        return took


class Frozen(Synced):
    """The same, without Python's garbage collector."""

    name = "frozen"

    def catch_up(self, step: int) -> None:
        super().catch_up(step)
        gc.collect()
        gc.freeze()
        gc.disable()

    def check(self) -> float | None:
        gc.enable()
        gc.unfreeze()
        return super().check()


class Behind(Synced):
    """A worker that gets a version during the step after it, in a thread and a stream of its own, and writes it then.

    The order at the end of a step: first the thread commits the version of the step before, then the trainer publishes.
    """

    name = "behind"
    _syncing: Future[tuple[PublishReport, SyncReport]] | None = None

    def __init__(self, ends: Ends) -> None:
        super().__init__(ends)
        self._threads = ThreadPoolExecutor(1, rl_profile.WORKER)
        on_gpu = next(self.worker.parameters()).device.type == "cuda"
        self._stream = torch.cuda.Stream() if on_gpu else None

    def follow(self, step: int, clock: Clock) -> dict[str, Any]:
        done: dict[str, Any] = {}
        if self._syncing is not None:
            self.ends.boundary.wait(self._syncing)
            clock.lap("commit", settle=False)
            done = self._commit(self._syncing)
            clock.lap("sync")
        future = self.publisher.publish(self.trainer, step=step, wait=False)
        self.ends.boundary.close()
        self._syncing = self._threads.submit(self._sync, future)
        clock.lap("publish", settle=False)
        return done

    def _sync(self, future: Future[PublishReport]) -> tuple[PublishReport, SyncReport]:
        sent = future.result()
        with torch.cuda.stream(self._stream) if self._stream else nullcontext():
            return sent, self.subscriber.sync(self.worker)

    def _commit(self, syncing: Future[tuple[PublishReport, SyncReport]]) -> dict[str, Any]:
        self.ends.boundary.open()
        self._syncing = None
        return self.reported(*syncing.result())

    def finish_background(self) -> None:
        super().finish_background()
        if self._syncing is not None:
            self.ends.boundary.wait(self._syncing)

    def check(self) -> float | None:
        if self._syncing is not None:
            self._commit(self._syncing)
        return super().check()


Arm = Copied | Synced


def open_publisher(store: str, keep: Literal["device", "host"], device: torch.device) -> Publisher:
    return Publisher(store, cast="BF16", keep=keep if device.type == "cuda" else None)


# -- the run ---------------------------------------------------------------------------------------------------------


class Training:
    """A policy that learns from recorded rollouts, block by block from the same state, with the worker of some arm."""

    def __init__(self, game: LanguageModel, trainer: nn.Module, lr: float, prompts: int) -> None:
        self.game, self.trainer, self.prompts, self.number = game, trainer, prompts, 0
        self.optimizer = torch.optim.AdamW(trainer.parameters(), lr=lr, weight_decay=0.0, fused=True)
        self.batches: list[Rollouts] = []
        self.windows: list[tuple[str, float, float]] = []  # of all phases so far
        self._snapshot: list[torch.Tensor] = []

    def record(self, arm: Copied, warm: int, steps: int) -> list[Step]:
        """Take some steps, keep the state, and record the rollouts of the steps after it; return the latter."""
        arm.catch_up(0)
        for seed in range(-warm, 0):
            self.game.learn(self.trainer, self.optimizer, self.game.play(arm.worker, self.prompts, seed % 2**32))
            arm.catch_up(0)
        self._snapshot = [tensor.clone() for tensor in self._tensors()]
        taken = [self.step(arm, 0, index) for index in range(steps)]
        tell(f"recorded {steps} steps of {mean_s(taken):.3f} s with {arm.name}, {taken[0].taught} samples teach")
        return taken

    def _tensors(self) -> list[torch.Tensor]:
        """Everything that a step of the trainer changes."""
        states = [self.optimizer.state[weight] for weight in self.trainer.parameters()]
        kept = [value for state in states for value in state.values() if isinstance(value, torch.Tensor)]
        return [*(weight.data for weight in self.trainer.parameters()), *kept]

    def restore(self) -> None:
        for own, kept in zip(self._tensors(), self._snapshot, strict=True):
            own.copy_(kept)

    def checksum(self) -> int:
        """A sum over the bits of the trainer's weights: the same after the same steps."""
        return sum(int(weight.data.view(torch.int32).sum(dtype=torch.int64)) for weight in self.trainer.parameters())

    def step(self, arm: Arm, turn: int, index: int) -> Step:
        clock = Clock(self.game.device)
        clock.start()
        played = self.game.play(arm.worker, self.prompts, index)
        clock.lap("play")
        self.batches += [] if index < len(self.batches) else [played]
        batch = self.batches[index]
        launches_s, core = time_launches(self.game.device), current_core()
        clock.start()  # the small operations are not counted
        self.game.learn(self.trainer, self.optimizer, batch)
        clock.lap("learn")
        self.number += 1
        done = arm.follow(self.number, clock)
        self.windows += clock.windows
        taught = int(grpo.advantages(batch.rewards, self.game.group).count_nonzero())
        reward, same = float(played.rewards.mean()), torch.equal(played.tokens, batch.tokens)
        measured = (clock.seconds, clock.memory, clock.host, launches_s, core)
        return Step(arm.name, turn, index, self.number, *measured, reward, taught, same, **done)

    def begin(self, arm: Arm) -> None:
        """Restore the trainer, and update the worker to it."""
        self.restore()
        arm.catch_up(self.number)
        wait(self.game.device)

    def block(self, arm: Arm, turn: int, steps: int, found: Measured) -> list[Step]:
        """Replay steps with one arm and check its weights; the first step is not counted."""
        before = len(COMPILED)
        self.begin(arm)
        taken = [self.step(arm, turn, index) for index in range(1 + steps)][1:]
        checked_s = arm.check()
        found.checks_s += [] if checked_s is None else [checked_s]
        found.checksums.setdefault(steps, set()).add(self.checksum())
        share = sum(step.sync_s for step in taken) / sum(step.total_s for step in taken)
        told = f"{arm.name}, round {turn}: {steps} steps of {mean_s(taken):.4f} s, of it {share:.2%} for the sync"
        if encoded := [f"{1e3 * step.published['encode_s']:.0f}" for step in taken if step.published]:
            told += f"; encoded in {' '.join(encoded)} ms; Triton compiled {len(COMPILED) - before} kernels"
        tell(told)
        return taken


def mean_s(steps: list[Step]) -> float:
    return statistics.mean(step.total_s for step in steps)


def rounds(arms: list[Arm], steps: int, block: int) -> Iterator[tuple[int, list[Arm], int]]:
    """Rounds of all arms, with their numbers of steps. Every other one is reversed: drift affects all arms alike."""
    for turn, first in enumerate(range(0, steps, block)):
        yield turn, arms if turn % 2 == 0 else arms[::-1], min(block, steps - first)


def run(
    options: argparse.Namespace,
    folder: str,
    store: str,
    found: Measured,
    save: Callable[[], object],
    report: Callable[[], object],
) -> None:
    """Measure; `save` is called after every block, and `report` when all are counted."""
    game = open_game(options, folder)
    trainer = game.policy()
    copied, worker = (in_bf16(game.policy()) for _ in range(2))
    training = Training(game, trainer, options.lr, options.prompts)
    found.weights = sum(weight.numel() for weight in trainer.parameters())
    plain = Copied(trainer, copied)
    found.before = training.record(plain, options.warm, 1 + min(options.block, options.steps))
    before = allocated(game.device)
    training.restore()
    copy_weights(trainer, worker)  # both begin with a base checkpoint: no anchor has to be fetched
    boundary = Boundary()
    with ExitStack() as stack:
        publisher = stack.enter_context(open_publisher(store, options.keep, game.device))
        subscriber = stack.enter_context(Subscriber(store, confirm=boundary.confirm))
        stack.callback(boundary.open)  # if a step fails, the thread of a sync is not left waiting
        ends = Ends(trainer, worker, publisher, subscriber, boundary)
        synced, behind, frozen = Synced(ends), Behind(ends), Frozen(ends)
        python, kernels = CopiedBesidePython(trainer, copied), CopiedBesideKernels(trainer, copied)
        every: list[Arm] = [plain, CopiedAgain(trainer, copied), synced, behind, frozen, python, kernels]
        chosen = [arm for arm in every if arm.name in options.arms]
        warm = min(options.warm, options.block, options.steps)
        warmed = training.block(synced, -1, warm, Measured())
        python.seconds = statistics.median(step.sync_s for step in warmed)
        if kernels in chosen:
            training.restore()
            kernels.load(rl_profile.busy_s(lambda: synced.catch_up(training.number)))
        for arm in chosen:
            if arm.name not in ("copy", "again", "sync"):
                training.block(arm, -1, warm, Measured())
        found.kept_bytes = allocated(game.device) - before
        for turn, arms, steps in rounds(chosen, options.steps, options.block):
            if turn and time.monotonic() - STARTED > options.seconds:
                tell(f"no further round begins: {options.seconds:g} s are over")
                break
            for arm in arms:
                found.steps += training.block(arm, turn, steps, found)
                save()
        report()
        for arm in chosen if options.profile else []:
            if arm.name in ("sync", "behind"):
                rl_profile.profile(training, arm, Path(options.profile))


# -- models that are made --------------------------------------------------------------------------------------------

MARKS = ["<end>", "<pad>", "<sys>", "<user>", "<bot>", "<unk>"]
SYMBOLS = {symbol: i for i, symbol in enumerate([*MARKS, *"0123456789", "+", "?", " ", "="])}


class EvenTokens(LanguageModel):
    """A model with random weights, generated on the device; its folder has a configuration and a tokenizer only.

    The reward is one in which untrained completions differ: the share of tokens with even ids.
    """

    def load(self) -> nn.Module:
        configuration = transformers().AutoConfig.from_pretrained(self.folder, local_files_only=True)
        torch.manual_seed(0)
        with self.device:
            model: nn.Module = transformers().AutoModelForCausalLM.from_config(
                configuration, dtype=torch.float32, attn_implementation="eager"
            )
        return model

    def play(self, policy: nn.Module, prompts: int, seed: int) -> Rollouts:
        played = super().play(policy, prompts, seed)
        counted = self.counted(played.tokens)
        even = (played.tokens[:, -ANSWER:] % 2 == 0) & counted
        return replace(played, rewards=even.sum(dim=1) / counted.sum(dim=1))


def open_game(options: argparse.Namespace, folder: str) -> LanguageModel:
    if options.model:
        return LanguageModel(folder, options.group, options.device)
    write_tokenizer(folder)
    kind = transformers().LlamaConfig if options.config == "smollm2-135m" else transformers().Qwen2Config
    kind(
        **CONFIGURATIONS[options.config],
        max_position_embeddings=128,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=SYMBOLS["<end>"],
        pad_token_id=SYMBOLS["<pad>"],
    ).save_pretrained(folder)
    return EvenTokens(folder, options.group, options.device)


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
    model.add_argument("--tiny", dest="config", action="store_const", const="trial", help="the same as --config trial")
    parser.add_argument("--steps", type=int, default=24, help="counted steps of each arm")
    parser.add_argument("--warm", type=int, default=3, help="steps before those, of the trainer and then of each arm")
    parser.add_argument("--block", type=int, default=8, help="steps of an arm in a row, which are recorded")
    parser.add_argument("--seconds", type=float, default=3600, help="begin no round after so long")
    parser.add_argument("--arms", nargs="+", choices=list(ARMS), default=["copy", "sync", "behind"])
    parser.add_argument("--prompts", type=int, default=128)
    parser.add_argument("--group", type=int, default=16)
    parser.add_argument("--lr", type=float, default=3e-6)
    parser.add_argument(
        "--keep", choices=["device", "host"], default="device", help="where the publisher keeps its copy"
    )
    parser.add_argument("--store", metavar="FOLDER", help="where to publish; default: in shared memory")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every step to this file, after each block")
    parser.add_argument(
        "--profile", metavar="FOLDER", help="at last, profile a step of sync and `behind`; write raw data there"
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")


def main(given: argparse.Namespace) -> None:
    options = given
    if min(options.steps, options.warm, options.block) < 1:
        raise SystemExit("steps are counted from 1")
    options.arms = sorted({"copy", *options.arms}, key=list(ARMS).index)
    options.command = f"python -m benchmarks {' '.join(sys.argv[1:])}"
    origin = provenance("torch", "transformers", "triton")
    origin["source"] = pulsesync.__file__
    cuda = options.device == "cuda"
    if cuda:
        count_compilations()
    origin["machine"]["device"] = torch.cuda.get_device_name() if cuda else "no GPU"
    asked = {name: value for name, value in vars(options).items() if name not in ("json", "store", "model", "profile")}
    found = Measured()

    def save() -> dict[str, Any]:
        fields = {"bench": "gpu_rl", "options": asked, **origin, **summary(found)}
        if options.json:
            listed = {what: [asdict(one) for one in getattr(found, what)] for what in ("before", "steps")}
            write(options.json, [{**fields, **listed}])
        return fields

    def report() -> None:
        fields = save()
        show(found, fields, options)
        print(json_line(fields), flush=True)

    tell(f"pulsesync {pulsesync.__version__} of {pulsesync.__file__}")
    with ExitStack() as stack:
        shared = SHARED_MEMORY if SHARED_MEMORY.is_dir() else None
        store = options.store or stack.enter_context(tempfile.TemporaryDirectory(prefix="pulse-bench-", dir=shared))
        folder = options.model or stack.enter_context(tempfile.TemporaryDirectory(prefix="pulse-model-"))
        if not cuda and not options.model:
            torch.set_num_threads(1)  # two threads on a shared core would wait for each other at every small operation
        run(options, folder, store, found, save, report)
