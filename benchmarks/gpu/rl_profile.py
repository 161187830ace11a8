"""Where the time of a publish and a sync goes inside a step of gpu_rl.py: kernels, lines of Python, allocators, clocks.

A profile has two parts, each of its own steps. In the first, a thread notes some hundred times a second which line each
thread is at, and another one the clocks of the GPU. In the second, PyTorch's profiler records every kernel and copy of
one step, and of what follows it in the background: generating once more, and the rest of the publish. Neither part is
quick: their steps take longer than those that are counted.
"""

import gzip
import json
import os
import statistics
import subprocess
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
from torch.profiler import ProfilerActivity
from torch.profiler import profile as profiler

import pulsesync
from benchmarks.harness.report import table

if TYPE_CHECKING:
    from benchmarks.gpu.gpu_rl import Arm, Training
    from benchmarks.gpu.rl_report import Step

MARK = "end of phase "  # begins the names of the profiler's events at the ends of phases
WORKER = "worker-sync"  # begins the name of the thread in which a worker one step behind syncs
SENDER = "pulse-send"  # begins the name of the publisher's thread
STEPS = 4  # that are sampled at most
INTERVAL_S = 1e-3  # between samples of the stacks
SWITCH_S = 5e-4  # for which a thread may keep the GIL meanwhile; the default of 5 ms would hide most samples
ROWS = 40  # of a table
RAW_BYTES = 2_000_000  # a file of kernels, at most
OURS = ("publish", "sync", "helpers")  # sides of a profile; the others are the trainer
PACKAGE = str(Path(pulsesync.__file__).parent) + os.sep
Spans = list[tuple[float, float]]


def profile(training: "Training", arm: "Arm", folder: Path) -> str:
    """Profile steps with an arm, print the tables, and write them to a file; return its name."""
    folder.mkdir(parents=True, exist_ok=True)
    print(f"\n== Profile of {arm.name} ==\n", flush=True)
    steps = min(STEPS, len(training.batches) - 1)
    training.begin(arm)
    training.step(arm, -1, 0)
    training.windows.clear()
    stacks, clocks = StackSampler(), clock_sampler()
    with clocks, stacks:
        taken = [training.step(arm, -1, index) for index in range(1, 1 + steps)]
        arm.finish_background()
    arm.check()
    found = {"host": stacks.show(steps), "memory": show_memory(taken), "clocks": clocks.show(training.windows)}
    path = folder / f"profile_{arm.name}.json"
    steps_taken = [asdict(step) for step in taken]
    path.write_text(json.dumps({**found, "steps": steps_taken}))  # before the part that takes more memory
    training.begin(arm)
    training.step(arm, -1, 0)
    found["kernels"] = trace(training, arm, folder / f"kernels_{arm.name}.json.gz")
    arm.check()
    path.write_text(json.dumps({**found, "steps": steps_taken}))
    return str(path)


def tell(text: str) -> None:
    print(text + "\n", flush=True)


# -- kernels ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Kernel:
    """A kernel or copy on the GPU; on a CPU, an operation of PyTorch. Times are in microseconds."""

    side: str  # trainer, publish, sync or helpers: who launched it
    stream: int
    begin: float
    took: float
    name: str

    @property
    def span(self) -> tuple[float, float]:
        return self.begin, self.begin + self.took


def activities() -> list[ProfilerActivity]:
    on_gpu = torch.cuda.is_available()
    return [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]


def busy_s(work: Callable[[], object]) -> float:
    """Seconds of all kernels and copies that a call launches; a millisecond without a GPU."""
    if not torch.cuda.is_available():
        work()
        return 1e-3
    torch.cuda.synchronize()
    with profiler(activities=activities()) as found:
        work()
        torch.cuda.synchronize()
    return sum(kernel.took for kernel in kernels_of(found)[0]) / 1e6


