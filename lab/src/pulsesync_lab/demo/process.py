"""The processes of a run: `python -m pulsesync_lab.demo.process FOLDER trainer`, trainer-1, or a worker's number."""

import os
import sys
import threading
import time
from pathlib import Path
from typing import NoReturn

import torch

from pulsesync.errors import PulseError, StoreError
from pulsesync.publish.warmup import warm_up
from pulsesync_lab.demo.rounds import Peer
from pulsesync_lab.demo.settings import DemoSettings
from pulsesync_lab.demo.trainer import DemoTrainer
from pulsesync_lab.demo.worker import DemoWorker

WRONG = 3  # exit code: a check failed, and the run must stop


def _end_with_parent(parent: int) -> None:
    """The parent process is gone: there is nothing left to report to."""
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


def _process(folder: Path, role: str) -> DemoTrainer | Peer | DemoWorker:
    name, _, number = role.partition("-")
    if name != "trainer":
        return DemoWorker(folder, int(name))
    return DemoTrainer(folder) if DemoSettings.load(folder).trainers == 1 else Peer(folder, int(number or 0))


def main() -> int:
    """Run one process; exit code 3 for an error that must stop the whole run."""
    folder, role = Path(sys.argv[1]), sys.argv[2]
    torch.set_num_threads(1)  # several processes share the machine; and sums are the same every time
    threading.Thread(target=_end_with_parent, args=(os.getppid(),), daemon=True).start()
    try:
        DemoSettings.load(folder).export_metrics(role)
        warm_up()
        _process(folder, role).run()
    except PulseError as e:
        print(f"{role}: {type(e).__name__}: {e}", file=sys.stderr)
        return 1 if isinstance(e, StoreError) and e.retryable else WRONG
    except ConnectionError as e:
        print(f"{role}: {e}", file=sys.stderr)
        return 1
    return 0


def leave(code: int) -> NoReturn:
    """End the process at once.

    Threads that still answer a worker may be inside torch, and if the interpreter ends them there, they abort the
    process.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    leave(main())
