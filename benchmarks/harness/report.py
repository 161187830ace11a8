"""What every benchmark prints: a table for people, one line of JSON for programs, and what the figures belong to."""

import json
import os
import platform
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np


def provenance(*packages: str) -> dict[str, Any]:
    """The machine, versions and commit that figures belong to."""
    import pulsesync

    def git(*arguments: str) -> str:
        here = Path(__file__).parent
        return subprocess.run(["git", *arguments], cwd=here, capture_output=True, text=True, check=False).stdout.strip()

    found: dict[str, str | None] = {}
    for package in ("numpy", "numba", "zstandard", *packages):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = None
    return {
        "machine": {"arch": platform.machine(), "system": platform.system(), "cores": len(os.sched_getaffinity(0))},
        "versions": {"python": platform.python_version(), "pulsesync": pulsesync.__version__, **found},
        "commit": git("rev-parse", "--short", "HEAD") + ("+changes" if git("status", "--porcelain", "-uno") else ""),
        "date": time.strftime("%Y-%m-%d"),
    }


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Lay out a table that is also Markdown: names to the left, numbers to the right."""
    wide = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head))]

    def line(row: Sequence[str]) -> str:
        cells = [cell.rjust(wide[i]) if i else cell.ljust(wide[i]) for i, cell in enumerate(row)]
        return f"| {' | '.join(cells)} |"

    rule = f"|{'|'.join('-' * (n + 1) + (':' if i else '-') for i, n in enumerate(wide))}|"
    return "\n".join([line(head), rule, *map(line, rows)])


def json_line(fields: dict[str, Any]) -> str:
    """One line of JSON for programs, with floats rounded to five digits."""

    def short(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: short(inner) for key, inner in value.items()}
        if isinstance(value, list | tuple):
            return [short(inner) for inner in value]
        return float(f"{value:.5g}") if isinstance(value, float) else value

    return json.dumps(short(fields), default=str)


def spread(values: Sequence[float]) -> dict[str, float]:
    """The 20th, 50th and 80th percentile; zeros for no values."""
    p20, p50, p80 = np.percentile(values, (20, 50, 80)) if len(values) else (0.0, 0.0, 0.0)
    return {"p20": float(p20), "p50": float(p50), "p80": float(p80)}


def shown(values: Sequence[float], scale: float = 1.0, digits: int = 3) -> str:
    """The median, with the 20th and 80th percentile in parentheses."""
    if not len(values):
        return "–"
    p20, p50, p80 = (f"{scale * value:,.{digits}f}" for value in spread(values).values())
    return f"{p50} ({p20}–{p80})"


@dataclass
class Rounds:
    """The seconds that one method took in each round, by operation."""

    name: str
    size: int = 0
    seconds: dict[str, list[float]] = field(default_factory=dict)

    def add(self, what: str, seconds: float) -> None:
        self.seconds.setdefault(what, []).append(seconds)

    def spread(self, what: str) -> dict[str, float]:
        return spread(self.seconds[what])

    def median(self, what: str) -> float:
        return self.spread(what)["p50"]

    def shown(self, what: str) -> str:
        return shown(self.seconds[what])

    def over(self, other: "Rounds", what: str) -> float:
        """How many times as long the other method took: the median of the ratios within each round."""
        return float(np.median(np.divide(other.seconds[what], self.seconds[what])))
