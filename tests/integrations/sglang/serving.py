"""A small model, its training, and SGLang's server for it, on loopback."""

import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from pulsesync import Publisher
from pulsesync.integrations.runtime import EngineRank, ModelShape, grid
from tests.examples import python_path

ROOT = Path(__file__).parents[3]
START_S = 240  # a start takes 20 seconds alone, most of it imports, and 90 on a busy machine
SIZES: dict[str, Any] = {
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "vocab_size": 130,  # 192 with SGLang's padding
    "max_position_embeddings": 128,
}


def make_checkpoint(folder: Path, kind: str = "Llama", **sizes: Any) -> Path:
    """Save a small model with random weights in BF16."""
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**{**SIZES, **sizes})
    getattr(transformers, f"{kind}ForCausalLM")(config).bfloat16().save_pretrained(folder)
    return folder


class Training:
    """A trainer that changes a few weights in each version, and saves every version as a checkpoint, too."""

    def __init__(self, checkpoint: Path, folder: Path, ranks: int = 2) -> None:
        self.location, self._folder = folder / "run", folder
        self.weights = load_file(checkpoint / "model.safetensors")
        self._config = (checkpoint / "config.json").read_bytes()
        shape = ModelShape.from_config(json.loads(self._config), lm_head="lm_head.weight" in self.weights)
        self.publisher = Publisher(
            str(self.location), grid=grid(shape, [EngineRank.sglang(rank, ranks) for rank in range(ranks)])
        )
        self._random = torch.Generator().manual_seed(7)
        self.version = -1

    def publish(self, weights: dict[str, Any] | None = None) -> int:
        """Publish these weights, or others by a few bits than the last ones."""
        if weights is not None:
            self.weights = weights
        elif self.version >= 0:
            for tensor in self.weights.values():
                chosen = torch.rand(tensor.shape, generator=self._random) < 0.02
                bits = tensor.view(torch.int16)
                bits[chosen] ^= 1
        self.version += 1
        self.publisher.publish({name: tensor.clone() for name, tensor in self.weights.items()}, step=self.version)
        self.publisher.flush()
        self.checkpoint(self.version).mkdir()
        save_file(self.weights, self.checkpoint(self.version) / "model.safetensors")
        (self.checkpoint(self.version) / "config.json").write_bytes(self._config)
        return self.version

    def checkpoint(self, version: int) -> Path:
        return self._folder / f"version-{version}"


class Server:
    """A running server."""

    def __init__(self, url: str, process: "subprocess.Popen[bytes]", log: Path) -> None:
        self.url, self.process, self.log = url, process, log

    def test(self, **asked: Any) -> Any:
        """Ask every rank what only a test asks."""
        return self.post("/test", asked)[1]

    def post(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        request = urllib.request.Request(self.url + path, json.dumps(body).encode())
        request.add_header("Content-Type", "application/json")
        try:
            with urllib.request.urlopen(request, timeout=60) as response:
                return response.status, json.loads(response.read())
        except urllib.error.HTTPError as e:
            with e:
                return e.code, json.loads(e.read())

    def has(self, training: Training, version: int) -> bool:
        """Whether the parameters of every rank are those that SGLang loads of a version, bit for bit."""
        answers = self.test(equals=str(training.checkpoint(version)))
        return all(answer["equals"] for answer in answers)

    @property
    def paused(self) -> bool:
        return any(answer["paused"] for answer in self.test())


@contextmanager
def serving(checkpoint: Path, log: Path, ranks: int) -> Iterator[Server]:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    command = [sys.executable, "-m", "tests.integrations.sglang.engine", str(port), str(ranks), str(checkpoint)]
    environment = {**os.environ, "PYTHONPATH": python_path(ROOT), "GLOO_SOCKET_IFNAME": "lo", "HF_HUB_OFFLINE": "1"}
    with log.open("wb") as output:
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=output, stderr=output)
    server = Server(f"http://127.0.0.1:{port}", process, log)
    try:
        _wait(server)
        yield server
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait(server: Server) -> None:
    until = time.monotonic() + START_S
    while time.monotonic() < until and server.process.poll() is None:
        try:
            urllib.request.urlopen(server.url + "/model_info", timeout=5).close()
        except OSError:
            time.sleep(0.3)
        else:
            return
    raise AssertionError(f"the server did not start: {server.log.read_text(errors='replace')[-3000:]}")
