"""`python -m pulsesync.study.experiments`: the same as `pulse study experiment`, where only torch is installed."""

import argparse
import sys
from pathlib import Path

from pulsesync.errors import PulseError
from pulsesync.study.experiments import runner
from pulsesync.study.experiments.sweeps import EXPERIMENTS


def main(arguments: list[str] | None = None) -> int:
    """Run what is asked for; exit code 0, or 1 if something failed."""
    parser = argparse.ArgumentParser(prog="python -m pulsesync.study.experiments", description=__doc__)
    parser.add_argument("names", nargs="+", metavar="NAME", help="of an experiment; all; or list, to see them")
    parser.add_argument("--out", type=Path, default=Path("experiments"), help="folder for recordings and pages")
    parser.add_argument("--steps", type=int, help="optimizer steps of every arm")
    parser.add_argument("--seeds", default="", help="such as 0,1,2")
    parser.add_argument("--model", default="demo", help="demo, or a folder with a Hugging Face checkpoint")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time")
    parser.add_argument("--quick", action="store_true", help="a few small steps of everything")
    told = parser.parse_args(arguments)
    return experiment(
        told.names, out=told.out, steps=told.steps, seeds=told.seeds, model=told.model, device=told.device,
        jobs=told.jobs, quick=told.quick,
    )  # fmt: skip


def experiment(
    names: list[str], *, out: Path, steps: int | None, seeds: str, model: str, device: str, jobs: int, quick: bool
) -> int:
    """Run experiments, or list them, and say what is done line by line; exit code 0, or 1 if something failed."""
    if names == ["list"]:
        for one in EXPERIMENTS.values():
            _say(f"{one.name:10}{len(one.arms):3} arms  {one.question}")
        return 0
    try:
        numbers = [int(seed) for seed in seeds.split(",")] if seeds else None
    except ValueError:
        return _fail(f"--seeds {seeds}: give them as 0,1,2")
    try:
        chosen = runner.choose(names, model=model, device=device, steps=steps, seeds=numbers, quick=quick)
        runner.run(chosen, out, jobs=jobs, tell=_say)
    except PulseError as e:
        return _fail(str(e))
    _say(f"{out / 'results.md'}")
    return 0


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def _fail(line: str) -> int:
    sys.stderr.write(f"{line}\n")
    return 1


if __name__ == "__main__":
    sys.exit(main())
