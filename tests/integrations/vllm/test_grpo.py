"""examples/grpo_vllm.py, as in life: TRL in one environment, a real vLLM server in another, which is this one.

make test-grpo gives the Python of the first in PULSE_TRL_PYTHON.
"""

import os
import re
import shlex
import subprocess
import time
from importlib.util import find_spec
from pathlib import Path

import pytest

if "PULSE_TRL_PYTHON" not in os.environ or find_spec("vllm") is None:
    pytest.skip("needs TRL and vLLM, each in its own environment: make test-grpo runs it", allow_module_level=True)

from tests.examples import EXAMPLES, command_of, python_path
from tests.integrations.vllm.serving import ROUTES, Server

TRL_PYTHON = os.environ["PULSE_TRL_PYTHON"]
BOUND = 5e-5  # on log-probabilities, of the server and of the trainer
pytestmark = pytest.mark.timeout(900)
END = re.compile(
    r"30 steps: log-probabilities of server and trainer differ by at most (\S+); the reward went from (\S+) to (\S+)"
)


def test_rollouts_are_on_policy_and_the_policy_learns(tmp_path: Path) -> None:
    """About two minutes, most of them the start of vLLM."""
    (tmp_path / "examples").symlink_to(EXAMPLES)
    settings = {name: value for name, value in os.environ.items() if name != "NUMBA_CACHE_DIR"}  # it has another numba
    _, *arguments = shlex.split(command_of("grpo_vllm.py"))
    model = tmp_path / "runs" / "tiny"
    server = Server(model, tmp_path / "server.log", *ROUTES, "--max-model-len", "256")
    with (tmp_path / "trainer.log").open("w+") as log:
        trainer = subprocess.Popen(
            [TRL_PYTHON, *arguments, "--server", server.url],
            cwd=tmp_path,
            env={**settings, "PYTHONPATH": python_path(), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        try:
            end = time.monotonic() + 200
            while not (model / "tokenizer_config.json").exists():  # which is saved last
                ended = trainer.poll() is not None or time.monotonic() > end
                assert not ended, (tmp_path / "trainer.log").read_text()
                time.sleep(0.2)
            server.start()
            failed = trainer.wait(400)
        finally:
            trainer.kill()
            if server.process is not None:
                server.kill()
    printed = (tmp_path / "trainer.log").read_text()
    assert not failed, printed
    found = END.fullmatch(printed.splitlines()[-1])
    assert found, printed
    difference, first, last = map(float, found.groups())
    assert difference <= BOUND
    assert last > first + 0.2
