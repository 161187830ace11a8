"""The benchmarks are found, say what they answer, and take the options that --quick gives them."""

import ast
import re
import sys
from pathlib import Path

import pytest

from benchmarks.harness import command, report, save

ROOT = Path(__file__).parents[1]
FOUND = command.find()


def test_every_script_is_listed_with_a_sentence() -> None:
    listed = command.listing()
    for name, path in FOUND.items():
        line = re.search(rf"^  {name} +(.*)$", listed, re.MULTILINE)
        assert line is not None, name
        assert len(line[1].split()) > 3, name
        assert command.docstring(path).split("\n\n")[0].rstrip().endswith(("?", ".")), name
    assert len(FOUND) >= 30


def test_what_is_not_listed_is_no_script() -> None:
    modules = [path for folder in command.FOLDERS for path in (ROOT / "benchmarks" / folder).glob("*.py")]
    assert len({path.stem for path in modules if path in FOUND.values()}) == len(FOUND)  # each name once
    for path in set(modules) - set(FOUND.values()):
        assert "add_argument(" not in path.read_text() or path.stem == "fleet", path


def test_quick_gives_options_that_the_benchmark_has() -> None:
    shared = (ROOT / "benchmarks/loco/fleet.py").read_text()  # adds options to two of them
    for name, path in FOUND.items():
        tree = ast.parse(path.read_text() + (shared if "fleets.arguments(" in path.read_text() else ""))
        assigned = [node for node in tree.body if isinstance(node, ast.Assign)]
        (quick,) = (node.value for node in assigned if getattr(node.targets[0], "id", "") == "QUICK")
        calls = (node for node in ast.walk(tree) if isinstance(node, ast.Call))
        adds = [node for node in calls if getattr(node.func, "attr", "") == "add_argument"]
        known = {arg.value for node in adds for arg in node.args if isinstance(arg, ast.Constant)}
        assert {option for option in ast.literal_eval(quick) if option.startswith("--")} <= known, name


def test_one_takes_quick_and_shows_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        command.main(["costs", "--help"])
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    assert "--quick" in shown
    assert "--cases" in shown


def test_what_is_missing_is_named_with_an_exit_code_of_its_own(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "keras", None)
    assert command.main(["keras", "--quick"]) == 77
    assert capsys.readouterr().err == "keras needs the package keras\n"


def test_figures_are_printed_as_a_table_and_saved_as_they_were_printed() -> None:
    assert report.table(["a", "b"], [["one", "22"]]) == "| a   |  b |\n|-----|---:|\n| one | 22 |"
    long = {"points": [{"name": "a", "seconds": [0.25 * i for i in range(100)]}, {"name": "b", "seconds": []}]}
    text, objects = save.split(["a table", report.json_line(long), "an end"])
    assert (text, objects) == (["a table", "an end"], [long])
    assert max(map(len, save.pretty(long).splitlines())) <= save.WIDTH
