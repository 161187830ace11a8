"""Two processes at the two ends of a link, which run the same command at the same time: for bench_cluster.py."""

import json
import os
import sys
from pathlib import Path
from typing import Any

from links import Link


class Pair:
    """The two processes. They run a script of this folder with a JSON argument, and answer JSON lines by JSON lines."""

    def __init__(
        self, link: Link, folder: Path, interfaces: tuple[str, str], script: str = "cluster_roles.py", **given: Any
    ) -> None:
        self.link = link
        roles = Path(__file__).parent / script
        store = str(folder / f"store-{interfaces[0]}-{os.urandom(4).hex()}")
        ends = zip(("trainer", "worker"), interfaces, strict=True)
        self.processes = [
            link.start(
                [sys.executable, str(roles), json.dumps({"rank": rank, "store": store, **given})],
                end,  # type: ignore[arg-type]
                env=os.environ | {"GLOO_SOCKET_IFNAME": interface},
            )
            for rank, (end, interface) in enumerate(ends)
        ]
        self._answers()

    def tell(self, do: str, **fields: Any) -> list[dict[str, Any]]:
        """Send a command to both; return their answers, by rank."""
        for process in self.processes:
            assert process.stdin
            process.stdin.write(json.dumps({"do": do, **fields}) + "\n")
            process.stdin.flush()
        return self._answers()

    def _answers(self) -> list[dict[str, Any]]:
        lines = [process.stdout.readline() for process in self.processes]  # type: ignore[union-attr]
        if not all(lines):
            raise RuntimeError("one of the two processes has died: see its error above")
        return [json.loads(line) for line in lines]

    def rate(self, shaped: float | None) -> float:
        """Bits a second that one large broadcast gets."""
        size = int(min(128e6, (shaped or 10e9) / 8))
        return 8 * size / min(seconds_of(self.tell("probe", size_bytes=size)) for _ in range(3))


def seconds_of(answers: list[dict[str, Any]]) -> float:
    """Seconds from the first start to the last end; both ranks have the same clock."""
    return float(max(one["done"] for one in answers) - min(one["began"] for one in answers))
