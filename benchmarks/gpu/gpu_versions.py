"""How long does each version of a run take on a GPU, how many kernels are compiled for it, and what does a tensor cost?

    python -m benchmarks gpu_versions                                   # all cases: a model, few, many, experts
    python -m benchmarks gpu_versions --cases model --weights 1e9 --versions 12 --keep host
    python -m benchmarks gpu_versions --cases few many experts          # 20,000 tensors of 5,000, 100 of a million

Triton begins with an empty cache, and its own hook counts what it compiles. Publisher and worker are in one process and
on one GPU; the store is in memory. After every version the worker's weights are compared with the trainer's, bit for
bit. `model` has the shapes of a real model of that many weights, and its density goes up and down between 0.05 % and
20 %. The other cases have as many weights in few large tensors, in many small ones, and as experts, and one density.
Every other version is published in the background. Of each case, a line for each version, and the least of the later
ones:

- publish, sync: milliseconds from the call to the end of all work it launched;
- waits: milliseconds for which publish(wait=False) blocks a trainer;
- check: microseconds a tensor, at each end, to check that the tensors are still at the same addresses;
- host: microseconds a tensor that publish and sync take longer than with few large tensors.
"""

import argparse
import os
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import torch

from benchmarks.harness.device import as_device, chances, equal, make, name_of, need_gpu, shapes, timed_ms, train_
from benchmarks.harness.report import json_line, provenance, table
from pulsesync import Publisher, Subscriber
from pulsesync.state.views import SourceMarks
from pulsesync.store import MemoryStore

QUICK = (
    "--cases", "few", "many", "--tensors", "6", "--size", "40", "--few", "2", "--weights", "1100", "--versions", "2",
)  # fmt: skip
CASES = ("model", "few", "many", "experts")
DENSITIES = [0.0005 * 400 ** (step * 5 % 8 / 7) for step in range(8)]  # of `model`
EARLY = 3  # versions that compile
Row = dict[str, float]


