"""`pulse export` writes a run as delta folders; `pulse import` publishes delta folders as a run."""

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from pulsesync.cli import options
from pulsesync.cli.progress import show_progress, track
from pulsesync.errors import NothingPublishedError
from pulsesync.integrations.delta_folder import DeltaExporter, DeltaImporter, DeltaVersion
from pulsesync.integrations.delta_folder.deltas import Checksum, Encoding


def export(
    run: str,
    folder: Path,
    *,
    first: Annotated[options.Version, Parameter(name="--from")] = None,
    to: options.Version = None,
    encoding: Encoding = "xor",
    checksum: Checksum = "xxh3-128",
    trust: options.Trust = None,
    as_json: options.Json = False,
) -> int:
    """Write the versions of a run as the delta folders that slime, miles and stitch read.

    The first version, such as FOLDER/weight_v000004, is a complete checkpoint; FOLDER/weight_v000005 and those after it
    contain what changed since the version before, with a checksum of every tensor that changed. Each folder appears
    when it is complete. Run the command again to continue after an interruption, or when the run has new versions.

    Args:
        run: The run to export.
        folder: Where the folders go: a folder that is empty, does not exist yet, or was exported to before.
        first: The version to begin with; if not given, the one after the last in FOLDER, or the oldest of the run.
        to: The last version to write; if not given, the newest.
        encoding: How changes are written: xor is smaller; overwrite may be applied twice.
        checksum: The checksum of each changed tensor; xxh3-128 and blake3 need pip install 'pulsesync[delta]'.
        trust: Public key of a publisher to trust, or a file of such keys; nothing else is then accepted.
        as_json: Print one JSON object for every version, for machines.

    Raises:
        UsageError: --to is before --from. NothingThereError: the run has no version.
        PulseError: the run cannot be read, or the folder cannot be written.
    """
    if first is not None and to is not None and to < first:
        raise options.UsageError(f"--to must not be before --from; got --to {to} and --from {first}")
    printer, count = options.Printer(as_json), 0
    store, keys = options.open_place(run), options.read_trust(trust)
    exporter = DeltaExporter(store, folder, first=first, encoding=encoding, checksum=checksum, trust=keys)
    with exporter, show_progress(as_json) as bars:
        try:
            for done in track(bars, "exporting", iter(lambda: exporter.advance(to), None), None):
                count += 1
                _report(printer, "exported", f"version {done.version} as {done.folder}", done)
        except NothingPublishedError as e:
            raise options.NothingThereError(options.unreachable(run)) from e
    if not count:
        last = "the newest" if to is None else to
        printer.note("complete", f"nothing to write: {folder} has every version up to {last}")
    return 0


def import_(
    folder: Path,
    run: str,
    *,
    base: Path | None = None,
    key: options.Key = None,
    spool: Path | None = None,
    as_json: options.Json = False,
) -> int:
    """Publish the delta folders of slime, miles, stitch or SkyRL as the versions of a run.

    Each folder becomes one version, whose step is the number in the folder's name. A folder is decoded and all of its
    checksums are compared before it is published. Run the command again to continue after an interruption, or when
    there are new folders.

    Args:
        folder: The folder with weight_v000001, weight_v000002 and so on; delta-00000001 and so on from SkyRL.
        run: Where to publish: a new run, or one that an import of this folder has begun.
        base: The checkpoint that the engines started with, needed if the first folder is a delta; it is published
            first.
        key: File with the key to sign with, from pulse keygen.
        spool: Folder in which the last version is kept, so that the next import need not fetch it.
        as_json: Print one JSON object for every version, for machines.

    Raises:
        PulseError: a folder cannot be read or is damaged, or the run cannot be written.
    """
    printer, count = options.Printer(as_json), 0
    importer = DeltaImporter(folder, options.open_place(run), base=base, signing_key=options.read_key(key), spool=spool)
    with importer, show_progress(as_json) as bars:
        for done in track(bars, "importing", iter(importer.advance, None), None):
            count += 1
            _report(printer, "imported", f"{done.folder} as version {done.version}", done)
        if importer.incomplete is not None:
            printer.note(
                "incomplete",
                f"{importer.incomplete} has no index yet and was skipped; run this command again when it is complete",
            )
    if not count:
        printer.note("complete", f"nothing to publish: the run has every complete folder of {folder}")
    return 0


def _report(printer: options.Printer, event: str, text: str, done: DeltaVersion) -> None:
    kind = "delta" if done.is_delta else "checkpoint"
    printer.tell(
        event,
        f"{text}: {kind}, {done.tensors} tensors, {options.size(done.size_bytes)}",
        version=done.version,
        folder=str(done.folder),
        kind=kind,
        tensors=done.tensors,
        size_bytes=done.size_bytes,
    )
