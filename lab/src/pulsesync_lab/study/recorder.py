"""Record a run's weights: how many change in a step, which, by how much, and what sending them would cost.

    with Recorder("study.jsonl").attach(optimizer, model) as recorder:
        for batch in batches:
            recorder.note(reward=...)          # optional: recorded with the next step
            ...
            optimizer.step()

or, without hooks or torch, `recorder.feed(state)` with every state: a module, a state dict, a mapping of arrays.

All weights are compared as bits in the dtype that inference uses, which needs one copy of them and a byte for each;
`whole=False` compares a sample instead, and then everything is of the sample, including sizes of patches. Windows of
several steps, other dtypes, gradients and sizes of updates are always of the sample.

With several ranks each writes its own file, "study-rank0.jsonl" and so on, of its shards; `Recording.join` adds them
up, and raises an error if one is missing. Shards are recognized if they are DTensors, as with FSDP2, or `Placed`; any
other tensor counts as complete, and is counted by the first rank only.
"""

import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

import pulsesync
from pulsesync.core.types import TensorSpec
from pulsesync.errors import PulseError, StateError
from pulsesync.state.views import mapping_of
from pulsesync_lab.study.measure import holdings
from pulsesync_lab.study.measure.buffers import LARGEST
from pulsesync_lab.study.measure.encoded import Encoder
from pulsesync_lab.study.measure.holdings import FLOATS, MANTISSAS, LocalTensors
from pulsesync_lab.study.measure.meter import Meter, MeterReading, MeterSettings
from pulsesync_lab.study.measure.writing import RecordingWriter
from pulsesync_lab.study.recording import WINDOWS, Recording, RecordingHeader, Step, WatchedTensor
from pulsesync_lab.study.steps import make_step, plain

_DTYPES = tuple(name for name in FLOATS if name != "F64")
_SETTINGS = ("betas", "eps", "weight_decay", "momentum", "dampening", "nesterov", "rho", "alpha")  # of an optimizer


