"""Every code block of README.md, docs/ and lab/docs/ is executed, or one of the tables below says why it is not.

The blocks of a page run in order, in a temporary folder. Its Python blocks share their names. A block that a table does
not list, and that does not run, fails. What a page cannot have in a test is replaced here, where it can be seen: a
bucket by a folder, and a model, an optimizer or a batch by a small one (`BEFORE`).
"""

import enum
import json
import os
import re
import subprocess
import sys
import tomllib
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from cyclopts import CycloptsError

from pulsesync import Publisher, Subscriber
from pulsesync.cli.parser import make_app
from tests.code_blocks import ROOT, SHELL, Block, CommandLine, blocks_of, command_lines, pages
from tests.commands import pulse
from tests.examples import python_path

torch = pytest.importorskip("torch", reason="the code blocks of the pages need torch: they are NOT tested")
pytestmark = pytest.mark.timeout(300)  # on a machine without cached kernels the first page compiles them
BUCKET = "s3://bucket/"  # replaced by a folder in every block that runs
PAUSE = "time.sleep(0.01 * "  # in place of time.sleep(: a small model's step stands for that of a larger one
DATA = ("", "text", "json", "toml", "yaml", "mermaid", "promql")  # drawings, listings and files: nothing to execute
PROGRAM = re.compile(r"^(\$ )?(pulse|pip|make|python|torchrun|vllm|curl|docker) ", re.MULTILINE)

MODEL = """
import torch
import pulsesync as pulse
torch.manual_seed(0)
model = torch.nn.Linear(64, 64).bfloat16()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
step = 0
"""

GROUP = """
torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
"""

RUN = """
import numpy as np
import pulsesync as pulse
weights = {{"w": np.zeros(1000, np.float32)}}
with pulse.Publisher("bucket/{name}") as publisher:
    for step in range(6):
        weights["w"][step] = 1
        publisher.publish(weights, step=step)
"""

# What runs before a page, or before the block with this piece: what a reader has already, and a page does not repeat.
BEFORE = {
    ("docs/usage.md", ""): MODEL
    + """
steps = 3
def train_one_step(model):
    with torch.no_grad():
        model.weight[:, :2] += 0.5
""",
    ("docs/gpu.md", ""): MODEL
    + """
from types import SimpleNamespace
class Policy(torch.nn.Linear):
    def forward(self, batch):
        return SimpleNamespace(loss=super().forward(batch).square().mean())
model = Policy(64, 64).bfloat16()  # in host memory, with the same calls as on a GPU
optimizer, batches = torch.optim.SGD(model.parameters(), lr=0.01), [torch.ones(4, 64).bfloat16()] * 2
masters = {name: tensor.float() for name, tensor in model.state_dict().items()}
""",
    ("docs/loco.md", ""): MODEL
    + GROUP
    + """
model = torch.nn.Linear(64, 64)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
data, first = [], True  # no batch, so no round, which would wait for three other trainers
def loss(model, batch):
    return model(batch).square().mean()
""",
    ("docs/integrations/other_trainers.md", ""): """
import numpy as np
import pulsesync as pulse
weights = {"w": np.zeros(1000, np.float32)}
with pulse.Publisher("bucket/run") as publisher:
    for step in range(61):
        weights["w"][step] = 1
        publisher.publish(weights, step=step)
""",
    ("docs/operations.md", ""): RUN.format(name="run"),
    ("docs/fleet.md", ""): RUN.format(name="policy"),
    ("docs/integrations/other_trainers.md", "pulse import updates/"): """
import shutil  # the folders of the export stand for a trainer's, and their first checkpoint for the base
shutil.rmtree("bucket/run")
shutil.copytree("updates/weight_v000000", "Qwen3-8B")
""",
    ("lab/docs/theory.md", ""): """
import torch
from pathlib import Path
from safetensors.torch import save_file
Path("checkpoint").mkdir()
save_file({"w": (torch.randn(1 << 16) * 0.02).bfloat16()}, "checkpoint/model.safetensors")
""",
    ("lab/docs/study.md", ""): MODEL
    + """
import shutil
from pathlib import Path
from safetensors.torch import save_file
batches, states, reward = range(3), [{"w": torch.full((64,), float(n)).bfloat16()} for n in range(3)], 0.5
def train_on(batch):
    optimizer.zero_grad()
    loss = model(torch.ones(4, 64).bfloat16()).square().mean()
    loss.backward()
    return loss
from pulsesync_lab.study import Recorder
for file in ("study-rank0.jsonl", "study-rank1.jsonl", "lr1e-6.jsonl", "lr3e-6.jsonl"):
    with Recorder(file) as one:
        for n, state in enumerate(states):
            one.feed(state, n)
for number, state in enumerate(states):
    Path(f"checkpoints/checkpoint-{number}").mkdir(parents=True)
    save_file(state, f"checkpoints/checkpoint-{number}/model.safetensors")
shutil.copy("checkpoints/checkpoint-0/model.safetensors", "first.safetensors")
shutil.copytree("checkpoints/checkpoint-1", "second")
for location in ("bucket/run", "runs/2026-11-15"):
    with pulse.Publisher(location) as one:
        for n, state in enumerate(states):
            one.publish(state, step=n)
""",
    ("lab/docs/study.md", "recorder.feed("): """
Path("study.jsonl").unlink()  # of the block before, to which this one is an alternative
""",
}

