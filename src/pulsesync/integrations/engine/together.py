"""The ranks of an engine coordinate themselves: each runs the same rule, on the answers of all."""

import json
import time
from typing import Any

from pulsesync.group.collective import Team
from pulsesync.integrations.engine.follower import EngineFollower
from pulsesync.integrations.engine.update import Ask, Step, Wait, moving, run


def move_together(
    follower: EngineFollower, team: Team, options: dict[str, Any], version: int | str, token: str
) -> dict[str, Any]:
    """Update this rank together with the others, all or none; return the report. Every rank must call this.

    The caller pauses and resumes generation, drops the KV cache and sets the version. Raises: as `moving`; GroupError.
    """

    def take(step: Step) -> Any:
        if isinstance(step, Wait):
            time.sleep(step.seconds)
        if not isinstance(step, Ask):
            return None
        answers = team.gather(json.dumps(follower.call(step.message)).encode())
        return [json.loads(answer) for answer in answers]

    return run(moving(options, version, token), take)
