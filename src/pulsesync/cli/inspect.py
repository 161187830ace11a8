"""What `pulse inspect` shows: the versions of a run, or the inside of one part."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

from rich.console import Console

from pulsesync import chain
from pulsesync.errors import FormatError, NotFoundError
from pulsesync.format import container, index
from pulsesync.format import layout as layouts
from pulsesync.format import manifest as manifests
from pulsesync.store import LocalStore


def show(path: Path, as_json: bool) -> int:
    """Print a run or a part; exit code 0.

    Raises:
        PulseError: it cannot be read, or its bytes are bad.
    """
    facts = _run(path) if path.is_dir() else _part(path)
    if as_json:
        print(json.dumps(facts))
        return 0
    console = Console(highlight=False, soft_wrap=True)
    rows = facts.pop("versions", None) or facts.pop("tiles")
    for key, value in facts.items():
        console.print(f"{key:12} {value}")
    widths = {key: max(len(key), *(len(str(row[key])) for row in rows)) for key in (rows[0] if rows else ())}
    console.print("\n" + "  ".join(f"{key:>{width}}" for key, width in widths.items()))
    for row in rows:
        console.print("  ".join(f"{row[key]!s:>{width}}" for key, width in widths.items()), markup=False)
    return 0


def _run(folder: Path) -> dict[str, Any]:
    store = LocalStore(folder)
    rows = []
    for key in store.list("manifests/"):
        one = manifests.parse(store.get(key))
        rows.append({
            "version": one.version, "step": one.step, "base": "-" if one.base is None else one.base.version,
            "epoch": f"{one.epoch}.{one.index}", "parts": len(one.parts), "bytes": sum(p.size for p in one.parts),
            "digest": one.digest[:12],
        })  # fmt: skip
    if not rows:
        raise NotFoundError(f"{folder} holds no run: there is no manifest in it", key="manifests/")
    layout = layouts.parse(store.get(chain.layout_key(one.layout)))
    return {
        "run": one.run,
        "tensors": len(layout.tensors),
        "tiles": len(layout.tiles),
        "weights": sum(spec.size for spec in layout.tensors),
        "ties": len(layout.ties),
        "versions": rows,
    }


def _part(path: Path) -> dict[str, Any]:
    try:
        data = path.read_bytes()
    except OSError as e:
        raise NotFoundError(f"cannot read {path}: {e.strerror}", key=str(path)) from e
    header, sections = container.open_part(data)
    store = LocalStore(path.parent.parent)
    try:
        layout = layouts.parse(store.get(chain.layout_key(header.layout)))
    except NotFoundError as e:
        raise FormatError(f"the layout {header.layout[:12]} of this part is not beside it, in ../layouts") from e
    shared, entries = index.parse(sections[0], len(layout.tiles), [len(s) for s in sections])
    return {
        "part": header.id,
        "bytes": len(data),
        "sections": len(sections),
        "index": len(sections[0]),
        "tables": ", ".join(f"{t.dtype} {'x'.join(map(str, t.frequencies.shape))}" for t in shared) or "none",
        "codecs": ", ".join(
            f"{n} {codec.name.lower()}" for codec, n in sorted(Counter(e.codec for e in entries).items())
        ),
        "tiles": [
            {
                "tile": e.tile,
                "tensor": layout.tiles[e.tile].tensor.name,
                "weights": layout.tiles[e.tile].size,
                "codec": e.codec.name.lower(),
                "section": e.section,
                "bytes": e.size,
            }
            for e in entries
        ],
    }
