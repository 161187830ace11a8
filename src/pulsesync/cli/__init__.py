"""The `pulse` command: parse, call, print. The work is in the library."""

import sys
from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter

import pulsesync
from pulsesync.errors import PulseError

app = App(
    name="pulse",
    help="Move model weights from trainers to inference workers, bit for bit, at a small fraction of the bytes.",
    version=pulsesync.__version__,
)


@app.command
def demo(
    *,
    steps: int = 20,
    lr: float = 3e-6,
    width: int = 1024,
    seed: int = 0,
    out: Path | None = None,
    json: bool = False,
) -> int:
    """Train a small network in one process, follow its weights in another, and prove that they are the same.

    The two talk through a folder alone. Every step prints how many BF16 weights changed, the bytes that travelled, and
    what the follower holds; at the end both ends hash all their weights.

    Args:
        steps: Optimizer steps to publish.
        lr: AdamW's learning rate; 3e-6 is usual in RL post-training. Try 1e-6 or 1e-5 to see the sparsity move.
        width: Of the network: 1024 makes 8.4 million weights.
        seed: Of weights and data.
        out: Folder for the run; a temporary one, removed at the end, if not given.
        json: Print one JSON object a step and a summary, for machines.
    """
    from pulsesync.cli.demo import run

    return run(steps=steps, lr=lr, width=width, seed=seed, out=out, as_json=json)


@app.command
def inspect(path: Annotated[Path, Parameter(help="A run's folder, or one part of it.")], *, json: bool = False) -> int:
    """Say what a run or a part is made of, after checking every byte of what is shown.

    Args:
        path: A run's folder, or a file in its `parts`.
        json: Print one JSON object, for machines.
    """
    from pulsesync.cli.inspect import show

    return show(path, as_json=json)


def main() -> None:
    """Run the command; a PulseError becomes one line and exit code 1, Ctrl-C exit code 130."""
    try:
        sys.exit(app())
    except PulseError as e:
        print(f"pulse: {e}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)
