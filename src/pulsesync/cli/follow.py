"""What `pulse follow` does: a folder that other programs load from is kept at the newest version of a run."""

from dataclasses import asdict
from pathlib import Path

from pulsesync.cli.options import NothingThereError, Printer, open_place, read_trust, size
from pulsesync.errors import NothingPublishedError, PulseError
from pulsesync.integrations.folder import FolderUpdate, HuggingFaceFolder


def follow(
    run: str,
    folder: Path,
    *,
    trust: str | None,
    cache: Path | None,
    once: bool,
    interval_s: float,
    hold_s: float,
    version: int | None,
    follow_replaced: bool,
    as_json: bool,
) -> int:
    """Follow until interrupted, or once; exit code 0. Raises: PulseError, NothingThereError."""
    store, printer, keys = open_place(run), Printer(as_json), read_trust(trust)
    with HuggingFaceFolder(
        store, folder, trust=keys, cache=cache, hold_s=hold_s, follow_replaced=follow_replaced
    ) as kept:
        if once or version is not None:
            try:
                flip = kept.update(version)
            except NothingPublishedError as e:
                raise NothingThereError(
                    f"there is no run at {run}, or none of its versions can be reached yet: check the location, or try "
                    "again later"
                ) from e
            if flip is not None:
                _report_flip(flip, printer)
                _report_missing(flip, folder, printer)
            elif held := kept.current:
                printer.tell("holds", f"{folder}/current is version {held.version} already", **asdict(held))
            return 0
        if held := kept.current:
            printer.note("holds", f"{folder}/current is version {held.version}; following {run}", **asdict(held))
        else:
            printer.note("waits", f"{folder} holds no version yet; following {run}", folder=str(folder))
        missing: tuple[str, ...] = ()
        for flip in kept.follow(interval_s, lambda e: _report_error(e, run, kept, printer)):
            _report_flip(flip, printer)
            if flip.missing != missing:
                _report_missing(flip, folder, printer)
            missing = flip.missing
    return 0


def _report_flip(flip: FolderUpdate, printer: Printer) -> None:
    sync, mark = flip.sync, flip.mark
    ways = "+".join(f"{sync.path.count(kind)} {kind}" for kind in dict.fromkeys(sync.path)) or "nothing"
    if flip.left_out:
        printer.note("left-out", f"not written, for no loader reads them: {', '.join(flip.left_out)}")
    printer.tell(
        "version",
        f"version {mark.version} (step {mark.step}) is current, in {flip.folder.name}: {ways}, "
        f"{size(sync.fetched_bytes)}, {flip.seconds:.1f} s, digest {mark.digest[:12]}",
        **asdict(mark),
        folder=str(flip.folder),
        began=flip.began,
        path=list(sync.path),
        changed=sync.changed,
        fetched_bytes=sync.fetched_bytes,
        seconds=round(flip.seconds, 3),
        left_out=list(flip.left_out),
        missing=list(flip.missing),
    )


def _report_missing(flip: FolderUpdate, folder: Path, printer: Printer) -> None:
    """Warn that `from_pretrained` will fail. The trainer has to help: these files travel with a version."""
    if flip.missing:
        printer.note(
            "missing",
            f"{folder}/current cannot be loaded as a Hugging Face model: the run has no {', no '.join(flip.missing)}. "
            'Publish a model that has a .config, or give the files to Publisher(files={"config.json": …})',
            files=list(flip.missing),
            folder=f"{folder}/current",
        )


def _report_error(error: PulseError, run: str, kept: HuggingFaceFolder, printer: Printer) -> None:
    if not isinstance(error, NothingPublishedError):
        printer.note("error", f"{error}; trying again", kind=type(error).__name__, message=str(error))
        return
    published, current = error.version, kept.current
    if published is not None:
        text = f"waiting for the first anchor of version {published} at {run}, which is probably still being written"
    elif current is not None:
        text = (
            f"there is no version at {run} any more; {kept.folder}/current stays version {current.version}, and pulse "
            "follow waits for the next one"
        )
    else:
        text = f"waiting for the first version: there is none at {run} yet; is this the place?"
    printer.note("waits", text, run=run)
