"""The run that a publisher writes: the options that apply to it, and how its records are read, parsed and signed."""

from dataclasses import dataclass, field
from typing import get_args

from pulsesync.core import arguments
from pulsesync.format import layout as layouts
from pulsesync.format import manifest as manifests
from pulsesync.format import signature
from pulsesync.format.manifest import Manifest
from pulsesync.format.patch import CodecName
from pulsesync.format.signature import SigningKey
from pulsesync.publish.checkpoint import PublisherState
from pulsesync.publish.companions import Files
from pulsesync.publish.costs import AnchorCodecChoice
from pulsesync.run.reader import RunReader
from pulsesync.store import Store


@dataclass
class WriterOptions:
    """How a run is written; see `Publisher`. What decides the bytes must be the same on all ranks of a team."""

    codec: CodecName
    grid: layouts.Grid
    min_tile: int
    files: Files
    anchor_every: float
    anchor_codec: AnchorCodecChoice = "auto"
    link: float | None = None  # bits per second
    resume: bool = False  # publish to an existing run even weights that do not continue it
    take_over: bool = False  # although another publisher has the lease of the run
    warns_of_fp32: bool = False  # once, if most weights of an FP32 model change in a version
    continues: PublisherState = field(default_factory=PublisherState)  # the version that the run must have; or empty

    def __post_init__(self) -> None:
        arguments.one_of("codec", self.codec, get_args(CodecName))
        arguments.one_of("anchor_codec", self.anchor_codec, get_args(AnchorCodecChoice))
        if self.link is not None:
            arguments.number("link", self.link, what="None or a number of bits per second", above=0)
        self.min_tile = arguments.whole("min_tile", self.min_tile, 1, what="a number of weights")
        what = "a fraction of the anchor's bytes"
        self.anchor_every = arguments.number("anchor_every", self.anchor_every, what=what)


@dataclass(frozen=True)
class RunRecords:
    """The records of one run, as its publisher sees them."""

    store: Store
    signing_key: SigningKey | None  # signs them; None: they are not signed
    epoch_patches: int  # of an epoch; the format fixes it, but for tests

    def reader(self) -> RunReader:
        """Return a reader that knows nothing yet: records are as they are now."""
        trust = {self.signing_key.public} if self.signing_key else None
        return RunReader(self.store, trust, epoch_patches=self.epoch_patches)

    def parse(self, record: bytes) -> Manifest:
        """Parse a record of this run, which rank 0 has checked."""
        return manifests.parse(record, epoch_patches=self.epoch_patches)

    def sign(self, record: Manifest) -> bytes:
        """Return the bytes of a record as it is stored, signed if there is a key."""
        return signature.sign(record.build(), self.signing_key)