class Recorder:
    """Records the changes from one look to the next, and writes each as a line of a file.

    It changes none of the weights, and draws no random numbers. Once it is attached it does not end a run: an error in
    a hook is a warning, after which nothing more is recorded (`fault`).

    Args:
        out: The file, which must not exist yet; None keeps the recording in memory.
        dtype: The dtype of inference. FP8 only if the weights are in FP8: others would need scales.
        contrast: Other dtypes to compare with, on the sample; FP8 with a fixed scale for each tensor. Those finer than
            the dtype of all weights are left out: BF16 weights do not show what FP32 weights would have done.
        windows: Numbers of looks: the sample is compared with its state that many looks before.
        sample: Weights in the sample, at most; all of them if this is more than half. With 2^17 weights, a density of
            1 % is measured to about 3 % in a step, one of 0.1 % to 9 %.
        whole: Compare all weights, and not only the sample.
        every: Look after every N-th step; what changed in between is recorded as one change.
        encode_every: Encode real patches at every N-th look, to record their sizes: a publisher's work for each codec.
        facts: More facts about the run, for the first line. They override what is observed: set `masters` to "BF16" if
            FP32 tensors are rounded after each step; then sizes of updates are not recorded.

    Raises:
        PulseError: the file exists, or cannot be written.
        ValueError: a dtype in which weights cannot be compared.
    """

    def __init__(
        self,
        out: str | Path | None = None,
        *,
        dtype: str = "BF16",
        contrast: Sequence[str] = ("F16", "F8_E4M3", "F32"),
        windows: Sequence[int] = WINDOWS,
        sample: int = 1 << 17,
        whole: bool = True,
        every: int = 1,
        encode_every: int = 0,
        facts: Mapping[str, Any] = {},
    ) -> None:
        for one in (dtype, *contrast):
            if one not in _DTYPES:
                raise ValueError(f"dtype and contrast must be among {', '.join(_DTYPES)}; got {one!r}")
        if min((every, sample, *windows)) < 1 or encode_every < 0 or (encode_every and not whole):
            raise ValueError(
                "every, sample and windows must be at least 1, and encode_every at least 0; encode_every needs "
                "whole=True"
            )
        self._plan = MeterSettings(dtype, tuple(contrast), tuple(sorted(set(windows))), sample, whole)
        self._every, self._encode_every, self._facts = every, encode_every, plain(facts)
        self._lines = RecordingWriter(out)
        self._hooks: list[Any] = []
        self._notes: dict[str, Any] = {}
        self._meters: list[Meter] = []
        self._holding: LocalTensors | None = None
        self._encoder: Encoder | None = None
        self._number, self._since, self._looks = -1, 0, 0
        self._closed = self._attached = False
        self.fault: Exception | None = None

    # Sources of states

    def attach(self, optimizer: Any, model: Any = None) -> "Recorder":
        """Record the parameters of a torch optimizer after each of its steps; names are those of the model.

        Raises:
            StateError: it has no parameters that can be compared.
            PulseError: this recorder is already in use.
        """
        trained = _trained(optimizer, model)
        tensors = self._hold(trained)
        known = {id(parameter) for _, parameter in trained}
        group = optimizer.param_groups[0]
        settings = plain({name: group[name] for name in _SETTINGS if name in group})
        self._facts = {"optimizer": type(optimizer).__name__, **settings, **self._facts}

        def before(*_: Any) -> None:
            if not self._looks:
                self._guarded(lambda: self._look(tensors, {}))

        def after(*_: Any) -> None:
            self._number += 1
            self._since += 1
            if self._since == self._every:
                self._guarded(step)

        def step() -> None:
            _check_known(optimizer, known)
            self._step(tensors, self._number, _rates(optimizer, tensors), _rate(optimizer.param_groups[0]), True)

        self._attached = True
        self._hooks = [optimizer.register_step_pre_hook(before), optimizer.register_step_post_hook(after)]
        return self

    def feed(self, state: Any, step: int | None = None, **facts: Any) -> Step | None:
        """Record a state: a module, a state dict, or a mapping of arrays.

        Returns None for the first, or one that is skipped.

        A step without a number is the one after the last; the first state is before step 0.

        Raises:
            StateError: names or shapes differ from before, or there is nothing to compare.
        """
        if self._closed:
            raise PulseError("this recorder was closed; make a new one")
        state = mapping_of(state)
        if self._holding is None:
            self._hold(list(state.items()))
        assert self._holding is not None
        tensors = self._holding.pick(state)
        if not self._looks:
            self._number = -1 if step is None else step
            self._look(tensors, {})
            return None
        self._number = self._number + 1 if step is None else step
        self._since += 1
        self._notes |= plain(facts)
        return self._step(tensors, self._number) if self._since == self._every else None

    def note(self, **facts: Any) -> None:
        """Record facts with the next step, such as reward or loss.

        Raises:
            TypeError: a fact cannot be written. Once attached this is a warning.
        """
        try:
            self._notes |= plain(facts)
        except Exception as e:
            if not self._attached:
                raise
            warnings.warn(f"a note could not be recorded: {type(e).__name__}: {e}", RuntimeWarning, stacklevel=2)

    # Results

    @property
    def recording(self) -> Recording:
        """What was recorded so far."""
        return self._lines.recording(self._plan.dtype)

    def close(self) -> Recording:
        """Detach from the optimizer, and return the recording. May be called again.

        Raises:
            FormatError, OSError: its file is no longer what was written.
        """
        self._let_go()
        return self.recording

    def _let_go(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks, self._meters, self._closed = [], [], True
        try:
            self._lines.close()
        except OSError as e:
            warnings.warn(f"the end of the recording could not be written: {e}", RuntimeWarning, stacklevel=3)

    def __enter__(self) -> "Recorder":
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, trace: TracebackType | None) -> None:
        self._let_go()

    def _guarded(self, look: Any) -> None:
        """Run in a hook, without raising: a training run is worth more than its recording."""
        if self.fault is not None:
            return
        try:
            look()
        except Exception as e:  # noqa: BLE001 - an edge: reported as a warning, and kept
            self.fault = e
            warnings.warn(f"recording stopped: {type(e).__name__}: {e}", RuntimeWarning, stacklevel=3)

    def _hold(self, named: Sequence[tuple[str, Any]]) -> list[Any]:
        """Fix the tensors to record, and return them."""
        if self._holding is not None or self._closed:
            raise PulseError("a recorder can record one optimizer only; make another recorder for this one")
        self._holding, tensors = holdings.hold(named)
        if not self._holding.tensors and holdings.rank_and_size()[0] == 0:
            raise StateError("there is nothing to compare: no tensor has a floating-point dtype")
        if len({tensor.device == "" for tensor in self._holding.tensors}) > 1:
            raise StateError("tensors must be all of numpy or all of torch; these are of both")
        _check_fp8(self._holding, self._plan.dtype)
        self._facts = {
            "pulsesync": pulsesync.__version__,
            **_torch_version(self._holding),
            "masters": self._holding.masters,
            "every": self._every,
            **self._facts,
            **_ranks(),
        }
        finest = min(self._holding.mantissa, MANTISSAS.get(str(self._facts["masters"]), MANTISSAS["F64"]))
        contrast = tuple(dtype for dtype in self._plan.contrast if MANTISSAS[dtype] <= finest)
        self._plan = replace(self._plan, contrast=contrast)
        return tensors

    def _look(self, tensors: Sequence[Any], given: Mapping[str, Any]) -> list[MeterReading]:
        """Look with every meter; None only the first time."""
        assert self._holding is not None
        if not self._meters:
            self._meters = _meters(self._holding, self._plan)
        flats = holdings.flats(tensors)
        found = []
        for meter, numbers in zip(self._meters, self._holding.devices.values(), strict=True):
            slopes = given.get("gradients")
            mine = None if slopes is None else [slopes[n] for n in numbers]
            rates = given.get("rates")
            own = None if rates is None else [rates[n] for n in numbers]
            found.append(meter.look([flats[n] for n in numbers], mine, own))
        self._looks += 1
        self._since = 0
        return [sight for sight in found if sight is not None]

    def _step(
        self,
        tensors: Sequence[Any],
        number: int,
        rates: Sequence[float] | None = None,
        lr: float | None = None,
        gradients: bool = False,
    ) -> Step:
        for meter in self._meters:
            meter.buffers.settle()
        began = time.perf_counter()
        assert self._holding is not None
        exact = self._every == 1 and self._holding.masters == "F32" and self._facts["masters"] in ("F32", True)
        given: dict[str, Any] = {"rates": rates if exact else None}
        if gradients:
            given["gradients"] = holdings.flats([tensor.grad for tensor in tensors])
        encodes = self._encode_every and self._looks % self._encode_every == 0
        old = self._bits() if encodes else {}
        sights = self._look(tensors, given)
        real = self._encode(old) if encodes else {}
        notes, self._notes = self._notes, {}
        step = make_step(sights, number, self._plan.dtype, real, lr=lr, facts=notes)
        step = replace(step, seconds=round(time.perf_counter() - began, 6))
        if not self._lines.begun:
            self._lines.begin(self._describe())
        self._lines.add(step)
        return step

    def _bits(self) -> dict[str, Any]:
        assert self._holding is not None
        flats = [bits for meter in self._meters for bits in meter.bits()]
        return dict(zip((tensor.name for tensor in self._holding.tensors), flats, strict=True))

    def _encode(self, old: Mapping[str, Any]) -> dict[str, int]:
        assert self._holding is not None
        if self._encoder is None:
            specs = [TensorSpec(t.name, self._plan.dtype, t.local) for t in self._holding.tensors]
            self._encoder = Encoder(specs, all_of_them=self._encode_every == 1)
        return self._encoder.sizes(old, self._bits())

    def _describe(self) -> RecordingHeader:
        assert self._holding is not None
        sampled = [stride.count for meter in self._meters for stride in meter.strides]
        compared = [size for meter in self._meters for size in meter.sizes]
        seen = tuple(
            WatchedTensor(tensor.name, tensor.shape, size, some)
            for tensor, size, some in zip(self._holding.tensors, compared, sampled, strict=True)
        )
        return RecordingHeader(self._plan.dtype, seen, self._plan.windows, self._plan.contrast, self._facts)


