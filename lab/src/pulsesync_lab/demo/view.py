"""The display of a run: facts of every step, collected, shown as they arrive, and summarized at the end.

No processes, files or terminal here: it receives the lines that the trainer logs, and returns text.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from pulsesync_lab.demo.settings import DemoSettings

Line = dict[str, Any]  # of steps.jsonl

BARS = "▁▂▃▄▅▆▇█"
TREND = 32  # steps, in the view
ENDS = 10  # steps, at either end of a run, whose mean reward is compared
COUNTERS = ("synced", "fetched_bytes", "generate_s", "sync_s", "pause_s", "wait_s")


class RunStory:
    """A run so far. Feed it every line; one about a repeated step replaces the earlier one."""

    def __init__(self, settings: DemoSettings) -> None:
        self.settings = settings
        self.lines: dict[int, Line] = {}
        self.syncs: list[Line] = []  # the lines that have a new version
        self.totals: dict[str, dict[str, float]] = {}  # of each worker, over all its restarts
        self.pauses: dict[str, float] = {}  # seconds, at the last sync of each
        self._states: dict[str, Line] = {}  # each worker's state in the last line
        self._newest = 0

    def add(self, line: Line) -> None:
        self.lines[line["step"]] = line
        if line["version"] > self._newest:  # otherwise the step is part of a later version
            self._newest = line["version"]
            self.syncs.append(line)
        for name, state in line["workers"].items():
            before = self._states.get(name, {})
            if any(state[key] < before.get(key, 0) for key in COUNTERS):
                before = {}  # it was restarted, and counts from zero
            grown = {key: state[key] - before.get(key, 0) for key in COUNTERS}
            total = self.totals.setdefault(name, dict.fromkeys(COUNTERS, 0))
            self.totals[name] = {key: total[key] + grown[key] for key in COUNTERS}
            if grown["synced"]:
                self.pauses[name] = grown["pause_s"] / grown["synced"]
            self._states[name] = state

    @property
    def last(self) -> Line | None:
        return self.lines[max(self.lines)] if self.lines else None

    @property
    def rewards(self) -> list[float]:
        return [line["reward"] for _, line in sorted(self.lines.items()) if line["reward"] is not None]

    def summary(self, restarts: Mapping[str, int], recounted: Sequence[str]) -> Line:
        """The run in figures, for summary.json. recounted: the workers that recounted their weights at the end."""
        lines, rewards = list(self.lines.values()), self.rewards
        changed = [line["changed"] for line in self.syncs if line["changed"] is not None]
        total, full = (lines[-1]["total"], lines[-1]["full_bytes"]) if lines else (0, 0)
        size = sum(line["size_bytes"] for line in self.syncs)
        trained, spent = (
            _seconds(lines, *keys) for keys in (["train_s"], ["wait_s", "train_s", "publish_s", "meet_s"])
        )
        span = self.settings.span
        ends = max(1, ENDS // span)  # lines
        every = {key: sum(total[key] for total in self.totals.values()) for key in COUNTERS}
        return {
            "steps": len(lines) * span,
            "versions": len(self.syncs),
            "seconds": spent,
            "reward_start": _mean(rewards[:ends]),
            "reward_end": _mean(rewards[-ends:]),
            "weights": total,
            "changed_share": _mean([count / total for count in changed]),
            "bytes_per_sync": _ratio(size, len(self.syncs)),
            "full_bytes": full,
            "times_smaller": _ratio(full * len(self.syncs), size),
            "bits_per_change": _ratio(8 * size, sum(changed)),
            "steps_behind": _mean([line["behind"] for line in lines]),
            "pause_s": _ratio(every["pause_s"], every["synced"]),
            "generating_share": _ratio(every["generate_s"], every["generate_s"] + every["sync_s"] + every["wait_s"]),
            "training_share": _ratio(trained, spent),
            "workers": {
                name: {
                    "version": state["version"],
                    "recounted": state["counted"],
                    "synced": self.totals[name]["synced"],
                }
                for name, state in _in_order(self._states)
            },
            "restarts": dict(restarts),
            "digests_agree": True,  # a process that finds that they do not ends the run
            "recounted_at_end": sorted(recounted),
            **({"loco": self._rounds()} if self.settings.trainers > 1 else {}),
        }

    def _rounds(self) -> Line:
        """The results of the trainers' rounds, as the first of them saw them."""
        rounds = [line["loco"] for line in self.lines.values()]
        sent, received, dense, owed = (
            (sum(part) for part in zip(*map(_traffic, rounds), strict=True)) if rounds else 4 * [0]
        )
        return {
            "rounds": len(rounds),
            "trainers": self.settings.trainers,
            "fired_share": _mean([loco["fired"] for loco in rounds]),
            "sent_bytes": _ratio(sent, len(rounds)),
            "received_bytes": _ratio(received, len(rounds)),
            "dense_bytes": _ratio(dense, len(rounds)),
            "payload_times_smaller": _ratio(dense, sent),
            "wire_times_smaller": _ratio(owed, received),
        }


