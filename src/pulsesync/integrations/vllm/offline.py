"""An offline `LLM` that follows a run."""

from typing import Any

from pulsesync.errors import PulseError
from pulsesync.integrations.vllm.follower import LATEST, RunOptions, merged
from pulsesync.integrations.vllm.server import UpdateReport, raise_error


def attach(
    llm: Any,
    location: str,
    *,
    trust: str | list[str] | None = None,
    cache: str | None = None,
    pointer: str | None = None,
) -> "OfflineFollower":
    """Let an offline LLM of vLLM follow a run; `update` brings it to a version.

    Args:
        llm: A `vllm.LLM`.
        location: A path or URL of the run, which every worker process reaches.
        trust: As for a `Subscriber`.
        cache: As for a `Subscriber`.
        pointer: Name of a pointer of the run to follow; None: the newest version.

    Raises:
        ValueError: an argument is not of its type. PulseError: vLLM's workers do not know this adapter.
    """
    given = {"location": location, "trust": trust, "cache": cache, "pointer": pointer}
    RunOptions.parse(given)
    return OfflineFollower(llm, given)


class OfflineFollower:
    """Brings an offline LLM to versions of a run. No request is in flight while `update` runs: both are blocking calls.

    Args:
        llm: A `vllm.LLM`.
        options: The fields of `RunOptions`.
    """

    def __init__(self, llm: Any, options: dict[str, Any]) -> None:
        self._llm, self._options = llm, options
        try:
            self.status()
        except AttributeError as e:
            raise PulseError(
                "vLLM's workers do not know pulsesync: install it in vLLM's environment, so that vLLM finds its entry "
                "point, and let VLLM_PLUGINS, if it is set, name 'pulse'"
            ) from e

    def status(self) -> dict[str, Any]:
        """Where the workers are, by rank 0."""
        found: dict[str, Any] = self._llm.collective_rpc("pulse_status")[0]
        return found

    @property
    def version(self) -> int | None:
        """The version that the engine computes with; None before the first update."""
        version: int | None = self.status()["version"]
        return version

    def update(self, version: int | str = LATEST, *, keep_kv_cache: bool = False) -> UpdateReport:
        """Bring all workers to the newest version, or to one; all of them or none.

        Args:
            version: The version to go to.
            keep_kv_cache: Keep what was cached of prompts, which was computed with other weights.

        Raises:
            PulseError: as `Subscriber.sync`; the engine has the weights that it had.
        """
        reports = self._llm.collective_rpc("pulse_update", args=(self._options, version))
        for report in reports:
            raise_error(report)
        if not keep_kv_cache:
            self._llm.reset_prefix_cache()
        done = merged(reports)
        if hasattr(self._llm, "update_weight_version"):
            self._llm.update_weight_version(str(done["version"]))
        return UpdateReport.parse({**done, "pause_s": done["seconds"]})
