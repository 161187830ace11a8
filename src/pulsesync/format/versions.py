"""The version of the format, and what a reader says of files that it cannot read.

Version 1 is frozen: every release reads it. Later releases may add codecs, dtypes, kinds of record and extensions.
docs/format.md defines which additions a reader ignores and which it refuses: with an UnsupportedError that says what to
do.
"""

from pulsesync.errors import UnsupportedError

VERSION = 1
_DRAFT = 0x80  # this bit was set in the version byte before the format was frozen
_NEW_RUN = (
    "which development versions before pulsesync 0.1.0 wrote and no release reads. Publish the weights into a new run, "
    "from the trainer's checkpoint (docs/versioning.md)"
)


def check_version(found: int, what: str) -> None:
    """Raises: UnsupportedError, if the version byte of a file is that of another version of the format."""
    if found & _DRAFT:
        raise draft(what, found - _DRAFT)
    if found != VERSION:
        raise UnsupportedError(
            f"{what} has format version {found}; this release of pulsesync reads version {VERSION}. Upgrade pulsesync"
        )


def check_name(found: object, expected: str, what: str) -> None:
    """Raises: UnsupportedError, if the `format` field of a JSON object is not the expected one."""
    if found == expected:
        return
    said = f"{what} has the format {str(found)[:40]!r}"
    if isinstance(found, str) and found.startswith(f"{expected}-draft"):
        raise UnsupportedError(f"{said}, {_NEW_RUN}")
    raise UnsupportedError(f"{said}; this release of pulsesync reads {expected!r}. Upgrade pulsesync")


def draft(what: str, number: int) -> UnsupportedError:
    """The error for a file that was written before the format was frozen."""
    return UnsupportedError(f"{what} is in draft {number} of the format, {_NEW_RUN}")


def unknown(what: str) -> UnsupportedError:
    """The error for something that a later release has added to the format; what: a sentence without its end."""
    return UnsupportedError(f"{what}, which this release of pulsesync does not know. Upgrade pulsesync to read it")