def _trained(optimizer: Any, model: Any) -> list[tuple[str, Any]]:
    """The parameters of an optimizer, by name; without a model by the optimizer's own names or by number."""
    names = {id(p): name for name, p in model.named_parameters()} if model is not None else {}
    out = []
    for number, group in enumerate(optimizer.param_groups):
        own = group.get("param_names") or [f"group{number}.{n}" for n in range(len(group["params"]))]
        for name, parameter in zip(own, group["params"], strict=True):
            if parameter.requires_grad:
                out.append((names.get(id(parameter), name), parameter))
    return out


def _check_known(optimizer: Any, known: set[int]) -> None:
    there = (p for group in optimizer.param_groups for p in group["params"])
    new = sum(id(p) not in known for p in there if p.requires_grad)
    if new:
        raise StateError(
            f"{new} parameters were added or unfrozen after the recorder was attached; attach a new recorder"
        )


def _rate(group: Mapping[str, Any]) -> float | None:
    return float(group["lr"]) if group.get("lr") is not None else None


def _rates(optimizer: Any, tensors: Sequence[Any]) -> list[float] | None:
    """The learning rate of each tensor; None where an optimizer has none."""
    by_group = [_rate(group) for group in optimizer.param_groups]
    pairs = zip(by_group, optimizer.param_groups, strict=True)
    own = {id(p): rate for rate, group in pairs if rate is not None for p in group["params"]}
    return None if None in by_group else [own.get(id(tensor), 0.0) for tensor in tensors]


