"""What a plan needs to know about a model: the number of weights and tensors, and the magnitudes.

From a checkpoint the magnitudes are counted, on a sample of large ones. From a config.json only shapes are known, and
magnitudes are assumed: normal around zero, as the model was initialised. Trained weights are spread more widely, with
more of them near zero, so that such a plan is rough.

In FP8 every tensor is scaled so that its largest weight is the largest of the dtype, as inference does.
"""

import json
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import NormalDist
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from pulsesync.core.types import DTYPES
from pulsesync.errors import FormatError, NotFoundError, UnsupportedError
from pulsesync_lab.study.measure.buffers import LARGEST, NumpyBuffers
from pulsesync_lab.study.predict import theory
from pulsesync_lab.study.recording import Counts

SAMPLE = 1 << 25  # approximate number of weights that are read
RUN = 1 << 14  # consecutive weights in a run: a disk reads pages
INITIALIZER_RANGE = 0.02

# How the layers of these models are built: their norms, biases of q, k and v, and norms of q and k.
_FAMILIES: Mapping[str, tuple[int, bool, bool]] = {
    "llama": (2, False, False),
    "mistral": (2, False, False),
    "mixtral": (2, False, False),
    "qwen2": (2, True, False),
    "qwen2_moe": (2, True, False),
    "qwen3": (2, False, True),
    "qwen3_moe": (2, False, True),
    "gemma": (2, False, False),
    "gemma2": (4, False, False),
    "gemma3": (4, False, True),
    "gemma3_text": (4, False, True),
    "smollm3": (2, False, False),
    "olmo2": (2, False, True),
    "phi3": (2, False, False),
}


@dataclass(frozen=True)
class ModelFacts:
    """Facts about a model."""

    name: str
    tensors: int
    weights_by_class: Counts  # by exponent bits, in the requested dtype
    source: str  # where this comes from, as text
    assumed: bool = False  # whether magnitudes are assumed
    rounded: bool = True  # whether its weights already are values of that dtype
    by_scale: Mapping[float, Counts] = field(default_factory=dict)  # the same by the scale of their tensor, if in FP8

    @property
    def size(self) -> int:
        return sum(self.weights_by_class.values())


def read_model(
    path: str | Path, dtype: str = "BF16", progress: Callable[[float], None] = lambda share: None
) -> ModelFacts:
    """Read a checkpoint (a safetensors file, or a folder with them), or at a config.json (or a folder with that).

    Raises:
        NotFoundError: there is neither; FormatError: or a subclass, for files that cannot be read.
    """
    path = Path(path)
    if not path.exists():
        raise NotFoundError(f"{path} does not exist: give a folder with a checkpoint, or a config.json", key=str(path))
    config = path if path.suffix == ".json" else path / "config.json"
    has_weights = (path.is_file() and path.suffix != ".json") or any(path.glob("*.safetensors"))
    if has_weights:
        return _of_checkpoint(path, dtype, progress)
    if not config.is_file():
        raise NotFoundError(f"{path} has neither safetensors files nor a config.json", key=str(path))
    return _of_config(config, dtype)


class _Scaled:
    """Counts of tensors by their scales, grouped within a factor of two; the mean scale stands for a group."""

    def __init__(self) -> None:
        self.counts: defaultdict[int, Counter[int]] = defaultdict(Counter)
        self.sums: defaultdict[int, float] = defaultdict(float)

    def add(self, scale: float, counts: Counts) -> None:
        if size := sum(counts.values()):
            octave = math.floor(math.log2(scale))
            self.counts[octave].update(counts)
            self.sums[octave] += scale * size

    def by_scale(self) -> dict[float, Counts]:
        return {self.sums[key] / counts.total(): dict(sorted(counts.items())) for key, counts in self.counts.items()}

    def by_class(self) -> Counts:
        return dict(sorted(sum(self.counts.values(), Counter[int]()).items()))


def scale_of(weights: NDArray[Any], dtype: str) -> float:
    """The scale of a tensor before it is cast: 1, except for FP8, for which all of it is read."""
    return float(NumpyBuffers().scales([weights], [1], dtype)[0]) if dtype in LARGEST else 1.0


