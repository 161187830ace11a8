"""For tests, ours and yours: weight updates like those of a real run, a recorded run, and arbitrary bits."""

from pulsesync.testing.recorded import RecordedSlice, load_recorded
from pulsesync.testing.updates import AdamUpdates, mutate, random_bits

__all__ = ["AdamUpdates", "RecordedSlice", "load_recorded", "mutate", "random_bits"]
