"""Epochs: the runs of patches over which history builds up. docs/format.md defines them.

An epoch starts at a root (index 0), or at the last patch of the epoch before. The format fixes how many patches make an
epoch. It is a parameter here so that tests and measurements can make epochs short; all readers and writers of a run
must use the same number.
"""

EPOCH_PATCHES = 32


def is_start(index: int, epoch_patches: int) -> bool:
    """Whether an epoch starts at a version: squashed patches begin and end here, and no history is needed."""
    return index in (0, epoch_patches)


def started_by(epoch: int, index: int) -> int:
    """The epoch that starts at a version, if one does."""
    return epoch if index == 0 else epoch + 1


def next_patch(epoch: int, index: int, epoch_patches: int) -> tuple[int, int]:
    """The epoch and index of the patch that follows a version."""
    return (epoch + 1, 1) if index >= epoch_patches else (epoch, index + 1)