def trace(training: "Training", arm: "Arm", path: Path) -> dict[str, Any]:
    """Profile a step, and what follows it in the background; write every kernel to a file, and print tables."""
    from benchmarks.gpu.gpu_rl import mark, wait

    with profiler(activities=activities()) as found:
        training.step(arm, -1, 1)
        mark("")
        training.game.play(arm.worker, training.prompts, 2)
        wait(training.game.device)
        mark("play after it")
        arm.finish_background()
        wait(training.game.device)
        mark("rest of the publish")
    kernels, phases = kernels_of(found)
    if not torch.cuda.is_available():
        tell("Kernels: there is no GPU; these are operations of PyTorch in the thread that learns.")
    elif not kernels:
        tell("Kernels: the profiler has recorded none (CUPTI is not available?).")
    left_out = write_kernels(path, kernels, phases)
    size = path.stat().st_size
    tell(f"{len(kernels) - left_out:,} kernels and copies are in {path} ({size:,} bytes); {left_out:,} are left out.")
    return {"file": path.name, "by_name": show_kernels(kernels), "by_phase": show_phases(kernels, phases)}


def kernels_of(found: Any) -> tuple[list[Kernel], list[tuple[str, float, float]]]:
    """All kernels in order, and the phases with their begins and ends. Microseconds since the first mark."""
    events = found.profiler.kineto_results.events()
    on_gpu = torch.cuda.is_available()
    marks, launches, ran = [], {}, []
    for event in events:
        name = event.name()
        on_host = str(event.device_type()).endswith("CPU")
        if name.startswith(MARK):
            marks += [(event.start_ns(), name.removeprefix(MARK))] if on_host else []
        elif on_host and on_gpu:
            if name.startswith("cu"):  # a call of CUDA, which has launched something
                launches[event.correlation_id()] = (event.device_resource_id(), event.start_ns())
        elif not on_host or "::" in name:
            ran.append((event, name))
    marks.sort()
    first = marks[0][0] if marks else min((event.start_ns() for event, _ in ran), default=0)
    pairs = ((name, (then - first) / 1e3, (now - first) / 1e3) for (then, _), (now, name) in pairwise(marks))
    phases = [phase for phase in pairs if phase[0]]
    threads = {one: thread.name for thread in threading.enumerate() for one in numbers_of(thread)}
    kernels = []
    for event, name in ran:
        own = (event.device_resource_id(), event.start_ns())
        thread, at = launches.get(event.correlation_id(), (None, own[1])) if on_gpu else own
        side = side_of(threads.get(thread), (at - first) / 1e3, phases)
        kernels.append(Kernel(side, own[0], (own[1] - first) / 1e3, event.duration_ns() / 1e3, name))
    streams = Counter(kernel.stream for kernel in kernels if kernel.side == "trainer")
    usual = max(streams, key=lambda stream: streams[stream], default=0)
    kernels = [
        replace(one, side="helpers") if one.side == "trainer" and one.stream != usual else one for one in kernels
    ]
    return sorted(kernels, key=lambda kernel: kernel.begin), phases


def numbers_of(thread: threading.Thread) -> set[int]:
    """The numbers that the profiler may give a thread: the system's, or the lower half of its address."""
    low = (thread.ident or 0) & 0xFFFFFFFF
    return {thread.native_id or 0, low, low - (1 << 32)}


def side_of(thread: str | None, at: float, phases: Sequence[tuple[str, float, float]]) -> str:
    """Who has launched a kernel at some time: a thread of ours, or the main thread in a phase of ours."""
    name = thread or ""  # unknown: that of backward passes
    if name.startswith(SENDER):
        return "publish"
    if name.startswith(WORKER):
        return "sync"
    if name.startswith("pulse"):
        return "helpers"
    phase = next((phase for phase, begin, end in phases if begin <= at < end), "")
    sides = {"publish": "publish", "commit": "publish", "sync": "sync"}
    return sides.get(phase, "trainer") if name == threading.main_thread().name else "trainer"


def write_kernels(path: Path, kernels: list[Kernel], phases: Any) -> int:
    """Write kernels as columns; return how many are left out: the trainer's far from ours, if the file is too large."""

    def packed(some: list[Kernel]) -> bytes:
        names, sides = (list(dict.fromkeys(getattr(one, what) for one in some)) for what in ("name", "side"))
        at = {name: n for n, name in enumerate(names)}
        begins = [round(10 * one.begin) for one in some]
        columns = {
            "side": [sides.index(one.side) for one in some],
            "stream": [one.stream for one in some],
            "begin_after_the_last": [now - then for then, now in zip([0, *begins], begins, strict=False)],
            "took": [round(10 * one.took) for one in some],
            "name": [at[one.name] for one in some],
        }
        listed = {"unit": "0.1 microseconds", "phases_us": phases, "sides": sides, "names": names, **columns}
        return gzip.compress(json.dumps(listed, separators=(",", ":")).encode())

    data, kept = packed(kernels), kernels
    if len(data) > RAW_BYTES:
        near = joined((begin - 1000, end + 1000) for begin, end in (one.span for one in kernels if one.side in OURS))
        kept = [one for one in kernels if one.side in OURS or overlap([one.span], near)]
        data = packed(kept)
    if len(data) > RAW_BYTES:
        kept = [one for one in kernels if one.side in OURS]
        data = packed(kept)
    path.write_bytes(data)
    return len(kernels) - len(kept)


