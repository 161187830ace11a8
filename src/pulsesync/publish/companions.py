"""The small files that are published with a model (config.json, tokenizer), from the caller, the model and the run.

They are content-addressed objects of the run, and every version names those that belong to it.
"""

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pulsesync.format.manifest import MAX_FILE_BYTES, FileRef, Manifest
from pulsesync.run import keys
from pulsesync.store import Store

Files = Mapping[str, bytes | os.PathLike[str]]  # by name: the content, or the path of a file that has it


def put_companions(store: Store, files: Files, source: Any, last: Manifest | None) -> tuple[FileRef, ...]:
    """Write the files that are published with a version: those given, then the source's, then the run's.

    Of several files with one name, the first in that order counts.

    Raises:
        ValueError, TypeError, OSError: a file is too large, of another type, or cannot be read; StoreError.
    """
    refs = {ref.name: ref for ref in last.files} if last else {}
    for name, given in {**_configs_of(source), **files}.items():
        data = _content(name, given)
        refs[name] = FileRef(name, hashlib.sha256(data).hexdigest(), len(data))
        store.put(keys.file_key(refs[name].id), data)
    return tuple(refs[name] for name in sorted(refs))


def _content(name: str, given: bytes | os.PathLike[str]) -> bytes:
    if isinstance(given, str):
        raise TypeError(f"files[{name!r}] must be bytes or a pathlib.Path; got the text {given[:80]!r}")
    size = os.stat(given).st_size if isinstance(given, os.PathLike) else len(given)
    if size > MAX_FILE_BYTES:
        raise ValueError(f"files[{name!r}] has {size} bytes; a file of a run must have at most {MAX_FILE_BYTES}")
    return Path(given).read_bytes() if isinstance(given, os.PathLike) else given


def _configs_of(source: Any) -> dict[str, bytes]:
    """Return the configurations that a model can write, as Hugging Face models can, by their names in a checkpoint."""
    found = {}
    for name in ("config", "generation_config"):
        to_json = getattr(getattr(source, name, None), "to_json_string", None)
        if callable(to_json):
            found[f"{name}.json"] = to_json().encode()
    return found
