"""The installed verl has the interface that was recorded, and the record has everything that the adapter relies on."""

from importlib.metadata import version
from pathlib import Path

import verl

from tests.integrations.verl.record_interface import ASKED, SAID, load, record
from tests.integrations.vllm.record_interface import reader


def test_the_installed_verl_has_the_interface_that_was_recorded() -> None:
    recorded, entry = load()
    folder = Path(verl.__file__).parents[1]
    assert version("verl") == recorded, (
        f"verl {version('verl')} was not recorded: read what has changed in the files of record_interface.py, then run "
        f"python -m tests.integrations.verl.record_interface {version('verl')} {folder}"
    )
    now = record(reader(folder))
    assert {name for name in entry.keys() | now.keys() if now.get(name) != entry.get(name)} == set()


def test_every_file_and_line_that_the_adapter_relies_on_is_in_the_record() -> None:
    _, entry = load()
    assert {path for path in {*ASKED, *SAID} if f"sha256 of verl/{path}" not in entry} == set()
    said = [line for lines in SAID.values() for line in lines]
    assert [line for line in said if not any(name.endswith(f" has {line!r}") for name in entry)] == []


def test_an_engine_of_verl_must_define_these_and_no_more() -> None:
    _, entry = load()
    place = "verl.checkpoint_engine.base:CheckpointEngine."
    abstract = {name.removeprefix(place) for name, said in entry.items() if place in name and "abstractmethod" in said}
    verbs = {"prepare", "build_topology", "init_process_group", "send_weights", "receive_weights", "finalize"}
    assert abstract == verbs
