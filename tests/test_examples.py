"""The examples run as their docstrings say, and end with the line that is promised there.

That of Ray is run in tests/integrations/test_ray.py, where there is a cluster, that of Hugging Face's Trainer in
tests/integrations/hf/test_page.py, where its packages are, that of JAX in tests/integrations/jax/test_page.py by make
test-jax, and that of GRPO in tests/integrations/vllm/test_grpo.py, by make test-grpo, with the environments of TRL and
of vLLM.
"""

import re
from pathlib import Path

import pytest

from tests.examples import EXAMPLES, Example, command_of

pytest.importorskip("torch")
pytestmark = pytest.mark.timeout(120)  # on a machine without cached kernels each process compiles them
TIMEOUT_S = 100


@pytest.mark.slow
def test_a_worker_follows_a_trainer_to_the_same_digest(tmp_path: Path) -> None:
    """About 6 s."""
    with Example("worker.py", tmp_path) as worker, Example("trainer.py", tmp_path) as trainer:
        published, followed = trainer.lines(TIMEOUT_S), worker.lines(TIMEOUT_S)
    assert re.fullmatch("version 20 has digest [0-9a-f]{64}", published[-1])
    assert followed[-1] == published[-1]


@pytest.mark.slow
def test_a_worker_has_what_ranks_of_fsdp2_published_together(tmp_path: Path) -> None:
    """About 8 s."""
    with Example("fsdp2.py", tmp_path) as ranks:
        assert ranks.lines(TIMEOUT_S)[-1] == "version 5: the worker has the gathered weights, bit for bit"


@pytest.mark.slow
@pytest.mark.parametrize("options", ["", "--trainers 2"])
def test_all_ranks_of_a_group_have_what_its_trainers_pushed(tmp_path: Path, options: str) -> None:
    """About 8 s each, over gloo and on CPUs; tests/device/test_nccl.py runs it on a GPU."""
    with Example("broadcast.py", tmp_path, options, ranks=3, CUDA_VISIBLE_DEVICES="") as ranks:
        assert ranks.lines(TIMEOUT_S)[-1] == "sync 5: all ranks have the trainer's weights, bit for bit"


@pytest.mark.slow
def test_trainers_that_meet_in_a_folder_agree_on_the_shared_weights(tmp_path: Path) -> None:
    """About 8 s."""
    with Example("loco_folder.py", tmp_path) as trainers:
        assert trainers.lines(TIMEOUT_S)[-1] == "after 4 rounds both trainers have the same shared weights, bit for bit"


def test_the_list_of_examples_is_complete_and_has_their_commands() -> None:
    listed = (EXAMPLES / "README.md").read_text()
    scripts = [path.name for path in EXAMPLES.glob("*.py")]
    assert len(scripts) == 9
    for script in scripts:
        assert f"[{script}]({script})" in listed
        assert f"`{command_of(script)}`" in listed