# Blocks that another test executes, because they need its packages, or more time than there is here.
ELSEWHERE = {
    ("docs/usage.md", "checkpoint.pt"): "tests/publish/test_checkpoints.py",
    ("docs/format.md", "def read_run("): "tests/format/test_format_document.py",
    ("docs/integrations/huggingface.md", "trainer.train()"): "tests/integrations/hf/test_page.py",
    ("docs/integrations/huggingface.md", "accelerator.prepare"): "tests/integrations/hf/test_page.py",
    ("docs/integrations/frameworks.md", "jax.grad(loss)"): "tests/integrations/jax/test_page.py",
    ("docs/integrations/frameworks.md", "trainer.compile("): "tests/integrations/keras/test_page.py",
    ("docs/integrations/torch.md", "mp.spawn(run"): "tests/group/test_broadcast.py",
    ("docs/integrations/ray.md", "ray.kill("): "tests/integrations/test_ray.py",
    ("docs/integrations/ray.md", "PPOConfig()"): "tests/integrations/test_ray.py",
    **{
        ("docs/integrations/other_trainers.md", piece): "tests/integrations/test_other_trainers.py"
        for piece in (
            '__import__("pulse_openrlhf")',
            "# pulse_openrlhf.py",
            "# pulse_slime.py",
            "# pulse_engine.py",
            '__import__("pulse_skyrl")',
            "# pulse_skyrl.py",
            "self._iter_params_with_optional_kv_scales()",
            "dtensor_params_generator(",
            "# pulse_nemo.py",
            "# pulse_prime.py",
        )
    },
}

# Python blocks that are compiled and not executed.
HF, JAX, KERAS, RANKS = (
    "an excerpt that needs Hugging Face's packages; the page's whole programs run in make test-trl",
    "an excerpt that needs JAX; the page's whole program runs in make test-jax",
    "an excerpt that needs Keras; the page's whole program runs in make test-jax",
    "an excerpt that needs several processes; the page's whole program runs here, and tests/group has the rest",
)
COMPILED = {
    ("README.md", "GRPOTrainer("): HF,
    ("docs/gpu.md", "pulse.warm_up(device="): "needs a GPU: make gpu-test warms its kernels up",
    (
        "docs/integrations/other_trainers.md",
        "while True:",
    ): "does not end; tests/integrations/test_delta_folder.py imports",
    ("docs/integrations/huggingface.md", "trainer = Trainer(..., callbacks="): HF,
    ("docs/integrations/huggingface.md", "trainer = GRPOTrainer(..., callbacks="): HF,
    ("docs/integrations/huggingface.md", "def rollout("): HF,
    ("docs/integrations/huggingface.md", "Trainer(peft_model"): HF,
    ("docs/integrations/huggingface.md", "adapter_weights(model)"): HF,
    ("docs/integrations/frameworks.md", "JaxPublisher  # in the trainer"): JAX,
    ("docs/integrations/frameworks.md", "JaxSubscriber  # in the worker"): JAX,
    ("docs/integrations/frameworks.md", "KerasPublisher  # in the trainer"): KERAS,
    ("docs/integrations/frameworks.md", "KerasSubscriber  # in the worker"): KERAS,
    ("docs/integrations/frameworks.md", "model.fit("): KERAS,
    ("docs/integrations/sglang.md", "SglangServer("): "needs an SGLang server: make test-sglang serves one",
    ("docs/integrations/sglang.md", "sglang.Engine("): "needs SGLang on a GPU",
    ("docs/integrations/torch.md", "src=[0, 1, 2, 3]"): RANKS,
    ("docs/integrations/torch.md", "ShardedPublisher("): RANKS,
    ("docs/integrations/torch.md", "cast.regroup("): RANKS,
    (
        "docs/integrations/torch.md",
        "TORCH_NCCL_BLOCKING_WAIT",
    ): "needs NCCL: make gpu-test runs tests/device/test_nccl.py",
    ("docs/metrics.md", "wandb.init("): "needs wandb; the page says with which version it was run",
    ("docs/metrics.md", "trackio.init("): "needs trackio; the page says with which version it was run",
    ("docs/integrations/vllm.md", "attach(llm"): "needs vLLM: make test-vllm attaches to one",
}

