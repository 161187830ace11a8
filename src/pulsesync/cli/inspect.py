"""`pulse inspect`: show what a run, one of its records or one part consists of."""

import json
from collections import Counter
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

from pulsesync.cli.log import rows, utc
from pulsesync.cli.options import Json, NothingThereError, Printer, Trust, Version, no_run, open_place, read_trust
from pulsesync.cli.progress import show_progress
from pulsesync.core.progress import ProgressBars
from pulsesync.errors import FormatError, NotFoundError
from pulsesync.format import container, index
from pulsesync.format import layout as layouts
from pulsesync.format import manifest as manifests
from pulsesync.format.body import Body
from pulsesync.format.index import TileEntry
from pulsesync.format.layout import Layout
from pulsesync.format.manifest import Manifest, RecordKind
from pulsesync.maintain.verify import find_records
from pulsesync.run import keys
from pulsesync.run.reader import RunReader, describe
from pulsesync.store import LocalStore

SHOWN = 100  # versions


def inspect(place: str, *, version: Version = None, trust: Trust = None, as_json: Json = False) -> int:
    """Show what a run, a version or a part consists of, after checking every byte of what is shown.

    Args:
        place: A run, or a file in its `manifests`, `anchors`, `squashes` or `parts`.
        version: Show this version of the run.
        trust: Public key of a publisher to trust, or a file of such keys.
        as_json: Print one JSON object, for machines.

    Raises:
        NothingThereError: there is no run, or no such version.
        PulseError: the run or the file cannot be read, or its bytes are bad.
    """
    if Path(place).is_file():
        facts, table = _file(Path(place), read_trust(trust))
    else:
        records = RunReader(open_place(place), read_trust(trust))
        with show_progress(as_json) as bars:
            facts, table = _run(records, place, bars) if version is None else _version(records, place, version)
    if as_json:
        print(json.dumps(facts))
        return 0
    for key, value in facts.items():
        if key == "created":
            print(f"{key:12} {utc(value)} UTC")
        elif not isinstance(value, list):
            print(f"{key:12} {'-' if value is None else value}")
    if table:
        print()
        Printer(False).table(table)
    return 0


def _run(records: RunReader, place: str, bars: ProgressBars) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    found = find_records(records, SHOWN, bars.report)
    if not found:
        raise NothingThereError(no_run(place), key="manifests/")
    if bad := next((one for one in found if one.fault), None):
        raise FormatError(
            f"{bad.key} in {place}: {bad.fault}; pulse verify {place} lists everything that is damaged", key=bad.key
        )
    whole = [one.record for one in found if one.record]
    newest = next(record for record in reversed(whole) if record.kind == RecordKind.VERSION)
    layout = records.layout(newest.layout)
    facts = {
        "run": newest.run,
        "newest": newest.version,
        "tensors": len(layout.tensors),
        "tiles": layout.tile_count,
        "weights": layout.size,
        "bytes": layout.size_bytes,
        "ties": len(layout.ties),
        "files": ", ".join(file.name for file in newest.files) or "none",
        "versions": [describe(record) for record in whole if record.kind == RecordKind.VERSION],
        "anchors": [describe(record) for record in whole if record.kind == RecordKind.ANCHOR],
        "squashes": [describe(record) for record in whole if record.kind == RecordKind.SQUASH],
    }
    return facts, list(rows(found))


def _version(records: RunReader, place: str, version: int) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    record = records.version(version)
    if record is None:
        raise NothingThereError(
            f"there is no version {version} in {place}: it is not published yet, or was pruned; pulse log lists what "
            "there is"
        )
    facts, parts = _record(record)
    small = [part.data for part in record.parts if part.data is not None]
    if not small:
        return facts, parts
    layout = records.layout(record.layout)
    facts["tiles"] = [row for data in small for row in _tiles(Body.of(data, layout).index.entries, layout)]
    return facts, facts["tiles"] if len(small) == len(parts) else parts


def _record(record: Manifest) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    parts = [
        {"part": part.id, "bytes": part.size, "stored": "parts/" if part.data is None else "in the record"}
        for part in record.parts
    ]
    facts = {
        **describe(record),
        "run": record.run,
        "layout": record.layout,
        "history": record.history,
        "anchor": record.anchor,
        "signed by": record.signed_by,
        "parts": parts,
        "files": [{"file": file.name, "bytes": file.size, "id": file.id} for file in record.files],
    }
    return facts, parts


def _file(path: Path, trust: Collection[str] | None) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    try:
        data = path.read_bytes()
    except OSError as e:
        raise NotFoundError(f"cannot read {path}: {e.strerror}", key=str(path)) from e
    if data.startswith(manifests.MAGIC):
        return _record(manifests.parse(data, trust))
    return _part(path, data)


def _part(path: Path, data: bytes) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    header, sections = container.open_part(data)
    store = LocalStore(path.parent.parent)
    try:
        layout = layouts.parse(store.get(keys.layout_key(header.layout)))
    except NotFoundError as e:
        raise FormatError(
            f"cannot read {path}: the layout {header.layout[:12]} of this part is missing in the folder "
            f"{path.parent.parent / 'layouts'}; inspect the part in its run's folder"
        ) from e
    shared, entries = index.parse(sections[0], layout.tile_count, [len(s) for s in sections])
    tiles = _tiles(entries, layout)
    facts = {
        "part": header.id,
        "bytes": len(data),
        "sections": len(sections),
        "index": len(sections[0]),
        "tables": ", ".join(f"{t.dtype} {'x'.join(map(str, t.frequencies.shape))}" for t in shared) or "none",
        "codecs": ", ".join(
            f"{n} {codec.name.lower()}" for codec, n in sorted(Counter(e.codec for e in entries).items())
        ),
        "tiles": tiles,
    }
    return facts, tiles


def _tiles(entries: Iterable[TileEntry], layout: Layout) -> list[dict[str, Any]]:
    return [
        {
            "tile": e.tile,
            "tensor": tile.tensor.name,
            "weights": tile.size,
            "codec": e.codec.name.lower(),
            "section": e.section,
            "bytes": e.size,
        }
        for e, tile in ((e, layout.tile(e.tile)) for e in entries)
    ]