def show(story: RunStory, restarts: Mapping[str, int], title: str) -> RenderableType:
    """The current state of the run, for a terminal that is redrawn."""
    line, steps = story.last, story.settings.steps
    if line is None:
        return Text(
            f"{title}: {story.settings.workers + story.settings.trainers} processes are starting …{_again(restarts)}"
        )
    facts = Text(f"{title}\n")
    facts.append(f"step {line['step']} of {steps}", style="bold")
    if line["reward"] is not None:
        facts.append(f"   reward {line['reward']:.3f} ")
        facts.append(trend(story.rewards[-TREND:]), style="green")
    facts.append(f"\n{_sent(line)}")
    if line["behind"]:
        facts.append(f"; completions {line['behind']:.1f} steps old")
    if "loco" in line:
        facts.append(f"\n{met(line['loco'], story.settings.trainers)}")
    table = Table(box=None, pad_edge=False, header_style="dim")
    for heading in ("", "version", "behind", "recounted", "pause"):
        table.add_column(heading, justify="right" if heading else "left")
    table.add_row("trainer", str(line["version"]), "", "", "")
    for name, state in _in_order(line["workers"]):
        table.add_row(name, _or_dash(state["version"]), _lag(line, state), _counted(state), _pause(story, name))
    return Group(facts, table, Text(paper(story) + _again(restarts), style="dim"))


def plain(story: RunStory, line: Line) -> str:
    """A step in one line, for logs and pipes; a round of several trainers adds another line."""
    reward = "" if line["reward"] is None else f"  reward {line['reward']:.3f}"
    workers = _in_order(line["workers"])
    rows = {
        "workers at": [_or_dash(state["version"]) for _, state in workers],
        "behind": [_lag(line, state) for _, state in workers],
        "recounted": [_counted(state) for _, state in workers],
        "pause": [_pause(story, name) for name, _ in workers],
    }
    where = ", ".join(f"{what} {' '.join(row)}" for what, row in rows.items())
    more = f"\n  {met(line['loco'], story.settings.trainers)}" if "loco" in line else ""
    sync = f"{_sent(line)}  version {line['version']}: {where}"
    return f"step {line['step']:>3}/{story.settings.steps}{reward}  {sync}{more}"


def met(loco: Line, trainers: int) -> str:
    """A round in one line: what a trainer sent and received, compared with dense FP32 updates."""
    sent, received, dense, owed = _traffic(loco)
    who = f"round {loco['round']}: {len(loco['trainers'])} of {trainers} trainers"
    if not sent:
        return f"{who}, without the first one, which received {received:,} bytes"
    return (
        f"{who}, {loco['fired']:.2%} of weights sent; payload {sent:,} bytes, {dense / sent:.1f} × smaller than dense; "
        f"wire {received:,} bytes received, {owed / max(received, 1):.1f} × less than dense through the same store"
    )


def _traffic(loco: Line) -> tuple[int, int, int, int]:
    """Bytes of a round: sent, received, and what both would have been for dense updates of all members."""
    others = len(loco["trainers"]) - ("trainer" in loco["trainers"])
    return loco["sent_bytes"], loco["received_bytes"], loco["dense_bytes"], others * loco["dense_bytes"]


def trend(values: Sequence[float]) -> str:
    """The values as a row of bars, from the smallest to the largest of them."""
    low, high = min(values, default=0.0), max(values, default=0.0)
    return "".join(BARS[int((len(BARS) - 1) * (value - low) / ((high - low) or 1))] for value in values)


def paper(story: RunStory) -> str:
    """The run's own sparsity, compared with the published one."""
    share = _mean([line["changed"] / line["total"] for line in story.syncs if line["changed"] is not None])
    if share is None:
        return "All weights are sent every time."
    mine = f"{1 - share:.2%} of the BF16 weights are unchanged in a version (learning rate {story.settings.lr:g})"
    theirs = "The PULSE paper has about 99 % at 1e-6 to 3e-6 on models of 0.5 to 7 billion weights"
    small = "; a policy as small as this one, at a higher rate, changes more" if story.settings.model == "demo" else ""
    return f"{mine}. {theirs}{small}."


