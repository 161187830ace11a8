"""What an exchange between trainers must be able to do. `group` has the one over torch.distributed, `store` any store.

All add up the same updates in the order of the trainers' names, so all yield the same bits.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from pulsesync.loco.gate import SentUpdate
from pulsesync.loco.payload import Coder
from pulsesync.loco.shared import Outcome, SharedState


@dataclass(frozen=True)
class EncodedUpdate:
    """An encoded update, in one piece or several."""

    id: str  # the SHA-256 of all pieces
    pieces: tuple[bytes, ...]


class Exchange(Protocol):
    """Connects one trainer with the others.

    A round is `prepare`, `propose` and, once its result is known, `confirm`.
    """

    trainer: str  # the name of this trainer

    @property
    def sent_bytes(self) -> int:
        """In total so far."""

    @property
    def received_bytes(self) -> int:
        """In total so far."""

    def join(self, mine: Sequence[SharedState], about: str) -> list[SharedState]:
        """Join the others: return the shared state of each fragment to continue from.

        about: the settings that must be equal on all trainers.

        Raises:
            StateError: the others have another model or other settings; VerificationError: replicas have diverged.
        """

    def prepare(self, coder: Coder, update: SentUpdate) -> EncodedUpdate:
        """Encode an update. Sends nothing."""

    def propose(self, coder: Coder, encoded: EncodedUpdate, size: int) -> Outcome:
        """Send an update to a fragment of this size.

        Return the round as it was decided, with this update or without it.

        Raises:
            RoundError: it failed for this trainer, whose state is unchanged; it may be tried again.
            VerificationError: the trainers are at different shared states.
        """

    def decline(self, coder: Coder, size: int, why: str) -> None:
        """Announce that this trainer proposes no update, so that the others do not wait for it; never raises."""

    def confirm(self, coder: Coder, outcome: Outcome, after: SharedState | None) -> None:
        """Send the others the result of a round, before anything is changed; None: the result is not shared.

        Raises:
            RoundError: a trainer could not complete the round; VerificationError: the trainers' results differ.
        """

    def missed(self, coder: Coder, size: int) -> Outcome | None:
        """The outcome of a round that was decided without this trainer; None if it was not decided."""

    def leave(self, rounds: Sequence[int]) -> None:
        """Leave after these rounds of each fragment: the others no longer wait for this trainer."""