# Shell blocks whose `pulse` commands are parsed by the real parser and not run.
PARSED = {
    ("docs/usage.md", "pulse publish checkpoint/"): "an overview of the commands; tests/cli runs each of them",
    ("lab/docs/experiments.md", "study experiment list"): "trains for minutes to hours; lab/tests runs small ones",
    ("docs/fleet.md", "$ pulse status"): "shows a fleet of three workers; tests/cli/test_status.py has one",
    (
        "docs/integrations/other_trainers.md",
        "pulse import /shared/sync",
    ): "reads what a trainer writes: test_delta_folder.py imports",
}

# Other programs that shell blocks name, which no test here can run, and why.
OTHER_PROGRAMS = {
    ".": "enters a virtual environment",
    "curl": "asks a vLLM server: make test-vllm sends the same requests",
    "openssl": "makes a certificate for the example; tests/server makes its own",
    "python -m sglang": "needs SGLang on a GPU",
    "python -m verl": "trains with verl on GPUs: make test-verl runs the checkpoint engine in verl's own workers",
    "python -m venv": "makes an environment: tests/test_distribution.py installs the wheel into one",
    "ray": "starts a cluster of several machines",
    "vllm": "needs vLLM: make test-vllm starts the same servers",
    "weed": "is a real S3 server: tests/s3.py starts it",
}
# Commands that do not end by themselves, and the tests that run them.
ENDLESS = {
    "follow": "tests/cli/test_follow.py",
    "serve": "tests/cli/test_serve.py",
    "relay": "tests/cli/test_serve.py",
    "demo": "lab/tests/cli/test_demo.py",
}
TIMEOUT_S = 100  # for processes that compile their kernels on a busy machine; else 5 s


class Verdict(enum.StrEnum):
    """What becomes of a block, the most first."""

    EXECUTED = "executed here"
    ELSEWHERE = "executed by a test of its own"
    CHECKED = "compiled or parsed, and not executed"
    OTHER = "commands of other programs"


def verdict_of(block: Block) -> Verdict | None:
    """What becomes of a block, by its language and the tables; None for what is no code."""
    if block.language == "python":
        return (
            Verdict.ELSEWHERE
            if listed(ELSEWHERE, block)
            else Verdict.CHECKED
            if listed(COMPILED, block)
            else Verdict.EXECUTED
        )
    if block.language in SHELL:
        verdicts = [_verdict_of_command(block, command) for command in command_lines(block)]
        assert verdicts, f"{block}: no command in it"
        return max(verdicts, key=list(Verdict).index)
    return None


def _verdict_of_command(block: Block, command: CommandLine) -> Verdict:
    if command.program == "pulse":
        ends = command.words[1] not in ENDLESS or "--once" in command.words
        return Verdict.EXECUTED if ends and not listed(PARSED, block) else Verdict.CHECKED
    return Verdict.OTHER if command.program in OTHER_PROGRAMS else Verdict.CHECKED


class Page:
    """Runs the blocks of a page, in order."""

    def __init__(self, page: str, folder: Path) -> None:
        self.folder = folder
        self.names: dict[str, Any] = {"__name__": "page"}
        self._before(page, "")

    def close(self) -> None:
        """End what the page's code left open."""
        for left in self.names.values():
            if isinstance(left, Publisher | Subscriber):
                left.close()
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()

    def run(self, block: Block) -> None:
        for page, piece in BEFORE:
            if piece and page == block.page and piece in block.text:
                self._before(page, piece)
        if block.language == "python":
            self._python(block)
        elif block.language in SHELL:
            for command in command_lines(block):
                self._command(block, command)
        else:
            _check_data(block)

    def _before(self, page: str, piece: str) -> None:
        exec(compile(BEFORE.get((page, piece), ""), f"before {page} {piece}", "exec"), self.names)

    def _python(self, block: Block) -> None:
        code = compile(self._local(block.text), str(block), "exec")
        if verdict_of(block) is not Verdict.EXECUTED:
            return
        if '__name__ == "__main__"' in block.text:
            self._process(block)
        else:
            exec(code, self.names)

    def _process(self, block: Block) -> None:
        """Run a program that starts processes of its own."""
        (self.folder / "program.py").write_text(self._local(block.text))
        subprocess.run(
            [sys.executable, "program.py"],
            cwd=self.folder,
            env={**os.environ, "PYTHONPATH": python_path(), "OMP_NUM_THREADS": "1"},
            timeout=TIMEOUT_S,
            check=True,
        )

    def _command(self, block: Block, command: CommandLine) -> None:
        program, arguments = command.program, command.words[1:]
        if program == "pulse":
            self._pulse(block, command)
        elif program == "make":
            assert re.search(rf"^{arguments[0]}:", (ROOT / "Makefile").read_text(), re.MULTILINE), f"{block}: {command}"
        elif program == "pip":
            _check_extras(block, arguments)
        elif program == "python" and arguments[0] == "-c":
            exec(compile(arguments[1], str(block), "exec"), {})
        elif program in ("python", "torchrun"):
            scripts = [word for word in arguments if word.endswith(".py")]
            assert scripts, f"{block}: {program} without a script"
            missing = [script for script in scripts if not (ROOT / script).exists() and not _is_on_page(block, script)]
            assert not missing, f"{block}: no such script: {missing}"
        else:
            assert program in OTHER_PROGRAMS, f"{block}: a program that no table lists: {program}"

    def _pulse(self, block: Block, command: CommandLine) -> None:
        arguments = [self._local(word) for word in command.words[1:]]
        if {"--help", "--version"}.isdisjoint(arguments):
            make_app().parse_args(arguments, exit_on_error=False, print_error=False)
        if _verdict_of_command(block, command) is not Verdict.EXECUTED:
            return
        done = pulse(*arguments)
        assert done.code == 0, f"{block}: pulse {' '.join(arguments)}: {done.err}"
        printed = done.out + done.err
        if command.shown is not None:
            assert _fits(printed, command.shown), f"{block}: prints\n{printed}and the page shows\n{command.shown}"

    def _local(self, text: str) -> str:
        return text.replace(BUCKET, f"{self.folder}/bucket/").replace("time.sleep(", PAUSE)


