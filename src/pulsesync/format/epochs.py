"""Where a version is in its run: epochs, and when one begins. docs/format.md defines both."""

from dataclasses import dataclass

from pulsesync.format.manifest import Manifest

EPOCH_PATCHES = 32  # patches in which history builds up; docs/format.md says what follows from it


@dataclass(frozen=True)
class Position:
    """The version a subscriber has, as its record said."""

    run: str
    version: int
    digest: str
    epoch: int
    index: int

    @classmethod
    def by(cls, manifest: Manifest) -> "Position":
        return cls(manifest.run, manifest.version, manifest.digest, manifest.epoch, manifest.index)

    @property
    def at_start(self) -> bool:
        """Whether an epoch begins here, so that squashed patches do and nothing remembered is needed."""
        return self.index in (0, EPOCH_PATCHES)

    @property
    def starts(self) -> int:
        """The epoch of which this is the start."""
        return self.epoch if self.index == 0 else self.epoch + 1


def position(previous: Manifest | None) -> tuple[int, int]:
    """Return epoch and index of the patch after a version; of a root, if there is none before it."""
    if previous is None:
        return 0, 0
    if previous.index >= EPOCH_PATCHES:
        return previous.epoch + 1, 1
    return previous.epoch, previous.index + 1
