"""What does it cost to update SGLang's ranks to the next version: bytes, seconds, and the pause?

    .venv-sglang/bin/python -m benchmarks.bench_sglang [--versions 8]        # about three minutes on 2 cores

SGLang's own server, managers, weight updaters, models and weight loaders, on CPUs and without its kernels
(tests/integrations/sglang/engine.py): nothing is generated, so that the pause is the time between the requests that
pause and resume, not what a client would wait for a token. `pauses_s` is the sum of all pauses of an update; the last
of them, `last_pause_s`, is the one in which weights are written. The model is a Llama of 42 million random weights in
BF16, in two tensor-parallel ranks; the changes are those of Adam (`pulsesync.testing.AdamUpdates`). For comparison,
each version is then loaded again from a file by SGLang's own loaders. After every update all parameters of both ranks
are compared with what SGLang loads of that version, bit for bit.
"""

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
from pathlib import Path

import torch
from safetensors.torch import load_file

from pulsesync.integrations.sglang import SglangServer
from pulsesync.testing import AdamUpdates
from tests.integrations.sglang.serving import Training, make_checkpoint, serving

SIZES = {"num_hidden_layers": 8, "hidden_size": 512, "num_attention_heads": 8, "num_key_value_heads": 4}
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
            driver, rows = SglangServer(server.url), []
            for version in range(given.versions + 1):
                state = updates.step() if version else updates.state()
                training.publish({name: torch.from_numpy(bits).view(torch.bfloat16) for name, bits in state.items()})
                began = time.perf_counter()
                report = driver.update(str(training.location), version)
                update_s = time.perf_counter() - began
                assert server.has(training, version), f"version {version} is not what SGLang loads"
                began = time.perf_counter()
                server.test(load=str(training.checkpoint(version)))
                reload_s = time.perf_counter() - began
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
    timed = [row for row in rows if row["path"] == "patch"]
    summary = {key: statistics.median(row[key] for row in timed) for key in rows[0] if key not in ("version", "path")}  # type: ignore[type-var]
    size = sum(tensor.numel() * 2 for tensor in weights.values())
    facts = {"checkpoint_bytes": size, "machine": platform.machine(), "load": os.getloadavg()[0]}
    print(json.dumps({"median": summary, **facts}))
