"""The files of examples/monitoring: they parse, and name only metrics and labels that exist."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from pulsesync import metrics

FOLDER = Path(__file__).parents[2] / "examples" / "monitoring"
NAMES = {
    name
    for one in metrics.INSTRUMENTS
    for name in (
        [f"{one.name}_{part}" for part in ("bucket", "sum", "count")] if one.kind == "histogram" else [one.name]
    )
}
MUST_ALERT = {  # what must not go unseen
    "pulse_lag_versions",
    "pulse_sync_failures_total",
    "pulse_publish_failures_total",
    "pulse_weights_torn",
    "pulse_recount_mismatches_total",
    "pulse_last_publish_timestamp_seconds",
    "pulse_store_up",
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


def check() -> list[str]:
    """What is wrong with the files, a line each."""
    return [f"examples/monitoring: {problem}" for problem in (*_expressions(), *_alerts(), *_board(), *_scraping())]


def _expressions() -> Iterator[str]:
    counters = {one.name for one in metrics.INSTRUMENTS if one.kind == "counter"}
    for place, expression in expressions().items():
        named = metrics_in(expression)
        if not named and not expression.startswith("up{"):
            yield f"{place} names no metric"
        yield from (f"{place} names {name}, which is no metric" for name in named - NAMES)
        selectors = re.findall(r"\{([^}]*)\}", expression)
        used = {name for selector in selectors for name in re.findall(r"(\w+)\s*[=!]=?~?\s*\"", selector)}
        used |= {name for group in re.findall(r"\bby \(([^)]*)\)", expression) for name in re.split(r",\s*", group)}
        yield from (f"{place} names {label}, which is no label" for label in used - LABELS)
        for name in named & counters:  # its value starts anew with its process; only its increase means something
            rates = re.findall(rf"(?:rate|increase)\({name}(?:\{{[^}}]*\}})?\[", expression)
            if len(rates) != len(re.findall(rf"\b{name}\b", expression)):
                yield f"{place} reads the counter {name} without rate or increase"


def _alerts() -> Iterator[str]:
    names = [rule["alert"] for rule in rules()]
    yield from (f"there are two alerts {name}" for name in {*names} if names.count(name) > 1)
    for rule in rules():
        if rule["labels"]["severity"] not in ("page", "ticket"):
            yield f"{rule['alert']}: severity must be page or ticket"
        if set(rule["annotations"]) != {"summary", "description"}:
            yield f"{rule['alert']} needs a summary and a description, and no other annotation"
        yield from (
            f"{rule['alert']} has {key}" for key in set(rule) - {"alert", "expr", "for", "labels", "annotations"}
        )
    alerted = {name for rule in rules() for name in metrics_in(rule["expr"])}
    yield from (f"no alert reads {name}" for name in MUST_ALERT - alerted)


def _board() -> Iterator[str]:
    made = board()
    if made["uid"] != "pulsesync" or made["schemaVersion"] < 36:
        yield "grafana.json has another uid, or a schema that Grafana would convert"
    if {one["name"] for one in made["templating"]["list"]} != {"datasource", "location"}:
        yield "grafana.json must have the variables datasource and location"
    places = [tuple(panel["gridPos"].values()) for panel in made["panels"]]
    if len({*places}) != len(places) or len({panel["id"] for panel in made["panels"]}) != len(places):
        yield "two panels have one place or one id"
    yield from (
        f"{panel['id']} is too wide" for panel in made["panels"] if panel["gridPos"]["x"] + panel["gridPos"]["w"] > 24
    )
    for panel in panels():
        if panel["datasource"] != {"type": "prometheus", "uid": "${datasource}"}:
            yield f"{panel['title']} must read the data source that is chosen on the board"
        if not 0 < len(panel["targets"]) == len({one["refId"] for one in panel["targets"]}):
            yield f"{panel['title']} has no target, or two with one refId"


def _scraping() -> Iterator[str]:
    made = yaml.safe_load((FOLDER / "prometheus.yml").read_text())
    if made["rule_files"] != ["alerts.yml"]:
        yield "prometheus.yml must load alerts.yml"
    jobs = {job["job_name"] for job in made["scrape_configs"]}
    if jobs != {"pulse-trainer", "pulse-worker", "pulse-server"}:
        yield f"prometheus.yml scrapes {sorted(jobs)}"
    (down,) = (rule for rule in rules() if rule["alert"] == "PulseTargetDown")
    matcher = re.search(r'job=~"(.*)"', down["expr"])
    yield from (f"PulseTargetDown misses {job}" for job in jobs if not matcher or not re.fullmatch(matcher[1], job))
