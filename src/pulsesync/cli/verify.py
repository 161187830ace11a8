"""`pulse verify`: replay a run and check every byte of it, or find out which version is in a folder."""

import sys
from collections import Counter
from pathlib import Path

from pulsesync.cli import options
from pulsesync.cli.progress import hide, show_progress, track
from pulsesync.errors import NotFoundError
from pulsesync.format.pointer import Pointer
from pulsesync.integrations.folder import identify
from pulsesync.maintain.verify import RunVerifier
from pulsesync.run.reader import RunReader


def verify(
    run: str,
    folder: Path | None = None,
    *,
    trust: options.Trust = None,
    trust_pointers: options.TrustPointers = None,
    as_json: options.Json = False,
) -> int:
    """Replay a run and check every hash and digest in it, or find out which version is in a folder.

    Every version is rebuilt from the one before it. Every anchor and squashed patch is compared with the version it
    leads to, and every move of a pointer with the version it names. Exit code 1 if something is bad, or if the folder
    contains no version of the run.

    Args:
        run: The run to check.
        folder: A checkpoint, or a folder that pulse follow updates: its digest is computed and compared with the run.
        trust: Public key of a publisher to trust, or a file of such keys.
        trust_pointers: Public key that may move pointers and nothing else, or a file of such keys; it needs --trust.
        as_json: Print one JSON object for each record, and a summary, for machines.

    Raises:
        NothingThereError: there is no run, or no version in it yet.
        PulseError: the run or the folder cannot be read.
    """
    if folder is None:
        return verify_run(run, trust=trust, trust_pointers=trust_pointers, as_json=as_json)
    return verify_folder(run, folder, trust=trust, as_json=as_json)


def verify_run(run: str, *, trust: str | None, trust_pointers: str | None, as_json: bool) -> int:
    """Replay a run; exit code 0 if all of it is good, otherwise 1. Raises: PulseError, NothingThereError."""
    printer, counted, bad, blocked = options.Printer(as_json), Counter[str](), 0, 0
    allowed, movers = options.read_keys(trust, trust_pointers)
    with show_progress(as_json) as bars:
        try:
            audit = RunVerifier(options.open_place(run), trust=allowed, trust_pointers=movers, progress=bars.report)
        except NotFoundError as e:
            raise options.NothingThereError(str(e)) from e
        for one in track(bars, "replaying", audit.run(), len(audit.found)):
            kind = "pointer" if isinstance(one.record, Pointer) else one.record.kind.value if one.record else "record"
            counted[kind] += 1
            blocked += one.blocked
            bad += one.fault is not None and not one.blocked
            facts = {"key": one.key, "ok": one.fault is None, "fault": one.fault, "blocked": one.blocked}
            if as_json:
                printer.tell("checked", "", **facts, version=one.record.version if one.record else None, kind=kind)
            elif one.fault and not one.blocked:
                hide()
                print(f"{one.key}: {one.fault}", file=sys.stderr)
    counts = ", ".join(
        f"{count} {kind if count == 1 else _PLURALS.get(kind, kind + 's')}" for kind, count in counted.items()
    )
    text = f"{counts}: " + ("all good" if not bad else f"{bad} bad")
    if blocked:
        text += f", and {blocked} that could not be checked, because something that they need is bad"
    good = counted.total() - bad - blocked
    printer.tell("summary", text, records=counted.total(), bad=bad, blocked=blocked, good=good, **counted)
    if bad and not as_json:
        print(_ADVICE, file=sys.stderr)
    return 1 if bad or blocked else 0


_ADVICE = (
    "Workers take another path where there is one, and otherwise keep their version. Check the disk or store. "
    "Restore what is bad from a backup, or keep publishing: the next anchor is a path around it."
)
_PLURALS = {"squash": "squashes", "pointer": "moves of pointers"}  # the others have an s


def verify_folder(run: str, folder: Path, *, trust: str | None, as_json: bool) -> int:
    """Compute a folder's digest; exit code 0 if it is a version of the run, and the one named. Raises: PulseError."""
    printer, records = options.Printer(as_json), RunReader(options.open_place(run), options.read_trust(trust))
    if records.newest() is None:
        raise options.NothingThereError(options.no_run(run))
    found = identify(records, folder)
    version = found.record.version if found.record else None
    claimed = found.mark.version if found.mark else None
    good = version is not None and claimed in (None, version)
    text = f"{folder} is version {version}, bit for bit: digest {found.digest[:12]}"
    if version is None:
        text = (
            f"{folder} is not a published version of {run}: digest {found.digest[:12]}. Its version was pruned, or the "
            "weights were changed; pulse follow into an empty folder writes a published version"
        )
    elif not good:
        text = (
            f"{folder} is version {version}, but its pulse.json names version {claimed}: pulse follow into an empty "
            "folder writes a published version"
        )
    printer.tell("identified", text, ok=good, version=version, claimed=claimed, digest=found.digest)
    return 0 if good else 1
