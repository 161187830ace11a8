"""`pulse study`: tables in the terminal, and files: a recording, CSV, Parquet, a page with plots."""

import json
import re
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

from cyclopts import App
from rich.console import Console

from pulsesync.cli.options import (
    Amount,
    Count,
    Flag,
    Json,
    Natural,
    NothingThereError,
    Trust,
    UsageError,
    open_place,
    read_trust,
)
from pulsesync.cli.progress import show_progress
from pulsesync.errors import NotFoundError, StoreError
from pulsesync_lab.cli.experiment import experiment
from pulsesync_lab.study.recording import Recording
from pulsesync_lab.study.report import rows, tables
from pulsesync_lab.study.report.page import write_report
from pulsesync_lab.study.sources import MeasureSettings, files_at, open_recordings

WIDTH = 120  # of tables that are not printed to a terminal


@dataclass(frozen=True)
class StudyOutputs:
    """What to write, and the learning rate for recordings that do not contain it."""

    out: Path | None = None
    csv: bool = False
    parquet: bool = False
    html: Path | None = None
    lr: float | None = None


app = App(name="study")
app.command(experiment)


@app.default
def study(
    *places: str,
    out: Path | None = None,
    csv: Flag = False,
    parquet: Flag = False,
    html: Path | None = None,
    dtype: Literal["BF16", "F16"] = "BF16",
    lr: Amount | None = None,
    sample: Natural = 1 << 20,
    headers: Flag = False,
    trust: Trust = None,
    limit: Count = 0,
    as_json: Json = False,
) -> int:
    """Show how many weights change from step to step, where, by how much, and what it costs to send them.

    PLACES are files that a Recorder wrote (*.jsonl; the files of a run's ranks are added up, those of several runs are
    compared), a run, or safetensors checkpoints: files or folders in order, or one folder with checkpoint-100,
    step_200 and so on. A run or checkpoints are measured now, which reads every version or checkpoint once.

    Args:
        places: What to study.
        out: Folder for the recording, the report and, if asked for, the tables; not one that PLACES are read from.
        csv: Write three CSV tables: steps, tensors, exponents.
        parquet: The same as Parquet. Needs pyarrow: pip install 'pulsesync-lab[study]'.
        html: File for the report: one page with plots that needs nothing else.
        dtype: The dtype of inference, if checkpoints are in FP32; others are compared in the dtype that most weights
            have.
        lr: Learning rate, for the theory's curve of Adam, if the recording does not contain it.
        sample: Number of weights that are sampled for windows of several steps and other dtypes.
        headers: Read only the headers of a run's patches: quick, but without what only the weights can show.
        trust: Public key of a publisher to trust, or a file of such keys.
        limit: Study this number of the newest steps; 0 for all.
        as_json: Print one JSON object for each recording, for machines.

    Raises:
        UsageError: there is nothing to study, or the places cannot be combined.
        NothingThereError: there is no such run or file.
        PulseError: something cannot be read or written.
    """
    wanted = StudyOutputs(out, csv, parquet, html, lr)
    if (wanted.csv or wanted.parquet) and wanted.out is None:
        raise UsageError("--csv and --parquet write several files: give a folder for them with --out")
    with show_progress(as_json) as bars:
        how = MeasureSettings(
            dtype,
            sample,
            headers,
            limit,
            read_trust(trust),
            open_place,
            lambda done, of, what: bars.report(done, of, "measuring"),
        )
        try:
            found = open_recordings(places, how)
        except ValueError as e:
            raise UsageError(str(e)) from e
        except NotFoundError as e:
            raise NothingThereError(str(e)) from e
    if wanted.html and len(found) > 1:
        raise UsageError(f"--html writes the report of one run; got {len(found)} runs: use --out for a report of each")
    _spare_inputs(places, found, wanted)
    written = {name: _write(name, recording, wanted, several=len(found) > 1) for name, recording in found.items()}
    if as_json:
        for name, recording in found.items():
            print(json.dumps({"name": name, **tables.facts(recording), "files": [str(f) for f in written[name]]}))
        return 0
    _show(found, wanted.lr)
    for files in written.values():
        print(*(f"wrote {file}" for file in files), sep="\n", end="\n" if files else "")
    return 0


def _show(found: dict[str, Recording], lr: float | None) -> None:
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = WIDTH
    if len(found) > 1:
        console.print(tables.compare(found))
    else:
        for name, recording in found.items():
            console.print(tables.show(recording, name, lr))


def _spare_inputs(places: Sequence[str], found: Collection[str], wanted: StudyOutputs) -> None:
    """Raises: UsageError, if an output would overwrite an input."""
    inputs = {file.resolve() for place in places if "://" not in place for file in files_at(place)}
    several = len(found) > 1
    folders = [] if wanted.out is None else [_folder(wanted.out, name, several=several) for name in found]
    targets = [folder / name for folder in folders for name in ("study.jsonl", "study.html")]
    for target in [*targets, *([wanted.html] if wanted.html else [])]:
        if target.resolve() in inputs:
            raise UsageError(f"{target} is an input and would be overwritten: give another --out or --html")


def _folder(out: Path, name: str, *, several: bool) -> Path:
    return out / re.sub(r"[^\w.-]+", "_", name).strip("._") if several else out


def _write(name: str, recording: Recording, wanted: StudyOutputs, *, several: bool) -> list[Path]:
    """Write the outputs of one recording: into the folder, or into a subfolder of its own if there are several."""
    files: list[Path] = []
    with _writing():
        if wanted.html:
            write_report(recording, wanted.html, name, wanted.lr)
            files.append(wanted.html)
        if wanted.out is None:
            return files
        folder = _folder(wanted.out, name, several=several)
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(prefix=".study-", dir=folder) as temporary:
            made = _make(name, recording, wanted, Path(temporary))
            files += [file.replace(folder / file.name) for file in made]
    return files


def _make(name: str, recording: Recording, wanted: StudyOutputs, folder: Path) -> list[Path]:
    files = [folder / "study.jsonl", folder / "study.html"]
    recording.write(files[0])
    write_report(recording, files[1], name, wanted.lr)
    files += rows.write_csv(recording, folder) if wanted.csv else []
    files += rows.write_parquet(recording, folder) if wanted.parquet else []
    return files


@contextmanager
def _writing() -> Iterator[None]:
    try:
        yield
    except OSError as e:
        raise StoreError(f"cannot write {e.filename}: {e.strerror}") from e