def show_kernels(kernels: list[Kernel]) -> dict[str, Any]:
    """Print the kernels of each side by total time; return them."""
    out: dict[str, Any] = {}
    for side in (*OURS, "trainer"):
        by_name: dict[str, list[float]] = defaultdict(list)
        for one in kernels:
            if one.side == side:
                by_name[one.name].append(one.took)
        listed = sorted(by_name.items(), key=lambda item: -sum(item[1]))[: 15 if side == "trainer" else ROWS]
        out[side] = {name: {"count": len(took), "us": sum(took), "most_us": max(took)} for name, took in listed}
        cells = [[name[:90], f"{len(took)}", f"{sum(took) / 1e3:.3f}", f"{max(took):.1f}"] for name, took in listed]
        if cells:
            tell(table([f"kernels of {side}", "number", "ms in all", "longest, µs"], cells))
    return out


def show_phases(kernels: list[Kernel], phases: Sequence[tuple[str, float, float]]) -> dict[str, Any]:
    """Print for each phase how long the GPU was busy, and with ours while the trainer's kernels ran; return it."""
    by_side = {side: joined(one.span for one in kernels if one.side == side) for side in (*OURS, "trainer")}
    ours = joined(one.span for one in kernels if one.side in OURS)
    out, cells = {}, []
    for name, begin, end in phases:
        inside = [(begin, end)]
        both = overlap(clipped(ours, begin, end), by_side["trainer"])
        row = {"phase": end - begin, **{side: overlap(inside, spans) for side, spans in by_side.items()}, "both": both}
        out[name] = {what: us / 1e3 for what, us in row.items()}
        cells.append([name, *(f"{ms:.2f}" for ms in out[name].values())])
    heads = ["GPU busy, ms", "phase", *(f"with {side}" for side in by_side), "ours and the trainer's at once"]
    tell(table(heads, cells))
    return out


def joined(spans: Iterable[tuple[float, float]]) -> Spans:
    """The same stretches of time in order, without overlaps."""
    out: Spans = []
    for begin, end in sorted(spans):
        if out and begin <= out[-1][1]:
            out[-1] = (out[-1][0], max(out[-1][1], end))
        else:
            out.append((begin, end))
    return out


def clipped(spans: Spans, begin: float, end: float) -> Spans:
    return [(max(begin, one), min(end, other)) for one, other in spans if one < end and other > begin]


def overlap(some: Spans, others: Spans) -> float:
    """For how long two lists of ordered stretches overlap."""
    total, n = 0.0, 0
    for begin, end in some:
        while n < len(others) and others[n][1] <= begin:
            n += 1
        at = n
        while at < len(others) and others[at][0] < end:
            total += min(end, others[at][1]) - max(begin, others[at][0])
            at += 1
    return total


# -- the host, line by line ------------------------------------------------------------------------------------------


