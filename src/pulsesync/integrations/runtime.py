"""Map the weights of a checkpoint to those of vLLM and SGLang, where they are fused, sharded over ranks and padded.

    model = ModelShape.from_config(config)  # Llama, Mistral, Qwen, Gemma, Phi-3, DeepSeek, …: see families.py
    placed = place(model, EngineRank.vllm(tp, tp_size), runtime_tensors(engine_model))

The result has the names of the checkpoint's tensors; its values are views into the engine's memory, each a rectangle of
the checkpoint's tensor. `for_subscriber` converts it for a `Subscriber`, and `grid` returns where a `Publisher` should
cut tensors so that every rank's part is complete tiles. Nothing is copied, and neither torch nor an engine is imported.
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

Part = tuple[int, int]  # the index of a part, and the number of parts


@dataclass(frozen=True)
class EngineRank:
    """Which part of a model a process of an engine has.

    Args:
        tp: Its tensor-parallel rank, which splits attention, dense layers, shared experts and the vocabulary.
        tp_size: How many such ranks there are.
        ep: Its expert-parallel rank, which selects some of the experts.
        ep_size: How many such ranks there are.
        expert_tp: Index and number of the part of each of those experts; if not given, the same as for the other
            tensors, or the entire expert with expert parallelism.
        vocab_padding: The vocabulary is padded to a multiple of this, and then divided by the ranks.
        latent: Whether latent attention reads kv_b_proj, or views into it; False if the engine computes with copies.

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
                raise ValueError(f"a rank must be from 0 to size - 1; got rank {n} of size {size}")

    @classmethod
    def vllm(
        cls, tp: int, tp_size: int, *, dp: int = 0, dp_size: int = 1, expert_parallel: bool = False
    ) -> "EngineRank":
        """Return a rank of vLLM: experts are distributed, or else split, over all ranks of all replicas."""
        flat = (dp * tp_size + tp, dp_size * tp_size)
        return cls(tp, tp_size, *flat) if expert_parallel else cls(tp, tp_size, expert_tp=flat)

    @classmethod
    def sglang(cls, tp: int, tp_size: int, ep_size: int = 1) -> "EngineRank":
        """Return a rank of SGLang: experts are distributed over ep_size groups of ranks, and split within each.

        SGLang keeps copies of the halves of kv_b_proj (w_kc and w_vc), so DeepSeek's attention is not mapped.
        """
        if tp_size % ep_size:
            raise ValueError(f"tp_size must be a multiple of ep_size; got tp_size {tp_size} and ep_size {ep_size}")
        group = tp_size // ep_size
        return cls(tp, tp_size, tp // group, ep_size, (tp % group, group), latent=False)

    @property
    def experts_split(self) -> Part:
        return self.expert_tp or ((0, 1) if self.ep_size > 1 else (self.tp, self.tp_size))


@dataclass(frozen=True)
class FusedPiece:
    """A rectangle of a checkpoint's tensor, and its position in a tensor of the runtime."""

    name: str
    shape: tuple[int, ...]
    at: tuple[int | slice, ...]  # index into the runtime's tensor, which gives a contiguous piece
    rows: Span | None = None
    columns: Span | None = None


@dataclass(frozen=True)
class Fused:
    """A tensor of the runtime and the pieces that it consists of; the rest is padding."""

    name: str
    shape: tuple[int, ...]
    pieces: tuple[FusedPiece, ...]


def fused(model: ModelShape, rank: EngineRank) -> Iterator[Fused]:
    """Yield every tensor that a rank of an engine has.

    Raises:
        StateError: the model cannot be divided by this many ranks, or the engine's tensors are not ranges of the
        checkpoint's tensors.
    """
    yield _vocabulary(EMBEDDING, model, rank)
    for n in range(model.layers):
        at = f"model.layers.{n}"
        yield _whole(f"{at}.input_layernorm.weight", model.hidden)
        if model.latent:
            yield from _latent_attention(f"{at}.self_attn", model, model.latent, rank)
        else:
            yield from _attention(f"{at}.self_attn", model, rank)
        yield _whole(f"{at}.post_attention_layernorm.weight", model.hidden)
        if model.mlp_norms:
            yield from (_whole(f"{at}.{when}_feedforward_layernorm.weight", model.hidden) for when in ("pre", "post"))
        if not model.experts or n in model.dense_layers:
            yield from _mlp(f"{at}.mlp", model, model.intermediate, rank, model.mlp_bias)
        else:
            yield from _moe(f"{at}.{model.moe}", model, rank)
    yield _whole("model.norm.weight", model.hidden)
    if model.lm_head:
        yield _vocabulary(HEAD, model, rank)


def _attention(at: str, model: ModelShape, rank: EngineRank) -> Iterator[Fused]:
    d, heads, kv_heads = model.head_dim, model.heads, model.kv_heads
    copies = rank.tp_size // kv_heads if rank.tp_size % kv_heads == 0 else 1  # ranks that have the same KV head
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
    """Yield the tensors of vLLM's MLA layer; W_UK_T and W_UV are views into kv_b_proj, if weights are not quantized."""
    if not rank.latent:
        raise StateError(f"this engine keeps copies of {at}.kv_b_proj, which a write in place would not update")
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
    w13 = tuple(
        FusedPiece(f"{at}.{n}.{name}.weight", (width, hidden), (n - first, rows), rows=span)
        for n in mine
        for rows, name in ((slice(0, local), gate), (slice(local, 2 * local), up))
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
    """Return rows of several tensors of a checkpoint, or of one that contains them one after the other."""
    if not model.fused_checkpoint:
        return _stacked(name, parts, *inner)
    if any(span != (0, rows) for _, rows, span in parts):
        raise StateError(
            f"the checkpoint has {len(parts)} matrices in {name!r}, and a rank has a part of each of them, which is "
            "not a single rectangle: start the engine without tensor parallelism",
            tensor=name,
        )
    return _whole(name, sum(rows for _, rows, _ in parts), *inner)


def _stacked(name: str, parts: Sequence[tuple[str, int, Span]], *inner: int) -> Fused:
    """Return rows of several tensors, one after the other: each has a name, its rows, and which of them are local."""
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
    """Return the even share of a rank, in units of `each`."""
    n, size = part
    if count % size:
        raise StateError(
            f"{name!r} cannot be split: {count} is not divisible by {size} ranks; use another number of ranks",
            tensor=name,
        )
    mine = count // size * each
    return n * mine, (n + 1) * mine


_DERIVED = ("W_UV", "W_UK_T", "W_UK_T_dcp_qrep", "W_K", "W_V", "w_kc", "w_vc")  # of kv_b_proj, in vLLM and in SGLang


def runtime_tensors(engine_model: Any) -> dict[str, Any]:
    """Return the parameters of an engine's model (a torch module), and what attention layers derive from kv_b_proj.

    Most versions of the engines keep derived tensors as plain attributes. `place` refuses those that are copies, which
    a write in place would not update.
    """
    out: dict[str, Any] = dict(engine_model.named_parameters())
    for at, module in engine_model.named_modules():
        for name in _DERIVED:
            if hasattr(tensor := getattr(module, name, None), "data_ptr"):
                out.setdefault(f"{at}.{name}", tensor)
    return out


def place(model: ModelShape, rank: EngineRank, runtime: Mapping[str, Any]) -> dict[str, Placed]:
    """Return which part of the checkpoint each of an engine's tensors has; padding is left out.

    It takes torch tensors and numpy arrays, and returns views into them. A tensor that the map does not contain must be
    in the memory of one that it contains: another name for it, or a view into it. A checkpoint's tensor of which this
    rank has nothing (an expert of another rank, a part of the vocabulary that is all padding) is left out.

    Raises:
        StateError: a tensor is unknown, missing, not contiguous or has another shape (`tensor`), or the model cannot be
            divided by this many ranks.
    """
    given: dict[str, Any] = {}
    for name, tensor in runtime.items():
        short = name.replace(".routed_experts.", ".")  # a module that newer versions of vLLM add
        if short in given:
            raise StateError(f"the runtime has {short!r} under two names", tensor=name)
        given[short] = tensor
    if model.tied and EMBEDDING in given:
        given.setdefault(HEAD, given[EMBEDDING])  # engines have tied weights under one name, or under both
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
            raise not_mapped("runtime", name)
    return out


def not_mapped(where: str, name: str) -> StateError:
    return StateError(f"the {where} has a tensor {name!r}, which the map of this model does not have", tensor=name)


def _checked(one: Fused, tensor: Any) -> Any:
    if tensor is None:
        raise StateError(
            f"the runtime has no tensor {one.name!r}, which the map of this model needs; check that the "
            "configuration is that of the engine's model",
            tensor=one.name,
        )
    if (shape := tuple(tensor.shape)) != one.shape:
        raise StateError(
            f"runtime tensor {one.name!r} has shape {shape}; for this rank of this model it must be {one.shape}: "
            "check the rank and the number of ranks",
            tensor=one.name,
        )
    if not _contiguous(tensor):
        raise StateError(f"runtime tensor {one.name!r} is not contiguous", tensor=one.name)
    return tensor


def _contiguous(tensor: Any) -> bool:
    return bool(tensor.is_contiguous() if hasattr(tensor, "is_contiguous") else tensor.flags.c_contiguous)


def _memory(tensor: Any) -> Span:
    """Return the first and the last address of a tensor's weights."""
    if hasattr(tensor, "data_ptr"):
        begin, width = int(tensor.data_ptr()), int(tensor.element_size())
        strides = [width * stride for stride in tensor.stride()]
    else:
        begin, width, strides = int(tensor.ctypes.data), int(tensor.itemsize), list(tensor.strides)
    if 0 in tensor.shape:
        return begin, begin
    return begin, begin + width + sum((n - 1) * stride for n, stride in zip(tensor.shape, strides, strict=True))


def check_loaded(placed: Mapping[str, Placed], checkpoint: Mapping[str, Any]) -> None:
    """Check that an engine which has loaded a checkpoint has its weights at the positions of the map.

    Shapes are not enough: some kernels swap or shuffle an expert's weights once they are loaded, and experts can be
    distributed in other orders. Tensors on a GPU are copied to the host, one by one.

    Raises:
        StateError: a tensor of the checkpoint is missing or has another dtype or shape, or its weights are elsewhere
            (`tensor`).
    """
    for name, one in placed.items():
        if name not in checkpoint:
            raise StateError(f"the checkpoint has no tensor {name!r}", tensor=name)
        in_host = [tensor.cpu() if hasattr(tensor, "cpu") else tensor for tensor in (checkpoint[name], one.tensor)]
        whole, mine = (view_bits({name: tensor})[0][name] for tensor in in_host)
        if (whole.spec.dtype, whole.spec.shape) != (mine.spec.dtype, one.shape):
            raise StateError(
                f"tensor {name!r} is {mine.spec.dtype} {one.shape} in the engine, but {whole.spec.dtype} "
                f"{whole.spec.shape} in the checkpoint",
                tensor=name,
            )
        window = Slice(one.rows, one.columns).of(whole.spec)
        table = whole.flat.reshape(whole.spec.rows, whole.spec.columns)
        if not np.array_equal(table[slice(*window.rows), slice(*window.columns)].reshape(-1), mine.flat):
            raise StateError(f"the weights of {name!r} are not at the position that the map names", tensor=name)


def for_subscriber(placed: Mapping[str, Placed]) -> tuple[dict[str, Any], Slices]:
    """Return the result of `place` as the tensors and the slices for a `Subscriber`.

        tensors, slices = for_subscriber(placed)
        Subscriber(location, slices=slices).sync(tensors)

    This rank must have a part of every layer of the run; it need not have other tensors, such as other ranks' experts.

    Raises:
        StateError: a tensor is not contiguous, or layers are cut in different ways.
    """
    tensors: dict[str, Any] = {}
    slices: dict[str, Slice | None] = {}
    for name, one in placed.items():
        part = Slice(one.rows, one.columns)
        if not _contiguous(one.tensor):
            raise StateError(f"tensor {name!r} is not contiguous", tensor=name)
        tensors[name] = one.tensor.reshape(part.of(TensorSpec(name, "", one.shape)).local.shape)
        # One pattern for all layers: each name of the run is matched with each pattern, and MoE models have 20,000.
        if slices.setdefault(re.sub(r"\.layers\.\d+\.", ".layers.*.", name), part) != part:
            raise StateError(f"tensor {name!r} is cut differently from that of another layer", tensor=name)
    return tensors, slices | {"*": None}


def grid(model: ModelShape, ranks: Iterable[EngineRank]) -> Grid:
    """Return where a `Publisher` should cut tensors so that the part of each of these ranks is complete tiles.

        grid(model, [*(EngineRank.vllm(n, 2) for n in range(2)), *(EngineRank.vllm(n, 8) for n in range(8))])

    Pass every rank of every kind of engine that will follow the run.
    """
    cuts: dict[str, tuple[set[int], set[int]]] = {}
    # Layers and experts are cut in the same way, so one of each is enough: a model may have 40,000 tensors.
    dense = frozenset({0} if model.dense_layers else ())
    few = replace(model, layers=2, experts=min(model.experts, 1), dense_layers=dense)
    alike = [replace(rank, ep=0, ep_size=1, expert_tp=rank.experts_split) for rank in ranks]
    for piece in chain.from_iterable(one.pieces for rank in alike for one in fused(few, rank)):
        spec = TensorSpec(piece.name, "", piece.shape)
        rows, columns = cuts.setdefault(re.sub(r"\.\d+\.", ".*.", piece.name), (set(), set()))
        rows.update({*(piece.rows or ())} - {0, spec.rows})
        columns.update({*(piece.columns or ())} - {0, spec.columns})
    if model.tied and EMBEDDING in cuts:
        cuts.setdefault(HEAD, cuts[EMBEDDING])  # a run that has both names stores them under the first
    return {name: (sorted(rows), sorted(columns)) for name, (rows, columns) in cuts.items() if rows or columns}