def _is_on_page(block: Block, script: str) -> bool:
    """Whether the page has the script: a reader saves one of its Python blocks, which run as any other."""
    return (
        re.search(rf"Save this as `{re.escape(script)}`[^\n]*\n\n```python\n", (ROOT / block.page).read_text())
        is not None
    )


def listed(table: dict[tuple[str, str], str], block: Block) -> str | None:
    """What a table says of a block: its key is the page, and a piece of the block."""
    return next((what for (page, piece), what in table.items() if page == block.page and piece in block.text), None)


def _fits(printed: str, shown: str) -> bool:
    """Whether a command prints what a page shows; `…` on the page is any text."""
    pattern = ".*?".join(re.escape(piece) for piece in shown.strip().split("…"))
    return re.fullmatch(pattern, printed.strip(), re.DOTALL) is not None


def _check_extras(block: Block, arguments: tuple[str, ...]) -> None:
    """Compare the extras of a pip command with those that the project has."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for named in re.findall(r"(?:pulsesync|\.)\[([\w,-]+)\]", " ".join(arguments)):
        for extra in named.split(","):
            assert extra in extras, f"{block}: there is no extra {extra}"


def _check_data(block: Block) -> None:
    assert block.language in DATA, f"{block}: a language that no test knows: {block.language}"
    assert not PROGRAM.search(block.text), f"{block}: has commands; mark it as bash or console"
    if block.language == "json":
        json.loads(block.text)
    elif block.language == "toml":
        tomllib.loads(block.text)


# A second or two each: they start several programs, or predict the sizes of whole runs.
LONG = ("lab/docs/study.md", "lab/docs/theory.md", "docs/integrations/other_trainers.md")


@pytest.mark.parametrize(
    "page", [pytest.param(page, marks=pytest.mark.slow if page in LONG else ()) for page in pages() if blocks_of(page)]
)
def test_the_code_of_a_page_runs(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with closing(Page(page, tmp_path)) as runner:
        for block in blocks_of(page):
            runner.run(block)


@pytest.mark.parametrize("table", ["BEFORE", "ELSEWHERE", "COMPILED", "PARSED"])
def test_every_entry_of_a_table_is_of_a_page_and_of_one_block(table: str) -> None:
    for page, piece in globals()[table]:
        assert page in pages()
        assert not piece or sum(piece in block.text for block in blocks_of(page)) == 1, (page, piece)


@pytest.mark.parametrize("test", sorted({*ELSEWHERE.values(), *ENDLESS.values()}))
def test_a_test_that_is_said_to_execute_a_block_exists(test: str) -> None:
    assert (ROOT / test).exists()


def test_a_block_that_fails_or_is_not_listed_is_found(tmp_path: Path) -> None:
    page = Page("page.md", tmp_path)
    for language, text in (
        ("python", "1 / 0"),
        ("bash", "pulse log --no-such-option run\n"),
        ("bash", "pulse log no-such-run\n"),
        ("bash", "no-such-program\n"),
        ("bash", "pip install 'pulsesync[no-such-extra]'\n"),
        ("bash", "make no-such-target\n"),
        ("", "pulse log run\n"),
        ("cobol", "STOP RUN.\n"),
        ("console", "$ pulse --version\nanother version\n"),
    ):
        with pytest.raises((AssertionError, CycloptsError, ZeroDivisionError), match=r"."):
            page.run(Block("page.md", 1, language, text))
