"""The short form of the trial that `make chaos` runs for longer: about two minutes, because the processes are real.

Nothing wrong is ever used, and nothing is lost in silence: every publish that was acknowledged is in the store, and
every one that is not there raised or was logged, by a log outside the processes that are killed.
"""

from pathlib import Path

import pytest

from tests.chaos import trials
from tests.chaos.trials import Trial
from tests.s3 import Server

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2 * trials.DEADLINE_S + 20)]


@pytest.mark.parametrize(
    "trial",
    [
        *(
            pytest.param(trials.killed(transport, kills=36), id=f"killed-{transport}")
            for transport in trials.TRANSPORTS
        ),
        pytest.param(trials.ended(points=24, how=("return",)), id="ended"),
        pytest.param(trials.refused("folder", "background"), id="disk-full"),
        pytest.param(trials.refused("s3", "background"), id="refused"),
        pytest.param(trials.hung(seconds=1.0), id="hung"),
        pytest.param(trials.slow_server(), id="slow-server"),
        pytest.param(trials.replaced(), id="replaced"),
        pytest.param(trials.restored(), id="restored"),
    ],
)
def test_no_wrong_weights_and_no_silent_loss(trial: Trial, tmp_path: Path, s3_server: Server) -> None:
    counts = trial(tmp_path, s3_server)
    assert counts.wrong_weights == 0, counts
    assert counts.silent_losses == 0, counts
    assert counts.acknowledged > 0, counts
