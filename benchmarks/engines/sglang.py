"""What does it cost to update SGLang's ranks to the next version: bytes, seconds, and the pause?

    .venv-sglang/bin/python -m benchmarks sglang [--versions 8]        # about three minutes on 2 cores

SGLang's own server, managers, weight updaters, models and weight loaders, on CPUs and without its kernels
(tests/integrations/sglang/engine.py): nothing is generated, so that the pause is the time between the requests that
pause and resume, not what a client would wait for a token. `pauses_s` is the sum of all pauses of an update; the last
of them, `last_pause_s`, is the one in which weights are written. The model is a Llama of 42 million random weights in
BF16, in two tensor-parallel ranks; the changes are those of Adam (`pulsesync.testing.AdamUpdates`). For comparison,
each version is then loaded again from a file by SGLang's own loaders. After every update all parameters of both ranks
are compared with what SGLang loads of that version, bit for bit.
"""

import argparse
import os
import statistics
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import sglang  # noqa: F401 - it is what this needs
from safetensors.torch import load_file

from benchmarks.harness.report import json_line, provenance, table
from benchmarks.harness.timing import timed
from benchmarks.harness.weights import as_torch
from pulsesync.integrations.sglang import SglangServer
from pulsesync.testing import AdamUpdates
from tests.integrations.sglang.serving import Training, make_checkpoint, serving

QUICK = ("--versions", "3")
SIZES: dict[str, Any] = {"num_hidden_layers": 8, "hidden_size": 512, "num_attention_heads": 8, "num_key_value_heads": 4}
SIZES |= {"intermediate_size": 1536, "vocab_size": 16000}


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--versions", type=int, default=8)


def main(given: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        checkpoint = make_checkpoint(folder / "model", **SIZES)
        training = Training(checkpoint, folder)
        weights = load_file(checkpoint / "model.safetensors")
        updates = AdamUpdates({name: tuple(tensor.shape) for name, tensor in weights.items()})
        with serving(checkpoint, folder / "log", 2) as server:
            driver, rows = SglangServer(server.url), list[dict[str, float | str]]()
            for version in range(given.versions + 1):
                state = updates.step() if version else updates.state()
                training.publish(as_torch(state))
                report, update_s = timed(partial(driver.update, str(training.location), version))
                assert server.has(training, version), f"version {version} is not what SGLang loads"
                _, reload_s = timed(partial(server.test, load=str(training.checkpoint(version))))
                rows.append(
                    {
                        "version": version,
                        "path": "+".join(report.path),
                        "fetched_bytes": report.fetched_bytes,
                        "update_s": round(update_s, 3),
                        "pauses_s": round(report.pause_s, 3),
                        "last_pause_s": round(driver._pause_s, 3),
                        "reload_s": round(reload_s, 3),
                    }
                )
                print(rows[-1], flush=True)
        training.publisher.close()
    patches = [row for row in rows if row["path"] == "patch"]
    names = [key for key in rows[0] if key not in ("version", "path")]
    summary = {key: statistics.median(float(row[key]) for row in patches) for key in names}
    size = sum(tensor.numel() * 2 for tensor in weights.values())
    print(
        "\n" + table(["median of the patches", ""], [[key, f"{value:,.3f}"] for key, value in summary.items()]) + "\n"
    )
    facts = {"checkpoint_bytes": size, "load": os.getloadavg()[0], **provenance("sglang", "torch")}
    print(json_line({"bench": "sglang", "median": summary, **facts}))
