"""What can go wrong, grouped by what the caller should do.

    PulseError
    ├── FormatError                 the bytes are bad: drop them, never apply them
    │   ├── ChecksumError           they are not the bytes that were written
    │   ├── SignatureError          no trusted key signed them
    │   ├── UnsupportedError        a version, codec or dtype that this reader does not know
    │   └── LimitError              a count or size is beyond what a reader accepts
    ├── ChainError                  good bytes for another state: use another path (squashed patches, an anchor)
    │   ├── BaseMismatchError       the local weights are not the patch's base
    │   ├── MissingLinkError        no published path leads to the version
    │   └── RunChangedError         the run at the location has changed: `follow_replaced=True` starts over
    │       ├── RunReplacedError    it holds another run
    │       ├── RunForkedError      it holds another state under the local version
    │       └── RunRolledBackError  its newest version is older than the local one
    ├── StoreError                  the transport; `retryable` says whether to try again
    │   ├── NotFoundError           there is no such object
    │   │   └── NothingPublishedError   no version can be synced yet: check the location, or wait
    │   ├── MissingBucketError      the bucket itself does not exist: create it, or correct the address
    │   └── ConflictError           another process created the object first
    │       ├── AnotherPublisherError   the run has another publisher: stop one of the two, or resume the run
    │       └── PointerMovedError   another process moved the pointer first: look where it is, and decide again
    ├── StaleWeightsError           the weights are older than `max_staleness` allows: sync before they are used
    ├── ClosedError                 this Publisher or Subscriber is closed: create another one
    ├── StateError                  the tensors do not fit the run: names, dtypes, shapes, memory layout
    ├── GroupError                  a process of a group died or is late: nothing changed, continue in a new group
    ├── RoundError                  trainers did not complete a round: nothing changed, the next attempt makes up for it
    └── VerificationError           the weights differ from the trainer's: rolled back, or stop serving if `torn`

The message says what was expected, what was found and what to do. Facts that a program may need are also attributes:
every class declares its own, an error is raised with those that are known as keywords, and of the others a `bool` is
False and everything else None.

Code that decodes bytes does not know which object they are from, and a store does not know what its caller wants to do.
What such an error lacks is added once, where it is known: the object by `at`, the next step by `advise`.

Attributes are set on the instance and have no defaults on the class: when Ray raises an error of a remote task, it
derives a class from the error's class, and reads from the original error only what that class does not have.
"""

from typing import Any, ClassVar, Self


class PulseError(Exception):
    """Base of everything this library raises on purpose.

    Attributes:
        failed_rank: The rank that failed, if it is another process of a group; None if this process failed.
        place: The object that the error is about, and where it is, unless the message names it.
        advice: What to do, unless the message says it.
    """

    failed_rank: int | None
    place: str | None
    advice: str | None
    _facts: ClassVar[dict[str, bool | None]] = {"failed_rank": None, "place": None, "advice": None}

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        cls._facts = {}
        for base in reversed(cls.__mro__):
            cls._facts |= vars(base).get("_facts", {})
        declared = cls.__annotations__.items()  # its own alone
        cls._facts |= {name: False if kind is bool else None for name, kind in declared if name not in vars(cls)}

    def __init__(self, message: str, **facts: Any) -> None:
        super().__init__(message)
        if unknown := facts.keys() - self._facts.keys():
            raise TypeError(f"{type(self).__name__} got an unexpected keyword argument {min(unknown)!r}")
        vars(self).update(self._facts | facts)

    def at(self, place: str) -> Self:
        """Name the object that the error is about, and return the error."""
        self.place = place
        return self

    def advise(self, advice: str) -> Self:
        """Say what to do about the error, and return the error."""
        self.advice = advice
        return self

    @property
    def reason(self) -> str:
        """The message without `advice`, for logs and for reports that give their own."""
        message = super().__str__()
        return f"{self.place}: {message}" if self.place else message

    def __str__(self) -> str:
        return f"{self.reason}. {self.advice}" if self.advice else self.reason


class FormatError(PulseError):
    """The bytes do not follow the format.

    Attributes:
        key: The object in the store.
        part: The id of the part.
        tensor: The name of the tensor.
    """

    key: str | None
    part: str | None
    tensor: str | None


class ChecksumError(FormatError):
    """The bytes differ from those that were written.

    Attributes:
        expected: The hash of the bytes that were written.
        actual: The hash of these bytes.
        section: The number of the section of the part that is damaged.
    """

    expected: str | None
    actual: str | None
    section: int | None


class SignatureError(FormatError):
    """A record is not signed, or signed by a key that is not trusted.

    Attributes:
        public_key: The key that signed it, as 64 hexadecimal digits; None if the record is not signed.
    """

    public_key: str | None


