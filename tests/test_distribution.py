"""What is published: the contents of the wheel and the sdist, and what they say of themselves."""

import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.metadata import Metadata

import pulsesync
from pulsesync.cli import doctor
from tests.distributions import CLEAN, ROOT, build, metadata_of, run, sdist_in, wheel_in

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel and the sdist of this tree."""
    folder = tmp_path_factory.mktemp("dist")
    build(ROOT, folder, "sdist", "wheel")
    return folder


@pytest.fixture(scope="module")
def unpacked(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that is in the sdist."""
    folder = tmp_path_factory.mktemp("unpacked")
    with tarfile.open(sdist_in(built)) as archive:
        archive.extractall(folder, filter="data")
    (source,) = folder.iterdir()
    return source


def contents(wheel: Path) -> dict[str, int]:
    """The files of a wheel with their checksums."""
    with zipfile.ZipFile(wheel) as archive:
        return {member.filename: member.CRC for member in archive.infolist()}


def test_the_wheel_holds_every_file_of_the_package_and_nothing_else(built: Path) -> None:
    source = ROOT / "src" / "pulsesync"
    wanted = {f"pulsesync/{file.relative_to(source)}" for file in source.rglob("*") if file.is_file()}
    wanted = {name for name in wanted if "__pycache__" not in name}
    found = {name for name in contents(wheel_in(built)) if ".dist-info/" not in name}
    assert found == wanted
    assert "pulsesync/py.typed" in found
    assert wheel_in(built).stat().st_size < 1_500_000


def test_the_wheel_built_from_the_sdist_is_the_wheel_built_from_the_tree(
    built: Path, unpacked: Path, tmp_path: Path
) -> None:
    build(unpacked, tmp_path, "wheel")
    assert contents(wheel_in(tmp_path)) == contents(wheel_in(built))


def test_the_sdist_holds_what_git_does_and_nothing_of_local_state(built: Path) -> None:
    with tarfile.open(sdist_in(built)) as archive:
        found = {member.name.split("/", 1)[1] for member in archive.getmembers()}
    listed = run("git", "ls-files", "--cached", "--others", "--exclude-standard", "-z").split("\0")
    tracked = {name for name in listed if name and (ROOT / name).is_file()}
    assert found - tracked == {"PKG-INFO"}
    places = {name.split("/")[0] for name in found - {"PKG-INFO"}}
    assert {name for name in tracked if name.split("/")[0] in places} - found == set()
    assert not any(part.startswith((".venv", ".git/", ".env")) for part in found)


def test_a_file_that_lies_in_the_checkout_does_not_get_into_the_sdist(tmp_path: Path) -> None:
    source = tmp_path / "source"
    for name in ("README.md", "LICENSE", "pyproject.toml", "tools", "src/pulsesync/core/version.py"):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        subprocess.run(["cp", "-r", ROOT / name, source / name], check=True)
    for name in ("notes.txt", ".env", "id_ed25519", "weights/model.safetensors"):
        (source / name).parent.mkdir(exist_ok=True)
        (source / name).write_text("local")
    build(source, tmp_path / "dist", "sdist")
    with tarfile.open(sdist_in(tmp_path / "dist")) as archive:
        names = {member.name.split("/", 1)[1] for member in archive.getmembers()}
    assert "src/pulsesync/core/version.py" in names
    assert not {"notes.txt", ".env", "id_ed25519", "weights/model.safetensors"} & names


def test_tests_of_the_sdist_run_from_it(unpacked: Path) -> None:
    """Some that need golden files, pages, tools and the package itself."""
    some = ["tests/test_lints.py", "tests/test_docs_site.py", "tests/format/test_golden.py"]
    options = ["-q", "-p", "no:cacheprovider", "-k", "not read and not squash and not writing"]  # nor compile kernels
    program = [sys.executable, "-m", "pytest", *options, *some]
    env = {**CLEAN, "PYTHONPATH": str(unpacked / "src")}
    done = subprocess.run(program, cwd=unpacked, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    assert " passed" in done.stdout


# -- metadata --------------------------------------------------------------------------------------------------------


def test_the_metadata_is_valid_and_says_the_version_of_the_source(built: Path) -> None:
    metadata = Metadata.from_email(metadata_of(wheel_in(built)), validate=True)
    assert str(metadata.version) == pulsesync.__version__
    assert metadata.description_content_type == "text/markdown"
    assert metadata.license_expression == "Apache-2.0"


def test_the_version_is_that_of_the_changelog_and_of_the_citation() -> None:
    changelog = (ROOT / "CHANGELOG.md").read_text()
    released = re.findall(r"^## \[(\d[^\]]*)\] – (\d{4}-\d\d-\d\d)$", changelog, re.MULTILINE)
    citation = dict(re.findall(r"^(version|date-released): (\S+)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE))
    assert released[0] == (citation["version"], citation["date-released"])
    if "dev" not in pulsesync.__version__:
        assert released[0][0] == pulsesync.__version__


def test_the_description_is_the_readme_without_links_that_lead_nowhere(built: Path) -> None:
    description = Metadata.from_email(metadata_of(wheel_in(built))).description or ""
    plain = re.sub(r"^```.*?^```$", "", description, flags=re.DOTALL | re.MULTILINE)
    addresses = re.findall(r"\]\(([^)\s]+)\)|(?:src|href)=\"([^\"]+)\"", plain)
    assert [address for pair in addresses for address in pair if address and not address.startswith("https://")] == []
    heading = (ROOT / "README.md").read_text().splitlines()[0]
    assert heading in description


def test_every_extra_that_is_named_anywhere_exists() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    sources = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("src/**/*.py"), ROOT / "Containerfile"]
    named = {
        extra.strip()
        for path in sources
        for found in re.findall(r"pulsesync\[([a-z][a-z0-9, -]*)\]", path.read_text())
        for extra in found.split(",")
    }
    assert named | set(doctor.EXTRAS) <= set(extras)
    assert {"torch", "serve"} <= named
