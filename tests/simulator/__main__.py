"""The command line: one schedule with all its events, or many schedules and their results."""

import argparse
import logging
import sys
import time
from collections import Counter
from collections.abc import Sequence

from tests.simulator import TEAMS, RunSimulator, SimulationError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one schedule and print its events, or many and print their results."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulator", description=main.__doc__)
    parser.add_argument("--seed", type=int, help="run one schedule, and print all its events")
    parser.add_argument("--seeds", default="0:100", help="run many schedules: first:last+1")
    parser.add_argument("--events", type=int, default=40, help="events in a schedule")
    parser.add_argument(
        "--trouble", type=float, default=1.0, help="how often faults occur, relative to the default of 1"
    )
    parser.add_argument("--teams", type=float, default=TEAMS, help="fraction of trainers that are teams of ranks")
    parser.add_argument("--keep-going", action="store_true", help="continue after a failure")
    options = parser.parse_args(arguments)
    if options.seed is not None:
        simulator = RunSimulator(options.seed, events=options.events, trouble=options.trouble, teams=options.teams)
        try:
            simulator.run()
        finally:
            _say("\n".join(simulator.log))
        return 0
    first, _, end = options.seeds.partition(":")
    events, faults, failed, versions = Counter[str](), Counter[str](), list[int](), 0
    began = time.perf_counter()
    seeds = range(int(first), int(end))
    for done, seed in enumerate(seeds, 1):
        try:
            report = RunSimulator(seed, events=options.events, trouble=options.trouble, teams=options.teams).run()
        except SimulationError as e:
            failed.append(seed)
            _say(str(e) if not options.keep_going else str(e).partition("\n")[0])
            if not options.keep_going:
                break
        else:
            events, faults, versions = events + report.events, faults + report.faults, versions + report.versions
        if done % 100 == 0 or done == len(seeds):
            each_ms = (time.perf_counter() - began) / done * 1000
            _say(f"{done} schedules, {events.total()} events, {faults.total()} faults, {each_ms:.0f} ms each")
    _say(f"{versions} versions\nevents: {_table(events)}\nfaults: {_table(faults)}\nfailed: {failed or 'none'}")
    return 1 if failed else 0


def _table(counts: Counter[str]) -> str:
    return ", ".join(f"{kind} {count}" for kind, count in counts.most_common())


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    logging.getLogger("pulsesync").setLevel(logging.CRITICAL)  # errors here are intended
    sys.exit(main())
