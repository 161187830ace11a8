"""The small files that are published with a model (config.json, tokenizer), from the caller, the model and the run.

They are content-addressed objects of the run, and every version names those that belong to it.
"""

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pulsesync.errors import FormatError
from pulsesync.format.manifest import MAX_FILE_BYTES, MAX_FILES, FileRef, Manifest, check_file_names
from pulsesync.run import keys
from pulsesync.store import Store

Files = Mapping[str, bytes | os.PathLike[str]]  # by name: the content, or the path of a file that has it


def put_companions(store: Store, files: Files, source: Any, last: Manifest | None) -> tuple[FileRef, ...]:
    """Write the files that are published with a version: those given, then the source's, then the run's.

    Of several files with one name, in upper or lower case, the first in that order counts.

    Raises: ValueError, TypeError, OSError: a file is too large, of another type, cannot be read, or has a name that the
    format does not allow, or there are too many; StoreError.
    """
    try:
        check_file_names(files.keys())
    except FormatError as e:
        raise ValueError(f"files cannot be published: {e}") from e
    refs = {ref.name.lower(): ref for ref in last.files} if last else {}
    given = {name.lower(): (name, content) for name, content in (*_configs_of(source).items(), *files.items())}
    if len(refs | given) > MAX_FILES:
        raise ValueError(f"a run can have {MAX_FILES} files of the model at most; these are {len(refs | given)}")
    for key, (name, content) in given.items():
        data = _content(name, content)
        refs[key] = FileRef(name, hashlib.sha256(data).hexdigest(), len(data))
        store.put(keys.file_key(refs[key].id), data)
    return tuple(sorted(refs.values(), key=lambda ref: ref.name))


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
