"""The records of the run that a publisher writes: how it reads, parses and signs them."""

from dataclasses import dataclass

from pulsesync.format import manifest as manifests
from pulsesync.format import signature
from pulsesync.format.manifest import Manifest
from pulsesync.format.signature import SigningKey
from pulsesync.run.reader import RunReader
from pulsesync.store import Store


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
        data = record.build()
        return signature.sign(data, self.signing_key) if self.signing_key else data