class UnsupportedError(FormatError):
    """A format version, codec or dtype that this reader does not know."""


class LimitError(FormatError):
    """A count, size or ratio is beyond what a reader accepts.

    Attributes:
        value: What was found.
        limit: The most that is accepted.
    """

    value: int | None
    limit: int | None


class ChainError(PulseError):
    """The bytes are good, but they cannot be applied to the local state.

    Attributes:
        key: The record in the store.
        version: The version that the record is for.
        expected: The run, layout or state that is needed, by its id or digest.
        actual: The one that was found.
    """

    key: str | None
    version: int | None
    expected: str | None
    actual: str | None


class BaseMismatchError(ChainError):
    """The local state is not the one that the patch was made against (`expected`, `actual`)."""


class MissingLinkError(ChainError):
    """No published path leads from the local version to the one asked for (`version`)."""


class RunChangedError(ChainError):
    """The run at a location is not the one that was followed so far (`version`: the local one).

    The local weights are unchanged. `sync(follow_replaced=True)` starts over from an anchor of what is there now.
    A publisher raises this if it is not the run of the trainer's checkpoint (`version`: the checkpoint's).

    Attributes:
        run: The id of the run that is there now.
    """

    run: str | None


class RunReplacedError(RunChangedError):
    """The location holds another run than before (`expected`, `actual`: run ids)."""


class RunForkedError(RunChangedError):
    """The local version is published with another state: the run was continued from a backup (`expected`, `actual`)."""


class RunRolledBackError(RunChangedError):
    """The newest published version is older than the local one: the run was restored from a backup.

    Attributes:
        newest: The newest published version.
    """

    newest: int | None


class StoreError(PulseError):
    """The store could not do what was asked.

    Attributes:
        key: The object, or the prefix, that was asked for.
        retryable: Whether the same call may succeed a little later.
    """

    key: str | None
    retryable: bool


class NotFoundError(StoreError):
    """There is no such object (`key`)."""


class NothingPublishedError(NotFoundError):
    """No version that can be synced is published at a location, or not yet.

    Attributes:
        location: The address or folder of the run.
        version: A version that is published, but cannot be reached before the first anchor is; None if there is none.
    """

    location: str | None
    version: int | None


class MissingBucketError(StoreError):
    """The bucket of an object store does not exist.

    It is not a NotFoundError: for readers and publishers, a missing object is a normal answer of a store.
    """


class ConflictError(StoreError):
    """The object to create exists already (`key`)."""


class AnotherPublisherError(ConflictError):
    """Another publisher writes to the same run: it has the lease of the run, or the version to publish exists already.

    Attributes:
        version: The version that exists; None, if it is about the lease.
    """

    version: int | None


class PointerMovedError(ConflictError):
    """Another process moved the pointer first; it stays where that process moved it to.

    Attributes:
        pointer: The name of the pointer.
        version: The version that it names now.
    """

    pointer: str | None
    version: int | None


class StaleWeightsError(PulseError):
    """The local weights are further from the version to follow than `max_staleness` allows.

    Attributes:
        version: The local version; None if nothing was synced yet.
        newest: The version to follow: the newest one, or the one that the pointer names.
        max_staleness: The number of versions by which the local version may differ from it.
    """

    version: int | None
    newest: int | None
    max_staleness: int | None


class ClosedError(PulseError):
    """A Publisher or Subscriber was closed, belongs to another process, or the interpreter is about to exit."""


class StateError(PulseError):
    """The tensors do not fit the run: a name, dtype, shape or memory layout.

    Attributes:
        tensor: The name of the tensor.
    """

    tensor: str | None


class GroupError(PulseError):
    """The processes of a group did not meet in time, or one of them failed; no weights have changed.

    Attributes:
        rank: The rank of this process.
        rejoin: Whether others are already waiting in a new group: the same call can be repeated at once.
    """

    rank: int | None
    rejoin: bool


class RoundError(PulseError):
    """A round was not completed by this trainer, and its state has not changed.

    Other trainers may have completed it: the next attempt, or `rejoin()`, takes that into account.

    Attributes:
        round: The number of the round.
    """

    round: int | None


class VerificationError(PulseError):
    """The weights after a write differ from the publisher's; they have been rolled back, unless `torn` is True.

    Attributes:
        key: The record in the store.
        version: The version that was applied.
        tensor: The name of a tensor that differs.
        expected: The digest of the publisher's state.
        actual: The digest of the state that was found.
        torn: Whether loading an anchor failed halfway. The weights are then between two versions; do not use them until
            a sync succeeds.
    """

    key: str | None
    version: int | None
    tensor: str | None
    expected: str | None
    actual: str | None
    torn: bool
