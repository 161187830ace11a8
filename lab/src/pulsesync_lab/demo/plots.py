"""The plots of a run: reward, sparsity, bytes per sync, staleness."""

from pulsesync_lab.charts import Panel
from pulsesync_lab.demo.view import RunStory

SIZES = {"sent": "size_bytes", "full": "full_bytes"}


def panels(story: RunStory) -> list[Panel]:
    """The plots of a run; quantities that it did not measure are empty."""
    lines = [line for _, line in sorted(story.lines.items())]
    syncs = sorted(story.syncs, key=lambda line: int(line["step"]))
    unchanged = [(s["step"], 100 * (1 - s["changed"] / s["total"])) for s in syncs if s["changed"] is not None]
    sizes = {name: [(s["step"], s[key]) for s in syncs] for name, key in SIZES.items()}
    return [
        Panel("Reward", {"reward": [(n["step"], n["reward"]) for n in lines if n["reward"] is not None]}),
        Panel("Weights unchanged in a version, %", {"unchanged": unchanged}),
        Panel("Bytes per sync", sizes, logarithmic=True),
        Panel("Staleness of completions, steps", {"behind": [(n["step"], n["behind"]) for n in lines]}),
    ]
