"""A real vLLM server and what benchmarks ask of it: log-probabilities, and when each token of a stream came.

    with Server(model, log) as server:
        before = server.answers()
        with TokenTimes(server) as times:
            ...                                                  # update the weights while it generates
        print(times.longest_gap(begin, end))

Everything is on 127.0.0.1, every wait has a timeout, and every process that is started is stopped.
"""

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np

HOST = "127.0.0.1"
NAME = "policy"  # of the served model
START_S, ANSWER_S = 240.0, 120.0  # the longest waits: for a server to start, and for an answer
GENERATED = 4  # tokens after each prompt
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}
ENGINE = {"dtype": "float32", "enforce_eager": True, "max_model_len": 256}
NO_PLUGINS = {"VLLM_PLUGINS": ""}  # an engine without this project: a baseline, or the reference
PROMPTS = (
    "The weights of a model are numbers that training has changed a little at a time, until",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return fibonacci(n - 1) +",
    "In the year 1850 the people of the valley had no road to the coast. They carried",
    "Water boils at 100 degrees Celsius at sea level. On a high mountain it boils at",
    "Question: What is seven times eight?\nAnswer:",
    "Der schnelle braune Fuchs springt über den faulen Hund, und der Hund",
    '{"name": "Ada", "born": 1815, "known for": ["the first program", "',
    "Dear Sir or Madam,\n\nI am writing to complain about the parcel that arrived on Monday, because",
)


