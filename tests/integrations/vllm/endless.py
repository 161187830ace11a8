"""A trainer that publishes a version of the small model after every step, until it is killed."""

import sys
import tempfile
from pathlib import Path

from tests.integrations.vllm.serving import Training, make_checkpoint

if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        training = Training(make_checkpoint(Path(folder)), Path(sys.argv[1]))
        for _ in range(10_000):
            training.step()
            training.versions[:-1] = [{} for _ in training.versions[:-1]]
