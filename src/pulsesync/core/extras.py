"""What is said where a package is missing that only some uses of pulsesync need."""

from pulsesync.errors import PulseError


def missing(error: ImportError, extra: str) -> PulseError:
    """The error for a package that is not installed: it names the extra of pulsesync that brings it along."""
    return PulseError(f"{error.name} is not installed: pip install 'pulsesync[{extra}]'")