# Checkpoints


def _of_checkpoint(path: Path, dtype: str, progress: Callable[[float], None]) -> ModelFacts:
    from pulsesync.state.checkpoint_files import open_checkpoint

    opened = open_checkpoint(path)
    floats = {name: array for name, array in opened.tensors.items() if _is_float(array)}
    total = sum(array.size for array in floats.values())
    if not total:
        raise UnsupportedError(
            f"{path} has no floating-point weights: a forecast for a quantised model is not possible"
        )
    if any(array.itemsize == 1 for array in floats.values()):
        raise UnsupportedError(
            f"{path} has FP8 weights, whose scales are not known: give the checkpoint that it was made from"
        )
    every = max(1, round(total / SAMPLE))
    scaled = _Scaled()
    done = 0
    for array in floats.values():
        flat = array.reshape(-1)
        scale = scale_of(flat, dtype)
        scaled.add(scale, _classes(flat, dtype, every, scale))
        done += array.size
        progress(done / total)
    looked = "all" if every == 1 else f"one in {every}"
    rounded = all(_holds(array.dtype, dtype) for array in floats.values())
    return ModelFacts(
        path.resolve().name,
        len(floats),
        scaled.by_class(),
        f"{looked} of its weights read",
        rounded=rounded,
        by_scale=scaled.by_scale() if dtype in LARGEST else {},
    )


def _is_float(array: NDArray[Any]) -> bool:
    return array.dtype.kind == "f" or array.dtype.name.startswith(("bfloat", "float"))


def _holds(stored: np.dtype[Any], dtype: str) -> bool:
    """Whether every value of one dtype is (nearly) a value of the other."""
    stored_bits = int(ml_dtypes.finfo(stored).nmant)  # type: ignore[no-untyped-call]
    return stored_bits <= (DTYPES[dtype].exponent_shift or 0)


def _classes(flat: NDArray[Any], dtype: str, every: int, scale: float) -> Counts:
    """Counts of a tensor's weights by class, from one run of weights in `every`."""
    counts = np.zeros(256, np.int64)
    seen = 0
    for begin in range(0, flat.size, RUN * every):
        run = flat[begin : begin + RUN]
        if dtype in LARGEST:
            run = NumpyBuffers().scale(run.astype(np.float32), np.float32(scale), dtype)
        some = classes_of(run, dtype)
        counts += np.bincount(some, minlength=256)
        seen += some.size
    scaled = {int(c): round(int(counts[c]) * flat.size / seen) for c in np.flatnonzero(counts)}
    if scaled:  # values changed by rounding are moved to classes that do not matter
        largest = max(scaled, key=lambda c: scaled[c])
        scaled[largest] += flat.size - sum(scaled.values())
    return scaled


def classes_of(weights: NDArray[Any], dtype: str = "BF16") -> NDArray[np.int64]:
    """The exponent bits of weights in a dtype, after a cast if needed."""
    kind, target = DTYPES[dtype], theory.numpy_dtype(dtype)
    cast = weights if weights.dtype == target else weights.astype(np.float32).astype(target)
    bits = np.ascontiguousarray(cast).view(kind.bits).astype(np.int64)
    return np.asarray((bits & ((1 << (8 * kind.itemsize - 1)) - 1)) >> (kind.exponent_shift or 0), np.int64)


# Configurations


