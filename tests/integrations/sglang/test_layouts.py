"""Where SGLang's own layers and weight loaders put a checkpoint's weights is where the maps say, for every family.

One process imports SGLang, and all ranks are forked from it.
"""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
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


EXPERTS = ["mixtral", "qwen2_moe", "qwen3_moe"]
Answers = dict[str, str | None]  # of a rank, by family


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Answers]]:
    """What the ranks of each world say."""
    folder = tmp_path_factory.mktemp("families")
    for name, (kind, sizes) in FAMILIES.items():
        make_checkpoint(folder / name, kind, **sizes)
    worlds = {"one": (1, 1, [*FAMILIES]), "two": (2, 1, [*FAMILIES]), "experts": (2, 2, EXPERTS)}
    jobs = [(ranks, ep, [str(folder / name) for name in names]) for ranks, ep, names in worlds.values()]
    done = subprocess.run(
        [sys.executable, "-m", "tests.integrations.sglang.layout_ranks", json.dumps(jobs)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": python_path(ROOT), "GLOO_SOCKET_IFNAME": "lo", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(zip(worlds, json.loads(done.stdout.splitlines()[-1]), strict=True))


def test_one_rank(found: dict[str, list[Answers]]) -> None:
    assert found["one"] == [dict.fromkeys(FAMILIES)]


def test_two_tensor_parallel_ranks(found: dict[str, list[Answers]]) -> None:
    for answers in found["two"]:
        assert "start the engine without tensor parallelism" in str(answers.pop("phi3"))
        assert answers == dict.fromkeys(name for name in FAMILIES if name != "phi3")
    assert len(found["two"]) == 2


def test_experts_spread_over_two_ranks(found: dict[str, list[Answers]]) -> None:
    assert found["experts"] == [dict.fromkeys(EXPERTS)] * 2
