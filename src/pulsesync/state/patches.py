"""Patches, checked and decoded against live weights: nothing is written before the digest of the result is known.

Several versions can be prepared on top of each other and committed at once, by `WeightState.commit`.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from typing import TypeAlias

from pulsesync.core.types import Sum
from pulsesync.errors import BaseMismatchError, FormatError, PulseError, VerificationError
from pulsesync.format.body import Body
from pulsesync.format.history import History
from pulsesync.format.manifest import Manifest, RecordKind
from pulsesync.state.backend import Delta, EpochHistory, Transition
from pulsesync.state.weights import WeightState

Parts: TypeAlias = Sequence[bytes | memoryview | Body]  # of a version, in the order of its record


class RecordFailed(Exception):  # noqa: N818 - an event of a sync, which no caller sees
    """Fetching, checking or decoding a record failed; a sync then tries without the record."""

    def __init__(self, record: Manifest, cause: PulseError) -> None:
        super().__init__(record, cause)
        self.record, self.cause = record, cause


@contextmanager
def about(record: Manifest) -> Iterator[None]:
    """Note that an error in this block is about a record."""
    try:
        yield
    except PulseError as e:
        raise RecordFailed(record, e) from e


class PatchTransaction:
    """Prepares patches of live weights."""

    def __init__(self, state: WeightState) -> None:
        self._state, self._backend = state, state.backend

    def prepare(self, manifest: Manifest, parts: Parts, after: Transition | None = None) -> Transition:
        """Check and decode a patch against the weights, or what they will be after a transition. Changes nothing.

        Returns the transition from the live weights to the version, including the changes of `after`.

        Raises: BaseMismatchError: it is for another state or history; FormatError: or a subclass, for bad bytes;
        VerificationError: the decoded weights are not those of the record.
        """
        try:
            return self.prepare_all([[(manifest, parts)]], after)
        except RecordFailed as e:
            cause = e.cause
        try:
            raise cause
        finally:
            del cause  # it refers to this frame

    def prepare_all(
        self, groups: Iterable[Sequence[tuple[Manifest, Parts]]], after: Transition | None = None
    ) -> Transition:
        """The same for patches of which each follows the one before it, given in groups that are decoded together.

        All patches of a group are decoded before the first is checked, but they are checked in order.

        Raises: RecordFailed: by the first bad one.
        """
        base = after or self._state.no_changes()
        changes, sums, history = copy(base.changes), base.sums, base.history
        for group in groups:
            for versions in _by_epoch(group):
                changes, sums, history = self._prepare(versions, changes, sums, history)
        return Transition(changes, sums, history, self._backend.count_changed(changes))

    def _prepare(
        self, versions: Sequence[tuple[Manifest, Parts]], changes: Delta, sums: Mapping[int, Sum], history: EpochHistory
    ) -> tuple[Delta, Mapping[int, Sum], EpochHistory]:
        """Prepare consecutive patches of one epoch, or one squashed patch; return changes, sums and history after."""
        first = versions[0][0]
        with about(first):
            history = self._check_base(first, sums, history)
        opened, in_index = [], []
        for manifest, parts in versions:
            with about(manifest):
                opened.append(bodies := self._open(manifest, parts))
                in_index.append(self._digests_in_index(manifest, bodies))
        remembers = first.kind == RecordKind.VERSION
        with about(first):
            found = self._backend.decode(opened, changes, history if remembers else None)
        for n, (manifest, _) in enumerate(versions):
            with about(manifest):
                self._check_base_digest(manifest, sums)
                if n == len(found.digest_changes):
                    assert found.fault is not None
                    raise found.fault
                sums = {**sums, **self.check_digest_changes(found.digest_changes[n], in_index[n], sums)}
                if self._state.whole:
                    self._check_digests(manifest, sums, found.history_digests[n])
        after = found.history if found.history is not None else self._backend.load_history(History())
        return found.changes, sums, after

    def _check_digests(self, manifest: Manifest, sums: Mapping[int, Sum], history: str | None) -> None:
        if (then := self._state.digest_of(sums)) != manifest.digest:
            raise VerificationError(
                "digest mismatch: the decoded weights differ from the manifest; weights unchanged",
                version=manifest.version,
                expected=manifest.digest,
                actual=then,
            )
        if history != manifest.history:
            raise VerificationError(
                "digest mismatch: the history of the epoch differs from the manifest; weights unchanged",
                version=manifest.version,
            )

    def _check_base(self, manifest: Manifest, sums: Mapping[int, Sum], history: EpochHistory) -> EpochHistory:
        """Check that a patch applies to these weights; return the history that it was encoded with."""
        layout, differing_tie = self._state.layout, self._state.differing_tie
        if manifest.base is None:
            raise BaseMismatchError(
                f"version {manifest.version} is not a patch: it cannot be applied to another version",
                version=manifest.version,
            )
        if manifest.layout != layout.id:
            raise BaseMismatchError(
                f"version {manifest.version} has the layout {manifest.layout[:12]}, and the local weights have "
                f"{layout.id[:12]}; a full resync from an anchor is required",
                expected=manifest.layout,
                actual=layout.id,
            )
        if differing_tie:
            raise BaseMismatchError(
                f"a tensor tied to {differing_tie!r} has other weights than it; a full resync from an anchor is "
                "required"
            )
        self._check_base_digest(manifest, sums)
        if manifest.kind == RecordKind.SQUASH or manifest.index == 1:
            return self._backend.load_history(History())
        if manifest.index != history.index + 1:
            raise BaseMismatchError(
                f"version {manifest.version} is patch {manifest.index} of its epoch, and the local weights have "
                f"{history.index} of them; apply patches in order",
                version=manifest.version,
            )
        return history

    def _check_base_digest(self, manifest: Manifest, sums: Mapping[int, Sum]) -> None:
        assert manifest.base is not None
        if self._state.whole and manifest.base.digest != (actual := self._state.digest_of(sums)):
            raise BaseMismatchError(
                f"version {manifest.version} applies to weights with digest {manifest.base.digest[:12]}; the local "
                f"weights have {actual[:12]}: a full resync from an anchor is required",
                expected=manifest.base.digest,
                actual=actual,
            )

    def _open(self, manifest: Manifest, parts: Parts) -> list[Body]:
        bodies = []
        for ref, part in zip(manifest.parts, parts, strict=True):
            if not isinstance(part, Body):
                if ref.data is None and len(part) != ref.size:
                    raise FormatError(f"part {ref.id[:12]} must have {ref.size} bytes; it has {len(part)}", part=ref.id)
                part = Body.of(part, self._state.layout, ref.id)
            if part.index.header.id != ref.id:
                raise FormatError(
                    f"expected part {ref.id[:12]}, but found part {part.index.header.id[:12]}", part=ref.id
                )
            bodies.append(part)
        return bodies

    def _digests_in_index(self, manifest: Manifest, bodies: Sequence[Body]) -> dict[int, Sum]:
        """The digests of local tiles after a patch, from the indexes of its parts. Each tile is in one part only."""
        found: dict[int, Sum] = {}
        for body in bodies:
            entries = {entry.tile: entry.sum for entry in body.index.entries if entry.tile in self._state.places}
            if not found.keys().isdisjoint(entries):
                raise FormatError(f"two parts of version {manifest.version} change the same tile")
            found.update(entries)
        return found

    def check_digest_changes(
        self, digest_changes: Mapping[int, Sum], in_index: Mapping[int, Sum], before: Mapping[int, Sum]
    ) -> dict[int, Sum]:
        """Return the digests that changed tiles will have, computed from the changes.

        Raises: VerificationError: they differ from the index. Only tiles that are completely local can be checked.
        """
        sums = {ordinal: before[ordinal] + by for ordinal, by in digest_changes.items()}
        for ordinal, total in sums.items():
            if self._state.places[ordinal].whole and total != in_index[ordinal]:
                name = self._state.layout.tiles[ordinal].tensor.name
                raise VerificationError(
                    f"digest mismatch: the decoded tensor {name!r} differs from the part's index; weights unchanged",
                    tensor=name,
                )
        return sums


def _by_epoch(versions: Sequence[tuple[Manifest, Parts]]) -> Iterator[Sequence[tuple[Manifest, Parts]]]:
    """Split consecutive versions where one does not continue the history of the one before it."""
    begin = 0
    for n in range(1, len(versions) + 1):
        if n == len(versions) or not _continues(versions[n - 1][0], versions[n][0]):
            yield versions[begin:n]
            begin = n


def _continues(earlier: Manifest, later: Manifest) -> bool:
    """Whether a record is that of the next patch of an epoch."""
    return (
        earlier.kind == later.kind == RecordKind.VERSION
        and later.base is not None
        and later.layout == earlier.layout
        and later.index == earlier.index + 1
    )
