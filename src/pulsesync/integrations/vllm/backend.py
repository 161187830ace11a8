"""The weight-transfer backend "pulse" of vLLM 0.25 and later: vLLM's own routes and clients update an engine.

    VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --weight-transfer-config '{"backend": "pulse"}'
    POST /init_weight_transfer_engine   {"init_info": {"location": "s3://bucket/run", "trust": ["…"]}}
    POST /update_weights                {"update_info": {"version": "latest"}}     # between start and finish

This module is imported by vLLM alone, when an engine is created with this backend.
"""

from dataclasses import dataclass
from typing import Any

from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo

from pulsesync.errors import GroupError, PulseError
from pulsesync.group.collective import Team
from pulsesync.integrations.engine.follower import EngineFollower, RunOptions
from pulsesync.integrations.engine.together import move_together
from pulsesync.integrations.engine.update import LATEST
from pulsesync.integrations.vllm import compat
from pulsesync.integrations.vllm.plugin import read_limits


@dataclass
class PulseInitInfo(WeightTransferInitInfo):  # type: ignore[misc]
    """The fields of `RunOptions`."""

    location: str
    trust: list[str] | None = None
    pointer: str | None = None
    follow_replaced: bool = False
    trust_pointers: list[str] | None = None


@dataclass
class PulseUpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    """The version to update to, or "latest"."""

    version: int | str = LATEST


class PulseWeightTransferEngine(WeightTransferEngine):  # type: ignore[misc]
    """Updates the live parameters of one rank to versions of a run, in place where that is possible."""

    init_info_cls = PulseInitInfo
    update_info_cls = PulseUpdateInfo
    supports_draft_weight_update = False

    def __init__(self, config: Any, vllm_config: Any, device: Any, model: Any) -> None:
        super().__init__(config, vllm_config, device, model)
        self.follower = EngineFollower(compat.VllmEngine(vllm_config, model), read_limits())
        self._options: dict[str, Any] | None = None
        self._team: Team | None = None
        self._updates = 0

    def init_transfer_engine(self, init_info: PulseInitInfo) -> None:
        """Follow a run. If this fails, the engine follows no run: later updates raise, and change nothing."""
        self._options = None
        self.follower.close()
        options = dict(vars(init_info))
        read_limits().open(RunOptions.parse(options))  # raises if it is not allowed, or no store has such a location
        self._team = self._team or compat.team_of(self.vllm_config)
        self._options = options

    def start_weight_update(self) -> None:
        """Do nothing: an update is complete in itself."""

    def finish_weight_update(self) -> None:
        """Do nothing: an update is complete in itself."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Update to a version. The base class synchronises an accelerator here, which fails without one."""
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: PulseUpdateInfo, load_weights: Any = None) -> None:
        """Update with the other ranks of this replica; the caller of vLLM's routes pauses and resumes."""
        if self._options is None or self._team is None:
            raise PulseError(
                'no run is configured: call /init_weight_transfer_engine with {"init_info": {"location": …}} first'
            )
        self._updates += 1  # on every rank
        try:
            token = f"backend-{self._updates}"
            move_together(self.follower, self._team, self._options, update_info.version, token)
        except GroupError:
            self._options = self._team = None  # a group that has failed cannot be used again: initialise again
            raise

    @staticmethod
    def trainer_send_weights(iterator: Any, trainer_args: Any) -> None:
        """Raise: a trainer publishes to the run instead. vLLM before 0.28 requires this method."""
        raise NotImplementedError("publish with pulsesync.Publisher; this backend reads the run from its store")

    def shutdown(self) -> None:
        self._options = None
        self.follower.close()
