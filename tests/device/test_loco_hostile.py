"""Payloads that a trainer in host memory refuses are refused by one on a GPU, with the same error."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("cryptography", reason="hostile payloads are NOT tested: pip install cryptography")


from pulsesync.errors import FormatError
from pulsesync.loco.payload import Coder
from pulsesync.loco.vectors import vectors_at
from tests.hostile import forge
from tests.hostile.test_loco_payloads import ATTACKS, LAYOUT, SIZE, Attack, letter, spoilt_payload, victim


def brought(coder: Coder, device: str) -> Coder:
    """The same reader on a device."""
    there: Any = vectors_at(torch.empty(0, device=device).device)
    described = None if coder.described is None else there.to_backend(coder.described.view(np.int16))
    return replace(coder, described=described, vectors=there)


def test_every_payload_that_a_host_refuses_is_refused_on_a_device(device: str) -> None:
    ends = [(case.name, case.end, outcome(case, device)) for case in ATTACKS]
    assert [(name, found) for name, expected, found in ends if found is not expected] == []


def outcome(case: Attack, device: str) -> type[Exception] | None:
    """What a trainer on a device raises; None: it accepts the payload."""
    coder, _, _ = victim(case.on)
    data = spoilt_payload(case)
    try:
        brought(coder, device).decode(data, "ada", 0, SIZE)
    except Exception as e:  # noqa: BLE001 - an error of another kind is a failure, with the name of its attack
        return type(e)
    return None


@pytest.mark.parametrize("mode", ["exact", "compact", "dense"])
def test_an_unspoilt_payload_is_read(mode: str, device: str) -> None:
    coder, sent, good = victim(mode)
    there = brought(coder, device)
    found = there.decode(good, "ada", 0, SIZE)[1]
    assert np.array_equal(there.vectors.fetch(found.values), sent.values)


@pytest.mark.parametrize("mode", ["exact", "compact"])
def test_a_device_and_a_host_agree_on_which_spoilt_payloads_are_good_and_on_what_they_hold(
    mode: str, device: str
) -> None:
    """Otherwise a round would fail for some trainers, or lead them to different weights."""
    here, _, _ = victim(mode)
    there, rng, refused = brought(here, device), np.random.default_rng(0), 0
    for _ in range(60 if device == "cuda" else 25):
        it = letter(mode)
        part = forge.read_part(it.coded, LAYOUT)
        spoilt = [bytearray(section) for section in part.sections()]
        section = spoilt[rng.integers(0, len(spoilt))]
        section[rng.integers(0, len(section))] ^= 1 << int(rng.integers(0, 8))
        it.coded = part.seal([bytes(section) for section in spoilt])
        outcomes = [read(coder, it.write()) for coder in (here, there)]
        assert outcomes[0] == outcomes[1]
        refused += outcomes[0] is None
    assert refused > 4


def read(coder: Coder, data: bytes) -> tuple[bytes, bytes] | None:
    """What a payload holds; None: it is refused."""
    try:
        found = coder.decode(data, "ada", 0, SIZE)[1]
    except FormatError:
        return None
    v = coder.vectors
    return v.fetch(found.positions).tobytes(), v.fetch(found.values).tobytes()
