"""Everything that people read is in plain English: errors, log messages, help texts, docstrings, comments and pages.

The project once had a dialect of its own. Each row of `ROWS` is a word of it, and what to write instead. What is looked
at is every string literal with a space in it, every docstring and every comment of the package, the examples, the
benchmarks and the tools, and every page; names in the code, and `code` inside a sentence, are not. Of the tests it is
every docstring, comment, message of an assertion or error, and reason to skip: other literals there are data, such as
programs and ids.
"""

import ast
import re
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from io import StringIO
from pathlib import Path

ROOT = Path(__file__).parents[2]
TESTS = ROOT / "tests"


@dataclass(frozen=True)
class Row:
    """A word of the dialect. A space of a pattern stands for any white space, so that phrases may span lines."""

    write: str
    instead_of: str  # a pattern
    planted: str  # a sentence in which it must be found
    allowed: str | None = None  # a pattern around the word, in which it is ordinary English
    ordinary: str = ""  # a sentence in which it must not be found


ROWS = [
    Row(
        "resume, continue",
        r"\b(take|takes|taken|took|taking) ((it|them|(the|a|its|this|that) run) )?up\b",
        "The run is signed: take it up with its key.",
        allowed=r"up (to|space|memory)\b",
        ordinary="A download may take up to 10 s.",
    ),
    Row(
        "resume, continue",
        r"\b(go|goes|gone|going|went) on (with|from)\b",
        "The trainer goes on from version 3.",
        ordinary="Training goes on meanwhile.",
    ),
    Row(
        "send, report, message, show",
        r"\b(told|tell|tells|telling)\b",
        "A rank is told of its tensor.",
        allowed=r"\b(tell|tells|telling)\b[^.]{0,40}\bapart\b",
        ordinary="Their digests tell the two states apart.",
    ),
    Row(
        "sends, reports",
        r"\b(rank|process|trainer|worker|peer)s? (say|says|said)\b",
        "Every rank says what it has.",
        ordinary="The report says how long each rank waited.",
    ),
    Row(
        "path, route",
        r"\b(on|along) (the|its|their|a) way\b"
        r"|\bfinds? (the|its|their) way\b"
        r"|\bways? (through|between|leads?)\b"
        r"|\bthe ways? (of a|from|is|was)\b"
        r"|\b(begins? on|looks? for|took|takes?) (a|another|the) way\b",
        "Nobody begins on a way that is about to end.",
        ordinary="A listener is never in the way, and anchors are made the same way.",
    ),
    Row(
        "local, current, kept",
        r"\bheld\b",
        "The version held is forgotten.",
        allowed=r"\bheld[- ]out\b",
        ordinary="The loss on held-out prompts.",
    ),
    Row(
        "in the background, after, next",
        r"\bbehind\b",
        "Anchors are written behind the versions.",
        allowed=r"\b(stores?|versions?|steps?|rounds?|(fall|leave|lag)s?|left|fell|how far|so far"
        r"|(is|are|be|was|were)( far| further)?) behind(?! the (caller|trainer|versions?)\b)"
        r"|\bbehind it is more than\b"  # a row of `pulse status --help`
        r"|\bbehind (a|an|its own|the|any) ([\w-]+ )?(proxy|server|middleware|firewall|balancer)\b",
        ordinary="A worker that is two versions behind, or is far behind, behind a reverse proxy.",
    ),
    Row(
        "concurrently, next to, compared with",
        r"\bbeside\b",
        "Encoding and sending go on beside each other.",
        ordinary="Besides, the link is slow.",
    ),
    Row(
        "diverge, differ",
        r"\bparted\b|\bpart (company|ways)\b|\b(can|could|cannot|may|would|never) part\b",
        "Code and document cannot part.",
        ordinary="A part of the model, and all parts from the disk.",
    ),
    Row(
        "agree on, yield, reach, become",
        r"\b(come|comes|came|coming) to\b",
        "The ranks came to different weights.",
        allowed=r"\b(when it comes to|come to (rest|life))\b",
        ordinary="When it comes to memory, less is better.",
    ),
    Row(
        "rank 0, coordinator",
        r"\bthe lead\b|\blead rank\b",
        "The lead decides for all.",
        ordinary="Records lead to a version.",
    ),
    Row(
        "roll back, restore",
        r"\b(put|puts|putting) ((it|them|weights|all|everything|the \w+) )?back\b|\bthe way back\b",
        "The weights were put back.",
        ordinary="The weights are rolled back.",
    ),
    Row(
        "tracked weights",
        r"\b(known|remembered) weights?\b",
        "Remembered weights are coded by their history.",
        ordinary="The last change of each weight is remembered.",
    ),
    Row(
        "coalesced",
        r"\b(folds|folded|folding)\b",
        "Three steps were folded into one version.",
        ordinary="A folder, and the fold of an array.",
    ),
    Row(
        "caller, another process, every rank",
        r"\b(whoever|whomever|somebody|anybody|everybody)\b",
        "The anchor is finished by whoever opens it.",
        ordinary="Someone with a clock.",
    ),
    Row(
        "N, this many, the given number of",
        r"\bso many\b",
        "Wait for so many seconds.",
        ordinary="As many as there are ranks.",
    ),
    Row(
        "module",
        r"\brooms\b|\b(this|each|every|another) room\b",
        "The records that rooms hand to each other.",
        ordinary="There is no room for it on the disk.",
    ),
    Row(
        "anchor, a full checkpoint, the full state",
        r"\bwhole states?\b|\b(loads?|fetche?s?) everything\b",
        "An anchor is a whole state.",
        ordinary="Close sends everything that is queued.",
    ),
    Row(
        "who may or must do it, in a plain sentence",
        r"\b(publisher|rank|trainer|worker|process|caller|reader|store|host|server)'s to \w+"
        r"|\b(is|are) (not )?(its|theirs|yours) to \w+",
        "Version 12 is not this publisher's to make.",
        ordinary="The trainer's step is added to its total.",
    ),
]


