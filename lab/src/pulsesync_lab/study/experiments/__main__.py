"""`python -m pulsesync_lab.study.experiments`: the same as `pulse study experiment`, if only torch is installed."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from pulsesync.errors import PulseError
from pulsesync_lab.study.experiments import runner
from pulsesync_lab.study.experiments.sweeps import EXPERIMENTS


def main(arguments: list[str] | None = None) -> int:
    """Run the given experiments; exit code 0, or 1 if something failed."""
    parser = argparse.ArgumentParser(prog="python -m pulsesync_lab.study.experiments", description=__doc__)
    parser.add_argument(
        "names", nargs="+", metavar="NAME", help="name of an experiment; 'all'; or 'list' to print the names"
    )
    parser.add_argument(
        "--out",
        type=Path,
        help="folder for recordings and pages (default: experiments, or experiments-quick with --quick)",
    )
    parser.add_argument("--steps", type=int, help="number of optimizer steps in every arm")
    parser.add_argument("--seeds", default="", help="seeds to run, such as 0,1,2")
    parser.add_argument("--model", default="demo", help="'demo', or a folder with a Hugging Face checkpoint")
    parser.add_argument("--device", default="cpu", help="'cpu' or 'cuda'")
    parser.add_argument("--jobs", type=int, default=1, help="number of processes to run at a time")
    parser.add_argument("--quick", action="store_true", help="run everything with a few small steps")
    options = parser.parse_args(arguments)
    try:
        experiment(
            options.names,
            out=options.out,
            steps=options.steps,
            seeds=read_seeds(options.seeds),
            model=options.model,
            device=options.device,
            jobs=options.jobs,
            quick=options.quick,
        )
    except PulseError as e:
        sys.stderr.write(f"{e}\n")
        return 1
    return 0


def experiment(
    names: Sequence[str],
    *,
    out: Path | None,
    steps: int | None,
    seeds: Sequence[int] | None,
    model: str,
    device: str,
    jobs: int,
    quick: bool,
) -> None:
    """Run experiments, or list them, and print progress line by line. Raises: PulseError."""
    if list(names) == ["list"]:
        for one in EXPERIMENTS.values():
            _say(f"{one.name:10}{len(one.arms):3} arms  {one.question}")
        return
    out = out or Path("experiments-quick" if quick else "experiments")
    chosen = runner.choose(names, model=model, device=device, steps=steps, seeds=seeds, quick=quick)
    runner.run(chosen, out, jobs=jobs, report=_say)
    _say(f"{out / 'results.md'}")


def read_seeds(text: str) -> list[int] | None:
    """Seeds such as 0,1,2; None for nothing. Raises: PulseError."""
    try:
        return [int(seed) for seed in text.split(",")] if text else None
    except ValueError as e:
        raise PulseError(f"--seeds must be integers such as 0,1,2; got {text}") from e


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