class StackSampler(threading.Thread):
    """Notes which line of pulsesync each thread is at, and what is called there."""

    def __init__(self) -> None:
        super().__init__(name="stack sampler", daemon=True)
        self._ends = threading.Event()
        self._seconds: dict[tuple[str, str, str], float] = defaultdict(float)  # by side, line, and what runs in it
        self._samples = 0
        self._wall_s = 0.0
        self._switch_s = sys.getswitchinterval()

    def __enter__(self) -> None:
        sys.setswitchinterval(SWITCH_S)
        self.start()

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        self.join()
        sys.setswitchinterval(self._switch_s)

    def run(self) -> None:
        began = then = time.perf_counter()
        while not self._ends.wait(INTERVAL_S):
            names = {thread.ident: thread.name for thread in threading.enumerate()}
            now = time.perf_counter()
            for ident, frame in sys._current_frames().items():
                if ident != self.ident and (found := place_of(frame, names.get(ident) or "")):
                    self._seconds[found] += now - then
            self._samples += 1
            then = now
        self._wall_s = time.perf_counter() - began

    def show(self, steps: int) -> dict[str, Any]:
        """Print where each side spends its time, by line and by function; return that, in milliseconds a step."""
        every_ms = 1e3 * self._wall_s / max(self._samples, 1)
        tell(
            f"The host: {self._samples} samples in {steps} steps, one in {every_ms:.2f} ms; threads may keep the GIL "
            f"for {1e3 * SWITCH_S:g} ms instead of {1e3 * self._switch_s:g}. Milliseconds a step; waiting counts."
        )
        out: dict[str, Any] = {"samples": self._samples, "interval_ms": every_ms}
        for side in sorted({side for side, _, _ in self._seconds}):
            lines: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
            functions: dict[str, float] = defaultdict(float)
            for (own, line, leaf), seconds in self._seconds.items():
                if own == side:
                    lines[line][leaf] += 1e3 * seconds / steps
                    file, _, function = line.partition(":")
                    functions[f"{file} {function.partition(' ')[2]}"] += 1e3 * seconds / steps
            by_line = sorted(lines.items(), key=lambda item: -sum(item[1].values()))[:ROWS]
            by_function = sorted(functions.items(), key=lambda item: -item[1])[:ROWS]
            cells = [[line, f"{sum(of.values()):.3f}", max(of, key=lambda leaf: of[leaf])] for line, of in by_line]
            tell(table([f"{side}: innermost line of pulsesync", "ms", "mostly in"], cells))
            tell(table([f"{side}: function", "ms"], [[name, f"{ms:.3f}"] for name, ms in by_function]))
            out[side] = {"ms": sum(functions.values()), "lines": dict(by_line), "functions": dict(by_function)}
        return out


def place_of(frame: FrameType, thread: str) -> tuple[str, str, str] | None:
    """The side that a thread works for, its innermost line in pulsesync, and what is called there; None: neither."""
    leaf, line, outermost = f"{Path(frame.f_code.co_filename).name} {frame.f_code.co_qualname}", "", ""
    at: FrameType | None = frame
    while at is not None:
        code = at.f_code
        if code.co_qualname == "Boundary.confirm":
            return None  # it waits for the end of a step
        if code.co_filename.startswith(PACKAGE):
            line = line or f"{code.co_filename.removeprefix(PACKAGE)}:{at.f_lineno} {code.co_qualname}"
            outermost = code.co_name
        at = at.f_back
    if not line:
        return None
    if thread.startswith(SENDER):
        return "publish, in the background", line, leaf
    if thread == threading.main_thread().name or thread.startswith(WORKER):
        return (outermost, line, leaf) if outermost in ("publish", "sync") else None
    return None if leaf.endswith("wait") else ("other threads of pulsesync", line, leaf)


# -- memory and clocks -----------------------------------------------------------------------------------------------


def show_memory(steps: "list[Step]") -> dict[str, Any]:
    """Print the events of the allocators and the sizes of memory for each phase, medians of steps; return them."""
    if not steps[0].memory:
        tell("Memory and allocators: not available without a GPU.")
        return {}
    if "pinned_allocations" not in steps[0].host["play"]:
        tell("Allocations of pinned host memory: this version of PyTorch does not count them.")
    events = ("driver_allocations", "driver_frees", "retries", "waits_for_all_streams", "pinned_allocations")
    out: dict[str, Any] = {}
    for phase in steps[0].memory:
        spent, sizes = [step.host[phase] for step in steps], [step.memory[phase] for step in steps]
        out[phase] = {what: sum(one[what] for one in spent) for what in events if what in spent[0]}
        out[phase] |= {what: statistics.median(one[what] for one in sizes) / 1e6 for what in sizes[0]}
    heads = [what.replace("_", " ") for what in next(iter(out.values()))]
    heads = [f"{what}, MB" if what.endswith(("peak", "current")) else what for what in heads]
    cells = [[phase, *(f"{value:,.0f}" for value in row.values())] for phase, row in out.items()]
    tell(table([f"memory, {len(steps)} steps", *heads], cells))
    return out


