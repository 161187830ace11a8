"""An offline `LLM` that follows a run."""

import json
import secrets
import time
from typing import Any

from pulsesync.errors import PulseError
from pulsesync.integrations.engine import update as updates
from pulsesync.integrations.engine.follower import RunOptions, find_version


def attach(
    llm: Any,
    location: str,
    *,
    trust: str | list[str] | None = None,
    pointer: str | None = None,
    trust_pointers: str | list[str] | None = None,
) -> "OfflineFollower":
    """Let an offline LLM of vLLM follow a run; `update` updates it to a version.

    Args:
        llm: A `vllm.LLM`.
        location: A path or URL of the run, which every worker process can reach.
        trust: As for a `Subscriber`.
        pointer: Name of a pointer of the run to follow; None: the newest version.
        trust_pointers: As for a `Subscriber`.

    Raises:
        ValueError: an argument has the wrong type. PulseError: vLLM's workers do not have this adapter.
    """
    given = {"location": location, "trust": trust, "pointer": pointer, "trust_pointers": trust_pointers}
    RunOptions.parse(given)
    return OfflineFollower(llm, given)


class OfflineFollower:
    """Updates an offline LLM to versions of a run. Nothing is generated meanwhile: both are blocking calls.

    Args:
        llm: A `vllm.LLM`.
        options: The fields of `RunOptions`.
    """

    def __init__(self, llm: Any, options: dict[str, Any]) -> None:
        self._llm, self._options = llm, options
        self._keep_cache = False
        try:
            self.status()
        except Exception as e:
            if "pulse_call" not in str(e):
                raise
            raise PulseError(
                "vLLM's workers have not loaded pulsesync: install it in vLLM's environment, so that vLLM finds its "
                "entry point, and add 'pulse' to VLLM_PLUGINS if that is set"
            ) from e

    def status(self) -> dict[str, Any]:
        """Return the status of the workers, as rank 0 reports it."""
        ranks: updates.Answers = self._ask({"do": "status"})
        updates.raise_error(ranks)
        return ranks[0]

    @property
    def version(self) -> int | None:
        """The version that the engine computes with; None before the first update."""
        return self.status()["version"]  # type: ignore[no-any-return]

    def update(self, version: int | str = updates.LATEST, *, keep_kv_cache: bool = False) -> updates.UpdateReport:
        """Update all workers to the newest version, or to a given one; all of them or none.

        Args:
            version: The version to update to.
            keep_kv_cache: Keep the cache of prompts, although old weights have computed it.

        Raises:
            PulseError: as `Subscriber.sync`; the engine's weights are unchanged. The one exception is a
                VerificationError: then it must not generate before an update succeeds.
        """
        self._keep_cache = keep_kv_cache
        began = time.perf_counter()
        updates.check_version(version)
        events = updates.UpdateEvents(self._options["location"])
        with events.noting_failure():
            goal = find_version(RunOptions.parse(self._options)) if version == updates.LATEST else version
            report = updates.run(updates.moving(self._options, goal, secrets.token_hex(8)), self._take)
        return events.updated(updates.UpdateReport.parse({**report, "pause_s": time.perf_counter() - began}))

    def _take(self, step: updates.Step) -> Any:
        if isinstance(step, updates.Ask):
            return self._ask(step.message)
        if isinstance(step, updates.Wait):
            time.sleep(step.seconds)
        elif isinstance(step, updates.Finish):
            if not self._keep_cache and self._llm.reset_prefix_cache() is False:
                raise PulseError(updates.CACHE_NOT_DROPPED)
            if hasattr(self._llm, "update_weight_version"):  # vLLM 0.27 and later
                self._llm.update_weight_version(str(step.version))
        return None

    def _ask(self, message: dict[str, Any]) -> Any:
        return self._llm.collective_rpc("pulse_call", args=(json.dumps(message),))
