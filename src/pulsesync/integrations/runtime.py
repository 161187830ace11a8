"""Where the weights of a checkpoint lie in an inference engine: fused, spread over ranks, padded; vLLM and SGLang.

    model = ModelShape.from_config(config)  # Llama, Mistral, Qwen2, Qwen3, their MoE models, Mixtral
    placed = place(model, EngineRank.vllm(tp, tp_size), dict(engine_model.named_parameters()))

What comes back names the checkpoint's tensors; its values are views into the engine's memory, each a rectangle of the
checkpoint's tensor. `for_subscriber` makes of it what a `Subscriber` takes, and `grid` says where a `Publisher` should
cut tensors so that every rank's part is whole tiles. Nothing is copied, and neither torch nor an engine is imported.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain, pairwise
from typing import Any

import numpy as np

from pulsesync.core.types import TensorSpec
from pulsesync.errors import StateError
from pulsesync.format.layout import Grid
from pulsesync.state.sharding import Placed
from pulsesync.state.slices import Slice, Slices, Span
from pulsesync.state.views import view_bits

__all__ = [
    "EngineRank",
    "Fused",
    "FusedPiece",
    "ModelShape",
    "check_loaded",
    "for_subscriber",
    "fused",
    "grid",
    "place",
]

VOCAB_PADDING = 64  # both engines pad the vocabulary to a multiple of this, then divide it by the ranks

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
_FAMILIES: dict[str, dict[str, Any]] = {  # what their configurations do not say
    "llama": {},
    "mistral": {},
    "qwen2": {"qkv_bias": True},
    "qwen3": {"qk_norm": True},
    "qwen2_moe": {"qkv_bias": True},
    "qwen3_moe": {"qk_norm": True},
    "mixtral": {"moe": "block_sparse_moe", "expert_names": ("w1", "w3", "w2")},
}


@dataclass(frozen=True)
class ModelShape:
    """The dimensions of a Llama-like model, and what its checkpoint calls its experts; `from_config` reads them.

    Args:
        layers: Number of layers.
        hidden: Width of the residual stream.
        heads: Number of attention heads.
        kv_heads: Number of key and value heads.
        head_dim: Width of a head.
        intermediate: Width of the MLP, in layers without experts.
        vocab: Rows of the embedding.
        qkv_bias: Whether the query, key and value projections have biases.
        o_bias: Whether the output projection of the attention has one.
        mlp_bias: Whether the projections of the MLP have them.
        qk_norm: Whether queries and keys are normalised.
        tied: Whether the embedding is the output matrix too.
        lm_head: Whether the checkpoint has lm_head.weight; one with tied weights may or may not.
        experts: Number of experts, in layers with experts.
        expert_intermediate: Width of an expert.
        dense_layers: Layers without experts, in a model that has some.
        moe: Name of the module of a layer that has its experts.
        expert_names: Names of an expert's gate, up and down projections.
        shared_intermediate: Width of an expert that every token goes to; 0 if there is none.
        shared: Its name; by the default name it has a gate, as in Qwen2-MoE.

    Raises:
        ValueError: the checkpoint has no lm_head.weight, and the weights are not tied.
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    tied: bool = False
    lm_head: bool = True
    experts: int = 0
    expert_intermediate: int = 0
    dense_layers: frozenset[int] = frozenset()
    moe: str = "mlp"
    expert_names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    shared_intermediate: int = 0
    shared: str = "shared_expert"

    def __post_init__(self) -> None:
        if not self.lm_head and not self.tied:
            raise ValueError("a checkpoint without lm_head.weight is one of a model with tied weights")

    @classmethod
    def from_config(cls, config: Any, lm_head: bool | None = None) -> "ModelShape":
        """Read a config.json, as a mapping or as transformers has it.

        lm_head: whether the run has a tensor or a tie of that name. Unless it is given, one with tied weights has none,
        which is how transformers saves it; a run published from a live module has both names.

        Raises:
            StateError: the names of this family (`model_type`) are not known here.
        """
        c: Mapping[str, Any] = config if isinstance(config, Mapping) else config.to_dict()
        family = c.get("model_type")
        if family not in _FAMILIES:
            raise StateError(f"no map for models of type {family!r}; known are {', '.join(_FAMILIES)}")
        tied, bias = bool(c.get("tie_word_embeddings", False)), bool(c.get("attention_bias", False))
        numbers: dict[str, Any] = {
            "layers": c["num_hidden_layers"],
            "hidden": c["hidden_size"],
            "heads": c["num_attention_heads"],
            "kv_heads": c.get("num_key_value_heads") or c["num_attention_heads"],
            "head_dim": c.get("head_dim") or c["hidden_size"] // c["num_attention_heads"],
            "intermediate": c["intermediate_size"],
            "vocab": c["vocab_size"],
            "qkv_bias": bias,
            "o_bias": bias,
            "mlp_bias": bool(c.get("mlp_bias", False)),
            "tied": tied,
            "lm_head": not tied if lm_head is None else lm_head,
        }
        said = {key: bool(c[key]) for key in ("qkv_bias",) if key in c}
        return cls(**numbers | _expert_numbers(c) | _FAMILIES[family] | said)


