"""What `pulse squash` and `pulse prune` do: keep the ways through a run short, and the run small."""

import time
from dataclasses import asdict
from pathlib import Path

from pulsesync.cli.options import NothingThereError, Printer, open_place, read_key, read_trust, size
from pulsesync.errors import SignatureError, StoreError
from pulsesync.maintain.prune import prune as prune_run
from pulsesync.maintain.squash import Squasher
from pulsesync.run.reader import RunReader


def squash(
    run: str,
    *,
    key: Path | None,
    delegation: Path | None,
    trust: str | None,
    cache: Path | None,
    follow: bool,
    interval_s: float,
    as_json: bool,
) -> int:
    """Write the squashed patches that a run is ready for, once or for ever; exit code 0. Raises: PulseError."""
    store, printer, keys = open_place(run), Printer(as_json), read_trust(trust)
    squasher = Squasher(store, signing_key=read_key(key, delegation), trust=keys, cache=cache)
    if not follow and RunReader(store, keys).newest() is None:
        raise NothingThereError(f"there is no run at {run}, or no version in it yet")
    count = 0
    while True:
        try:
            for one in squasher.steps():
                count += 1
                printer.tell(
                    "squashed",
                    f"versions {one.base} to {one.version} in one: {size(one.size_bytes)} in place of "
                    f"{size(one.instead_of_bytes)}",
                    **asdict(one),
                )
        except SignatureError:
            raise
        except StoreError as e:
            if not follow:
                raise
            printer.note("error", f"{e}; trying again", kind=type(e).__name__, message=str(e))
        if not follow:
            break
        time.sleep(interval_s)
    printer.tell("summary", f"{count} squashed patches written", written=count)
    return 0


def prune(
    run: str, *, keep_versions: int, keep_hours: float, grace_hours: float, trust: str | None, as_json: bool
) -> int:
    """Prune a run; exit code 0. Raises: PulseError, NothingThereError."""
    store, keys = open_place(run), read_trust(trust)
    if RunReader(store, keys).newest() is None:
        raise NothingThereError(f"there is no run at {run}, or no version in it yet")
    report = prune_run(store, keep_versions=keep_versions, keep_hours=keep_hours, grace_hours=grace_hours, trust=keys)
    Printer(as_json).tell(
        "pruned",
        f"versions {report.kept_from} to {report.newest} are kept; {report.versions} versions and {report.records} "
        f"anchors and squashed patches taken out of use, {report.bodies} bodies deleted: {size(report.freed_bytes)}",
        **asdict(report),
    )
    return 0
