"""All that a publisher computes for a version: what the benchmarks of codecs measure."""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pulsesync.core import digest
from pulsesync.core.types import Sum
from pulsesync.format import patch
from pulsesync.format.history import History
from pulsesync.format.layout import Layout
from pulsesync.format.manifest import BaseRef, Manifest, PartRef


@dataclass(frozen=True)
class Published:
    """A version as it is in a store, and the state of its publisher afterwards."""

    manifest: bytes
    part: bytes | memoryview
    changed: int
    sums: dict[int, Sum]
    digest: str
    history: History


def publish(
    layout: Layout, before: Mapping[str, Any], after: Mapping[str, Any], sums: Mapping[int, Sum], history: History,
    *, codec: patch.CodecName, base: BaseRef, remembers: bool,
) -> Published:  # fmt: skip
    """Compare two states, encode a patch, and write its record; the base does not change."""
    known = history if remembers else None
    part = patch.encode(layout, layout.tiles, before, after, sums, codec=codec, history=known)
    new_sums = {**sums, **part.sums}
    state = digest.state_digest(layout.tables, new_sums.values())
    later = history.after(part.patches, before)
    manifest = Manifest(
        run="0" * 32, version=base.version + 1, step=base.version, epoch=0, index=history.index + 1, base=base,
        layout=layout.id, parts=(PartRef(part.id, len(part.data)),), digest=state,
        history=later.digest() if later.tiles else None, created=int(time.time()),
    )  # fmt: skip
    changed = sum(one.changed for one in part.patches)
    return Published(manifest.build(), part.data, changed, new_sums, state, later)
