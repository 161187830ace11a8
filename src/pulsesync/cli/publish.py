"""`pulse publish`: a checkpoint on disk becomes the next version of a run."""

from dataclasses import asdict
from pathlib import Path
from typing import Literal

from pulsesync.cli.options import Amount, Count, Flag, Json, Key, Printer, open_place, read_key, size
from pulsesync.cli.progress import show_progress
from pulsesync.format.patch import CodecName
from pulsesync.publish.publisher import Publisher
from pulsesync.run.reader import RunReader
from pulsesync.state.checkpoint_files import open_checkpoint


def publish(
    checkpoint: Path,
    run: str,
    *,
    step: Count | None = None,
    resume: Flag = False,
    cast: Literal["BF16", "F16", "F8_E4M3", "F8_E5M2"] | None = None,
    codec: CodecName = "auto",
    key: Key = None,
    spool: Path | None = None,
    anchor_every: Amount = 1.0,
    take_over: Flag = False,
    as_json: Json = False,
) -> int:
    """Publish a checkpoint as the next version of a run; the first one starts the run.

    Only what changed since the last version is sent. The files that a loader needs in addition to the weights
    (config.json, the tokenizer) are published with them. A trainer publishes from memory with `pulsesync.Publisher`;
    this command is for checkpoints that another program has written.

    Args:
        checkpoint: A safetensors file, or a folder as transformers writes it, with one file or several shards.
        run: Where to publish.
        step: The trainer's step, which logs and reports show; if not given, the one after the run's last.
        resume: Publish a checkpoint that does not continue the run, too: one whose --step is not above that of the last
            version, and of which over half of the weights differ.
        cast: Publish FP32 tensors in this dtype, which should be the dtype that workers use.
        codec: How changes are coded; auto picks the smallest.
        key: File with the key to sign with, from pulse keygen.
        spool: Folder in which the last version is kept, so that the next publish need not fetch it.
        anchor_every: Write an anchor when the patches since the last one add up to this multiple of its size.
        take_over: Continue a run to which another publisher has just written, instead of waiting until its lease ends.
        as_json: Print one JSON object, for machines.

    Raises:
        PulseError: the checkpoint cannot be read, or cannot be published.
    """
    opened = open_checkpoint(checkpoint)
    store, signing_key = open_place(run), read_key(key)
    if step is None:
        last = RunReader(store, {signing_key.public} if signing_key else None).newest()
        step = 0 if last is None else last.step + 1
    publisher = Publisher(
        store,
        resume=resume,
        codec=codec,
        cast=cast,
        signing_key=signing_key,
        files=opened.files,
        spool=spool,
        anchor_every=anchor_every,
        take_over=take_over,
    )
    with show_progress(as_json) as bars, publisher:
        bars.report(0, None, f"publishing {size(opened.size_bytes)} of {checkpoint}")
        report = publisher.publish(opened.tensors, step=step)
        publisher.flush()
        anchor_bytes = publisher.anchor_bytes
    Printer(as_json).tell(
        "published",
        f"version {report.version} (step {report.step}): {report.changed:,} of {report.total:,} weights changed, "
        f"{size(report.payload_bytes)} sent instead of {size(report.full_bytes)}",
        **asdict(report),
        density=report.density,
        anchor_bytes=anchor_bytes,
        run=publisher.run,
        files=sorted(opened.files),
    )
    return 0
