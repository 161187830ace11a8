"""Trainers in one process group of torch.distributed, over gloo or NCCL.

Two ways to add up. "owner": each trainer owns a range of the entries; it is sent that part of every update, adds them
up in the order of the trainers and sends the sum to all, so that traffic does not grow with their number (for dense
updates it is what a ring all-reduce takes). "gather": each sends its whole update to all. Both give the same bits.

Bytes travel at their exact lengths, sizes first. Whatever goes wrong with one trainer's bytes, it takes part in every
collective to the end, and all learn of it together: nobody is left waiting, and nobody commits.
"""

import hashlib
import json
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Literal

import numpy as np

from pulsesync.errors import ChainError, FormatError, RoundError, StateError, VerificationError
from pulsesync.loco.exchange import Letter
from pulsesync.loco.gate import F32, Sparse, Split
from pulsesync.loco.outer import aggregate
from pulsesync.loco.payload import Coder, summed_unit
from pulsesync.loco.shared import Outcome, Shared

NOTE_BYTES = 256  # of what trainers tell each other in a round besides payloads, at a time


class GroupExchange:
    """An exchange in a process group, the default one if none is given. Trainers are named by their ranks."""

    def __init__(self, group: Any = None, *, reduce: Literal["owner", "gather"] = "owner") -> None:
        from torch import distributed

        self._group, self._reduce = group, reduce
        self._rank, self._size = distributed.get_rank(group), distributed.get_world_size(group)
        self._device = "cuda" if distributed.get_backend(group) == "nccl" else "cpu"
        self._names = [f"{rank:05d}" for rank in range(self._size)]
        self.trainer = self._names[self._rank]
        self.sent_bytes = self.received_bytes = 0

    def join(self, mine: Sequence[Shared], about: str) -> list[Shared]:
        """Take, of each fragment, the state of whoever has come furthest; before the first round, rank 0's."""
        alike = f"{about} {self._reduce} {[state.layout for state in mine]}"
        same = hashlib.sha256(alike.encode()).hexdigest()
        if any(note["same"] != same for note in self._tell({"same": same})):
            raise StateError(f"the trainers of this group do not train the same model in the same way ({about})")
        return [self._furthest(state) for state in mine]

    def _furthest(self, state: Shared) -> Shared:
        told = self._tell({"round": state.round, "digest": state.digest})
        newest = max(note["round"] for note in told)
        digests = [note["digest"] if note["round"] == newest else None for note in told]
        source = next(rank for rank, digest in enumerate(digests) if digest)
        if newest and len({digest for digest in digests if digest}) > 1:
            raise VerificationError(f"trainers hold different states after round {newest}", round=newest)
        if all(digest == digests[source] for digest in digests):
            return state
        data = state.to_bytes() if self._rank == source else b""
        got = self._swap([data if digest != digests[source] else b"" for digest in digests])[source]
        return Shared.from_bytes(got, like=state) if got else state

    def prepare(self, coder: Coder, split: Split) -> Letter:
        ranges = self._ranges(split.sent.size) if self._reduce == "owner" else [(0, split.sent.size)]
        pieces = [coder.encode(self.trainer, split.sent.part(a, b), split.unit, a) for a, b in ranges]
        return Letter(hashlib.sha256(b"".join(pieces)).hexdigest(), tuple(pieces))

    def propose(self, coder: Coder, letter: Letter, size: int) -> Outcome:
        return self._round(coder, letter, size, [])

    def decline(self, coder: Coder, size: int, why: str) -> None:
        with suppress(RoundError):
            self._round(coder, Letter("", (b"",) * self._size), size, [_short(why)])

    def _round(self, coder: Coder, letter: Letter, size: int, faults: list[str]) -> Outcome:
        """Take part in every collective of a round, to its end, whatever is wrong; then all learn of it."""
        way = self._by_owners if self._reduce == "owner" else self._by_all
        total = way(coder, letter, size, faults)
        told = self._tell({"payload": letter.id, "fault": faults[0] if faults else ""})
        for name, note in zip(self._names, told, strict=True):
            if note["fault"]:
                raise RoundError(f"round {coder.round} failed at trainer {name}: {note['fault']}", round=coder.round)
        members = {name: note["payload"] for name, note in zip(self._names, told, strict=True)}
        return Outcome(members, total)

    def confirm(self, coder: Coder, outcome: Outcome, after: Shared | None) -> None:
        if after is None:
            return
        told = self._tell({"digest": after.digest})
        if any(note["digest"] != after.digest for note in told):
            raise VerificationError(f"trainers came to different weights in round {after.round}", round=after.round)

    def missed(self, coder: Coder, size: int) -> Outcome | None:
        return None  # a group has no rounds without all of it

    def leave(self, rounds: Sequence[int]) -> None:
        pass  # the group ends when its processes end it

    def _ranges(self, size: int) -> list[tuple[int, int]]:
        return [(size * i // self._size, size * (i + 1) // self._size) for i in range(self._size)]

    def _by_all(self, coder: Coder, letter: Letter, size: int, faults: list[str]) -> F32:
        got = self._swap(letter.pieces[:1] * self._size)
        got[self._rank] = letter.pieces[0]
        parts = [_read(coder, d, name, (0, size), 1, faults)[0] for name, d in zip(self._names, got, strict=True)]
        return aggregate(parts, size)

    def _by_owners(self, coder: Coder, letter: Letter, size: int, faults: list[str]) -> F32:
        ranges, everyone = self._ranges(size), self._size
        begin, end = ranges[self._rank]
        got = self._swap(letter.pieces)
        got[self._rank] = letter.pieces[self._rank]
        read = [_read(coder, d, name, (begin, end), 1, faults) for name, d in zip(self._names, got, strict=True)]
        total = aggregate([part for part, _ in read], end - begin)
        positions = np.arange(total.size) if coder.described is None else np.flatnonzero(total)
        union = Sparse(total.size, positions, total[positions])
        sums = coder.encode(self.trainer, union, summed_unit(union, [unit for _, unit in read]), begin, everyone)
        got = self._swap([b"" if faults else sums] * everyone)
        got[self._rank] = sums
        whole = np.zeros(size, np.float32)
        for name, (a, b), data in zip(self._names, ranges, got, strict=True):
            _read(coder, data, name, (a, b), everyone, faults)[0].add_to(whole[a:b])
        return whole

    # The collectives

    def _swap(self, outgoing: Sequence[bytes]) -> list[bytes]:
        """Send each trainer its bytes; return what each has sent here. Nothing goes to oneself."""
        import torch
        from torch import distributed

        lengths = [0 if rank == self._rank else len(data) for rank, data in enumerate(outgoing)]
        coming = [row[self._rank] for row in self._all_gather(torch.tensor(lengths, dtype=torch.int64))]
        place = [distributed.get_global_rank(self._group, rank) if self._group else rank for rank in range(self._size)]
        boxes = [torch.empty(int(n), dtype=torch.uint8, device=self._device) for n in coming]
        full = [
            torch.frombuffer(bytearray(data), dtype=torch.uint8).to(self._device) if n else None
            for data, n in zip(outgoing, lengths, strict=True)
        ]
        moves = []
        for rank in range(self._size):
            if (tensor := full[rank]) is not None:
                moves.append(distributed.P2POp(distributed.isend, tensor, place[rank], self._group))
            if coming[rank]:
                moves.append(distributed.P2POp(distributed.irecv, boxes[rank], place[rank], self._group))
        try:
            for work in distributed.batch_isend_irecv(moves) if moves else []:
                work.wait()
        except RuntimeError as e:
            raise RoundError(f"the group of trainers is broken: {e}") from e
        self.sent_bytes += sum(lengths)
        self.received_bytes += int(sum(coming))
        return [box.cpu().numpy().tobytes() for box in boxes]

    def _tell(self, note: dict[str, Any]) -> list[dict[str, Any]]:
        """Tell everybody something short; return what each has told."""
        import torch

        data = json.dumps(note).encode().ljust(NOTE_BYTES)
        assert len(data) == NOTE_BYTES
        rows = self._all_gather(torch.frombuffer(bytearray(data), dtype=torch.uint8))
        return [json.loads(bytes(row.cpu().numpy())) for row in rows]

    def _all_gather(self, row: Any) -> list[Any]:
        import torch
        from torch import distributed

        row = row.to(self._device)
        rows = [torch.empty_like(row) for _ in range(self._size)]
        try:
            distributed.all_gather(rows, row, group=self._group)
        except RuntimeError as e:
            raise RoundError(f"the group of trainers is broken: {e}") from e
        self.sent_bytes += (self._size - 1) * row.nbytes
        self.received_bytes += (self._size - 1) * row.nbytes
        return rows


def _read(
    coder: Coder, data: bytes, trainer: str, span: tuple[int, int], terms: int, faults: list[str]
) -> tuple[Sparse, int | None]:
    """Decode a payload: its entries, and their unit. What is wrong with it is noted, to be told when all are done."""
    try:
        head, sent = coder.decode(data, trainer, *span, terms)
        return sent, head.scale if head.mode == "compact" else None
    except (FormatError, ChainError) as e:
        faults.append(_short(f"{type(e).__name__}: {e}"))
        return Sparse(span[1] - span[0], np.empty(0, np.int64), np.empty(0, np.float32)), None


def _short(fault: str) -> str:
    """As much of it as fits into a note."""
    return fault.encode("ascii", "replace").decode().replace('"', "'").replace("\\", "/")[:100]
