"""One suite for every engine that follows a run in its own weights.

Subclass it, and give it an engine and a run:

    class TestMyEngine(EngineTests):
        @pytest.fixture
        def followed(self, ...):
            return MyEngineAndRun(...)
"""

from pathlib import Path
from typing import Any, Protocol

import pytest

from pulsesync.errors import FormatError


class FollowedEngine(Protocol):
    """An engine, and a run that has version 0 and nothing else."""

    @property
    def location(self) -> Path:
        """The folder of the run."""

    def publish(self) -> Any:
        """Publish the next version."""

    def update(self, version: int) -> Any:
        """Update the engine to a version of the run. Raises what the engine's client raises."""

    def check(self, version: int) -> None:
        """Assert that the engine serves this version bit for bit, says so, and generates."""

    def spoil(self) -> None:
        """Write to the engine's weights, which are of the newest version, as something else might."""


class EngineTests:
    """Tests of what every engine does. The fixture `followed` is a FollowedEngine, of its own for each test."""

    def test_a_damaged_version_is_refused_while_the_old_one_is_served(self, followed: FollowedEngine) -> None:
        followed.publish()
        followed.update(1)
        followed.publish()
        record = followed.location / "manifests" / f"{2:016d}"
        good = record.read_bytes()
        record.chmod(0o644)
        at = len(good) // 2
        for damaged in (good[:-20] + bytes(20), good[:at] + bytes([good[at] ^ 255]) + good[at + 1 :]):
            record.write_bytes(damaged)
            with pytest.raises(FormatError):
                followed.update(2)
            followed.check(1)
        followed.publish()  # the next version goes by the same patch
        with pytest.raises(FormatError):
            followed.update(3)
        followed.check(1)
        record.write_bytes(good)
        followed.update(3)
        followed.check(3)

    def test_weights_that_something_else_wrote_are_repaired(self, followed: FollowedEngine) -> None:
        followed.publish()
        followed.update(1)
        followed.spoil()
        followed.publish()
        followed.update(2)
        followed.check(2)
