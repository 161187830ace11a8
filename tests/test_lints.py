"""The checks of `make lint` find what they look for: planted words and broken links."""

from pathlib import Path

from tools.lint.pages import broken_links
from tools.lint.privacy import read_of_others
from tools.lint.words import check_page, check_python


def test_words_are_found_in_literals_docstrings_and_comments_and_not_in_names() -> None:
    source = '''"""A title.

A version
held.
"""
held = told = {"held": 1}
raise ValueError("a rank was"
                 f" told {held}")  # it is
# folded
print(f"{'so many' if held else ''}", "`held` is a name")
'''
    found = [(finding.line, finding.word) for finding in check_python(source)]
    assert found == [(4, "held"), (7, "told"), (9, "folded"), (10, "so many")]


def test_of_a_test_the_words_are_found_in_what_is_no_data() -> None:
    source = """def test_it() -> None:
    "It is held."
    program = "held = 1"  # it is folded
    assert run(program) == "is held", f"{program} was told"
    pytest.skip("so many", reason="it lies beside it")
    raise ValueError("whoever calls it")
"""
    found = [(finding.line, finding.word) for finding in check_python(source, is_test=True)]
    assert found == [(2, "held"), (3, "folded"), (4, "told"), (5, "so many"), (5, "beside"), (6, "whoever")]


def test_words_are_found_in_pages_with_their_lines() -> None:
    page = "# Told\n\n```python\nheld = 1\n# held\n```\n\n```sh\npulse log  # beside\n```\nHe came\nto it. `told`\n"
    found = [(finding.line, finding.word) for finding in check_page(page)]
    assert found == [(1, "Told"), (5, "held"), (9, "beside"), (11, "came to")]


def test_a_link_to_a_missing_file_or_heading_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    (tmp_path / "other.md").write_text("# A heading, `in code`\n")
    page.write_text("[a](other.md#a-heading-in-code) [b](other.md#none) [c](none.md) [d](https://example.org/none)\n")
    assert broken_links(page) == ["other.md#none", "none.md"]


def test_what_is_private_to_another_class_is_found_and_that_of_the_same_class_is_not() -> None:
    source = """from package import _name
import module

class One:
    def __eq__(self, other):
        return isinstance(other, One) and self._x == other._x and super()._x == One._x
    def twin(self, near: "One | None", far: Two):
        made = One()
        return made._x, near._x, (lambda: self._x)(), (lambda made: made._x)(near), far._x
    @classmethod
    def make(cls):
        made = cls.__new__(cls)
        made._x = other._x = 1

module._call(), getattr(far, "_x"), module.__name__, One._x
"""
    found = [(line, expression) for line, _, expression in read_of_others(source)]
    assert found == [
        (1, "from package import _name"),
        (9, "made._x"),
        (9, "far._x"),
        (13, "other._x"),
        (15, "module._call"),
        (15, "getattr(far, '_x')"),
        (15, "One._x"),
    ]
