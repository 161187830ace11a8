"""Two ranks of a Trainer, over gloo: with DDP rank 0 publishes, with FSDP2 both do, and workers get it all."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

REASON = "needs the packages of Hugging Face: make test-trl runs it"
transformers = pytest.importorskip("transformers", reason=REASON)
pytest.importorskip("peft", reason=REASON)

import torch  # noqa: E402 - after what skips the module

from pulsesync import Subscriber  # noqa: E402
from pulsesync.errors import StateError  # noqa: E402
from pulsesync.integrations.folder import HuggingFaceFolder  # noqa: E402
from pulsesync.integrations.pretrained import checkpoint_weights  # noqa: E402
from tests.examples import ROOT, python_path  # noqa: E402
from tests.integrations.hf import models  # noqa: E402

pytestmark = [pytest.mark.timeout(400), pytest.mark.filterwarnings("ignore::FutureWarning")]
TIMEOUT_S = 360  # less than pytest takes to end a test that does not answer
KINDS = {
    "ddp": ["Parameter"],
    "fsdp2": ["DTensor"],
    "fsdp2-tied": ["DTensor"],
    "native": ["DTensor"],
    "native-tied": ["DTensor"],
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what ranks.py has written of each kind: two processes for all, which take seconds to start."""
    folder = tmp_path_factory.mktemp("ranks")
    kinds = [*KINDS, "fsdp2-adapter", "fsdp2-merged"]
    for kind in kinds:
        (folder / kind).mkdir()
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    process = subprocess.Popen(
        [*launcher, str(ROOT / "tests" / "integrations" / "hf" / "ranks.py"), str(folder), *kinds],
        env={
            **os.environ,
            "PYTHONPATH": python_path(ROOT),
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
            "CUDA_VISIBLE_DEVICES": "",
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        said, _ = process.communicate(timeout=TIMEOUT_S)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    assert process.returncode == 0, said[-6000:]
    return folder


def results(folder: Path) -> Any:
    """What each rank has found."""
    return [torch.load(folder / f"result-{rank}", weights_only=False) for rank in range(2)]


def check_versions(folder: Path, steps: dict[int, dict[str, torch.Tensor]], versions: dict[int, int]) -> None:
    assert versions == {0: 0, 1: 1, 2: 2, 3: 3}
    subscriber = Subscriber(str(folder / "run"))
    weights = {name: torch.zeros_like(tensor) for name, tensor in steps[0].items()}
    for step, version in versions.items():
        subscriber.sync(weights, version=version)
        assert models.differing(weights, steps[step]) == []
    assert models.differing(steps[0], steps[3])


@pytest.mark.parametrize("kind", KINDS)
def test_workers_have_what_two_ranks_trained(kind: str, trained: Path) -> None:
    first, second = results(trained / kind)
    assert first["refused"] == second["refused"] == ""
    assert first["parameters"] == second["parameters"] == KINDS[kind]
    assert second["versions"] == ({} if kind == "ddp" else first["versions"])  # with DDP it publishes nothing
    check_versions(trained / kind, first["steps"], first["versions"])

    with HuggingFaceFolder(str(trained / kind / "run"), trained / kind / "folder") as folder:
        flip = folder.update()
    assert flip is not None
    assert flip.missing == ()
    loaded = transformers.AutoModelForCausalLM.from_pretrained((trained / kind / "folder" / "current").resolve())
    assert type(loaded).__name__ == ("Qwen2ForCausalLM" if kind.endswith("-tied") else "LlamaForCausalLM")
    assert models.differing(loaded.state_dict(), first["steps"][3]) == []


def test_an_adapter_of_a_sharded_model_is_published_by_its_shards(trained: Path) -> None:
    first, _ = results(trained / "fsdp2-adapter")
    assert (first["refused"], first["parameters"]) == ("", ["DTensor"])
    assert all("lora_" in name for name in first["steps"][0])
    check_versions(trained / "fsdp2-adapter", first["steps"], first["versions"])


def test_adapters_are_not_merged_into_shards_and_every_rank_says_so(trained: Path) -> None:
    for rank in results(trained / "fsdp2-merged"):
        assert "adapters cannot be merged into shards" in rank["refused"]
        assert rank["versions"] == {}
    assert not (trained / "fsdp2-merged" / "run").exists()


@pytest.mark.filterwarnings("ignore::UserWarning")  # of a single rank that has nothing to shard
def test_a_model_that_fsdp1_has_flattened_is_refused(tmp_path: Path) -> None:
    """Accelerate makes none on CPUs: this one is torch's own."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1)
    try:
        model = FullyShardedDataParallel(models.llama(), device_id=torch.device("cpu"))
        with pytest.raises(StateError, match="FSDP1 has flattened the model's parameters"):
            checkpoint_weights(model)
    finally:
        torch.distributed.destroy_process_group()
