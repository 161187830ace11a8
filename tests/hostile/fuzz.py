"""Feed a reader damaged versions for as long as you like: `python tests/hostile/fuzz.py --seconds 120`.

Input n of a seed is the same on every machine and for any number of jobs. Each must be refused with a PulseError and
without a trace, or be accepted with exactly the right state; within ten seconds, and with the same result by both sets
of kernels (tried on one in sixteen). What is not so ends the run with status 1, and the input is saved.
"""

import argparse
import faulthandler
import multiprocessing
import os
import resource
import secrets
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]  # a script does not find `tests` by itself

from tests.backends import use_kernels  # noqa: E402
from tests.hostile import forge, mutations  # noqa: E402

HANG_S = 10
MEMORY_BYTES = 6 << 30  # of address space: enough for the compiler, too little for a bomb


class Fuzzer:
    """One reader of each kind, and the inputs of a seed."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.victims = [forge.Victim(forge.sample(name)) for name in forge.NAMES]
        for victim in self.victims:  # so that everything is compiled
            mutations.judge(victim, victim.target.version.objects())

    def victim(self, n: int) -> forge.Victim:
        return self.victims[n % len(self.victims)]

    def input(self, n: int) -> dict[str, bytes]:
        return mutations.mutate(self.victim(n).target, Random(f"{self.seed}/{n}"))

    def run(self, n: int) -> str:
        """Say what became of input n. Raises: MisreadError."""
        victim, objects = self.victim(n), self.input(n)
        outcome = mutations.judge(victim, objects)
        if n // 8 % 16 == 0:
            with use_kernels("reference"):
                other = mutations.judge(victim, objects)
            if other != outcome:
                raise mutations.MisreadError(f"{outcome} by compiled kernels, {other} by the reference")
        if n // 8 % 16 == 1:
            again = mutations.judge(victim, victim.target.version.objects())
            if again != "accepted, and right":
                raise mutations.MisreadError(f"after it, the good version is refused: {again}")
        return outcome


def work(seed: int, job: int, jobs: int, seconds: float, at: Any, queue: Any) -> None:
    """Run every jobs-th input; put the outcomes into the queue, and the number of the current input into `at`."""
    if hasattr(os, "sched_setaffinity"):  # one core each: the library then starts no threads for such small tiles
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[job % len(cores)]})
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    fuzzer, outcomes, n = Fuzzer(seed), Counter[str](), job
    end = time.monotonic() + seconds
    told = time.monotonic()
    while time.monotonic() < end:
        at.value = n
        faulthandler.dump_traceback_later(HANG_S, exit=True)
        try:
            outcomes[fuzzer.run(n)] += 1
        except mutations.MisreadError as e:
            queue.put((job, outcomes, f"input {n}: {e}"))
            return
        n += jobs
        if time.monotonic() > told + 1:
            queue.put((job, outcomes, None))
            outcomes, told = Counter(), time.monotonic()
    faulthandler.cancel_dump_traceback_later()
    queue.put((job, outcomes, None))


def save(seed: int, n: int) -> Path:
    folder = Path(tempfile.mkdtemp(prefix=f"pulse-fuzz-{seed}-{n}-"))
    target = forge.sample(forge.NAMES[n % len(forge.NAMES)])
    for key, data in mutations.mutate(target, Random(f"{seed}/{n}")).items():
        path = folder / key.replace("/", "+")[:120]
        path.write_bytes(data)
    return folder


def say(outcomes: Counter[str], seconds: float) -> str:
    refused = {name: count for name, count in outcomes.most_common() if name.endswith("Error")}
    classes = ", ".join(f"{name} {count:,}" for name, count in refused.items())
    right = outcomes["accepted, and right"]
    return (
        f"{outcomes.total():,} inputs in {seconds:.0f} s: {sum(refused.values()):,} refused ({classes}), "
        f"{right:,} accepted and right"
    )


def fuzz(seed: int, seconds: float, jobs: int) -> int:
    context = multiprocessing.get_context("spawn")
    queue, places = context.Queue(), [context.Value("q", -1) for _ in range(jobs)]
    workers = [context.Process(target=work, args=(seed, j, jobs, seconds, places[j], queue)) for j in range(jobs)]
    for worker in workers:
        worker.start()
    print(f"seed {seed}, {jobs} jobs; compiling may take a minute first", flush=True)
    began = reported = time.monotonic()
    outcomes, faults = Counter[str](), {}
    while any(worker.is_alive() for worker in workers) or not queue.empty():
        if not queue.empty():
            job, some, fault = queue.get()
            began = began if outcomes else time.monotonic() - 1
            outcomes += some
            if fault:
                faults[places[job].value] = fault
        else:
            time.sleep(0.05)
        if outcomes and time.monotonic() > reported + 10:
            reported = time.monotonic()
            print(say(outcomes, reported - began), flush=True)
    for worker, place in zip(workers, places, strict=True):
        if worker.exitcode:
            faults[place.value] = f"input {place.value}: the reader crashed or hung (exit status {worker.exitcode})"
    for n, fault in faults.items():
        print(f"{fault}\n  saved in {save(seed, n)}; again with --seed {seed} --replay {n}")
    end = "SOME WERE MISREAD" if faults else "none crashed, hung or gave a wrong state"
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024
    print(f"{say(outcomes, time.monotonic() - began)}; {end}; at most {peak:.0f} MiB a job; seed {seed}")
    return 1 if faults or not outcomes else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=120)
    parser.add_argument("--seed", type=int, default=None, help="which inputs; a new one each time if not given")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--replay", type=int, metavar="N", help="run input N of the seed alone, in this process")
    args = parser.parse_args()
    seed = secrets.randbits(32) if args.seed is None else args.seed
    if args.replay is None:
        return fuzz(seed, args.seconds, args.jobs)
    fuzzer = Fuzzer(seed)
    faulthandler.dump_traceback_later(HANG_S, exit=True)
    print(fuzzer.run(args.replay))
    return 0


if __name__ == "__main__":
    sys.exit(main())
