"""Two processes of one JAX program: what is replicated works, what is not is refused, and none waits."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.examples import python_path

pytest.importorskip("jax", reason="needs JAX: make test-jax runs it")


@pytest.mark.timeout(240)
def test_replicated_arrays_work_and_arrays_with_parts_elsewhere_are_refused(tmp_path: Path) -> None:
    """About 10 s: each process imports JAX and connects to the other."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {**os.environ, "PYTHONPATH": python_path(), "JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
    processes = [
        subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("process.py")), str(rank), str(port), str(tmp_path / "run")],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        outputs = [process.communicate(timeout=200) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0], outputs
    (first, second) = (out.splitlines() for out, _ in outputs)
    assert first[0].startswith("refused: 'w' has shards on devices of other processes")
    assert first[1:] == second == ["synced: True"]
