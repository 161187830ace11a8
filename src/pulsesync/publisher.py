"""The trainer's end: find what changed, encode it, write the body, then create the manifest that makes it a version."""

import operator
import secrets
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any, get_args

from pulsesync import chain, digest
from pulsesync.errors import ConflictError, NotFoundError, StateError, StoreError
from pulsesync.format import layout as layouts
from pulsesync.format import patch
from pulsesync.format.history import History
from pulsesync.format.layout import Layout
from pulsesync.format.manifest import MAX_VERSION, Base, Manifest, PartRef
from pulsesync.model import Bits, TensorSpec
from pulsesync.state import State, Transition
from pulsesync.store import Store, open_store
from pulsesync.tensors import view_bits

Cuts = int | Sequence[int]  # how many even pieces, or the borders between them


@dataclass(frozen=True)
class PublishReport:
    """What a publish did."""

    version: int
    changed: int  # weights
    total: int  # weights
    payload_bytes: int  # all that the version added to the store
    full_bytes: int  # what the whole state would be
    encode_s: float
    store_s: float

    @property
    def density(self) -> float:
        return self.changed / self.total if self.total else 0.0


class Publisher:
    """Publishes a changing state into a new run. Keeps one copy of the state: the last version committed.

        pub = Publisher("runs/one")
        report = pub.publish(model, step=step)

    grid maps name patterns to how a tensor is cut into tiles, by rows and by columns: a number of even pieces, for
    readers that hold slices, of which none gets less than min_tile weights; or the borders themselves, those of a
    sharded trainer, say. The first pattern that fits a name counts.
    """

    def __init__(
        self,
        location: str | Store,
        *,
        codec: patch.CodecName = "auto",
        grid: Mapping[str, tuple[Cuts, Cuts]] | None = None,
        min_tile: int = 1 << 20,
    ) -> None:
        if codec not in get_args(patch.CodecName):
            raise ValueError(f"no codec {codec!r}; there are {', '.join(get_args(patch.CodecName))}")
        self.store = open_store(location) if isinstance(location, str) else location
        self.codec: patch.CodecName = codec
        self.grid = dict(grid or {})
        self.min_tile = min_tile
        self.run = secrets.token_hex(16)
        self._state: State | None = None
        self._last: Manifest | None = None
        self._pending: tuple[Manifest, State, Transition | None] | None = None  # sent, perhaps committed

    def publish(self, source: Any, *, step: int = 0) -> PublishReport:
        """Publish a module, state dict or mapping of arrays as the next version; the first one whole.

        Raises:
            StateError: tensors came, went, changed shape or tie; ConflictError: the run has another publisher.
            After any exception the base is still the last version committed: the next publish covers both steps.
        """
        began = time.perf_counter()
        step = _checked(step)
        self._settle()
        views, ties = view_bits(source)
        flats = {name: view.flat for name, view in views.items()}
        specs = [view.spec for view in views.values()]
        if self._state is None or self._last is None:
            return self._publish_first(specs, flats, ties, step, began)
        state, last = self._state, self._last
        _same_tensors(state.layout, specs, ties)
        epoch, index = chain.position(last)
        history = state.history if index > 1 else History()
        remembers = self.codec in ("auto", "history")
        part = patch.encode(
            state.layout, state.layout.tiles, state.flats, flats, state.sums, codec=self.codec,
            history=history if remembers else None,
        )  # fmt: skip
        sums = {**state.sums, **part.sums}
        after = digest.state_digest(state.layout.tiles, sums)
        transition = Transition(part.patches, sums, history.after(part.patches, state.flats), after)
        encoded = time.perf_counter()
        manifest = Manifest(
            run=self.run,
            version=last.version + 1,
            step=step,
            epoch=epoch,
            index=index,
            base=Base(last.version, last.digest),
            layout=state.layout.id,
            parts=(PartRef(part.id, len(part.data)),),
            digest=after,
            history=transition.history.digest() if transition.history.tiles else None,
            created=int(time.time()),
        )
        self._pending = manifest, state, transition
        written = self._commit(manifest, part.data)
        self._advance()
        return _report(state.layout, manifest, transition.changed, written, encoded - began, encoded)

    def _publish_first(
        self, specs: list[TensorSpec], flats: Mapping[str, Bits], ties: Mapping[str, str], step: int, began: float
    ) -> PublishReport:
        layout = layouts.make((self._cut(spec) for spec in specs), ties)
        state = State(layout, {name: flat.copy() for name, flat in flats.items()}, {})
        part = patch.encode_whole(layout, layout.tiles, state.flats, state.sums)
        encoded = time.perf_counter()
        manifest = Manifest(
            run=self.run, version=0, step=step, epoch=0, index=0, base=None, layout=layout.id,
            parts=(PartRef(part.id, len(part.data)),), digest=state.digest, history=None, created=int(time.time()),
        )  # fmt: skip
        self.store.put(chain.layout_key(layout.id), layout.data)
        self._pending = manifest, state, None
        written = len(layout.data) + self._commit(manifest, part.data)
        self._advance()
        total = sum(spec.size for spec in layout.tensors)
        return _report(layout, manifest, total, written, encoded - began, encoded)

    def _commit(self, manifest: Manifest, body: bytes) -> int:
        """Write the body, create the manifest (now the version exists), hint at it; return the bytes added."""
        self.store.put(chain.part_key(manifest.parts[0].id), body)
        data = manifest.build()
        try:
            self.store.create(chain.manifest_key(manifest.version), data)
        except ConflictError as e:
            raise ConflictError(
                f"version {manifest.version} exists already: the run has another publisher, or this is an old run; "
                "publish into a new folder",
                key=chain.manifest_key(manifest.version),
            ) from e
        with suppress(StoreError):  # a hint that may lag; the version is there
            self.store.put(chain.HEAD, str(manifest.version).encode())
        return len(body) + len(data)

    def _advance(self) -> None:
        """Move the base to the version that was just committed; doing it twice does no harm."""
        assert self._pending is not None
        manifest, state, transition = self._pending
        if transition is not None:
            state.commit(transition)
        self._state, self._last, self._pending = state, manifest, None

    def _settle(self) -> None:
        """If the last publish was cut off, find out whether its version came to be, and move the base if it did."""
        if self._pending is None:
            return
        try:
            stored = self.store.get(chain.manifest_key(self._pending[0].version))
        except NotFoundError:
            stored = b""
        if stored == self._pending[0].build():
            self._advance()
        self._pending = None

    def _cut(self, spec: TensorSpec) -> TensorSpec:
        for pattern, (rows, columns) in self.grid.items():
            if fnmatchcase(spec.name, pattern):
                pieces = [cuts if isinstance(cuts, int) else 1 for cuts in (rows, columns)]
                even = layouts.cut_evenly(spec, pieces[0], pieces[1], self.min_tile)
                return replace(
                    even,
                    row_cuts=even.row_cuts if isinstance(rows, int) else tuple(rows),
                    column_cuts=even.column_cuts if isinstance(columns, int) else tuple(columns),
                )
        return spec


def _checked(step: int) -> int:
    if isinstance(step, bool) or not 0 <= (whole := operator.index(step)) <= MAX_VERSION:
        raise ValueError(f"step must be a whole number from 0 to {MAX_VERSION}, not {step!r}")
    return whole


def _report(
    layout: Layout, manifest: Manifest, changed: int, written: int, encode_s: float, encoded: float
) -> PublishReport:
    full = sum(spec.size * spec.kind.itemsize for spec in layout.tensors)
    total = sum(spec.size for spec in layout.tensors)
    store_s = time.perf_counter() - encoded
    return PublishReport(manifest.version, changed, total, written, full, encode_s, store_s)


def _same_tensors(layout: Layout, specs: list[TensorSpec], ties: Mapping[str, str]) -> None:
    before: dict[str, Any] = {spec.name: (spec.dtype, spec.shape) for spec in layout.tensors} | dict(layout.ties)
    now: dict[str, Any] = {spec.name: (spec.dtype, spec.shape) for spec in specs} | dict(ties)
    if before != now:
        names = sorted({name for name, _ in before.items() ^ now.items()})
        raise StateError(f"the tensors of a run stay the same; {names[0]!r} came, went or changed", tensor=names[0])