def sizes(given: argparse.Namespace, case: str) -> dict[str, tuple[int, ...]]:
    """The tensors of a case."""
    total = given.tensors * given.size
    if case == "model":
        return dict(shapes(given.weights))
    if case == "few":
        return {f"model.layers.{n}.weight": (total // given.few,) for n in range(given.few)}
    if case == "many":
        return {f"model.layers.{n}.weight": (given.size,) for n in range(given.tensors)}
    return {
        f"model.layers.{layer}.mlp.experts.{expert}.{part}.weight": (given.expert_size,)
        for layer in range(given.layers)
        for expert in range(given.experts)
        for part in ("gate_proj", "up_proj", "down_proj")
    }


def count_compilations() -> list[str]:
    """The names of the kernels that Triton compiles from now on, by its own hook."""
    from triton import knobs

    compiled: list[str] = []

    def hook(*, fn: Any, **_: Any) -> None:
        compiled.append(fn.name)

    knobs.runtime.jit_post_compile_hook = hook
    return compiled


def versions(case: str, given: argparse.Namespace, compiled: list[str]) -> Iterator[Row]:
    """Publish and sync versions one after the other; the last row has the time of the check of addresses."""
    model = make(sizes(given, case))
    worker = {name: torch.zeros_like(tensor) for name, tensor in model.items()}
    by_density = [chances(density) for density in (DENSITIES if case == "model" else [given.density / 100])]
    store, changed = MemoryStore(), 0
    subscriber = Subscriber(store)
    with Publisher(store, codec=given.codec, keep=given.keep) as publisher:
        for version in range(given.versions):
            before, row = len(compiled), dict[str, float]()
            if version % 2:
                began = time.perf_counter()
                future = publisher.publish(model, wait=False)
                row["waits_ms"] = 1e3 * (time.perf_counter() - began)
                report = future.result()
            else:
                report, row["publish_ms"] = timed_ms(lambda: publisher.publish(model))
            row["compiled_to_publish"] = len(compiled) - before
            got, row["sync_ms"] = timed_ms(lambda: subscriber.sync(worker))
            row["compiled_to_sync"] = len(compiled) - before - row["compiled_to_publish"]
            row |= {
                "encode_ms": 1e3 * report.encode_s,
                "prepare_ms": 1e3 * got.prepare_s,
                "apply_ms": 1e3 * got.apply_s,
            }
            assert equal(model, worker), f"{case}, version {version}: the worker's weights are not the trainer's"
            row |= {"density": report.density, "bits_a_change": 8 * report.payload_bytes / max(changed, 1)}
            yield row
            changed = train_(model, by_density[version % len(by_density)])
    marks = SourceMarks.of(model)
    assert marks is not None
    yield {"check_us": min(1e3 * timed_ms(lambda: marks.fit(model))[1] for _ in range(5)) / len(model)}


def measure(case: str, given: argparse.Namespace, compiled: list[str]) -> dict[str, Any]:
    *rows, check = versions(case, given, compiled)
    late = rows[EARLY:] if len(rows) > EARLY + 1 else rows
    found = {key: min(row[key] for row in late if key in row) for key in ("publish_ms", "waits_ms", "sync_ms")}
    found |= {"bits_a_change": rows[-1]["bits_a_change"], **check}
    return {"case": case, **found, "compiled_late": sum(r["compiled_to_publish"] + r["compiled_to_sync"] for r in late),
            "versions": rows}  # fmt: skip


def show(found: dict[str, Any]) -> None:
    names = ("publish_ms", "waits_ms", "encode_ms", "sync_ms", "prepare_ms", "apply_ms")
    cells = [
        [
            str(number),
            f"{row['density']:.2%}",
            *(f"{row[name]:.1f}" if name in row else "" for name in names),
            f"{row['compiled_to_publish']:g}, {row['compiled_to_sync']:g}",
        ]
        for number, row in enumerate(found["versions"])
    ]
    print(f"\n{found['case']}: {found['tensors']:,} tensors, {found['weights']:,} weights\n")
    head = [name.replace("_", " ") for name in names]
    print(table(["version", "changed", *head, "compiled to publish, to sync"], cells), flush=True)


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--weights", type=float, default=135e6, help="of `model`")
    parser.add_argument("--tensors", type=int, default=20_000, help="of `many`")
    parser.add_argument("--size", type=int, default=5_000, help="weights of each of the --tensors")
    parser.add_argument("--few", type=int, default=100, help="large tensors, with as many weights in all")
    parser.add_argument("--layers", type=int, default=48, help="of `experts`")
    parser.add_argument("--experts", type=int, default=128, help="of each layer")
    parser.add_argument("--expert-size", type=int, default=5_000, help="weights of each of an expert's three tensors")
    parser.add_argument("--density", type=float, default=0.8, help="percent of the weights that a version changes")
    parser.add_argument("--versions", type=int, default=12, help="of each case; two epochs are 65")
    parser.add_argument("--codec", default="auto")
    parser.add_argument("--keep", choices=("device", "host"), default="device", help="where the publisher's base is")


def main(given: argparse.Namespace) -> None:
    need_gpu(max(given.weights if "model" in given.cases else 0, given.tensors * given.size))
    with tempfile.TemporaryDirectory(prefix="pulse-triton-") as cache, as_device():
        os.environ["TRITON_CACHE_DIR"] = cache
        compiled, rows = count_compilations(), list[dict[str, Any]]()
        for case in given.cases:
            some = sizes(given, case)
            weights = sum(torch.Size(shape).numel() for shape in some.values())
            rows.append({"tensors": len(some), "weights": weights, **measure(case, given, compiled)})
            show(rows[-1])
    few = next((row for row in rows if row["case"] == "few"), None)
    for row in rows:
        for end in ("publish", "sync"):
            if few:
                more_ms = row[f"{end}_ms"] - row["weights"] / few["weights"] * few[f"{end}_ms"]
                row[f"{end}_host_us"] = 1e3 * more_ms / row["tensors"]
    names = ("publish_ms", "waits_ms", "sync_ms", "bits_a_change", "check_us", "publish_host_us", "sync_host_us")
    cells = [[row["case"], *(f"{row[name]:.3f}" if name in row else "–" for name in names)] for row in rows]
    print(f"\n{name_of()}: least of the versions from the {EARLY + 1}th on\n")
    print(table(["case", *(name.replace("_", " ") for name in names)], cells) + "\n")
    print(json_line({"bench": "gpu_versions", **provenance("torch", "triton"), "gpu": name_of(), "cases": rows}))
