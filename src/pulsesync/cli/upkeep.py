"""`pulse squash` keeps the paths through a run short; `pulse prune` keeps the run small."""

import time
from dataclasses import asdict
from pathlib import Path

from pulsesync.cli import options
from pulsesync.cli.progress import show_progress
from pulsesync.errors import StoreError
from pulsesync.maintain.prune import prune as prune_run
from pulsesync.maintain.squash import Squasher
from pulsesync.run.reader import RunReader


def squash(
    run: str,
    *,
    key: options.Key = None,
    delegation: Path | None = None,
    trust: options.Trust = None,
    cache: Path | None = None,
    follow: options.Flag = False,
    interval_s: options.Interval = 10.0,
    as_json: options.Json = False,
) -> int:
    """Write squashed patches: many versions as one, so that a worker that was away catches up with fewer bytes.

    Args:
        run: The run to squash.
        key: File with the run's signing key, or with one that it delegates to.
        delegation: The file that pulse delegate wrote for that key.
        trust: Public key of a publisher to trust, or a file of such keys.
        cache: Folder in which fetched bytes are kept.
        follow: Continue as the run grows, until interrupted.
        interval_s: Seconds between checks for new versions.
        as_json: Print one JSON object for each squashed patch, for machines.

    Raises:
        NothingThereError: there is no run, or no version in it yet.
        PulseError: the run cannot be read, or a squashed patch cannot be written.
    """
    store, printer, keys = options.open_place(run), options.Printer(as_json), options.read_trust(trust)
    squasher = Squasher(store, signing_key=options.read_key(key, delegation), trust=keys, cache=cache)
    if not follow and RunReader(store, keys).newest() is None:
        raise options.NothingThereError(options.no_run(run))
    count = 0
    while True:
        try:
            with show_progress(as_json) as bars:
                bars.report(count, None, "squashing")
                for one in squasher.steps():
                    count += 1
                    printer.tell(
                        "squashed",
                        f"versions {one.base} to {one.version} in one: {options.size(one.size_bytes)} instead of "
                        f"{options.size(one.instead_of_bytes)}",
                        **asdict(one),
                    )
                    bars.report(count, None, "squashing")
        except StoreError as e:
            if not follow:
                raise
            printer.retries(e)
        if not follow:
            break
        time.sleep(interval_s)
    reason = "" if count else squasher.waits_for
    printer.tell(
        "summary",
        f"{count} squashed {'patch' if count == 1 else 'patches'} written{reason and f': {reason}'}",
        written=count,
        reason=reason,
    )
    return 0


def prune(
    run: str,
    *,
    keep_versions: options.Natural = 100,
    keep_hours: options.Amount = 24.0,
    grace_hours: options.Amount = 1.0,
    trust: options.Trust = None,
    trust_pointers: options.TrustPointers = None,
    as_json: options.Json = False,
) -> int:
    """Delete old versions that no worker should need; an anchor and every version since it always remain.

    The versions that pointers name remain as well, with every version since the oldest of them.
    Records are deleted at once; their bodies by a later run of this command, when the grace period is over.

    Args:
        run: The run to prune.
        keep_versions: Keep at least this number of the newest versions.
        keep_hours: Keep also every version that is younger than this, by the store's clock.
        grace_hours: Time for workers to finish a sync that they have begun, before bodies are deleted.
        trust: Public key of a publisher to trust, or a file of such keys.
        trust_pointers: Public key that may move pointers and nothing else, or a file of such keys; it needs --trust.
        as_json: Print one JSON object, for machines.

    Raises:
        NothingThereError: there is no run, or no version in it yet.
        PulseError: the run cannot be read, or cannot be pruned.
    """
    store, (keys, movers) = options.open_place(run), options.read_keys(trust, trust_pointers)
    if RunReader(store, keys).newest() is None:
        raise options.NothingThereError(options.no_run(run))
    printer = options.Printer(as_json)
    with show_progress(as_json) as bars:
        report = prune_run(
            store,
            keep_versions=keep_versions,
            keep_hours=keep_hours,
            grace_hours=grace_hours,
            trust=keys,
            trust_pointers=movers,
            progress=bars.report,
        )
    printer.tell(
        "pruned",
        f"versions {report.kept_from} to {report.newest} are kept; {report.versions} versions and {report.records} "
        f"anchors and squashed patches removed, {report.bodies} bodies deleted: {options.size(report.freed_bytes)}",
        **asdict(report),
    )
    if report.pinned_by:
        printer.note(
            "pinned",
            f"more versions are kept than requested, because the pointer {report.pinned_by} names an old version; move "
            f"it with: pulse point {run} {report.pinned_by} VERSION",
            pointer=report.pinned_by,
        )
    return 0
