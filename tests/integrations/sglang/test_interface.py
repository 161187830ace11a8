"""The installed SGLang has the interface that was recorded, and the record has all that the adapter relies on."""

from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.integrations.sglang.record_interface import ASKED, CALLED, SAID, load, record
from tests.integrations.vllm.record_interface import reader


def test_the_installed_sglang_has_the_interface_that_was_recorded() -> None:
    found = find_spec("sglang")
    if found is None or found.origin is None:
        pytest.skip("SGLang is not installed: its interface is UNTESTED here; run make test-sglang")
    recorded, entry = load()
    folder = Path(found.origin).parents[1]
    assert version("sglang") == recorded, (
        f"SGLang {version('sglang')} was not recorded: read what has changed in the files of record_interface.py, then "
        f"run python -m tests.integrations.sglang.record_interface {version('sglang')} {folder}"
    )
    now = record(reader(folder))
    assert {name for name in entry.keys() | now.keys() if now.get(name) != entry.get(name)} == set()


def test_everything_that_the_adapter_relies_on_is_in_the_record() -> None:
    _, entry = load()
    wanted = [f"{path}:{name}" for path, names in ASKED.items() for name in names if not name.endswith(".*")]
    wanted += [f"{path} has {line!r}" for path, lines in SAID.items() for line in lines]
    wanted += [f"sha256 of {path}" for path in ASKED] + CALLED
    assert [name for name in wanted if name not in entry] == []
