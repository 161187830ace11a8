"""Where SGLang's own layers and weight loaders put a checkpoint's weights is where the maps say, for every family.

Each set of ranks takes 20 seconds or more, most of it imports, and checks all families.
"""

import json
import os
import socket
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

if find_spec("sglang") is None:
    pytest.skip("SGLang is not installed: its layouts are UNTESTED here; run make test-sglang", allow_module_level=True)

from tests.examples import python_path
from tests.integrations.sglang.serving import ROOT, make_checkpoint

pytestmark = pytest.mark.timeout(600)

MOE: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama-tied": ("Llama", {"tie_word_embeddings": True}),
    "mistral": ("Mistral", {"head_dim": 16}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "gemma2": ("Gemma2", {"head_dim": 16, "hidden_act": "gelu_pytorch_tanh"}),
    "phi3": ("Phi3", {"pad_token_id": 0}),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen2_moe": ("Qwen2Moe", {**MOE, "shared_expert_intermediate_size": 64}),
    "qwen3_moe": ("Qwen3Moe", {**MOE, "head_dim": 16}),
}


def make_families(folder: Path) -> list[Path]:
    return [make_checkpoint(folder / name, kind, **sizes) for name, (kind, sizes) in FAMILIES.items()]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return make_families(tmp_path_factory.mktemp("families"))


def check_ranks(checkpoints: list[Path], ranks: int, ep: int = 1) -> dict[str, list[str | None]]:
    """What each rank reports for each checkpoint."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    module = [sys.executable, "-m", "tests.integrations.sglang.layout_rank"]
    environment = {**os.environ, "PYTHONPATH": python_path(ROOT), "GLOO_SOCKET_IFNAME": "lo", "HF_HUB_OFFLINE": "1"}
    processes = [
        subprocess.Popen(
            [*module, str(rank), str(ranks), str(ep), str(port), *map(str, checkpoints)],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
    ]
    found: dict[str, list[str | None]] = {}
    try:
        for process in processes:
            output, errors = process.communicate(timeout=400)
            assert process.returncode == 0, errors[-3000:]
            for line in output.splitlines():
                if line.startswith("{"):
                    for name, answer in json.loads(line).items():
                        found.setdefault(name, []).append(answer)
    finally:
        for process in processes:
            process.kill()
    return found


def test_one_rank(checkpoints: list[Path]) -> None:
    assert check_ranks(checkpoints, 1) == {name: [None] for name in FAMILIES}


def test_two_tensor_parallel_ranks(checkpoints: list[Path]) -> None:
    found = check_ranks(checkpoints, 2)
    assert all("start the engine without tensor parallelism" in str(why) for why in found.pop("phi3"))
    assert found == {name: [None] * 2 for name in FAMILIES if name != "phi3"}


def test_experts_spread_over_two_ranks(checkpoints: list[Path]) -> None:
    chosen = [folder for folder in checkpoints if "moe" in folder.name or folder.name == "mixtral"]
    assert check_ranks(chosen, 2, ep=2) == {folder.name: [None] * 2 for folder in chosen}
