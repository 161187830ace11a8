"""What can go wrong, grouped by what the caller should do.

    PulseError
    ├── FormatError                 the bytes are bad: drop them, never apply
    │   ├── ChecksumError           they are not the bytes that were written
    │   ├── SignatureError          nobody who is trusted wrote them
    │   ├── UnsupportedError        a version, codec or dtype this reader does not know
    │   └── LimitError              a count or size is beyond what a reader accepts
    ├── ChainError                  good bytes, wrong state: take another way (squash, anchor)
    │   ├── BaseMismatchError       the weights held are not the patch's base
    │   ├── MissingLinkError        no published path from here to there
    │   └── RunChangedError         the location no longer holds what was followed: `follow_replaced=True` starts over
    │       ├── RunReplacedError    it holds another run
    │       ├── RunForkedError      it holds another state under the local version
    │       └── RunRolledBackError  its newest version is older than the local one
    ├── StoreError                  the transport; `retryable` says whether to try again
    │   ├── NotFoundError
    │   │   └── NothingPublishedError   no version can be synced yet: check the location, or wait
    │   └── ConflictError           somebody else created it first
    │       └── AnotherPublisherError   the run has one: this one must stop, or take the run up anew
    ├── ClosedError                 this Publisher or Subscriber can do nothing any more: create another one
    ├── StateError                  the tensors given do not fit the run: names, dtypes, shapes, memory layout
    ├── GroupError                  a process of a group died or fell behind: nothing changed, go on in a new group
    ├── RoundError                  trainers did not complete a round: nothing changed, the next try makes up for it
    └── VerificationError           weights after apply are not the trainer's: they were put back, stop serving if not

Each carries its facts as attributes as well as in its message.
"""

from typing import Any


class PulseError(Exception):
    """Base of everything this library raises on purpose. Keyword facts become attributes."""

    def __init__(self, message: str, **facts: Any) -> None:
        super().__init__(message)
        self.__dict__.update(facts)

    def __getattr__(self, name: str) -> Any:  # only for what is not there: lets type checkers accept any fact
        raise AttributeError(f"this {type(self).__name__} carries no {name!r}")


class FormatError(PulseError):
    """Bytes that do not say what the format asks for."""


class ChecksumError(FormatError):
    """Bytes that differ from those that were written (`expected`, `actual`)."""


class SignatureError(FormatError):
    """A record without a signature, or with one by a key that is not trusted (`key`)."""


class UnsupportedError(FormatError):
    """A format version, codec or dtype that this reader does not know."""


class LimitError(FormatError):
    """A count, size or ratio beyond what a reader accepts."""


class ChainError(PulseError):
    """Good bytes that do not lead on from the state that is held."""


class BaseMismatchError(ChainError):
    """The state held is not the one the patch was made against (`expected`, `actual`)."""


class MissingLinkError(ChainError):
    """No published version leads from the one held to the one asked for."""


class RunChangedError(ChainError):
    """The run at a location is not the one that was followed so far (`version`: the local one, `run`: what is there).

    The local weights are unchanged. `sync(follow_replaced=True)` starts over from an anchor of what is there now.
    """


class RunReplacedError(RunChangedError):
    """The location holds another run than before (`expected`, `actual`: run ids)."""


class RunForkedError(RunChangedError):
    """The local version exists with another state, so the run was continued from a backup (`expected`, `actual`)."""


class RunRolledBackError(RunChangedError):
    """The newest published version (`newest`) is older than the local one, so the run was restored from a backup."""


class StoreError(PulseError):
    """The store could not do what was asked (`key`; `retryable`, if the same call may succeed a little later)."""

    retryable: bool = False


class NotFoundError(StoreError):
    """There is no such object (`key`)."""


class NothingPublishedError(NotFoundError):
    """No version that can be synced is published at a location, or not yet (`location`)."""


class ConflictError(StoreError):
    """The object exists already and was to be created (`key`)."""


class AnotherPublisherError(ConflictError):
    """A version that was to be published exists: somebody else publishes into the same run (`version`)."""


class ClosedError(PulseError):
    """A Publisher or Subscriber that was closed, belongs to another process, or meets the end of the interpreter."""


class StateError(PulseError):
    """Tensors that do not fit the run: a name, dtype, shape or memory layout (`tensor`)."""


class GroupError(PulseError):
    """Processes that work together did not come together in time (`rank`: this one's); no weights have changed."""


class RoundError(PulseError):
    """A round between trainers did not come about (`round`); no trainer's state has changed."""


class VerificationError(PulseError):
    """The state after an apply is not the publisher's; it has been rolled back, unless `torn` is True.

    `torn`: loading an anchor failed halfway. The weights are between two versions; do not use them until a sync
    succeeds.
    """
