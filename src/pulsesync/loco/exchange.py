"""What an exchange between trainers must be able to do. `group` has the one over torch.distributed, `store` any store.

All are given the same proposals and add them up in the order of the trainers' names, so all give the same bits.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from pulsesync.loco.gate import SentUpdate
from pulsesync.loco.payload import Coder
from pulsesync.loco.shared import Outcome, SharedState


@dataclass(frozen=True)
class EncodedUpdate:
    """An update as it travels, in one piece or several."""

    id: str  # the SHA-256 of all pieces
    pieces: tuple[bytes, ...]


class Exchange(Protocol):
    """One trainer's way to the others. A round is `prepare`, `propose` and, once its result is known, `confirm`."""

    trainer: str  # its name among them
    sent_bytes: int  # so far, everything counted
    received_bytes: int

    def join(self, mine: Sequence[SharedState], about: str) -> list[SharedState]:
        """Join the others: return the shared state of each fragment to continue from.

        about: what all must have set alike.

        Raises:
            StateError: the others train another model, or in another way; VerificationError: replicas have diverged.
        """

    def prepare(self, coder: Coder, update: SentUpdate) -> EncodedUpdate:
        """Encode an update. Sends nothing."""

    def propose(self, coder: Coder, letter: EncodedUpdate, size: int) -> Outcome:
        """Send an update to a fragment of this size; return the round as it was decided, with it or without.

        Raises:
            RoundError: it failed for this trainer, whose state has not changed: it may be tried again.
            VerificationError: the trainers are at different shared states.
        """

    def decline(self, coder: Coder, size: int, why: str) -> None:
        """Say that this trainer has nothing to propose, so that nobody waits for it; never raises."""

    def confirm(self, coder: Coder, outcome: Outcome, after: SharedState | None) -> None:
        """Tell the others what a round led to, before anything is changed; None: to nothing that is shared.

        Raises:
            RoundError: a trainer could not complete the round; VerificationError: the trainers' results differ.
        """

    def missed(self, coder: Coder, size: int) -> Outcome | None:
        """The outcome of a round that was decided without this trainer; None if it was not decided."""

    def leave(self, rounds: Sequence[int]) -> None:
        """Say goodbye after so many rounds of each fragment: nobody need wait for this trainer."""