def _check_fp8(holding: LocalTensors, dtype: str) -> None:
    """Check that all but a few tensors, such as norms, are FP8."""
    wider = [tensor for tensor in holding.tensors if tensor.dtype not in LARGEST]
    if dtype in LARGEST and 2 * sum(t.size for t in wider) > sum(t.size for t in holding.tensors):
        raise StateError(
            f"tensor {wider[0].name!r} is {wider[0].dtype}, which would need a scale to be compared in {dtype}: use "
            f"another dtype, and contrast=({dtype!r},)",
            tensor=wider[0].name,
        )


def _ranks() -> dict[str, int]:
    rank, ranks = holdings.rank_and_size()
    return {"rank": rank, "ranks": ranks} if ranks > 1 else {}


def _meters(holding: LocalTensors, plan: MeterSettings) -> list[Meter]:
    """One meter for each device, each with its share of the sample."""
    from pulsesync_lab.study.measure.choosing import buffers_and_counting

    total = max(sum(tensor.size for tensor in holding.tensors), 1)
    out = []
    for device, numbers in holding.devices.items():
        mine = [holding.tensors[n] for n in numbers]
        share = max(1, plan.sample * sum(tensor.size for tensor in mine) // total)
        sizes, columns = [tensor.size for tensor in mine], [tensor.columns for tensor in mine]
        out.append(Meter(sizes, columns, replace(plan, sample=share), *buffers_and_counting(device)))
    return out


def _torch_version(holding: LocalTensors) -> dict[str, str]:
    if all(tensor.device == "" for tensor in holding.tensors):
        return {}
    import torch

    return {"torch": str(torch.__version__)}