FIELDS = ("SM clock, MHz", "memory clock, MHz", "power, W", "reasons")
Sample = tuple[float, float, float, float, str]  # when, and the fields


@dataclass
class ClockSampler:
    """Notes the clocks of the GPU in a thread; `unavailable` says why it cannot."""

    unavailable: str = ""
    samples: list[Sample] = field(default_factory=list)
    _ends: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def __enter__(self) -> None:
        if not self.unavailable:
            self._thread = threading.Thread(target=self._run, name="clock sampler", daemon=True)
            self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        if self._thread is not None:
            self._thread.join(5)

    def _run(self) -> None:
        """Note clocks until `_ends` is set."""

    def show(self, windows: Sequence[tuple[str, float, float]]) -> dict[str, Any]:
        """Print the clocks by phase; return them."""
        if self.unavailable or not self.samples:
            tell(f"Clocks: not available: {self.unavailable or 'there were no samples'}.")
            return {"unavailable": self.unavailable or "no samples"}
        out: dict[str, Any] = {}
        for phase in dict.fromkeys(phase for phase, _, _ in windows):
            inside = [(begin, end) for name, begin, end in windows if name == phase]
            seen = [one for one in self.samples if any(begin <= one[0] < end for begin, end in inside)]
            out[phase] = {"samples": len(seen)}
            for n, what in enumerate(FIELDS[:3], 1):
                values: list[float] = [float(one[n]) for one in seen]
                out[phase][what] = [min(values), statistics.median(values), max(values)] if seen else []
            out[phase]["reasons"] = sorted({one[4] for one in seen})
        cells = [
            [phase, *(" – ".join(f"{v:g}" for v in value) if isinstance(value, list) and what != "reasons" else
             ", ".join(value) if what == "reasons" else f"{value}" for what, value in row.items())]
            for phase, row in out.items()
        ]  # fmt: skip
        tell(table(["clocks: least – median – most", "samples", *FIELDS], cells))
        return out


class NvmlSampler(ClockSampler):
    """By NVML, 50 times a second."""

    def _run(self) -> None:
        nvml = import_module("pynvml")
        nvml.nvmlInit()
        device = nvml.nvmlDeviceGetHandleByIndex(0)
        reasons = getattr(nvml, "nvmlDeviceGetCurrentClocksEventReasons", None)
        reasons = reasons or nvml.nvmlDeviceGetCurrentClocksThrottleReasons
        while not self._ends.wait(0.02):
            clocks = (nvml.nvmlDeviceGetClockInfo(device, which) for which in (nvml.NVML_CLOCK_SM, nvml.NVML_CLOCK_MEM))
            power = nvml.nvmlDeviceGetPowerUsage(device) / 1e3
            self.samples.append((time.perf_counter(), *clocks, power, hex(reasons(device))))


class SmiSampler(ClockSampler):
    """By nvidia-smi, 20 times a second; the time is that at which its line arrives."""

    def _run(self) -> None:
        query = "clocks.sm,clocks.mem,power.draw,clocks_event_reasons.active"
        command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader,nounits", "-i", "0", "-lms", "50"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:

            def stop() -> None:
                self._ends.wait()
                process.terminate()

            threading.Thread(target=stop, daemon=True).start()
            assert process.stdout is not None
            for line in process.stdout:
                try:
                    *values, reason = line.strip().split(", ")
                    sm, memory, power = map(float, values)
                except ValueError:
                    self.unavailable = f"nvidia-smi prints {line.strip()!r}"
                    continue
                self.samples.append((time.perf_counter(), sm, memory, power, reason))
            self._ends.set()


def clock_sampler() -> ClockSampler:
    """By NVML if it can be imported, else by nvidia-smi."""
    if not torch.cuda.is_available():
        return ClockSampler("there is no GPU")
    try:
        import_module("pynvml").nvmlInit()
    except Exception:  # noqa: BLE001 - whatever is missing, nvidia-smi may be there
        pass
    else:
        return NvmlSampler()
    try:
        subprocess.run(["nvidia-smi", "-L"], capture_output=True, check=True, timeout=10)
    except (OSError, subprocess.SubprocessError) as error:
        return ClockSampler(f"neither pynvml nor nvidia-smi runs ({error})")
    return SmiSampler()
