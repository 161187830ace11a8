"""JSON from elsewhere: what is wrong with it is one kind of error, and no module reads it in another way."""

import re
from pathlib import Path

import pytest

import pulsesync
from pulsesync.errors import FormatError, LimitError
from pulsesync.format.json_reader import load_json, read_json

BAD = {
    "empty": b"",
    "cut off": b'{"a": [1',
    "more than one": b"{} {}",
    "no UTF-8": b'"\xff"',
    "nested lists": b"[" * 100_000,
    "nested objects": b'{"a":' * 100_000,
    "a key twice": b'{"a": 1, "a": 2}',
    "not a number": b"[NaN]",
    "infinite": b"-Infinity",
    "a number of thousands of digits": b"9" * 5_000,
}

OWN = {  # modules that call json.loads themselves, and why they may
    "format/json_reader": "is the reader",
    "store/http": "below the format, and catches everything",
    "state/checkpoint_files": "the config of a model may contain Infinity; catches nesting",
    "integrations/sglang": "finds JSON inside a sentence of its own server; messages of the ranks of one process group",
    "integrations/engine/answers": "catches everything",
    "integrations/engine/together": "messages of the ranks of one team",
    "integrations/vllm/plugin": "messages of its own engine",
    "group/agreement": "messages of the ranks of one process group",
    "publish/committed": "messages of the ranks of one team",
    "publish/team": "messages of the ranks of one team",
    "publish/ownership": "messages of the ranks of one team",
}


@pytest.mark.parametrize("data", BAD.values(), ids=BAD)
def test_what_is_wrong_with_json_is_a_format_error(data: bytes) -> None:
    with pytest.raises(FormatError, match="the note"):
        read_json(data, "the note")


def test_json_has_a_limit_and_an_object_is_one() -> None:
    assert read_json(b"[1, 2]", "the note", limit=6) == [1, 2]
    assert load_json(b'{"a": 1}', "the note") == {"a": 1}
    with pytest.raises(LimitError, match="the note can have 5 bytes at most"):
        read_json(b"[1, 2]", "the note", limit=5)
    with pytest.raises(FormatError, match="the note is not a JSON object"):
        load_json(b"[1, 2]", "the note")


def test_no_other_module_reads_json_from_elsewhere_by_itself() -> None:
    """A new one uses the reader, or is added above with the reason why its JSON needs none."""
    folder = Path(pulsesync.__file__).parent
    modules = {path.relative_to(folder).with_suffix("").as_posix(): path for path in folder.rglob("*.py")}
    found = {name for name, path in modules.items() if re.search(r"json\.loads?\(|JSONDecoder", path.read_text())}
    assert {name for name in found if not name.startswith("lab/")} <= OWN.keys()