def _expert_numbers(c: Mapping[str, Any]) -> dict[str, Any]:
    step, dense = c.get("decoder_sparse_step") or 1, set(c.get("mlp_only_layers") or ())
    layers = range(c["num_hidden_layers"])
    return {
        "experts": c.get("num_experts") or c.get("num_local_experts") or 0,
        "expert_intermediate": c.get("moe_intermediate_size") or c["intermediate_size"],
        "shared_intermediate": c.get("shared_expert_intermediate_size") or 0,
        "dense_layers": frozenset(n for n in layers if n in dense or (n + 1) % step),
    }


Part = tuple[int, int]  # which of how many


@dataclass(frozen=True)
class EngineRank:
    """Which part of a model a process of an engine has.

    Args:
        tp: Its tensor-parallel rank, which splits attention, dense layers, shared experts and the vocabulary.
        tp_size: How many such ranks there are.
        ep: Its expert-parallel rank, which chooses among the experts.
        ep_size: How many such ranks there are.
        expert_tp: Which of how many parts of each of those experts; if not given, the same as of the rest, and with
            expert parallelism all of them.
        vocab_padding: The vocabulary is padded to a multiple of this, and then divided by the ranks.

    Raises:
        ValueError: a rank is not below its size.
    """

    tp: int = 0
    tp_size: int = 1
    ep: int = 0
    ep_size: int = 1
    expert_tp: Part | None = None
    vocab_padding: int = VOCAB_PADDING

    def __post_init__(self) -> None:
        for n, size in ((self.tp, self.tp_size), (self.ep, self.ep_size), self.experts_split):
            if not 0 <= n < size:
                raise ValueError(f"there is no rank {n} of {size}")

    @classmethod
    def vllm(
        cls, tp: int, tp_size: int, *, dp: int = 0, dp_size: int = 1, expert_parallel: bool = False
    ) -> "EngineRank":
        """As vLLM has it: experts are spread, or else split, over all ranks of all data-parallel replicas."""
        flat = (dp * tp_size + tp, dp_size * tp_size)
        return cls(tp, tp_size, *flat) if expert_parallel else cls(tp, tp_size, expert_tp=flat)

    @classmethod
    def sglang(cls, tp: int, tp_size: int, ep_size: int = 1) -> "EngineRank":
        """As SGLang has it: experts are spread over ep_size groups of ranks, and split within each."""
        if tp_size % ep_size:
            raise ValueError(f"{tp_size} ranks are not {ep_size} groups of one size")
        group = tp_size // ep_size
        return cls(tp, tp_size, tp // group, ep_size, (tp % group, group))

    @property
    def experts_split(self) -> Part:
        return self.expert_tp or ((0, 1) if self.ep_size > 1 else (self.tp, self.tp_size))


@dataclass(frozen=True)
class FusedPiece:
    """A rectangle of a checkpoint's tensor, and where a tensor of the runtime has it."""

    name: str
    shape: tuple[int, ...]
    at: tuple[int | slice, ...]  # index of the runtime's tensor; what it gives is contiguous
    rows: Span | None = None
    columns: Span | None = None


@dataclass(frozen=True)
class Fused:
    """A tensor of the runtime and what it is made of; what no piece has is padding."""

    name: str
    shape: tuple[int, ...]
    pieces: tuple[FusedPiece, ...]


def fused(model: ModelShape, rank: EngineRank) -> Iterator[Fused]:
    """Every tensor that a rank of an engine holds.

    Raises:
        StateError: the model cannot be divided by so many ranks.
    """
    yield _vocabulary(EMBEDDING, model, rank)
    for n in range(model.layers):
        at, dense = f"model.layers.{n}", not model.experts or n in model.dense_layers
        yield _whole(f"{at}.input_layernorm.weight", model.hidden)
        yield from _attention(f"{at}.self_attn", model, rank)
        yield _whole(f"{at}.post_attention_layernorm.weight", model.hidden)
        if dense:
            yield from _mlp(f"{at}.mlp", model, model.intermediate, rank, model.mlp_bias)
        else:
            yield from _moe(f"{at}.{model.moe}", model, rank)
    yield _whole("model.norm.weight", model.hidden)
    if model.lm_head:
        yield _vocabulary(HEAD, model, rank)


def _attention(at: str, model: ModelShape, rank: EngineRank) -> Iterator[Fused]:
    d, heads, kv_heads = model.head_dim, model.heads, model.kv_heads
    copies = rank.tp_size // kv_heads if rank.tp_size % kv_heads == 0 else 1  # ranks that hold the same KV head
    q = _share(heads, (rank.tp, rank.tp_size), d, f"{at}.q_proj.weight")
    kv = _share(kv_heads, (rank.tp // copies, rank.tp_size // copies), d, f"{at}.k_proj.weight")
    parts = (("q_proj", heads * d, q), ("k_proj", kv_heads * d, kv), ("v_proj", kv_heads * d, kv))
    yield _stacked(f"{at}.qkv_proj.weight", parts, model.hidden)
    if model.qkv_bias:
        yield _stacked(f"{at}.qkv_proj.bias", parts)
    yield _columns(f"{at}.o_proj.weight", model.hidden, heads * d, q)
    if model.o_bias:
        yield _whole(f"{at}.o_proj.bias", model.hidden)
    if model.qk_norm:
        yield from (_whole(f"{at}.{name}.weight", d) for name in ("q_norm", "k_norm"))


def _mlp(at: str, model: ModelShape, width: int, rank: EngineRank, bias: bool = False) -> Iterator[Fused]:
    span = _share(width, (rank.tp, rank.tp_size), 1, f"{at}.gate_proj.weight")
    parts = (("gate_proj", width, span), ("up_proj", width, span))
    yield _stacked(f"{at}.gate_up_proj.weight", parts, model.hidden)
    yield _columns(f"{at}.down_proj.weight", model.hidden, width, span)
    if bias:
        yield _stacked(f"{at}.gate_up_proj.bias", parts)
        yield _whole(f"{at}.down_proj.bias", model.hidden)


def _moe(at: str, model: ModelShape, rank: EngineRank) -> Iterator[Fused]:
    yield _whole(f"{at}.gate.weight", model.experts, model.hidden)
    yield from _experts(f"{at}.experts", model, rank)
    if model.shared_intermediate:
        yield from _mlp(f"{at}.{model.shared}", model, model.shared_intermediate, rank)
        if model.shared == "shared_expert":
            yield _whole(f"{at}.shared_expert_gate.weight", 1, model.hidden)


def _experts(at: str, model: ModelShape, rank: EngineRank) -> Iterator[Fused]:
    gate, up, down = model.expert_names
    width, hidden = model.expert_intermediate, model.hidden
    begin, end = span = _share(width, rank.experts_split, 1, f"{at}.0.{gate}.weight")
    each, more = divmod(model.experts, rank.ep_size)  # the first ranks have one more (vLLM 0.11 and later)
    first = each * rank.ep + min(rank.ep, more)
    mine = range(first, first + each + (rank.ep < more))
    local = end - begin
    gates, ups = ((slice(0, local), gate), (slice(local, 2 * local), up))
    w13 = tuple(
        FusedPiece(f"{at}.{n}.{name}.weight", (width, hidden), (n - first, rows), rows=span)
        for n in mine
        for rows, name in (gates, ups)
    )
    w2 = tuple(FusedPiece(f"{at}.{n}.{down}.weight", (hidden, width), (n - first,), columns=span) for n in mine)
    yield Fused(f"{at}.w13_weight", (len(mine), 2 * local, hidden), w13)
    yield Fused(f"{at}.w2_weight", (len(mine), hidden, local), w2)


def _vocabulary(name: str, model: ModelShape, rank: EngineRank) -> Fused:
    padded = -(-model.vocab // rank.vocab_padding) * rank.vocab_padding
    begin, end = _share(padded, (rank.tp, rank.tp_size), 1, name)
    top, bottom = min(begin, model.vocab), min(end, model.vocab)
    piece = FusedPiece(name, (model.vocab, model.hidden), (slice(0, bottom - top),), rows=(top, bottom))
    return Fused(name, (end - begin, model.hidden), (piece,) if top < bottom else ())


def _whole(name: str, *shape: int) -> Fused:
    return Fused(name, shape, (FusedPiece(name, shape, (slice(None),)),))


def _stacked(name: str, parts: Sequence[tuple[str, int, Span]], *inner: int) -> Fused:
    """Rows of several tensors, one after the other: each has a name, its rows, and which of them are here."""
    module, _, kind = name.rpartition(".")
    at = module.rpartition(".")[0]
    borders = [0, *accumulate(end - begin for _, _, (begin, end) in parts)]
    pieces = tuple(
        FusedPiece(f"{at}.{part}.{kind}", (size, *inner), (slice(*span),), rows=rows)
        for (part, size, rows), span in zip(parts, pairwise(borders), strict=True)
    )
    return Fused(name, (borders[-1], *inner), pieces)


def _columns(name: str, rows: int, columns: int, span: Span) -> Fused:
    piece = FusedPiece(name, (rows, columns), (slice(None),), columns=span)
    return Fused(name, (rows, span[1] - span[0]), (piece,))


def _share(count: int, part: Part, each: int, name: str) -> Span:
    """The even share of a rank, in units of `each`."""
    n, size = part
    if count % size:
        raise StateError(f"{count} cannot be divided by {size} ranks, which {name!r} needs", tensor=name)
    mine = count // size * each
    return n * mine, (n + 1) * mine


def place(model: ModelShape, rank: EngineRank, runtime: Mapping[str, Any]) -> dict[str, Placed]:
    """Say which part of the checkpoint each weight of an engine's tensors is; padding is left out.

    Takes torch tensors and numpy arrays; what it returns are views into them. A tensor that the map does not know must
    be in the memory of one that it knows, by another name. A checkpoint's tensor of which nothing is here (an expert of
    another rank, a part of the vocabulary that is all padding) is not named.

    Raises:
        StateError: a tensor is unknown, missing, not contiguous or of another shape (`tensor`), or the model cannot be
            divided by so many ranks.
    """
    given: dict[str, Any] = {}
    for name, tensor in runtime.items():
        short = name.replace(".routed_experts.", ".")  # newer vLLM has this module in between
        if short in given:
            raise StateError(f"the runtime has {short!r} by two names", tensor=name)
        given[short] = tensor
    if model.tied and EMBEDDING in given:
        given.setdefault(HEAD, given[EMBEDDING])  # engines name tied weights once, or twice
    out: dict[str, Placed] = {}
    known = set()
    for one in fused(model, rank):
        tensor = _checked(one, given.pop(one.name, None))
        known.add(_memory(tensor))
        for piece in one.pieces:
            out[piece.name] = Placed(tensor[piece.at], piece.shape, piece.rows, piece.columns)
    for name, tensor in given.items():
        if _memory(tensor) not in known:
            raise StateError(f"the map of this model has no runtime tensor {name!r}", tensor=name)
    return out


def _checked(one: Fused, tensor: Any) -> Any:
    if tensor is None:
        raise StateError(f"the runtime has no tensor {one.name!r}", tensor=one.name)
    if (shape := tuple(tensor.shape)) != one.shape:
        raise StateError(
            f"runtime tensor {one.name!r} has shape {shape}; of this model, this rank has {one.shape}",
            tensor=one.name,
        )
    if not _contiguous(tensor):
        raise StateError(f"runtime tensor {one.name!r} is not contiguous", tensor=one.name)
    return tensor


def _contiguous(tensor: Any) -> bool:
    return bool(tensor.is_contiguous() if hasattr(tensor, "is_contiguous") else tensor.flags.c_contiguous)


def _memory(tensor: Any) -> tuple[int, tuple[int, ...]]:
    address = tensor.data_ptr() if hasattr(tensor, "data_ptr") else tensor.ctypes.data
    return int(address), tuple(tensor.shape)


def check_loaded(placed: Mapping[str, Placed], checkpoint: Mapping[str, Any]) -> None:
    """Check that an engine which has loaded a checkpoint holds its weights where the map says.

    Shapes do not tell all: some kernels swap or shuffle an expert's weights once they are loaded, and experts can be
    spread in other orders. What is on a GPU is brought to the host, tensor by tensor.

    Raises:
        StateError: a tensor of the checkpoint is missing or of another dtype or shape, or its weights are not there
            (`tensor`).
    """
    for name, one in placed.items():
        if name not in checkpoint:
            raise StateError(f"the checkpoint has no tensor {name!r}", tensor=name)
        whole, mine = (view_bits({name: _to_host(tensor)})[0][name] for tensor in (checkpoint[name], one.tensor))
        if (whole.spec.dtype, whole.spec.shape) != (mine.spec.dtype, one.shape):
            raise StateError(
                f"tensor {name!r} is {mine.spec.dtype} {one.shape} here and {whole.spec.dtype} {whole.spec.shape} in "
                "the checkpoint",
                tensor=name,
            )
        held = Slice(one.rows, one.columns).of(whole.spec)
        table = whole.flat.reshape(whole.spec.rows, whole.spec.columns)
        if not np.array_equal(table[slice(*held.rows), slice(*held.columns)].reshape(-1), mine.flat):
            raise StateError(f"the weights of {name!r} are not where the map says", tensor=name)


def _to_host(tensor: Any) -> Any:
    """A tensor in host memory: itself, if it is there."""
    return tensor.cpu() if hasattr(tensor, "cpu") else tensor


def for_subscriber(placed: Mapping[str, Placed]) -> tuple[dict[str, Any], Slices]:
    """What `place` found, as the tensors and the slices of a `Subscriber`.

        tensors, slices = for_subscriber(placed)
        Subscriber(location, slices=slices).sync(tensors)

    Every layer of the run must be held; other names of the run, such as those of other ranks' experts, are not.

    Raises:
        StateError: a tensor is not contiguous, or layers are cut in different ways.
    """
    tensors: dict[str, Any] = {}
    slices: dict[str, Slice | None] = {}
    for name, one in placed.items():
        held = Slice(one.rows, one.columns)
        if not _contiguous(one.tensor):
            raise StateError(f"tensor {name!r} is not contiguous", tensor=name)
        tensors[name] = one.tensor.reshape(held.of(TensorSpec(name, "", one.shape)).local.shape)
        # A pattern for all layers: each name of the run is held against each pattern, and MoE models have 20,000.
        if slices.setdefault(re.sub(r"\.layers\.\d+\.", ".layers.*.", name), held) != held:
            raise StateError(f"tensor {name!r} is cut in another way than that of another layer", tensor=name)
    return tensors, slices | {"*": None}


def grid(model: ModelShape, ranks: Iterable[EngineRank]) -> Grid:
    """Where a `Publisher` should cut tensors so that the part of each of these ranks is whole tiles.

        grid(model, [*(Rank.vllm(n, 2) for n in range(2)), *(Rank.vllm(n, 8) for n in range(8))])

    Give it every rank of every kind of engine that will follow the run.
    """
    cuts: dict[str, tuple[set[int], set[int]]] = {}
    # Layers and experts are cut alike: one of each kind says it, and a model may have 40,000 tensors.
    dense = frozenset({0} if model.dense_layers else ())
    few = replace(model, layers=2, experts=min(model.experts, 1), dense_layers=dense)
    alike = [replace(rank, ep=0, ep_size=1, expert_tp=rank.experts_split) for rank in ranks]
    for piece in chain.from_iterable(one.pieces for rank in alike for one in fused(few, rank)):
        spec = TensorSpec(piece.name, "", piece.shape)
        rows, columns = cuts.setdefault(re.sub(r"\.\d+\.", ".*.", piece.name), (set(), set()))
        rows.update({*(piece.rows or ())} - {0, spec.rows})
        columns.update({*(piece.columns or ())} - {0, spec.columns})
    if model.tied and EMBEDDING in cuts:
        cuts.setdefault(HEAD, cuts[EMBEDDING])  # a run that has both names files them under the first
    return {name: (sorted(rows), sorted(columns)) for name, (rows, columns) in cuts.items() if rows or columns}