@dataclass(frozen=True)
class Answer:
    """One prompt with what was generated after it, and the log-probability of every token but the first."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]


Answers = list[Answer]


def difference(some: Answers, others: Answers) -> float:
    """The largest difference of two log-probabilities of the same token after the same tokens.

    Where different tokens were generated, the rest is not compared; the two tokens must be about equally likely, and
    the difference of their log-probabilities counts.
    """
    largest = 0.0
    for one, other in zip(some, others, strict=True):
        same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one.tokens, other.tokens, strict=True)))
        # The first token has no log-probability. One that differs has: both engines found theirs the most likely.
        some_values, other_values = (np.array(x.logprobs[:same]) for x in (one, other))
        assert same > len(one.tokens) - GENERATED - 1, "the prompts are not the same"
        largest = max(largest, float(np.abs(some_values - other_values).max()))
    return largest


def free_port() -> int:
    with socket.socket() as found:
        found.bind((HOST, 0))
        port: int = found.getsockname()[1]
        return port


@contextmanager
def process(command: Sequence[str], log: Path, environment: Mapping[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    """A process with its own process group, all of which is stopped at the end. Its output goes to a file."""
    with log.open("wb") as file:
        child = subprocess.Popen(
            command, env={**os.environ, **environment}, stdout=file, stderr=file, start_new_session=True
        )
    try:
        yield child
    finally:
        child.send_signal(signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            child.wait(30)
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)  # the workers, if they are still there
        child.wait(30)


class Server:
    """`vllm serve`, from the environment of this Python or of another one.

    As a context manager it starts, waits until it answers, and is stopped at the end with its whole process group. With
    wait=False, the caller calls `wait` itself, as one does that starts several.
    """

    def __init__(
        self, model: Path, log: Path, arguments: Sequence[str] = (), environment: Mapping[str, str] | None = None,
        *, name: str | None = NAME, python: str = sys.executable, wait: bool = True,
    ) -> None:  # fmt: skip
        self.port, self.log, self._waits = free_port(), log, wait
        self.url = f"http://{HOST}:{self.port}"
        flags = ["--dtype", "float32", "--enforce-eager", "--max-model-len", str(ENGINE["max_model_len"])]
        address = ["--host", HOST, "--port", str(self.port), *(["--served-model-name", name] if name else [])]
        script = "from vllm.entrypoints.cli.main import main; main()"
        command = [python, "-c", script, "serve", str(model), *flags, *address, *arguments]
        self._process = process(command, log, {**ENVIRONMENT, **(environment or {})})

    def __enter__(self) -> "Server":
        self._child = self._process.__enter__()
        if self._waits:
            self.wait()
        return self

    def wait(self) -> None:
        """Wait until the server answers. Raises: AssertionError, if it ends or does not start; it is stopped then."""
        began = time.monotonic()
        while time.monotonic() - began < START_S and self._child.poll() is None:
            try:
                self.call("GET", "/health", raw=True)
                return
            except OSError:
                time.sleep(0.5)
        tail = self.log.read_text(errors="replace")[-4000:]
        self._process.__exit__(None, None, None)
        raise AssertionError(f"the server did not start in {START_S:.0f} s; the end of its log:\n{tail}")

    def __exit__(self, *_: object) -> None:
        self._process.__exit__(None, None, None)

    def call(self, method: str, path: str, body: Any = None, *, raw: bool = False) -> Any:
        """The response of a route. Raises: AssertionError, for any status but 200."""
        link = http.client.HTTPConnection(HOST, self.port, timeout=ANSWER_S)
        try:
            data = None if body is None else json.dumps(body)
            link.request(method, path, data, {"Content-Type": "application/json"})
            answer = link.getresponse()
            text = answer.read()
            assert answer.status == 200, f"{method} {path} answered {answer.status}: {text[:2000].decode()}"
            return text if raw else json.loads(text)
        finally:
            link.close()

    def answers(self) -> Answers:
        """The log-probabilities of the prompts and of what is generated after them, one prompt at a time."""
        return [self._answer(prompt) for prompt in PROMPTS]

    def _answer(self, prompt: str) -> Answer:
        wanted = {"max_tokens": GENERATED, "temperature": 0, "logprobs": 0, "prompt_logprobs": 0}
        body = {"model": NAME, "prompt": prompt, "return_token_ids": True, **wanted}
        (choice,) = self.call("POST", "/v1/completions", body)["choices"]
        of_prompt = choice["prompt_token_ids"]
        each = zip(of_prompt[1:], choice["prompt_logprobs"][1:], strict=True)
        scores = [entry[str(token)]["logprob"] for token, entry in each]
        return Answer((*of_prompt, *choice["token_ids"]), (*scores, *choice["logprobs"]["token_logprobs"]))


class TokenTimes:
    """Keeps one request generating all the time, and records when each token came."""

    def __init__(self, server: Server) -> None:
        self.times: list[float] = []
        self._server, self._ending = server, threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> "TokenTimes":
        self._thread.start()
        self.wait_for(8)
        return self

    def __exit__(self, *_: object) -> None:
        self._ending.set()
        self._thread.join(ANSWER_S)
        if self._error:
            raise self._error

    def wait_for(self, count: int) -> None:
        """Wait until `count` more tokens have arrived."""
        goal, until = len(self.times) + count, time.monotonic() + ANSWER_S
        while len(self.times) < goal:
            if self._error or time.monotonic() > until:
                raise AssertionError("the server does not generate") from self._error
            time.sleep(0.002)

    def longest_gap(self, begin: float, end: float) -> float:
        """The longest time without a token, of those that overlap with a span of time."""
        times = np.array(self.times)
        gaps = np.diff(times)[(times[1:] >= begin) & (times[:-1] <= end)]
        return float(gaps.max())

    def usual_gap(self, before: float) -> float:
        times = np.array([at for at in self.times if at < before])
        return float(np.median(np.diff(times)))

    def _run(self) -> None:
        try:
            while not self._ending.is_set():
                self._stream()
        except BaseException as e:  # noqa: BLE001 (the other thread raises it)
            self._error = e

    def _stream(self) -> None:
        body = {"model": NAME, "prompt": "Once upon a time", "max_tokens": 240, "ignore_eos": True, "stream": True}
        link = http.client.HTTPConnection(HOST, self._server.port, timeout=ANSWER_S)
        try:
            link.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
            answer = link.getresponse()
            assert answer.status == 200, f"a stream answered {answer.status}: {answer.read(2000).decode()}"
            for line in answer:
                if line.startswith(b"data: {"):
                    assert b'"error"' not in line, f"a stream ended with {line[:2000].decode()}"
                    self.times.append(time.perf_counter())
                if self._ending.is_set():
                    return  # which closes the connection, and so ends the request
        finally:
            link.close()


def reload(server: Server, folder: Path, mode: str = "keep") -> float:
    """Have vLLM load a checkpoint while it is paused; return the seconds of the pause."""
    server.call("POST", f"/pause?mode={mode}", raw=True)
    began = time.perf_counter()
    body = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
    server.call("POST", "/collective_rpc", body, raw=True)
    server.call("POST", "/resume", raw=True)
    return time.perf_counter() - began


def say(text: str) -> None:
    """Print progress to stderr, with the time."""
    print(f"[{time.strftime('%H:%M:%S')}] {text}", file=sys.stderr, flush=True)
