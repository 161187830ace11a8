"""Where the weights of a checkpoint lie in an inference engine: fused, spread over ranks, padded; vLLM and SGLang.

    model = ModelShape.from_config(config)  # Llama, Mistral, Qwen, Gemma, Phi-3, DeepSeek, …: see families.py
    placed = place(model, EngineRank.vllm(tp, tp_size), runtime_tensors(engine_model))

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
from pulsesync.integrations.families import LatentShape, ModelShape
from pulsesync.state.sharding import Placed
from pulsesync.state.slices import Slice, Slices, Span
from pulsesync.state.views import view_bits

__all__ = [
    "EngineRank",
    "Fused",
    "FusedPiece",
    "LatentShape",
    "ModelShape",
    "check_loaded",
    "for_subscriber",
    "fused",
    "grid",
    "place",
    "runtime_tensors",
]

VOCAB_PADDING = 64  # both engines pad the vocabulary to a multiple of this, then divide it by the ranks

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"

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
        latent: Whether latent attention reads kv_b_proj, or views into it; not if the engine multiplies with copies.

    Raises:
        ValueError: a rank is not below its size.
    """

    tp: int = 0
    tp_size: int = 1
    ep: int = 0
    ep_size: int = 1
    expert_tp: Part | None = None
    vocab_padding: int = VOCAB_PADDING
    latent: bool = True

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
        """As SGLang has it: experts are spread over ep_size groups of ranks, and split within each.

        It keeps copies of the halves of kv_b_proj (w_kc and w_vc), so that DeepSeek's attention is not mapped.
        """
        if tp_size % ep_size:
            raise ValueError(f"{tp_size} ranks are not {ep_size} groups of one size")
        group = tp_size // ep_size
        return cls(tp, tp_size, tp // group, ep_size, (tp % group, group), latent=False)

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
        StateError: the model cannot be divided by so many ranks, or this engine's tensors are no ranges of its tensors.
    """
    yield _vocabulary(EMBEDDING, model, rank)
    for n in range(model.layers):
        at, dense = f"model.layers.{n}", not model.experts or n in model.dense_layers
        yield _whole(f"{at}.input_layernorm.weight", model.hidden)
        if model.latent:
            yield from _latent_attention(f"{at}.self_attn", model, model.latent, rank)
        else:
            yield from _attention(f"{at}.self_attn", model, rank)
        yield _whole(f"{at}.post_attention_layernorm.weight", model.hidden)
        if model.mlp_norms:
            yield from (_whole(f"{at}.{when}_feedforward_layernorm.weight", model.hidden) for when in ("pre", "post"))
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
    yield _joined(f"{at}.qkv_proj.weight", model, parts, model.hidden)
    if model.qkv_bias:
        yield _joined(f"{at}.qkv_proj.bias", model, parts)
    yield _columns(f"{at}.o_proj.weight", model.hidden, heads * d, q)
    if model.o_bias:
        yield _whole(f"{at}.o_proj.bias", model.hidden)
    if model.qk_norm:
        yield from (_whole(f"{at}.{name}.weight", d) for name in ("q_norm", "k_norm"))


def _latent_attention(at: str, model: ModelShape, latent: LatentShape, rank: EngineRank) -> Iterator[Fused]:
    """What vLLM's MLA layer has; its W_UK_T and W_UV are views into kv_b_proj, if weights are not quantized."""
    if not rank.latent:
        raise StateError(f"this engine keeps copies of {at}.kv_b_proj, which a write in place leaves as they were")
    heads, part = model.heads, (rank.tp, rank.tp_size)
    query, compressed = latent.nope + latent.rope, latent.kv_rank + latent.rope
    q_name, q_width = ("q_b_proj", latent.q_rank) if latent.q_rank else ("q_proj", model.hidden)
    if latent.q_rank:
        parts = (("q_a_proj", latent.q_rank), ("kv_a_proj_with_mqa", compressed))
        whole = [(name, rows, (0, rows)) for name, rows in parts]  # on every rank
        yield _stacked(f"{at}.fused_qkv_a_proj.weight", whole, model.hidden)
        yield _whole(f"{at}.q_a_layernorm.weight", latent.q_rank)
    else:
        yield _whole(f"{at}.kv_a_proj_with_mqa.weight", compressed, model.hidden)
    yield _rows(f"{at}.{q_name}.weight", heads * query, q_width, _share(heads, part, query, f"{at}.{q_name}.weight"))
    yield _whole(f"{at}.kv_a_layernorm.weight", latent.kv_rank)
    both = latent.nope + latent.value
    yield _rows(f"{at}.kv_b_proj.weight", heads * both, latent.kv_rank, _share(heads, part, both, f"{at}.kv_b_proj"))
    span = _share(heads, part, latent.value, f"{at}.o_proj.weight")
    yield _columns(f"{at}.o_proj.weight", model.hidden, heads * latent.value, span)


def _mlp(at: str, model: ModelShape, width: int, rank: EngineRank, bias: bool = False) -> Iterator[Fused]:
    span = _share(width, (rank.tp, rank.tp_size), 1, f"{at}.gate_proj.weight")
    parts = (("gate_proj", width, span), ("up_proj", width, span))
    yield _joined(f"{at}.gate_up_proj.weight", model, parts, model.hidden)
    yield _columns(f"{at}.down_proj.weight", model.hidden, width, span)
    if bias:
        yield _joined(f"{at}.gate_up_proj.bias", model, parts)
        yield _whole(f"{at}.down_proj.bias", model.hidden)


def _moe(at: str, model: ModelShape, rank: EngineRank) -> Iterator[Fused]:
    yield _whole(f"{at}.gate.weight", model.experts, model.hidden)
    if model.router_bias:
        yield _whole(f"{at}.gate.e_score_correction_bias", model.experts)
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


def _joined(name: str, model: ModelShape, parts: Sequence[tuple[str, int, Span]], *inner: int) -> Fused:
    """Rows of several tensors of a checkpoint, or a checkpoint's own tensor that has them one after the other."""
    if not model.fused_checkpoint:
        return _stacked(name, parts, *inner)
    if any(span != (0, rows) for _, rows, span in parts):
        raise StateError(
            f"the checkpoint has {len(parts)} matrices in {name!r}, and of each of them a rank has a part, which is no "
            "one rectangle: only an engine without tensor parallelism can be mapped",
            tensor=name,
        )
    return _whole(name, sum(rows for _, rows, _ in parts), *inner)


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


def _rows(name: str, rows: int, columns: int, span: Span) -> Fused:
    piece = FusedPiece(name, (rows, columns), (slice(None),), rows=span)
    return Fused(name, (span[1] - span[0], columns), (piece,))


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


_DERIVED = ("W_UV", "W_UK_T", "W_UK_T_dcp_qrep", "W_K", "W_V", "w_kc", "w_vc")  # of kv_b_proj, in vLLM and in SGLang


def runtime_tensors(engine_model: Any) -> dict[str, Any]:
    """The parameters of an engine's model (a torch module), and what its attention layers derive from kv_b_proj.

    Most versions of the engines keep what is derived as plain attributes. `place` refuses those that are copies, which
    a write in place would leave as they were.
    """
    out: dict[str, Any] = dict(engine_model.named_parameters())
    for at, module in engine_model.named_modules():
        for name in _DERIVED:
            if hasattr(tensor := getattr(module, name, None), "data_ptr"):
                out.setdefault(f"{at}.{name}", tensor)
    return out


def place(model: ModelShape, rank: EngineRank, runtime: Mapping[str, Any]) -> dict[str, Placed]:
    """Say which part of the checkpoint each weight of an engine's tensors is; padding is left out.

    Takes torch tensors and numpy arrays; what it returns are views into them. A tensor that the map does not know must
    be in the memory of one that it knows: another name for it, or a view into it. A checkpoint's tensor of which
    nothing is here (an expert of another rank, a part of the vocabulary that is all padding) is not named.

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
    known: list[Span] = []
    for one in fused(model, rank):
        tensor = _checked(one, given.pop(one.name, None))
        known.append(_memory(tensor))
        for piece in one.pieces:
            out[piece.name] = Placed(tensor[piece.at], piece.shape, piece.rows, piece.columns)
    for name, tensor in given.items():
        begin, end = _memory(tensor)
        if not any(low <= begin < end <= high for low, high in known):
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


def _memory(tensor: Any) -> Span:
    """The addresses that a tensor's weights lie between."""
    if hasattr(tensor, "data_ptr"):
        begin, width = int(tensor.data_ptr()), int(tensor.element_size())
        strides = [width * stride for stride in tensor.stride()]
    else:
        begin, width, strides = int(tensor.ctypes.data), int(tensor.itemsize), list(tensor.strides)
    if 0 in tensor.shape:
        return begin, begin
    return begin, begin + width + sum((n - 1) * stride for n, stride in zip(tensor.shape, strides, strict=True))


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

        grid(model, [*(EngineRank.vllm(n, 2) for n in range(2)), *(EngineRank.vllm(n, 8) for n in range(8))])

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
