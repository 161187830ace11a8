"""What `pulse study experiment` does: run sweeps, and say what is done."""

from pathlib import Path

from pulsesync.cli.options import Flag, Natural, UsageError
from pulsesync.errors import PulseError


def experiment(
    *names: str,
    out: Path | None = None,
    steps: Natural | None = None,
    seeds: str = "",
    model: str = "demo",
    device: str = "cpu",
    jobs: Natural = 1,
    quick: Flag = False,
) -> int:
    """Run the sweeps of the papers: learning rate, windows, delay, scale, optimizer, masters, warm-up and others.

    Every arm and seed gives a recording, which pulse study shows; every experiment a page that compares the published
    figures with these; and results.md is an index of all. What is finished is not run again, and not replaced by what
    has fewer steps. Needs torch: pip install 'pulsesync[torch]'.

    Args:
        names: Names of experiments; all; or list, to see them.
        out: Folder for recordings and pages; experiments if not given, with --quick experiments-quick.
        steps: Optimizer steps of every arm, instead of its own number.
        seeds: Such as 0,1,2, which is what is run if not given.
        model: demo; smollm2, which python -m pulsesync.lab.demo.smollm2 .models/smollm2 downloads; or a folder with a
            Hugging Face checkpoint.
        device: Where policies compute: cpu or cuda.
        jobs: Arms at a time, each in a process of its own.
        quick: A few small steps of everything, to see that it works.

    Raises:
        UsageError: there is no such experiment or model.
        PulseError: an arm failed, or torch is missing.
    """
    from pulsesync.cli.demo import find_model, need_torch

    need_torch()
    from pulsesync.lab.study.experiments import __main__ as module
    from pulsesync.lab.study.experiments import sweeps

    unknown = [name for name in names if name not in (*sweeps.EXPERIMENTS, "all", "list")]
    if unknown:
        raise UsageError(f"there is no experiment {', '.join(unknown)}: pulse study experiment list shows them")
    try:
        numbers = module.read_seeds(seeds)
    except PulseError as e:
        raise UsageError(str(e)) from e
    module.experiment(
        names or ["list"],
        out=out,
        steps=steps,
        seeds=numbers,
        model=find_model(model),
        device=device,
        jobs=jobs,
        quick=quick,
    )
    return 0
