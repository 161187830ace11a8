"""The scripts in examples/ for tests: each is run as a process, by the command that its docstring gives."""

import ast
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"
INTERPRETERS = {"python": [sys.executable], "torchrun": [sys.executable, "-m", "torch.distributed.run"]}


def python_path(*folders: Path) -> str:
    """Where a process that a test starts finds the package, and what this process was given."""
    given = os.environ.get("PYTHONPATH", "")
    return os.pathsep.join([str(ROOT / "src"), *map(str, folders), *([given] if given else [])])


def command_of(script: str) -> str:
    """The command in a script's docstring: its first indented line."""
    lines = (ast.get_docstring(ast.parse((EXAMPLES / script).read_text())) or "").splitlines()
    return next(line.strip() for line in lines if line.startswith("    "))


class Example:
    """A script that runs in a folder as it would in a checkout. Use it as a context, at whose end its processes end.

    Args:
        script: Its name.
        folder: The folder.
        options: Options that its command does not have.
        ranks: The number of its processes, if not that of its command.
        environment: Variables of the environment.
    """

    def __init__(
        self, script: str, folder: Path, options: str = "", ranks: int | None = None, **environment: str
    ) -> None:
        if not (folder / "examples").exists():
            (folder / "examples").symlink_to(EXAMPLES)
        program, *arguments = shlex.split(f"{command_of(script)} {options}")
        if ranks is not None:
            arguments[arguments.index("--nproc-per-node") + 1] = str(ranks)
        self.process = subprocess.Popen(
            [*INTERPRETERS[program], *arguments],
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={
                **os.environ,
                "PYTHONPATH": python_path(),
                "OMP_NUM_THREADS": "1",
                "GLOO_SOCKET_IFNAME": "lo",
                **environment,
            },
            start_new_session=True,
        )

    def __enter__(self) -> "Example":
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)  # with the processes that it started
        self.process.communicate()

    def lines(self, timeout_s: float) -> list[str]:
        """Wait for its end, which must be a good one; return what it printed."""
        out, err = self.process.communicate(timeout=timeout_s)
        assert self.process.returncode == 0, err
        return out.splitlines()