def _of_config(path: Path, dtype: str) -> ModelFacts:
    try:
        config = json.loads(path.read_bytes())
        config = config.get("text_config", config) | {"model_type": config["model_type"]}
        shapes = list(shapes_of(config))
        scale = float(config.get("initializer_range", INITIALIZER_RANGE))
    except UnsupportedError:
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ZeroDivisionError) as e:
        raise FormatError(f"{path} is not a valid model configuration of transformers: {e!r}") from e
    scaled = _Scaled()
    for size, times in Counter(math.prod(shape) for shape in shapes if len(shape) > 1).items():
        by = scale_of(np.array([scale * largest_normal(size)]), dtype)
        scaled.add(by, normal_classes(scale * by, size * times, dtype))
    one = scale_of(np.ones(1), dtype)  # norms begin at one
    vectors = sum(math.prod(shape) for shape in shapes if len(shape) == 1)
    scaled.add(one, {int(classes_of(np.array([one], np.float32), dtype)[0]): vectors})
    source = f"magnitudes are assumed: normal with a standard deviation of {scale:g} (initializer_range)"
    rounded = dtype in ("BF16", "F16", "F32")  # as published checkpoints are, most likely in BF16
    return ModelFacts(
        path.resolve().parent.name,
        len(shapes),
        scaled.by_class(),
        source,
        assumed=True,
        rounded=rounded,
        by_scale=scaled.by_scale() if dtype in LARGEST else {},
    )


def largest_normal(count: int) -> float:
    """The median of the largest magnitude of this number of normal weights, in standard deviations."""
    return -NormalDist().inv_cdf(min(math.log(2) / (2 * max(count, 1)), 0.25))


def normal_classes(scale: float, count: int, dtype: str = "BF16") -> Counts:
    """The distribution of normal weights over the classes of a dtype, as counts that add up to the total."""
    bias = theory.exponent_bias(dtype)
    highest = 2 * bias + (dtype == "F8_E4M3")  # it has no infinity, so one more class is finite
    below = [math.erf(2.0 ** (c - bias) / scale / math.sqrt(2)) for c in range(1, highest + 1)]
    ends = [round(count * share) for share in (*below, 1.0)]
    shares = np.diff(ends, prepend=0)
    return {c: int(shares[c]) for c in np.flatnonzero(shares).tolist()}


def shapes_of(config: Mapping[str, Any]) -> Iterator[tuple[int, ...]]:
    """The shapes of a model's tensors, in no particular order. Raises: UnsupportedError, for an unknown family."""
    family = config["model_type"]
    if family not in _FAMILIES:
        known = ", ".join(sorted(_FAMILIES))
        raise UnsupportedError(
            f"the shapes of {family!r} are not known (only those of {known}): give a checkpoint instead"
        )
    hidden, vocabulary = int(config["hidden_size"]), int(config["vocab_size"])
    yield (vocabulary, hidden)
    if not config.get("tie_word_embeddings", family.startswith("gemma")):
        yield (vocabulary, hidden)
    yield (hidden,)
    for layer in range(int(config["num_hidden_layers"])):
        yield from _attention(config, hidden)
        yield from [(hidden,)] * _FAMILIES[family][0]
        yield from _feed_forward(config, hidden, layer)


def _attention(config: Mapping[str, Any], hidden: int) -> Iterator[tuple[int, ...]]:
    _, biases, norms = _FAMILIES[config["model_type"]]
    heads = int(config["num_attention_heads"])
    width = int(config.get("head_dim") or hidden // heads)
    queries, keys = heads * width, int(config.get("num_key_value_heads") or heads) * width
    yield from [(queries, hidden), (keys, hidden), (keys, hidden), (hidden, queries)]
    if config.get("attention_bias", biases):
        yield from [(queries,), (keys,), (keys,)]
    if norms:
        yield from [(width,), (width,)]


def _feed_forward(config: Mapping[str, Any], hidden: int, layer: int) -> Iterator[tuple[int, ...]]:
    """Gate, up and down; of every expert, if the layer has experts."""
    experts = int(config.get("num_local_experts") or config.get("num_experts") or 0)
    dense = layer in config.get("mlp_only_layers", ()) or (layer + 1) % int(config.get("decoder_sparse_step", 1) or 1)
    if not experts or dense:
        yield from _gated(hidden, int(config["intermediate_size"]))
        return
    yield (experts, hidden)
    for _ in range(experts):
        yield from _gated(hidden, int(config.get("moe_intermediate_size") or config["intermediate_size"]))
    if shared := config.get("shared_expert_intermediate_size"):
        yield from _gated(hidden, int(shared))
        yield (1, hidden)


def _gated(hidden: int, inner: int) -> list[tuple[int, ...]]:
    return [(inner, hidden), (inner, hidden), (hidden, inner)]
