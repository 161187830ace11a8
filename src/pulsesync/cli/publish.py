"""What `pulse publish` does: a checkpoint on disk becomes the next version of a run."""

from dataclasses import asdict
from pathlib import Path

from rich.console import Console

from pulsesync.cli.options import Printer, open_place, read_key, size
from pulsesync.format.patch import CodecName
from pulsesync.publish.publisher import Publisher
from pulsesync.state.checkpoint_files import open_checkpoint


def publish(
    checkpoint: Path,
    run: str,
    *,
    step: int,
    cast: str | None,
    codec: CodecName,
    key: Path | None,
    spool: Path | None,
    anchor_every: float,
    as_json: bool,
) -> int:
    """Publish a checkpoint; exit code 0. Raises: PulseError."""
    opened = open_checkpoint(checkpoint)
    publisher = Publisher(
        open_place(run),
        codec=codec,
        cast=cast,
        signing_key=read_key(key),
        files=opened.files,
        spool=spool,
        anchor_every=anchor_every,
    )
    with Console(stderr=True).status(f"publishing {size(opened.size_bytes)} of {checkpoint}"), publisher:
        report = publisher.publish(opened.tensors, step=step)
        publisher.flush()
        anchor_bytes = publisher.anchor_bytes
    Printer(as_json).tell(
        "published",
        f"version {report.version} (step {report.step}): {report.changed:,} of {report.total:,} weights changed, "
        f"{size(report.payload_bytes)} sent in place of {size(report.full_bytes)}",
        **asdict(report),
        density=report.density,
        anchor_bytes=anchor_bytes,
        run=publisher.run,
        files=sorted(opened.files),
    )
    return 0
