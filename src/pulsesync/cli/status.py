"""What `pulse status` shows: a run at a glance, and where each of its workers is."""

import json
import sys
import time
from dataclasses import asdict
from typing import Annotated, Any

from cyclopts import Parameter

from pulsesync.cli import options
from pulsesync.errors import NothingPublishedError, StoreError
from pulsesync.run.fleet import MAX_AGE_S, MAX_LAG, WRONG, FleetStatus, VersionStatus, WorkerStatus, read_fleet


def status(
    run: str,
    *,
    max_lag: options.Count = MAX_LAG,
    max_age_s: Annotated[options.Amount, Parameter(name="--max-age")] = MAX_AGE_S,
    watch: options.Flag = False,
    interval_s: options.Interval = 5.0,
    trust: options.Trust = None,
    trust_pointers: options.TrustPointers = None,
    as_json: options.Json = False,
) -> int:
    """Show a run and its workers at a glance: newest version, last anchor, pointers, and where each worker is.

    Workers appear by their heartbeats, small records that pulse follow and Subscriber(heartbeat="rollout-3") keep in
    the run, or send to pulse serve or pulse relay if they read the run from there. Each worker is in one of these
    states:

    - `ok`: its last sync succeeded, and it is at most --max-lag versions from the version that it follows.
    - `joining`: it has not completed its first sync yet.
    - `behind`: it is more than --max-lag versions away.
    - `failing`: its last sync failed; or a recount found weights that something else has written; or another process
      writes the heartbeat of the same name.
    - `torn`: its weights are between two versions and must not be used until a sync succeeds.
    - `silent`: its last heartbeat is older than --max-age seconds: the process hangs, or was killed.
    - `unreadable`: what is there in place of a heartbeat is not one, or the store does not show it.
    - `ended`: it was closed.

    The exit code is 0 if all is well; 1 if a worker is `behind`, `failing`, `torn` or `silent`, or if the store does
    not list or show heartbeats, so that not all workers are known; 3 if there is no run. So a monitor needs no more
    than this:

        pulse status s3://bucket/run --max-lag 20 || alert

    A heartbeat is what a worker reports about itself, and it is not signed: use it to monitor workers only. How long
    ago a worker was seen is by the clock of the store, for which an empty object, pruned/clock, is written to it; of a
    store that this command cannot write to, it is by this machine's clock.

    Args:
        run: The run.
        max_lag: How many versions a worker may be away from the one that it follows.
        max_age_s: Seconds after which a worker without a heartbeat counts as silent.
        watch: Look again and again, until interrupted.
        interval_s: Seconds between looks, with --watch.
        trust: Public key of a publisher to trust, or a file of such keys.
        trust_pointers: Public key that may move pointers and nothing else, or a file of such keys; it needs --trust.
        as_json: Print one JSON object, for machines; with --watch, one a look.

    Raises:
        NothingThereError: there is no run, or no version in it yet.
        PulseError: it cannot be read.
    """
    store, printer = options.open_place(run), options.Printer(as_json)
    keys, movers = options.read_keys(trust, trust_pointers)
    while True:
        try:
            found = read_fleet(store, trust=keys, trust_pointers=movers, max_lag=max_lag, max_age_s=max_age_s)
        except NothingPublishedError as e:
            if not watch:
                raise options.NothingThereError(options.no_run(run)) from e
            printer.note("waits", f"there is no version at {run} yet")
        except StoreError as e:
            if not (watch and e.retryable):
                raise
            printer.retries(e)
        else:
            if watch and not as_json and sys.stdout.isatty():
                print("\x1b[H\x1b[2J", end="")  # the top of an empty screen
            _show(found, printer)
            if not watch:
                return 0 if found.is_well else 1
        time.sleep(interval_s)


def _show(found: FleetStatus, printer: options.Printer) -> None:
    if printer.as_json:
        workers = [asdict(worker) | {"version": worker.version} for worker in found.workers]
        print(json.dumps({**asdict(found), "workers": workers, "ok": found.is_well}), flush=True)
        return
    now_s, newest = time.time(), found.newest
    print(f"{found.location}: version {newest.version} (step {newest.step}), {ago(found.age_s)}")
    print(f"run       {found.run}")
    print(f"signed    {f'by {found.signed_by}' if found.signed_by else 'no'}")
    print(f"anchor    {_anchor(found.anchor, now_s)}")
    print(f"versions  {', '.join(f'{one.version}: {options.size(one.size_bytes)}' for one in found.versions)}")
    print(f"pointers  {', '.join(f'{name} {version}' for name, version in found.pointers.items()) or 'none'}")
    print()
    if found.unknown is not None:
        print(f"workers: not known: {found.unknown}")
    if found.own_clock is not None:
        print(f"workers: their ages are by this machine's clock: {found.own_clock}")
    if not found.workers and found.unknown is None:
        print('no worker has left a heartbeat: workers do so with pulse follow or Subscriber(heartbeat="NAME")')
    elif found.workers:
        printer.table(map(_row, found.workers))
        print()
        for worker in found.workers:
            if worker.problem is not None:
                print(f"{worker.name} is {worker.state}: {worker.problem}")
        print(_summary(found))
    sys.stdout.flush()


def _anchor(anchor: VersionStatus | None, now_s: float) -> str:
    if anchor is None:
        return "none yet, so that no new worker can join"
    written = f"{options.size(anchor.size_bytes)}, {ago(now_s - anchor.created_s)}"
    return f"version {anchor.version} (step {anchor.step}), {written}"


def _row(worker: WorkerStatus) -> dict[str, Any]:
    record = worker.heartbeat
    recount = None
    if record and record.recounted_s is not None:
        before_s = max(0.0, record.time_s - record.recounted_s)  # both by the worker's clock
        recount = f"{'equal' if record.recount_equal else 'DIFFERS'}, {ago(worker.seen_s + before_s)}"
    return {
        "worker": worker.name,
        "version": worker.version,
        "lag": worker.lag,
        "pause": None if record is None or record.pause_s is None else f"{1e3 * record.pause_s:,.1f} ms",
        "fetched": options.size(record.fetched_bytes) if record else None,
        "recount": recount,
        "seen": ago(worker.seen_s),
        "state": worker.state,
    }


def _summary(found: FleetStatus) -> str:
    states = [worker.state for worker in found.workers]
    junk = states.count("unreadable")
    wrong = sum(state in WRONG for state in states)
    workers = _count(len(states) - junk, "worker")
    verdict = "all is well" if not wrong else f"{wrong} need{'s' if wrong == 1 else ''} attention"
    return f"{workers}: {verdict}" + (f"; {_count(junk, 'heartbeat')} cannot be read" if junk else "")


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'s' if number != 1 else ''}"


def ago(seconds: float) -> str:
    """A time that has passed, as people read it: 12 s ago, 3 min ago."""
    seconds = max(0.0, seconds)
    for limit, unit, each in ((120, "s", 1), (7200, "min", 60), (172_800, "h", 3600)):
        if seconds < limit:
            return f"{seconds / each:.0f} {unit} ago"
    return f"{seconds / 86_400:.0f} days ago"
