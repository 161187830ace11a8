"""`pulse plan`: what it says, and what it refuses."""

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from lab.tests.forecasts import forecast_once, one_forecast
from pulsesync.cli.options import read_rate, size
from pulsesync.core.threads import default_threads
from pulsesync_lab.cli.plan import rate
from pulsesync_lab.study.predict.evidence import STEPS, find
from pulsesync_lab.study.predict.forecast import Optimizer, TrainingSettings, forecast
from pulsesync_lab.study.predict.models import read_model
from pulsesync_lab.study.predict.theory import ADAM, LION
from tests.commands import pulse
from tests.tiers import slow

__all__ = ["forecast_once", "one_forecast"]

ASKED = ("--lr", "1e-6", "--bandwidth", "200mbit", "--step-time", "50")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    matrix = (np.random.default_rng(0).standard_normal((512, 512)) * 0.02).astype(ml_dtypes.bfloat16)
    save_file({"matrix": matrix}, folder / "model.safetensors")
    return folder


def test_it_answers_in_a_few_lines(checkpoint: Path) -> None:
    done = pulse("plan", "--model", checkpoint, *ASKED)
    assert done.code == 0
    assert not done.err
    for line in ("model", "changes", "windows", "critical", "codec", "anchors"):
        assert sum(text.startswith(f"{line} ") for text in done.out.splitlines()) == 1
    for row in ("history", "context", "gap", "plain (4-byte index and value)", "full weights"):
        assert sum(text.strip().startswith(f"{row} ") for text in done.out.splitlines()) == 1
    assert "262,144 weights in 1 tensors, 0.5 MB" in done.out
    assert (
        "fresh from BF16, weights below 0.00026 change at a step of one learning rate; none above 0.00051" in done.out
    )
    assert "patches gain little here" in done.out  # half a megabyte goes over any link


def test_machines_get_the_same_as_one_object(checkpoint: Path) -> None:
    (told,) = pulse("plan", "--model", checkpoint, *ASKED, "--every", 2, "--no-masters", "--json").events
    assert (told["weights"], told["full_bytes"], told["masters"], told["between_s"]) == (262144, 524288, False, 100)
    assert told["ways"]["full"]["seconds"] == pytest.approx(524288 * 8 / 200e6)
    assert told["changed"]["first"] <= told["changed"]["highest"]
    assert told["enough"]
    assert told["critical_magnitude"] == pytest.approx([256e-6, 512e-6])
    assert (told["optimizer"], told["betas"]) == ("adamw", [0.9, 0.999])
    assert told["error"] is None
    assert "syncs of 2 steps" in told["unlike_measured"]


@pytest.mark.parametrize("optimizer", ["lion", slow("adamw")])
def test_the_error_is_the_one_that_runs_of_this_kind_support(checkpoint: Path, optimizer: Optimizer) -> None:
    training = TrainingSettings(3e-6, {"adamw": ADAM, "lion": LION}[optimizer], optimizer=optimizer)
    found = find(training)
    asked = ("plan", "--model", checkpoint, "--lr", "3e-6", *ASKED[2:], "--optimizer", optimizer)
    (told,) = pulse(*asked, "--json").events
    shown = pulse(*asked).out
    model = read_model(checkpoint, "BF16")
    how: dict[str, Any] = {"by_scale": model.by_scale, "rounded": model.rounded, "steps": STEPS[1]}
    told_by = forecast(model.weights_by_class, model.tensors, training, **how)
    early = told_by.mean(0, STEPS[1])  # the steps that the errors were measured over, and not all that are forecast
    assert early.sizes["history"] != told["ways"]["history"]["size_bytes"]
    assert list(told["error"]) == [one.kind for one in found]
    for one in found:
        low, high = one.bytes_off
        assert told["error"][one.kind] == {
            "runs": one.runs,
            "models": one.models,
            "bytes": [low, high],
            "changed": list(one.density_off),
            "weights": list(one.sizes),
            "steps": STEPS[1],
            "expected_bytes": [round(early.sizes["history"] / (1 + high)), round(early.sizes["history"] / (1 + low))],
        }
        mean = early.sizes["history"]
        assert f"expect    {size(mean / (1 + high))} to {size(mean / (1 + low))} a sync of history" in shown
        assert f"{one.runs} runs of {one.models} such models of {one.sizes[0]:,} to {one.sizes[1]:,} weights" in shown
        assert f"{low:+.0%} to {high:+.0%} off in bytes" in shown
    assert f"over the first {STEPS[1]} steps, where the forecast is {size(early.sizes['history'])} a sync" in shown
    assert "for later steps the error is not measured" in shown


