"""How a version is committed: its record, and the order in which a publisher writes and reads objects."""

import logging
import secrets
import time
from collections.abc import Sequence

from pulsesync.errors import AnotherPublisherError, ConflictError, FormatError, NotFoundError, StoreError
from pulsesync.format import manifest as manifests
from pulsesync.format import patch
from pulsesync.format.diff import Diff
from pulsesync.format.epochs import EPOCH_PATCHES
from pulsesync.format.history import History
from pulsesync.format.manifest import BaseRef, FileRef, Manifest, PartRef
from pulsesync.format.patch import CodecName, EncodedPart
from pulsesync.format.weights import by_block
from pulsesync.run import keys
from pulsesync.state.backend import Transition
from pulsesync.state.weights import WeightState
from pulsesync.store import Store

logger = logging.getLogger(__name__)


def encode_next(
    state: WeightState, last: Manifest, diffs: Sequence[Diff], codec: CodecName
) -> tuple[EncodedPart, Transition]:
    """Encode the patch from the last version to the next, of a state or of this rank's part of one. Changes nothing."""
    _, index = last.next_patch
    history = state.history if index > 1 else History()
    known = history if codec in ("auto", "history") else None
    part = patch.encode_diff(state.layout, diffs, state, state.sums, codec=codec, history=known)
    sums = {**state.sums, **part.sums}
    changes = by_block(part.patches)
    return part, Transition(changes, sums, history.after(part.patches, state), state.backend.count_changed(changes))


def next_record(
    last: Manifest,
    step: int,
    parts: tuple[PartRef, ...],
    state_digest: str,
    history: str | None,
    anchor: int | None,
    files: tuple[FileRef, ...],
    lowest_step: int | None = None,
) -> Manifest:
    """Return the record of a patch to the last version; lowest_step: of all the steps that are in it."""
    epoch, index = last.next_patch
    return Manifest(
        run=last.run,
        version=last.version + 1,
        step=step,
        epoch=epoch,
        index=index,
        base=BaseRef(last.version, last.digest),
        layout=last.layout,
        parts=parts,
        digest=state_digest,
        history=history,
        created=int(time.time()),
        anchor=anchor,
        files=files,
        rewound_at=_rewound_at(last, step if lowest_step is None else lowest_step),
        epoch_patches=last.epoch_patches,
    )


def _rewound_at(last: Manifest, lowest_step: int) -> int | None:
    """Return the newest version at which the step went back, up to the version after the last one."""
    return last.version + 1 if lowest_step < last.step else last.rewound_at


def root_record(
    after: Manifest | None,
    step: int,
    layout: str,
    state_digest: str,
    anchor: int | None,
    files: tuple[FileRef, ...],
    epoch_patches: int = EPOCH_PATCHES,
) -> Manifest:
    """Return the record of a state that has no base, in a new run or after the last version of one.

    Its epoch is new: the last version may have started an epoch, whose anchor would have the key of the root's anchor.
    """
    return Manifest(
        run=after.run if after else secrets.token_hex(16),
        version=after.version + 1 if after else 0,
        step=step,
        epoch=after.next_patch[0] + 1 if after else 0,
        index=0,
        base=None,
        layout=layout,
        parts=(),
        digest=state_digest,
        history=None,
        created=int(time.time()),
        anchor=anchor,
        files=files,
        rewound_at=_rewound_at(after, step) if after else None,
        epoch_patches=epoch_patches,
    )


def is_committed(store: Store, version: int, data: bytes) -> bool:
    """Return whether this record is stored, if the answer to its creation was lost. Raises: StoreError."""
    try:
        stored = store.get(keys.manifest_key(version), 0, manifests.MAX_BYTES + 1)
    except NotFoundError:
        return False
    if stored != data:
        try:
            manifests.parse(stored)  # that of another publisher
        except FormatError as e:
            raise StoreError(
                f"the record of version {version} in the store cannot be read, so it is not known whether that version "
                "was committed; publish again",
                retryable=True,
            ) from e
    return stored == data


def create(store: Store, manifest: Manifest, data: bytes, after: Manifest | None) -> None:
    """Commit a version whose parts are in the store: write its start, its record and the head.

    Raises: AnotherPublisherError: the version exists; or the version before it is gone, because others have published
    for so long that it was pruned. StoreError.
    """
    key = keys.manifest_key(manifest.version)
    if manifest.at_start or manifest.history is None:
        store.put(keys.start_key(manifest.digest), str(manifest.version).encode())
    try:
        if after is not None:
            store.get(keys.manifest_key(after.version), 0, 1)
        store.create(key, data)
    except (ConflictError, NotFoundError) as e:
        found = "already exists" if isinstance(e, ConflictError) else "cannot be created, because its base was pruned"
        raise AnotherPublisherError(
            f"version {manifest.version} {found}: another publisher is writing to this run. What it published "
            "is unchanged, and these weights were not published. Decide which trainer's weights the workers should "
            "have, and stop the other one; a new Publisher then adds its weights after the newest version. Or publish "
            "to another location",
            key=key,
            version=manifest.version,
        ) from e
    try:
        store.put(keys.HEAD, str(manifest.version).encode())
    except StoreError as e:  # the head may lag; the version is committed
        logger.warning("Version %d is committed, but the head could not be updated: %s", manifest.version, e)
