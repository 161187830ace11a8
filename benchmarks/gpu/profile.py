"""Where the time of an encode and of a decode goes on a GPU: by kernel, and by function of the host."""

import functools
import statistics
import time
from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING

from torch.profiler import ProfilerActivity
from torch.profiler import profile as profiler

from benchmarks.harness.device import timed_ms, wait
from pulsesync.format.body import Body
from pulsesync.state.patches import PatchTransaction

if TYPE_CHECKING:
    from benchmarks.gpu.gpu import Bench
    from pulsesync.format.patch import CodecName


def kernels(bench: "Bench") -> str:
    """Where the time goes: kernels of one encode and one decode, by the profiler."""
    manifest, _ = bench.record("context")

    def all_of_it() -> None:
        encoded = bench.compare().encode(bench.last, "context")
        state = bench.state
        state.commit(state.commit(PatchTransaction(state).prepare(manifest, [Body.of(encoded[0].data, state.layout)])))
        state.backend.count()

    all_of_it()
    wait()
    with profiler(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as found:
        all_of_it()
        wait()
    return str(found.key_averages().table(sort_by="cuda_time_total", row_limit=32, max_name_column_width=48))


LINES = {  # the functions to time, by module; where one calls another, the time of the inner one counts for both
    "device.baseline": "compare_pile encode_changes",
    "device.parts": "code_piles diffs_of digest_changes digest_changes_by_block begin_remember",
    "device.encode": "begin_digest_changes HotSearch _choose_sizes _count_rows _launch build_cold build_many _packed"
    " to_host",
    "device.encode._PileCoder": "_count_classes choose_cuts count _decide _build_cold write",
    "device.tracked": "HotSearch begin_advance",
    "device.state": "decode_patch",
    "device.decode": "open_part decode_coded HotSearch parse_streams_of streams_of _upload parse_cold _step_cold"
    " begin_digest_changes digest_changes begin_remember check_faults",
    "device.decode._StreamDecoder": "__init__ launch",
    "format.patch": "finish choose _assemble",
    "format.container": "build open_part",
    "format.tables": "normalise choose_cuts choose_from",
}


def lines(bench: "Bench", codec: "CodecName") -> str:
    """Where the host's time goes: median milliseconds of functions in seven encodes and decodes, and how often each."""
    spent: dict[str, list[float]] = {}

    def told(name: str, function: Callable[..., object]) -> Callable[..., object]:
        @functools.wraps(function)
        def call(*args: object, **options: object) -> object:
            began = time.perf_counter()
            try:
                return function(*args, **options)
            finally:
                spent.setdefault(name, []).append(1e3 * (time.perf_counter() - began))

        return call

    state, layout = bench.state, bench.state.layout
    if codec == "history":  # measure the second patch of an epoch: the first one has no history
        first = bench.record(codec)
        bench.forget_new()
        bench.advance(*first)
    manifest, data = bench.record(codec)
    for module, names in LINES.items():
        at, _, inside = module.partition("._")
        loaded = import_module(f"pulsesync.{at}")
        loaded = getattr(loaded, f"_{inside}") if inside else loaded
        for name in names.split():
            setattr(loaded, name, told(f"{module}.{name}", getattr(loaded, name)))
    out = []
    for what in ("encode", "decode and commit"):
        walls = list[float]()
        for n in range(9):
            if n == 2:  # warm
                spent.clear()
                walls.clear()
            if what == "encode":
                _, ms = timed_ms(lambda: bench.encode(codec))
            else:
                back, ms = timed_ms(
                    lambda: state.commit(PatchTransaction(state).prepare(manifest, [Body.of(data, layout)]))
                )
                state.commit(back)
            walls.append(ms)
        out.append(f"{what}, {codec}: {statistics.median(walls):.2f} ms")
        for name, times in sorted(spent.items(), key=lambda item: -sum(item[1])):
            out.append(f"  {statistics.median(times):8.2f} ms  {len(times) / 7:5.1f} ×  {name}")
    return "\n".join(out)