def test_the_cores_are_an_option_and_said(checkpoint: Path) -> None:
    asked = ("plan", "--model", checkpoint, *ASKED, "--json")
    (few,), (many,), (own,) = (pulse(*asked, *more).events for more in (("--cores", 1), ("--cores", 64), ()))
    assert (few["cores"], many["cores"], own["cores"]) == (1, 64, default_threads())
    for way in ("history", "gap", "full"):
        assert few["ways"][way].pop("sync_s") > many["ways"][way].pop("sync_s")
    differs = {key for key in few if few[key] != many[key]}
    assert differs == {"cores"}
    assert "on 64 cores at each end" in pulse(*asked[:-1], "--cores", 64).out


@pytest.mark.parametrize("optimizer", ["muon", "sgd"])
def test_optimizers_without_a_theory_are_refused_with_the_reason(checkpoint: Path, optimizer: str) -> None:
    done = pulse("plan", "--model", checkpoint, *ASKED, "--optimizer", optimizer)
    assert done.refused(2, f"got {optimizer}, for which there is no forecast")


@pytest.mark.usefixtures("one_forecast")
@pytest.mark.parametrize(
    ("options", "saying"),
    [
        (("--optimizer", "lion", "--no-masters"), "not measured for lion with betas of 0.9 and 0.99 and no masters"),
        (("--every", 4, "--warm-up", 9), "error not measured for syncs of 4 steps; a warm-up"),
        (("--betas", "0.5,0.9"), "error not measured for adamw with betas of 0.5 and 0.9 and FP32 masters"),
        (("--dtype", "F8_E4M3"), "error not measured for F8_E4M3"),
        (("--every", 1000), "error not measured for syncs of 1000 steps"),
    ],
)
def test_of_runs_unlike_those_measured_it_says_so_and_claims_nothing(
    checkpoint: Path, options: tuple[object, ...], saying: str
) -> None:
    done = pulse("plan", "--model", checkpoint, *ASKED, *options)
    assert done.code == 0
    assert saying in done.out
    assert "off in bytes" not in done.out


def test_where_the_rate_is_below_the_least_of_fp8_no_weight_is_sure_to_change(checkpoint: Path) -> None:
    asked = ("--lr", "1e-7", *ASKED[2:])
    done = pulse("plan", "--model", checkpoint, *asked, "--dtype", "F8_E4M3", "--no-masters")
    assert "fresh from F8_E4M3, no weight above 3.2e-06 changes at a step of one learning rate\n" in done.out


def test_a_config_is_enough_and_the_answer_says_what_was_assumed(tmp_path: Path) -> None:
    config = {
        "model_type": "llama",
        "hidden_size": 2048,
        "vocab_size": 32000,
        "num_hidden_layers": 4,
        "num_attention_heads": 32,
        "intermediate_size": 8192,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    done = pulse("plan", "--model", tmp_path, *ASKED)
    assert done.code == 0
    assert "magnitudes are assumed: normal with a standard deviation of 0.02" in done.out
    assert "patches gain little here" not in done.out
    assert "error not measured for assumed magnitudes" in done.out


@pytest.mark.parametrize(
    ("changed", "code", "saying"),
    [
        ({"--bandwidth": "200"}, 2, "such as 200mbit"),
        ({"--bandwidth": "0mbit"}, 2, "such as 200mbit"),
        ({"--betas": "0.9"}, 2, "such as 0.9,0.999"),
        ({"--betas": "0.9,1.5"}, 2, "such as 0.9,0.999"),
        ({"--lr": "0"}, 2, "--lr must be a number above 0; got 0"),
        ({"--step-time": "0"}, 2, "--step-time must be a number above 0; got 0"),
        ({"--every": "2049"}, 2, "must be at most 2048"),
        ({"--model": "/no/such/folder"}, 2, "--model: /no/such/folder does not exist: give a folder with a checkpoint"),
    ],
)
def test_what_makes_no_sense_is_refused(checkpoint: Path, changed: dict[str, str], code: int, saying: str) -> None:
    options = {"--model": str(checkpoint), **dict(zip(ASKED[::2], ASKED[1::2], strict=True)), **changed}
    assert pulse("plan", *(word for pair in options.items() for word in pair)).refused(code, saying)


def test_links_and_sizes_are_read_and_written_as_people_do() -> None:
    assert [read_rate(text, "--bandwidth") for text in ("200mbit", "1.5 Gbit/s", "64kbps")] == [200e6, 1.5e9, 64e3]
    assert [size(999), size(1200), size(15_231_233_024)] == ["999 bytes", "1,200 bytes", "15.2 GB"]
    assert [rate(506_000), rate(21.9e9)] == ["506 kbit/s", "21.9 gbit/s"]