@dataclass(frozen=True)
class Finding:
    """A word of the dialect in a file."""

    line: int
    word: str
    write: str


def find_words(text: str) -> Iterator[tuple[int, Row, str]]:
    """The words of the dialect in a text: how far in each begins, its row, and how it is written there."""
    if not _ANY.search(text):  # as in almost every text
        return
    plain = re.sub(r"`[^`\n]*`", lambda code: "`" * len(code[0]), text)
    for row in ROWS:
        left = plain
        if row.allowed:
            left = _pattern(row.allowed).sub(lambda ordinary: "`" * len(ordinary[0]), plain)
        yield from ((found.start(), row, found[0]) for found in _pattern(row.instead_of).finditer(left))


@cache
def _pattern(phrase: str) -> re.Pattern[str]:
    return re.compile(re.sub(r" (?![^\[]*\])", r"\\s+", phrase), re.IGNORECASE)


_ANY = _pattern("|".join(row.instead_of for row in ROWS))


def check_text(text: str, first_line: int = 1) -> list[Finding]:
    return [
        Finding(first_line + text.count("\n", 0, begin), " ".join(word.split()), row.write)
        for begin, row, word in find_words(text)
    ]


def check_python(source: str, first_line: int = 1, *, is_test: bool = False) -> list[Finding]:
    """The findings in string literals and comments; of a test, in those literals alone that are no data."""
    tree = ast.parse(source)
    roots = _texts_of_a_test(tree) if is_test else [tree]
    pieces = {id(piece) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for piece in node.values}
    found = []
    for node in (node for root in roots for node in ast.walk(root)):
        if isinstance(node, ast.JoinedStr):
            text = "".join(str(piece.value) if isinstance(piece, ast.Constant) else "``" for piece in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in pieces:
            text = node.value
        else:
            continue
        if " " in text.strip():
            spans_lines = text.count("\n") == (node.end_lineno or node.lineno) - node.lineno
            found += check_text(text if spans_lines else text.replace("\n", " "), node.lineno)
    found += [finding for line, text in _comments(source) for finding in check_text(text, line)]
    moved = [Finding(first_line - 1 + finding.line, finding.word, finding.write) for finding in found]
    return sorted(moved, key=lambda finding: finding.line)


def _texts_of_a_test(tree: ast.AST) -> Iterator[ast.AST]:
    """The docstrings, the messages of assertions and errors, and the reasons to skip."""
    for node in ast.walk(tree):
        match node:
            case ast.Expr(ast.Constant(str()) as text):
                yield text
            case ast.Assert(msg=ast.expr() as text) | ast.Raise(exc=ast.expr() as text):
                yield text
            case ast.keyword("reason", text):
                yield text
            case ast.Call(ast.Attribute(ast.Name("pytest"), "skip" | "fail")):
                yield from node.args


def _comments(source: str) -> Iterator[tuple[int, str]]:
    """Comments with their first lines; those on lines that follow each other are one."""
    begun, lines = 0, list[str]()
    for token in tokenize.generate_tokens(StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            line = token.start[0]
            if lines and line != begun + len(lines):
                yield begun, "\n".join(lines)
                lines = []
            begun = begun if lines else line
            lines.append(token.string.lstrip("#"))
    if lines:
        yield begun, "\n".join(lines)


def check_page(text: str) -> list[Finding]:
    """The findings in a page; of Python in it, those in its string literals and comments."""
    found, at = [], 0
    for block in re.finditer(r"^```(?:python|py)\b.*\n((?:.*\n)*?)```", text, re.MULTILINE):
        found += check_text(text[at : block.start()], 1 + text.count("\n", 0, at))
        found += _check_block(block[1], 1 + text.count("\n", 0, block.start(1)))
        at = block.end()
    return found + check_text(text[at:], 1 + text.count("\n", 0, at))


def _check_block(source: str, first_line: int) -> list[Finding]:
    try:
        return check_python(source, first_line)
    except SyntaxError:  # two columns, or an outline: names in it are read as words
        return check_text(source, first_line)


def read_by_people() -> list[Path]:
    """All pages, and the Python files of the packages, examples, benchmarks, tools and tests, except this one."""
    files = list(ROOT.glob("*.md"))
    for folder in ("src", "lab", "docs", "examples", "benchmarks", "tools"):
        files += [path for kind in ("*.py", "*.md") for path in (ROOT / folder).rglob(kind)]
    files += TESTS.rglob("*.py")
    examples = {Path(__file__), TESTS / "test_lints.py"}  # of the words
    return sorted(path for path in files if "__pycache__" not in path.parts and path not in examples)


def check_file(path: Path) -> list[str]:
    text = path.read_text()
    found = (
        check_page(text)
        if path.suffix == ".md"
        else check_python(text, is_test="tests" in path.relative_to(ROOT).parts)
    )
    return [f"{path.relative_to(ROOT)}:{one.line}: {one.word!r}; write: {one.write}" for one in found]


def check() -> list[str]:
    """The findings in all files; and rows whose own examples they get wrong."""
    wrong = [
        f"tools/lint/words.py: the row {row.write!r} does not find {row.planted!r}, or finds {row.ordinary!r}"
        for row in ROWS
        if row.write not in [found.write for found in check_text(row.planted)]
        or row.write in [found.write for found in check_text(row.ordinary)]
    ]
    return wrong + [finding for path in read_by_people() for finding in check_file(path)]
