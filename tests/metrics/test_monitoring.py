"""The files of examples/monitoring: they parse, and name only metrics and labels that exist."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from pulsesync import metrics

yaml: Any = pytest.importorskip("yaml")

FOLDER = Path(__file__).parents[2] / "examples" / "monitoring"
NAMES = {
    name
    for one in metrics.INSTRUMENTS
    for name in (
        [f"{one.name}_{part}" for part in ("bucket", "sum", "count")] if one.kind == "histogram" else [one.name]
    )
}
LABELS = {label for one in metrics.INSTRUMENTS for label in one.labels} | {"le", "instance", "job"}


def board() -> dict[str, Any]:
    made: dict[str, Any] = json.loads((FOLDER / "grafana.json").read_text())
    return made


def rules() -> list[dict[str, Any]]:
    return [rule for group in yaml.safe_load((FOLDER / "alerts.yml").read_text())["groups"] for rule in group["rules"]]


def panels() -> list[dict[str, Any]]:
    return [panel for panel in board()["panels"] if panel["type"] != "row"]


def expressions() -> dict[str, str]:
    shown = {f"{panel['title']} {one['refId']}": one["expr"] for panel in panels() for one in panel["targets"]}
    return {**shown, **{rule["alert"]: rule["expr"] for rule in rules()}}


def metrics_in(expression: str) -> set[str]:
    return set(re.findall(r"\bpulse_[a-z_]+\b", re.sub(r'"[^"]*"', '""', expression)))


@pytest.mark.parametrize("place", expressions())
def test_an_expression_names_only_metrics_that_exist(place: str) -> None:
    expression = expressions()[place]
    assert metrics_in(expression) <= NAMES
    assert metrics_in(expression) or expression.startswith("up{")


@pytest.mark.parametrize("place", expressions())
def test_an_expression_names_only_labels_that_exist(place: str) -> None:
    expression = expressions()[place]
    selectors = re.findall(r"\{([^}]*)\}", expression)
    used = {name for selector in selectors for name in re.findall(r"(\w+)\s*[=!]=?~?\s*\"", selector)}
    used |= {name for group in re.findall(r"\bby \(([^)]*)\)", expression) for name in re.split(r",\s*", group)}
    assert used <= LABELS


def test_a_counter_is_never_read_without_a_rate() -> None:
    """The value of a counter starts anew with its process; only its increase means something."""
    counters = {one.name for one in metrics.INSTRUMENTS if one.kind == "counter"}
    for place, expression in expressions().items():
        for name in metrics_in(expression) & counters:
            assert len(re.findall(rf"(?:rate|increase)\({name}(?:\{{[^}}]*\}})?\[", expression)) == len(
                re.findall(rf"\b{name}\b", expression)
            ), place


def test_a_metric_that_does_not_exist_is_found() -> None:
    assert not metrics_in("rate(pulse_fetched_bytes[5m])") <= NAMES
    assert not metrics_in("pulse_sync_pause_seconds") <= NAMES  # a histogram has no sample of that name
    assert metrics_in("rate(pulse_sync_pause_seconds_count[5m])") <= NAMES


def test_every_alert_says_how_urgent_it_is_and_what_to_do() -> None:
    assert len({rule["alert"] for rule in rules()}) == len(rules()) >= 10
    for rule in rules():
        assert rule["labels"]["severity"] in ("page", "ticket"), rule
        assert set(rule["annotations"]) == {"summary", "description"}, rule
        assert set(rule) <= {"alert", "expr", "for", "labels", "annotations"}, rule


def test_there_is_an_alert_for_everything_that_must_not_go_unseen() -> None:
    alerted = {name for rule in rules() for name in metrics_in(rule["expr"])}
    assert alerted >= {
        "pulse_lag_versions",
        "pulse_sync_failures_total",
        "pulse_publish_failures_total",
        "pulse_weights_torn",
        "pulse_recount_mismatches_total",
        "pulse_last_publish_timestamp_seconds",
        "pulse_store_up",
    }


def test_the_board_can_be_imported() -> None:
    made = board()
    assert made["uid"] == "pulsesync"
    assert made["schemaVersion"] >= 36
    assert {one["name"] for one in made["templating"]["list"]} == {"datasource", "location"}
    places = [tuple(panel["gridPos"].values()) for panel in made["panels"]]
    assert len(set(places)) == len(places)
    assert len({panel["id"] for panel in made["panels"]}) == len(made["panels"])
    assert all(panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24 for panel in made["panels"])
    for panel in panels():
        assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        assert len({one["refId"] for one in panel["targets"]}) == len(panel["targets"]) > 0


def test_the_scrape_example_parses_and_loads_the_rules() -> None:
    made = yaml.safe_load((FOLDER / "prometheus.yml").read_text())
    assert made["rule_files"] == ["alerts.yml"]
    jobs = {job["job_name"] for job in made["scrape_configs"]}
    assert jobs == {"pulse-trainer", "pulse-worker", "pulse-server"}
    (down,) = (rule for rule in rules() if rule["alert"] == "PulseTargetDown")
    matcher = re.search(r'job=~"(.*)"', down["expr"])
    assert matcher is not None
    assert all(re.fullmatch(matcher[1], job) for job in jobs)