def summarize(story: RunStory, summary: Line) -> str:
    """The summary in sentences."""
    versions, span, out = summary["versions"], story.settings.span, list[str]()
    out.append(f"{summary['steps']} steps and {versions} versions in {summary['seconds']:.0f} s.")
    if summary["reward_start"] is not None:
        out.append(
            f"Reward: {summary['reward_start']:.3f} at the start, {summary['reward_end']:.3f} at the end "
            f"(means of the first and last {min(max(ENDS, span) // span * span, summary['steps'])} steps)."
        )
    if versions:
        bits = "" if summary["bits_per_change"] is None else f", {summary['bits_per_change']:.2f} bits a change"
        out.append(
            f"Bytes: {summary['bytes_per_sync']:,.0f} a sync in place of {summary['full_bytes']:,}: "
            f"{summary['times_smaller']:.1f} times smaller{bits}, everything counted."
        )
        out.append(f"Sparsity: {paper(story)}")
    if rounds := summary.get("loco"):
        out.append(_meetings(rounds, story.settings))
    for name, worker in summary["workers"].items():
        out.append(f"{name.capitalize()}: {worker['synced']} syncs, each verified; at version {worker['version']}.")
    out.append(_times(summary))
    restarts = ", ".join(f"{title(name)} ({count} ×)" for name, count in summary["restarts"].items())
    out.append(f"Started again: {restarts or 'none'}.")
    missing = story.settings.workers - len(summary["recounted_at_end"])
    recounted = f"{missing} of the workers did not recount" if missing else "all workers recounted"
    out.append(f"Every version's digest agreed; {recounted} at the end.")
    return "\n".join(out)


def title(name: str) -> str:
    """The display name of a process."""
    if name.startswith("trainer"):
        return name.replace("-", " ") if "-" in name else "the trainer"
    return f"worker {name}"


def _meetings(rounds: Line, settings: DemoSettings) -> str:
    if not rounds["payload_times_smaller"] or not rounds["wire_times_smaller"]:
        return f"Trainers: {rounds['trainers']}. The first one took part in no round."
    return (
        f"Trainers: {rounds['trainers']}, which met after every {settings.sync_every} steps, {rounds['rounds']} × "
        f"({settings.loco}). {rounds['fired_share']:.2%} of weights were sent. A payload was "
        f"{rounds['sent_bytes']:,.0f} bytes in place of {rounds['dense_bytes']:,.0f} of dense FP32: "
        f"{rounds['payload_times_smaller']:.1f} times smaller. On the wire a trainer received "
        f"{rounds['received_bytes']:,.0f} bytes a round: {rounds['wire_times_smaller']:.1f} times less than the "
        "others' dense payloads through the same store. All trainers had the same shared weights after every round."
    )


def _times(summary: Line) -> str:
    parts = []
    if summary["pause_s"] is not None:
        parts.append(f"A sync paused a worker's weights for {1000 * summary['pause_s']:.1f} ms")
    if summary["generating_share"]:
        parts.append(f"workers generated {summary['generating_share']:.0%} of their time")
    if summary["training_share"]:
        parts.append(f"the trainer trained {summary['training_share']:.0%} of its own")
    return "; ".join(parts) + "." if parts else "No worker synced."


def _sent(line: Line) -> str:
    what = "all" if line["changed"] is None else f"{line['changed'] / line['total']:.2%}"
    smaller = line["full_bytes"] / line["size_bytes"]
    return f"changed {what}: {line['size_bytes']:,} bytes, {smaller:.1f} × smaller than full"


def _in_order(workers: Mapping[str, Line]) -> list[tuple[str, Line]]:
    return sorted(workers.items(), key=lambda item: (len(item[0]), item[0]))  # 10 after 9


def _lag(line: Line, state: Line) -> str:
    return "–" if state["version"] is None else str(line["version"] - state["version"])


def _counted(state: Line) -> str:
    return "–" if state["counted"] < 0 else str(state["counted"])


def _pause(story: RunStory, name: str) -> str:
    return f"{1000 * story.pauses[name]:.1f}ms" if name in story.pauses else "–"


def _again(restarts: Mapping[str, int]) -> str:
    return "".join(f"\n{title(name)} was started again, {count} ×" for name, count in restarts.items())


def _or_dash(value: object) -> str:
    return "–" if value is None else str(value)


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def _seconds(lines: Sequence[Line], *keys: str) -> float:
    return float(sum(line.get(key, 0.0) for line in lines for key in keys))
