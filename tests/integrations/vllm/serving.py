"""A small model, its training, and a real vLLM server for it, on loopback."""

import hashlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from pulsesync import Publisher
from pulsesync.integrations.runtime import EngineRank, ModelShape, grid
from tests.examples import python_path

ROOT = Path(__file__).parents[3]
START_S = 240  # a start takes 20 seconds alone and 60 on a busy machine
PROMPTS = [[3, 17, 5, 90, 41, 7], [101, 2, 2, 8], [60, 61, 62, 63, 64, 65, 66, 67, 68]]
ROUTES = ("--middleware", "pulsesync.integrations.vllm.Routes")
SIZES: dict[str, Any] = {
    "num_hidden_layers": 3,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,  # the least that vLLM has on a CPU
    "intermediate_size": 96,
    "vocab_size": 150,  # 192 with vLLM's padding
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
    "initializer_range": 0.06,  # with larger weights the attention of vLLM and that of transformers differ by more
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def make_checkpoint(folder: Path) -> Any:
    """Save a small Llama with random weights in BF16, and a tokenizer of as many words; return it in FP32."""
    import transformers
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace

    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SIZES)
    model = transformers.LlamaForCausalLM(config).bfloat16()
    model.save_pretrained(folder)
    tokenizer = Tokenizer(WordLevel({f"w{n}": n for n in range(SIZES["vocab_size"])}, unk_token="w0"))
    tokenizer.pre_tokenizer = Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="w2").save_pretrained(folder)
    return model.float()


class Training:
    """Real steps of AdamW on FP32 masters, published in BF16; every version is remembered.

    Tensors are cut for two ranks, so that engines with one rank and with two can follow.
    """

    def __init__(self, model: Any, location: Path) -> None:
        self.model, self.location = model, location
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        shape = ModelShape.from_config(model.config, lm_head=True)
        cuts = grid(shape, [EngineRank.vllm(n, 2) for n in range(2)])
        self.publisher = Publisher(str(location), cast="BF16", grid=cuts)
        self.versions: list[dict[str, Any]] = []
        self.publish()

    def step(self) -> None:
        tokens = torch.randint(0, SIZES["vocab_size"], (4, 32))
        self.model(input_ids=tokens, labels=tokens).loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.publish()

    def publish(self) -> None:
        state = {name: tensor.detach() for name, tensor in self.model.state_dict().items()}
        self.publisher.publish(state, step=len(self.versions))
        self.versions.append({name: tensor.bfloat16().clone() for name, tensor in state.items()})

    def logprobs(self, version: int) -> list[list[float]]:
        """Of the prompts' own tokens, computed by transformers in FP32 with the weights of a version."""
        kept = {name: tensor.clone() for name, tensor in self.model.state_dict().items()}
        self.model.load_state_dict({name: tensor.float() for name, tensor in self.versions[version].items()})
        found = prompt_logprobs(self.model)
        self.model.load_state_dict(kept)
        return found


@torch.no_grad()
def prompt_logprobs(model: Any) -> list[list[float]]:
    """Of the prompts' own tokens, as transformers computes them."""
    found = []
    for prompt in PROMPTS:
        logits = model(input_ids=torch.tensor([prompt])).logits[0].log_softmax(-1)
        found.append([float(logits[n, token]) for n, token in enumerate(prompt[1:])])
    return found


