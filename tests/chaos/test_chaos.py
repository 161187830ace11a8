"""The short forms of the trials that `make chaos` runs for longer: seconds in `make test`, a minute in the slow tier.

Nothing wrong is ever used, and nothing is lost in silence: every publish that was acknowledged is in the store, and
every one that is not there raised or was logged, by a log outside the processes that are killed.
"""

from pathlib import Path

import pytest

from tests.chaos import trials
from tests.chaos.trials import Trial
from tests.processes import Fleet
from tests.s3 import Server
from tests.tiers import slow

pytestmark = pytest.mark.timeout(2 * trials.DEADLINE_S + 20)


@pytest.mark.parametrize(
    "trial",
    [
        pytest.param(trials.killed("folder", kills=10), id="killed"),
        pytest.param(trials.ended(points=4, how=("return",)), id="ended"),
        pytest.param(trials.refused("folder", "background"), id="disk-full"),
        slow(trials.replaced(), id="replaced"),
        *(slow(trials.killed(transport, kills=36), id=f"killed-often-{transport}") for transport in trials.TRANSPORTS),
        slow(trials.ended(points=24, how=("return",)), id="ended-anywhere"),
        slow(trials.refused("s3", "background"), id="refused"),
        slow(trials.hung(seconds=1.0), id="hung"),
        slow(trials.slow_server(), id="slow-server"),
        slow(trials.restored(), id="restored"),
    ],
)
def test_no_wrong_weights_and_no_silent_loss(trial: Trial, tmp_path: Path, fleet: Fleet, s3_server: Server) -> None:
    counts = trial(fleet, tmp_path, s3_server)
    assert counts.wrong_weights == 0, counts
    assert counts.silent_losses == 0, counts
    assert counts.acknowledged > 0, counts
