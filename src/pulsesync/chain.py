"""The rules of a run, without I/O: where its objects are, and whether a version may follow the one that is held."""

from dataclasses import dataclass

from pulsesync.errors import ChainError, MissingLinkError
from pulsesync.format.manifest import Manifest

EPOCH_PATCHES = 32  # patches in which history builds up; FORMAT.md says what follows from it


@dataclass(frozen=True)
class Held:
    """The version a subscriber has, as its manifest said."""

    run: str
    version: int
    digest: str
    epoch: int
    index: int

    @classmethod
    def by(cls, manifest: Manifest) -> "Held":
        return cls(manifest.run, manifest.version, manifest.digest, manifest.epoch, manifest.index)


def manifest_key(version: int) -> str:
    return f"manifests/{version:016d}"


def part_key(id_: str) -> str:
    return f"parts/{id_}"


def layout_key(id_: str) -> str:
    return f"layouts/{id_}"


HEAD = "head"  # a hint: the newest version, perhaps not quite


def position(previous: Manifest | None) -> tuple[int, int]:
    """Return epoch and index of the patch after a version; of an anchor, if there is none before it."""
    if previous is None:
        return 0, 0
    if previous.index >= EPOCH_PATCHES:
        return previous.epoch + 1, 1
    return previous.epoch, previous.index + 1


def accept(held: Held | None, manifest: Manifest, version: int) -> None:
    """Check that a manifest is the version it was fetched as, and may come next.

    Raises:
        ChainError: it belongs to another run or place; MissingLinkError: it does not lead on from what is held.
    """
    if manifest.version != version:
        raise ChainError(f"asked for version {version}, got {manifest.version}", version=version)
    if held is None:
        if manifest.base is not None:
            raise MissingLinkError(f"version {version} is a patch, and nothing is held to apply it to", version=version)
        return
    if manifest.run != held.run:
        raise ChainError("the version belongs to another run", expected=held.run, actual=manifest.run)
    if manifest.base is None:
        return
    if manifest.base.version != held.version:
        raise MissingLinkError(
            f"version {version} follows {manifest.base.version}; {held.version} is held", version=version
        )
    same_epoch = (manifest.epoch, manifest.index) == (held.epoch, held.index + 1)
    next_epoch = manifest.epoch > held.epoch and manifest.index == 1
    if not (same_epoch or next_epoch):
        raise ChainError(f"version {version} is out of place in its epoch", version=version)
