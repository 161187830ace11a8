"""The wheel in an environment of its own, that has only what it declares: no checkout, no extras, no tools.

Dependencies are linked from this environment, which needs no network. `make dist-test` installs the wheel and the sdist
with pip instead, as a user does, and has these tests use that environment: PULSE_INSTALLED is its folder of commands,
and PULSE_EDGE that of an environment without numba, which has what constraints/edge.txt lists.
"""

import json
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import pulsesync
from tests.code_blocks import blocks_of
from tests.commands import start
from tests.distributions import CLEAN, ROOT, new_environment, pins, run
from tools.lint.public_names import MODULES

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]


@pytest.fixture(scope="module")
def installed(environment: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of commands of the environment, in which kernels have been compiled: once, not by every process."""
    program = "import pulsesync; pulsesync.warm_up('BF16'); pulsesync.warm_up('F16')"
    run(environment / "python", "-c", program, cwd=tmp_path_factory.mktemp("warm"))
    return environment


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A new environment: the wheel is installed, its declared dependencies are linked."""
    if given := os.environ.get("PULSE_INSTALLED"):
        return Path(given)
    return new_environment(tmp_path_factory.mktemp("installed"), ROOT)


def test_an_empty_environment_uses_the_installed_wheel_and_no_more_than_it_declares(
    installed: Path, tmp_path: Path
) -> None:
    program = "import pulsesync; from importlib.util import find_spec; print(pulsesync.__file__, find_spec('pytest'))"
    file, foreign = run(installed / "python", "-c", program, cwd=tmp_path).split()
    assert Path(file).is_relative_to(installed.parent)
    assert foreign == "None"


def test_the_installed_command_says_the_version_of_the_source(installed: Path, tmp_path: Path) -> None:
    assert run(installed / "pulse", "--version", cwd=tmp_path).strip() == pulsesync.__version__
    program = "from importlib.metadata import version; print(version('pulsesync'))"
    assert run(installed / "python", "-c", program, cwd=tmp_path).strip() == pulsesync.__version__


PUBLISH = """
import numpy as np
from pulsesync import Publisher

weights = {"w": np.linspace(-1, 1, 10_000, dtype=np.float16), "b": np.zeros(7, np.float32)}
with Publisher("run") as publisher:
    for step in range(4):
        weights["w"][step::50] += np.float16(0.01)
        print(publisher.publish(weights, step=step, coalesce=False).version, flush=True)
"""
FOLLOW = """
import numpy as np
from pulsesync import Subscriber

weights = {"w": np.zeros(10_000, np.float16), "b": np.ones(7, np.float32)}
subscriber = Subscriber("run")
report = subscriber.sync(weights, wait_s=60)
while report.version < 3:
    report = subscriber.sync(weights)
subscriber.verify()
print(report.version, weights["w"].view(np.uint16).sum(dtype=np.int64), weights["b"].sum())
"""


def test_two_processes_publish_and_follow_a_run(installed: Path, tmp_path: Path) -> None:
    follower = subprocess.Popen(
        [installed / "python", "-c", FOLLOW],
        cwd=tmp_path,
        env=CLEAN,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert run(installed / "python", "-c", PUBLISH, cwd=tmp_path).split() == ["0", "1", "2", "3"]
        out, err = follower.communicate(timeout=120)
    finally:
        follower.kill()
    assert follower.returncode == 0, err
    expected = np.linspace(-1, 1, 10_000, dtype=np.float16)
    for step in range(4):
        expected[step::50] += np.float16(0.01)
    assert out.split() == ["3", str(expected.view(np.uint16).sum(dtype=np.int64)), "0.0"]


READ_GOLDEN = """
import sys
from pathlib import Path
import numpy as np
from pulsesync import Subscriber, kernels
from pulsesync.format import layout
from pulsesync.state.views import new_tensors

kernels.active = lambda **_: kernels.load("reference")  # those for every dtype take minutes to compile
for run in sorted(Path(sys.argv[1]).iterdir()):
    (table,) = (run / "layouts").iterdir()
    tensors = new_tensors(layout.parse(table.read_bytes()).tensors)
    report = Subscriber(str(run)).sync(tensors)
    with np.load(run / "expected.npz") as expected:
        assert set(expected) == set(tensors)
        assert all(tensors[name].tobytes() == bits.tobytes() for name, bits in expected.items()), run
    print(run.name, report.version)
"""


def test_the_installed_package_reads_every_golden_run(installed: Path, tmp_path: Path) -> None:
    """To the same weights: this is what a release promises of the format."""
    golden = ROOT / "tests" / "golden" / "v1"
    read = run(installed / "python", "-c", READ_GOLDEN, golden, cwd=tmp_path).splitlines()
    newest = {folder.name: int((folder / "head").read_text()) for folder in golden.iterdir()}
    assert dict(line.split() for line in read) == {name: str(version) for name, version in newest.items()}


def test_the_quickstart_without_torch_runs(installed: Path, tmp_path: Path) -> None:
    """The programs of the page, and the commands with which it looks at a run."""
    trainer, worker = (
        b.text for b in blocks_of("docs/quickstart.md") if b.language == "python" and "runs/numpy" in b.text
    )
    published = run(installed / "python", "-c", trainer, cwd=tmp_path).splitlines()
    assert [line.split(":")[0] for line in published] == [f"version {n}, step {n}" for n in range(5)]
    synced = run(installed / "python", "-c", worker, cwd=tmp_path)
    assert synced.startswith("version 4, step 4: 1 anchor + 4 patches, ")
    assert "5 versions, 1 anchor: all good" in run(installed / "pulse", "verify", "runs/numpy", cwd=tmp_path)


def test_the_help_lists_the_commands(installed: Path, tmp_path: Path) -> None:
    out = run(installed / "pulse", "--help", cwd=tmp_path)
    assert {"demo", "publish", "follow", "serve", "relay"} <= set(re.findall(r"[a-z]+", out))


USE = """
import importlib
from pulsesync import PulseError
module = importlib.import_module({module!r})
for name in module.__all__:
    try:
        getattr(module, name)
    except PulseError as e:
        print(e)
"""


@pytest.mark.parametrize("module", sorted({*MODULES} - {"pulsesync.testing", "pulsesync_lab.study"}))
def test_every_public_module_is_imported_without_extras_or_names_the_one_that_is_missing(
    module: str, installed: Path, tmp_path: Path
) -> None:
    """`pulsesync.testing` has suites for pytest, which brings itself."""
    for line in run(installed / "python", "-c", USE.format(module=module), cwd=tmp_path).splitlines():
        assert re.search(r"\w+ is not installed: pip install 'pulsesync\[[a-z]+\]'", line), line


WITHOUT = {
    "import pulsesync; pulsesync.Broadcast()": "torch",
    "from pulsesync import loco; loco.GroupExchange()": "torch",
    "from pulsesync.quantized import quantize": "torch",
    "from pulsesync.server import serve; serve('.')": "serve",
    "from pulsesync import metrics; metrics.export()": "metrics",
    "from pulsesync import metrics; metrics.OpenTelemetryMetrics()": "otel",
    "from pulsesync.integrations.jax import JaxPublisher; JaxPublisher('run').publish({'w': 0})": "jax",
    "from pulsesync.integrations.ray import RayStore; RayStore('run')": "ray",
    "from pulsesync.integrations.huggingface import PulseCallback": "hf",
    "from pulsesync.integrations.keras import KerasCallback": "keras",
}


@pytest.mark.parametrize("program", WITHOUT)
def test_what_needs_an_extra_names_it(program: str, installed: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [installed / "python", "-c", program], cwd=tmp_path, env=CLEAN, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert f"pip install 'pulsesync[{WITHOUT[program]}]'" in done.stderr.splitlines()[-1]


@pytest.mark.parametrize(("command", "extra"), [("serve .", "serve"), ("relay http://127.0.0.1:1", "serve")])
def test_a_command_that_needs_an_extra_names_it(command: str, extra: str, installed: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [installed / "pulse", *command.split()], cwd=tmp_path, env=CLEAN, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert done.stderr.startswith("pulse: ")
    assert f"pip install 'pulsesync[{extra}]'" in done.stderr


@pytest.mark.parametrize("command", ["demo", "study recorded", "plan --model small"])
def test_a_command_of_the_lab_names_the_package_that_is_missing(command: str, installed: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [installed / "pulse", *command.split()], cwd=tmp_path, env=CLEAN, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    name, lab = command.split()[0], f"pulsesync-lab {pulsesync.__version__}"
    assert done.stderr.startswith(f"pulse: pulse {name} needs the package {lab}, which is not installed")
    assert f"\n  {name} " in run(installed / "pulse", "--help", cwd=tmp_path)


# A small machine: no numba, and nothing that a list does not name

EDGE = ROOT / "constraints" / "edge.txt"


@pytest.fixture(scope="module")
def edge(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of commands of an environment as docs/usage.md makes it for a small machine."""
    if given := os.environ.get("PULSE_EDGE"):
        return Path(given)
    return new_environment(tmp_path_factory.mktemp("edge"), ROOT, only=pins(EDGE))


INSTALLED = """
from importlib.metadata import distributions
print(*{d.metadata["Name"].lower().replace("_", "-") for d in distributions()})
"""


def test_a_small_machine_has_what_its_list_names_and_the_page_installs_that_list(edge: Path, tmp_path: Path) -> None:
    found = set(run(edge / "python", "-c", INSTALLED, cwd=tmp_path).split()) - {"pip", "setuptools"}
    assert found == {"pulsesync", *pins(EDGE)}
    assert not {"numba", "llvmlite", "torch"} & found
    commands = [block.text for block in blocks_of("docs/usage.md") if block.language == "bash"]
    assert any(f"pip install --no-deps -r {EDGE.relative_to(ROOT)} .\n" in text for text in commands)


PUBLISH_UPDATES = """
from pulsesync import Publisher
from pulsesync.testing import AdamUpdates
import ml_dtypes

updates = AdamUpdates({"w": (300, 1000), "v": (70_000,), "b": (7,)}, lr=1e-5)
with Publisher("run", codec="history") as publisher:
    for step in range(5):
        weights = {name: bits.view(ml_dtypes.bfloat16) for name, bits in updates.step().items()}
        print(publisher.publish(weights, step=step, coalesce=False).changed, publisher.digest)
"""
FOLLOW_UPDATES = """
import sys
import ml_dtypes
import numpy as np
from pulsesync import Subscriber

def empty():
    return {"w": np.zeros((300, 1000), ml_dtypes.bfloat16), "v": np.zeros(70_000, ml_dtypes.bfloat16),
            "b": np.zeros(7, ml_dtypes.bfloat16)}

weights, subscriber = empty(), Subscriber(sys.argv[1])
for version in range(5):
    report = subscriber.sync(weights, version)
    print(*report.path, report.digest, subscriber.verify())
joins = Subscriber(sys.argv[1])
joins.sync(empty())
print(joins.verify())
"""


@pytest.fixture(scope="module")
def updates(installed: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """A run that the normal environment has published, and the digest of each version."""
    folder = tmp_path_factory.mktemp("updates")
    published = [line.split() for line in run(installed / "python", "-c", PUBLISH_UPDATES, cwd=folder).splitlines()]
    assert all(int(changed) > 1000 for changed, _ in published)
    return folder / "run", [digest for _, digest in published]


@pytest.fixture(params=["folder", "server"])
def place(request: pytest.FixtureRequest, updates: tuple[Path, list[str]]) -> Iterator[str]:
    """Where a worker finds the run."""
    folder = str(updates[0])
    if request.param == "folder":
        yield folder
        return
    with start("serve", folder, "--port", "0", "--json") as server:
        assert server.stdout is not None
        try:
            yield json.loads(server.stdout.readline())["url"]
        finally:
            server.terminate()


def test_a_small_machine_has_the_weights_of_every_version_and_warns_once(
    edge: Path, updates: tuple[Path, list[str]], place: str, tmp_path: Path
) -> None:
    command = [str(edge / "python"), "-c", FOLLOW_UPDATES, place]
    done = subprocess.run(command, cwd=tmp_path, env=CLEAN, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    *synced, joined = done.stdout.splitlines()
    digests = updates[1]
    assert synced == [f"{'patch' if n else 'anchor'} {one} {one}" for n, one in enumerate(digests)]
    assert joined == digests[-1]
    assert len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith("numba is not installed")


def test_a_small_machine_follows_into_a_folder_and_its_doctor_finds_nothing_broken(
    edge: Path, updates: tuple[Path, list[str]], tmp_path: Path
) -> None:
    run(edge / "pulse", "follow", str(updates[0]), "model", "--once", cwd=tmp_path)
    (file,) = (tmp_path / "model" / "current").glob("*.safetensors")
    assert file.stat().st_size > 2 * 370_007
    found = run(edge / "pulse", "doctor", str(updates[0]), "--read-only", cwd=tmp_path)
    assert "warn    kernels           numba is not installed" in found
    assert "fail  " not in found


@pytest.mark.parametrize(
    ("program", "package"),
    [
        ("from pulsesync import Subscriber; Subscriber('s3://bucket/run')", "obstore"),
        ("from pulsesync import SigningKey; SigningKey('00' * 32).public", "cryptography"),
    ],
)
def test_what_a_small_machine_leaves_out_is_named_where_it_is_needed(
    program: str, package: str, edge: Path, tmp_path: Path
) -> None:
    done = subprocess.run(
        [edge / "python", "-c", program], cwd=tmp_path, env=CLEAN, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert f"pip install {package}" in done.stderr.splitlines()[-1]