def expected_parameters(weights: dict[str, Any], ranks: int = 1) -> dict[str, str]:
    """What `Peek.peek` shows of an FP32 engine with the weights of a version, fused as vLLM's source says.

    Of several ranks it is that of the first, and without the matrices that they share: kernels have packed these away.
    """
    out: dict[str, Any] = {}
    for name, tensor in weights.items():
        out[name] = tensor.float()
    for n in range(SIZES["num_hidden_layers"]):
        at = f"model.layers.{n}"
        qkv = [out.pop(f"{at}.self_attn.{part}_proj.weight") for part in "qkv"]
        out[f"{at}.self_attn.qkv_proj.weight"] = torch.cat(qkv)
        gate_up = [out.pop(f"{at}.mlp.{part}_proj.weight") for part in ("gate", "up")]
        out[f"{at}.mlp.gate_up_proj.weight"] = torch.cat(gate_up)
    out.pop("lm_head.weight", None)
    padded = torch.zeros(192, SIZES["hidden_size"])
    padded[: SIZES["vocab_size"]] = out["model.embed_tokens.weight"]
    out["model.embed_tokens.weight"] = padded[: 192 // ranks]
    if ranks > 1:
        out = {name: tensor for name, tensor in out.items() if "proj" not in name}
    return {
        name: f"{t.dtype} {tuple(t.shape)} {hashlib.sha256(t.contiguous().numpy().tobytes()).hexdigest()[:16]}"
        for name, t in out.items()
    }


class Server:
    """A vLLM server in a process group of its own."""

    def __init__(
        self, model: Path, log: Path, *flags: str, plain: bool = False, dev: bool = False, ranks: int = 1
    ) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.mode, self.ranks = "in place" if plain else "mirror", ranks
        self.url, self.log = f"http://127.0.0.1:{self.port}", log
        self._command = [
            *(sys.executable, "-c", "from vllm.entrypoints.cli.main import main; main()", "serve", str(model)),
            *("--host", "127.0.0.1", "--port", str(self.port), "--served-model-name", "policy"),
            *("--dtype", "float32", "--enforce-eager", "--max-model-len", "512", "--max-num-seqs", "8"),
            *("--tensor-parallel-size", str(ranks)),
            *("--worker-extension-cls", "tests.integrations.vllm.peek.Peek", *flags),
        ]
        self._environment = {
            **os.environ,
            "PYTHONPATH": f"{ROOT}{os.pathsep}{python_path()}",
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_SERVER_DEV_MODE": str(int(dev)),
            "PULSE_VLLM_PLAIN_WEIGHTS": str(int(plain)),
        }
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with self.log.open("ab") as out:
            self.process = subprocess.Popen(
                self._command, env=self._environment, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
            )
        end = time.monotonic() + START_S
        while time.monotonic() < end:
            if self.process.poll() is not None:
                raise AssertionError(f"vLLM ended at its start:\n{self.log.read_text()[-4000:]}")
            try:
                with urllib.request.urlopen(f"{self.url}/health", timeout=2):
                    return
            except OSError:
                time.sleep(0.2)
        raise AssertionError(f"vLLM did not start within {START_S} s:\n{self.log.read_text()[-4000:]}")

    def kill(self) -> None:
        """End the server and its workers at once, as kill -9 does."""
        assert self.process is not None
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(30)

    def post(self, path: str, body: Any = None, timeout_s: float = 60) -> Any:
        data = json.dumps(body).encode() if body is not None else b""
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"}, method="POST")
        with urllib.request.urlopen(request, timeout=timeout_s) as response:
            return json.loads(response.read() or b"null")

    def ask_workers(self, method: str, *args: Any) -> Any:
        """Call a method of the workers, by a development route."""
        return self.post("/collective_rpc", {"method": method, "args": list(args)})["results"]

    def logprobs(self, model: str = "policy") -> list[list[float]]:
        """Of the prompts' own tokens, as the server computes them."""
        found = []
        for prompt in PROMPTS:
            body = {"model": model, "prompt": prompt, "max_tokens": 1, "prompt_logprobs": 0, "temperature": 0}
            answer = self.post("/v1/completions", body)["choices"][0]["prompt_logprobs"]
            found.append([row[str(token)]["logprob"] for row, token in zip(answer[1:], prompt[1:], strict=True)])
        return found

    def generate(self, prompt: Sequence[int], tokens: int) -> Iterator[tuple[float, dict[str, Any]]]:
        """Stream a completion: when each event came, and what it was."""
        body = {
            "model": "policy",
            "prompt": list(prompt),
            "max_tokens": tokens,
            "ignore_eos": True,
            "stream": True,
            "temperature": 0,
        }
        request = urllib.request.Request(
            f"{self.url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=120) as response:
            for line in response:
                if line.startswith(b"data: {"):
                    yield time.perf_counter(), json.loads(line[6:])


@contextmanager
def serving(model: Path, log: Path, *flags: str, **options: Any) -> Iterator[Server]:
    """Start a `Server`, and end it. Args: as there."""
    server = Server(model, log, *flags, **options)
    try:
        server.start()
        yield server
    finally:
        if server.process is not None and server.process.poll() is None:
            os.killpg(server.process.pid, signal.SIGTERM)
            try:
                server.process.wait(20)
            except subprocess.TimeoutExpired:
                server.kill()


def difference(found: list[list[float]], expected: list[list[float]]) -> float:
    """The largest difference between two sets of log-probabilities of the same tokens."""
    return max(abs(a - b) for one, other in zip(found, expected, strict=True) for a, b in zip(one, other, strict=True))
