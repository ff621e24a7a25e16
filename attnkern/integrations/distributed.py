"""Sequences sharded over ranks: attention under any Mask, and torch's `context_parallel` with attnkern's kernels.

Batches and heads need nothing from here: attention of DTensors (sharding.py). The ring is made of public pieces, as a
ring of one's own would be: `attention(..., return_lse=True)`, `merge_attention` and `attention_backward`.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.utils import _pytree as pytree

from .. import masks
from ..api import attention
from ..arguments import autocast, autocasts, check_bool, exporting, making_graph, type_error
from ..backends import select
from ..mask import Mask
from ..merge import attention_backward, merge_attention
from ..packed import heads_first, tokens_first
from ..params import shown
from ..problem import Problem
from ..varlen import check_packed
from .sdpa import use_as_sdpa
from .shards import (
    ShardedMask,
    Shards,
    balanced_shards,
    check_dim,
    check_initialised,
    even_shards,
    in_order,
    length_of,
    live_scores,
    place_of,
    shard_mask,
    taken,
)

__all__ = [
    "ShardedMask",
    "balanced_shards",
    "context_parallel",
    "even_shards",
    "live_scores",
    "shard_mask",
    "sharded_attention",
    "sharded_varlen_attention",
]


@contextlib.contextmanager
def context_parallel(
    mesh: Any,
    *,
    buffers: Sequence[Tensor],
    buffer_seq_dims: Sequence[int],
    no_restore_buffers: set[Tensor] | None = None,
    load_balance: bool = True,
    attn_mask: Mask | ShardedMask | None = None,
) -> Iterator[Callable[[list[Tensor], list[int]], list[Tensor]]]:
    """torch's `context_parallel` over attnkern's kernels, on CPU (gloo) as on CUDA, with GQA, and under a mask.

    Inside, every rank holds its part of the buffers, and F.scaled_dot_product_attention of (B, H, L / ranks, E) parts
    is attention over the whole sequence: keys and values go round the ranks, results are merged by their log-sum-exp.
    Calls bring no attn_mask of their own, and no dropout.

    Args:
        mesh: a 1-D DeviceMesh, whose process group serves the buffers' device.
        buffers, buffer_seq_dims: tensors with a sequence dimension, and which dimension that is. They are sharded in
            place and restored at the end, but for `no_restore_buffers`.
        load_balance: rank r of n gets parts r and 2n - 1 - r of 2n (zig-zag), which evens out the work of a causal
            mask; F.sdpa must then be called with is_causal=True. False: part r of n, for any F.sdpa.
        attn_mask: a Mask over the whole sequence, of any length, for every call: `sharded_attention` takes the place of
            torch's ring. Calls with is_causal=True attend to what the mask lets and the order of the whole sequence.
            load_balance then means `balanced_shards`. Or what `shard_mask` has made of it.

    Yields:
        unshard(tensors, seq_dims): gathers parts like those of the buffers, such as outputs, in the original order.

    Raises:
        TypeError: mesh is not a DeviceMesh. RuntimeError: torch.distributed is not initialised, the mesh is not 1-D or
        its group does not serve the device, a buffer does not have the mask's length. ValueError: another number of
        buffer_seq_dims than of buffers, a sequence length that is not divisible by the parts (without attn_mask).

    Source: H. Liu et al., "Ring attention with blockwise transformers for near-infinite context", 2023.
    """
    check_mesh(mesh, buffers)
    if len(buffers) != len(buffer_seq_dims):
        raise ValueError(
            "attnkern: buffer_seq_dims must have one dimension for each of buffers, "
            f"got {len(buffer_seq_dims)} for {len(buffers)}"
        )
    not_restored = set(no_restore_buffers or ())
    if attn_mask is not None:
        if isinstance(attn_mask, Mask):
            shards = None if load_balance else even_shards(attn_mask.seqlen_q, mesh.size())
            attn_mask = shard_mask(attn_mask, mesh.get_group(), shards)
        _check_under_mask(attn_mask, mesh, buffers, buffer_seq_dims)
        with _under_mask(attn_mask, buffers, buffer_seq_dims, not_restored) as unshard:
            yield unshard
        return
    parts = mesh.size() * (2 if load_balance else 1)
    for n, (buffer, dim) in enumerate(zip(buffers, buffer_seq_dims, strict=True)):
        check_dim(f"buffers[{n}]", buffer, f"buffer_seq_dims[{n}]", dim)
        check_length(f"buffers[{n}]", buffer.shape[dim], mesh.size(), parts)

    from torch.distributed.tensor.experimental import _attention as engine

    options = engine._cp_options  # the only way to the order of the parts
    was = options.enable_load_balance
    replace = functools.partial(setattr, F, "scaled_dot_product_attention")
    with contextlib.ExitStack() as stack:
        for x in buffers:  # torch's resizes them where they lie
            _become(stack, x, x, not_restored)
        stack.enter_context(use_as_sdpa())
        stack.callback(replace, F.scaled_dot_product_attention)
        replace(_of_dtensors)
        stack.callback(setattr, options, "enable_load_balance", was)
        options.enable_load_balance = load_balance
        ring = engine.context_parallel(
            mesh,
            buffers=list(buffers),
            buffer_seq_dims=list(buffer_seq_dims),
            no_restore_buffers=not_restored,
        )
        stack.enter_context(ring)
        torchs = F.scaled_dot_product_attention  # makes DTensors of the parts, and calls _of_dtensors
        stack.callback(replace, torchs)
        replace(_in_place_of_sdpa(torchs))
        yield functools.partial(engine.context_parallel_unshard, mesh)


@contextlib.contextmanager
def _under_mask(
    sharded: ShardedMask, buffers: Sequence[Tensor], dims: Sequence[int], not_restored: set[Tensor]
) -> Iterator[Callable[[list[Tensor], list[int]], list[Tensor]]]:
    """`context_parallel` by `sharded_attention`."""

    @functools.cache
    def causal() -> ShardedMask:
        mask = sharded.mask
        both = mask & masks.causal(mask.seqlen_q, mask.seqlen_k, device=mask.device)
        return shard_mask(both, sharded.group, sharded.queries)

    def attend(query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool, scale: float | None) -> Any:
        used = causal() if is_causal else sharded
        return sharded_attention(query, key, value, used, scale=scale, enable_gqa=True)

    def unshard(tensors: list[Tensor], seq_dims: list[int]) -> list[Tensor]:
        return [sharded.unshard(x, dim) for x, dim in zip(tensors, seq_dims, strict=True)]

    parts = [sharded.shard(x, dim) for x, dim in zip(buffers, dims, strict=True)]
    with contextlib.ExitStack() as stack:
        stack.callback(setattr, F, "scaled_dot_product_attention", F.scaled_dot_product_attention)
        F.scaled_dot_product_attention = _in_place_of_sdpa(attend)
        for x, part in zip(buffers, parts, strict=True):
            _become(stack, x, part, not_restored)
        yield unshard


def _become(stack: contextlib.ExitStack, x: Any, other: Tensor, not_restored: set[Tensor]) -> None:
    """Gives x what `other` holds, in memory of its own, and its former memory in the end. So what it was a view of, as
    tokens and labels are of one text, stays as it is."""
    if x not in not_restored:
        stack.callback(x.set_, x.detach())
    x.set_(other.detach().clone(memory_format=torch.contiguous_format))


def _in_place_of_sdpa(ring: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """F.sdpa inside `context_parallel`. Compiled models call it between their graphs: messages don't go into them."""

    @torch.compiler.disable(reason="attnkern: context_parallel exchanges messages, which no graph holds")
    def scaled_dot_product_attention(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """Refuses what the ring doesn't support, before any rank waits for another."""
        _check_not_traced("context_parallel")
        if attn_mask is not None:
            raise RuntimeError(
                "attnkern: attn_mask must be None under context_parallel, whose ranks see parts of the keys"
            )
        check_no_dropout(dropout_p, "under context_parallel")
        if not enable_gqa and not query.shape[1] == key.shape[1] == value.shape[1]:
            raise RuntimeError(
                "attnkern: query, key and value must have as many heads as each other without enable_gqa, "
                f"got {query.shape[1]}, {key.shape[1]}, {value.shape[1]}"
            )
        return ring(query, key, value, is_causal=is_causal, scale=scale)

    return scaled_dot_product_attention


def _of_dtensors(query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool, scale: float | None) -> Tensor:
    """The one operator that torch's ring supports on every device; F.sdpa itself would choose another one on CPU."""
    return torch.ops.aten._scaled_dot_product_flash_attention(query, key, value, 0.0, is_causal, scale=scale)[0]


_of_dtensors.__name__ = "scaled_dot_product_attention"  # what torch's context_parallel replaces in F


def check_mesh(mesh: Any, tensors: Sequence[Tensor]) -> None:
    """Raises unless `mesh` is a 1-D DeviceMesh over a process group that serves the tensors' device."""
    check_initialised("context_parallel")
    from torch.distributed.device_mesh import DeviceMesh

    if not isinstance(mesh, DeviceMesh):
        raise TypeError(
            f"attnkern: argument 'mesh' must be a DeviceMesh, not {type(mesh).__name__} "
            "(DeviceMesh.from_group makes one of a process group)"
        )
    if mesh.ndim != 1:
        raise RuntimeError(
            f"attnkern: mesh must have one dimension, got {mesh.ndim} of sizes {tuple(mesh.shape)} "
            "(mesh['name'] takes one out)"
        )
    for n, x in enumerate(tensors):
        if not isinstance(x, Tensor):
            raise type_error(f"buffers[{n}]", "Tensor", x)
        if x.requires_grad:
            raise RuntimeError(f"attnkern: buffers[{n}] must not require a gradient: it is sharded in place")
        if x.device.type != mesh.device_type:
            raise RuntimeError(
                f"attnkern: buffers[{n}] must be on the mesh's device {mesh.device_type}, got {x.device}"
            )
    served = dist.get_backend_config(mesh.get_group())  # "cpu:gloo,cuda:nccl"
    if mesh.device_type not in [entry.split(":")[0] for entry in served.split(",")]:
        raise RuntimeError(
            f"attnkern: the mesh's process group must serve {mesh.device_type} tensors, got one for {served}"
        )


def _check_under_mask(sharded: Any, mesh: Any, buffers: Sequence[Tensor], dims: Sequence[int]) -> None:
    """Raises unless `context_parallel` can run under this mask."""
    if not isinstance(sharded, ShardedMask):
        raise TypeError(f"attnkern: argument 'attn_mask' must be Mask or ShardedMask, not {type(sharded).__name__}")
    ranks, of_mesh = (dist.get_process_group_ranks(group) for group in (sharded.group, mesh.get_group()))
    if ranks != of_mesh:
        raise RuntimeError(
            f"attnkern: attn_mask must be sharded over the mesh's ranks {shown(of_mesh)}, got {shown(ranks)}"
        )
    for n, (x, dim) in enumerate(zip(buffers, dims, strict=True)):
        check_dim(f"buffers[{n}]", x, f"buffer_seq_dims[{n}]", dim)
        if x.shape[dim] != sharded.mask.seqlen_q:
            raise RuntimeError(
                f"attnkern: buffers[{n}] must have {sharded.mask.seqlen_q} tokens in dimension {dim}, as attn_mask, "
                f"got {tuple(x.shape)}"
            )


def check_length(name: str, length: int, ranks: int, parts: int) -> None:
    """Raises unless a sequence can be cut into equal parts for all ranks."""
    if length % parts:
        zigzag = "" if parts == ranks else f" in {parts // ranks} parts each (load_balance=False: one)"
        raise ValueError(
            f"attnkern: {name}'s sequence length must be divisible by {parts}, for {ranks} ranks{zigzag}, got {length}"
        )


def sharded_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: ShardedMask,
    *,
    dropout_p: float = 0,
    scale: float | None = None,
    enable_gqa: bool = False,
    softcap: float | None = None,
    return_lse: bool = False,
    exchange: str = "ring",
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention over a sequence that is sharded over ranks, each of which holds the tokens that `attn_mask` gives it.

    "ring": the keys and values that a rank needs come to it, one owner after the other, while it attends to those of
    the one before. The results are merged by their log-sum-exp. What nobody of a rank attends to is not sent, and costs
    no call. "all_to_all" (Ulysses): each rank gets all tokens of some heads. Any heads do that the ranks divide.

    Args:
        query: (B, Hq, own queries, E), key: (B, Hk, own keys, E), value: (B, Hv, own keys, Ev), as `attn_mask.shard`
            gives them; dtypes and strides as in `attention`, one batch size.
        attn_mask: by `shard_mask`, of this process group.
        scale, enable_gqa, softcap, return_lse, backend: as in `attention`. dropout_p: must be 0.
        exchange: "ring" or "all_to_all".

    Returns:
        (B, Hq, own queries, Ev) in query's dtype; with return_lse also lse (B, Hq, own queries). Differentiable once by
        the ring, as often as `attention` by the other.

    Raises:
        As `attention`; RuntimeError also where query or key doesn't have this rank's tokens, or dropout_p isn't 0.
        TypeError: attn_mask is no ShardedMask. ValueError: numbers of heads that the ranks don't divide, an unknown
        exchange.

    Source: H. Liu et al., "Ring attention with blockwise transformers for near-infinite context", 2023; S. Jacobs et
    al., "DeepSpeed Ulysses", 2023.
    """
    if not isinstance(attn_mask, ShardedMask):
        raise TypeError(
            f"attnkern: argument 'attn_mask' must be ShardedMask, not {type(attn_mask).__name__} "
            "(shard_mask makes one of a Mask)"
        )
    if exchange not in ("ring", "all_to_all"):
        raise ValueError(f"attnkern: exchange must be 'ring' or 'all_to_all', got {shown(exchange)}")
    _check_not_traced("sharded_attention")
    check_no_dropout(dropout_p, "where the sequence is sharded")
    check_bool("return_lse", return_lse)
    problem = Problem.from_sdpa(query, key, value, None, 0, False, scale, enable_gqa, softcap=softcap)
    _check_shards(query, key, value, attn_mask)
    if backend is not None:  # what it refuses is said before anything is sent: an error amid messages leaves them there
        select(problem, backend)
    if autocasts(query.device):
        query, key, value = autocast(query, key, value)
    options = {"scale": scale, "enable_gqa": enable_gqa, "softcap": softcap, "backend": backend}
    if exchange == "all_to_all":
        results = _by_heads(query, key, value, attn_mask, options)
    else:
        results = _RingAttention.apply(query, key, value, attn_mask, options)
    return results if return_lse else results[0]


# Dynamo follows nothing so marked, and gives the reason. (torch.compiler.disable marks, too, but imports Dynamo.)
sharded_attention._torchdynamo_disable = True  # type: ignore[attr-defined]
sharded_attention._torchdynamo_disable_msg = (  # type: ignore[attr-defined]
    "attnkern: sharded_attention exchanges messages between ranks, which no graph holds"
)


def sharded_varlen_attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: ShardedMask, *, return_lse: bool = False, **options: Any
) -> Tensor | tuple[Tensor, Tensor]:
    """`sharded_attention` of packed sequences: query (own tokens, Hq, E), key and value (own tokens of keys, Hk, E).

    attn_mask: `shard_mask(masks.packed(cu_seqlens, ...))`. Options and errors are those of `sharded_attention`.

    Returns:
        (own tokens, Hq, Ev); with return_lse also lse (Hq, own tokens).
    """
    check_packed(query, key, value)
    q, k, v = heads_first(query, key, value, batch=True)
    results: Any = sharded_attention(q, k, v, attn_mask, return_lse=True, **options)
    out, lse = tokens_first(results[0]), results[1].squeeze(0)
    return (out, lse) if return_lse else out


class _RingAttention(torch.autograd.Function):
    """(query, key, value, ShardedMask, options) -> (out, lse)"""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, sharded: ShardedMask, options: dict) -> Any:
        exact = torch.promote_types(query.dtype, torch.float32)
        out = query.new_zeros(*query.shape[:3], value.shape[3], dtype=exact)  # rounded once, at the end
        lse = query.new_full(query.shape[:3], -math.inf, dtype=exact)
        first = True
        for owner, (k, v) in _arriving(sharded, key, value):
            for rows, keys, mask in sharded.parts[owner]:
                new = attention(query[:, :, rows], k[:, :, keys], v[:, :, keys], mask, return_lse=True, **options)
                old = out[:, :, rows], lse[:, :, rows]
                merged = new if first else merge_attention(old, (new[0].to(exact), new[1]))
                first = False
                for x, y in zip(old, merged, strict=True):
                    x.copy_(y)
        out = out.to(query.dtype)
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.how = sharded, options
        return out, lse

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor, grad_lse: Tensor) -> Any:
        saved = ctx.saved_tensors  # once: a checkpoint gives them no second time
        with torch.no_grad():
            grads = _RingAttention._gradients(saved, grad_out, grad_lse, *ctx.how)
        if torch.is_grad_enabled():
            grads = _DifferentiableOnce.apply(*grads, *saved[:3], grad_out, grad_lse)
        return *grads, None, None

    @staticmethod
    def _gradients(
        saved: tuple[Tensor, ...], grad_out: Tensor, grad_lse: Tensor, sharded: ShardedMask, options: dict
    ) -> tuple[Tensor, ...]:
        query, key, value, out, lse = saved
        grad_query, grad_key, grad_value = (torch.zeros_like(x, dtype=lse.dtype) for x in (query, key, value))
        returning = _Returning(sharded, grad_key, grad_value)
        for owner, (k, v) in _arriving(sharded, key, value):
            grad_k, grad_v = (torch.zeros_like(x, dtype=lse.dtype) for x in (k, v))
            for rows, keys, mask in sharded.parts[owner]:
                given = grad_out[:, :, rows], query[:, :, rows], k[:, :, keys], v[:, :, keys]
                results = out[:, :, rows], lse[:, :, rows]
                dq, dk, dv = attention_backward(
                    *given, *results, mask, grad_lse=grad_lse[:, :, rows].to(lse.dtype), **options
                )
                grad_query[:, :, rows] += dq
                grad_k[:, :, keys] += dk
                grad_v[:, :, keys] += dv
            returning.give(owner, grad_k, grad_v)
        returning.wait()
        return tuple(x.to(query.dtype) for x in (grad_query, grad_key, grad_value))


class _DifferentiableOnce(torch.autograd.Function):
    """(three gradients, what they depend on) -> the gradients, whose own derivatives are refused.

    torch's `once_differentiable` doesn't tell autograd what gradients depend on: a derivative by one of these would be
    None, or 0 by materialize_grads.
    """

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, *sources: Tensor) -> Any:
        return query, key, value

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise RuntimeError(
            "attnkern: sharded_attention's ring has no derivatives of second order: exchange='all_to_all' has them"
        )


class _Exchange:
    """Tensors on their way to some ranks and from others. Empty ones don't travel."""

    def __init__(self, group: Any, sends: Iterable[tuple[Tensor, int]], receives: Iterable[tuple[Tensor, int]]):
        ops = [
            dist.P2POp(operation, x, dist.get_global_rank(group, rank), group)
            for operation, tensors in ((dist.isend, sends), (dist.irecv, receives))
            for x, rank in tensors
            if x.numel() > 0
        ]
        self.ops = ops  # which keep what is sent
        self.requests = dist.batch_isend_irecv(ops) if ops else []

    def wait(self) -> None:
        for request in self.requests:
            request.wait()


def _arriving(sharded: ShardedMask, *own: Tensor) -> Iterator[tuple[int, list[Tensor]]]:
    """Of each rank in turn, this one first: the needed keys of tensors (B, H, keys, E). The next ones are on their way
    meanwhile. In step n every rank gives to the n-th one after it, so that none waits for a later step of another."""
    rank, size = sharded.rank, len(sharded.keys)

    def packed(reader: int) -> list[Tensor]:
        runs = [place_of(run, sharded.keys[rank]) for run in sharded.needed[reader][rank]]
        return [taken(x, runs, 2).contiguous() for x in own]

    def start(step: int) -> tuple[int, list[Tensor], _Exchange]:
        reader, owner = (rank + step) % size, (rank - step) % size
        count = length_of(sharded.needed[rank][owner])
        received = [x.new_empty(*x.shape[:2], count, x.shape[3]) for x in own]
        sends, receives = ([(x, peer) for x in some] for some, peer in ((packed(reader), reader), (received, owner)))
        return owner, received, _Exchange(sharded.group, sends, receives)

    coming = start(1) if size > 1 else None
    yield rank, packed(rank)
    for step in range(1, size):
        assert coming is not None
        owner, received, exchange = coming
        exchange.wait()
        coming = start(step + 1) if step + 1 < size else None
        yield owner, received


class _Returning:
    """Gradients of keys that came by `_arriving`, on their way home, where they are added up."""

    def __init__(self, sharded: ShardedMask, *home: Tensor):
        self.sharded, self.home = sharded, home
        self.coming: tuple[int, list[Tensor], _Exchange] | None = None

    def give(self, owner: int, *grads: Tensor) -> None:
        """What this rank has for `owner`; the rank that stands to this one as this one to the owner gives likewise."""
        sharded, rank, size = self.sharded, self.sharded.rank, len(self.sharded.keys)
        if owner == rank:
            self._add(rank, grads)
            return
        reader = (2 * rank - owner) % size
        count = length_of(sharded.needed[reader][rank])
        received = [x.new_empty(*x.shape[:2], count, x.shape[3]) for x in self.home]
        sends, receives = [(x, owner) for x in grads], [(x, reader) for x in received]
        exchange = _Exchange(sharded.group, sends, receives)
        self.wait()
        self.coming = reader, received, exchange

    def wait(self) -> None:
        if self.coming is not None:
            reader, received, exchange = self.coming
            exchange.wait()
            self._add(reader, received)
            self.coming = None

    def _add(self, reader: int, grads: Iterable[Tensor]) -> None:
        rank = self.sharded.rank
        runs = [place_of(run, self.sharded.keys[rank]) for run in self.sharded.needed[reader][rank]]
        for home, x in zip(self.home, grads, strict=True):
            for (begin, end), piece in zip(runs, x.split([end - begin for begin, end in runs], 2), strict=True):
                home[:, :, begin:end] += piece


def _by_heads(query: Tensor, key: Tensor, value: Tensor, sharded: ShardedMask, options: dict) -> tuple[Tensor, Tensor]:
    """Attention of some heads over all tokens, on each rank."""
    size = len(sharded.queries)
    if any(x.shape[1] % size for x in (query, key, value)):
        raise ValueError(
            f"attnkern: with exchange='all_to_all' numbers of heads must be divisible by the {size} ranks, got "
            f"{query.shape[1]}, {key.shape[1]}, {value.shape[1]}"
        )
    mask = sharded.mask
    if mask.shape[1] > 1:
        own = query.shape[1] // size
        mask = pytree.tree_map(lambda x: x.narrow(1, sharded.rank * own, own).contiguous(), mask)
    q = _HeadsForTokens.apply(query, sharded.group, sharded.queries, True)
    k, v = (_HeadsForTokens.apply(x, sharded.group, sharded.keys, True) for x in (key, value))
    out, lse = attention(q, k, v, mask, return_lse=True, **options)
    out = _HeadsForTokens.apply(out, sharded.group, sharded.queries, False)
    lse = _HeadsForTokens.apply(lse.unsqueeze(-1), sharded.group, sharded.queries, False)
    return out, lse.squeeze(-1)


class _HeadsForTokens(torch.autograd.Function):
    """(B, all heads, own tokens, E) -> (B, own heads, all tokens, E) or back, which also is its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any, shards: Shards, to_heads: bool) -> Tensor:
        ctx.how = group, shards, to_heads
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        if to_heads:
            given = x.chunk(size, 1)
            received = [x.new_empty(x.shape[0], x.shape[1] // size, length_of(runs), x.shape[3]) for runs in shards]
        else:
            given = tuple(taken(x, runs, 2) for runs in shards)
            received = [torch.empty_like(given[rank], memory_format=torch.contiguous_format) for _ in shards]
        given = tuple(part.contiguous() for part in given)
        others = [n for n in range(size) if n != rank]
        _Exchange(group, [(given[n], n) for n in others], [(received[n], n) for n in others]).wait()
        received[rank] = given[rank]
        return in_order(torch.cat(received, 2), shards, 2) if to_heads else torch.cat(received, 1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        group, shards, to_heads = ctx.how
        return _HeadsForTokens.apply(grad, group, shards, not to_heads), None, None, None


def _check_shards(query: Tensor, key: Tensor, value: Tensor, sharded: ShardedMask) -> None:
    """Raises unless the tensors are what `sharded` gives this rank."""
    rank, mask = sharded.rank, sharded.mask
    counts = length_of(sharded.queries[rank]), *[length_of(sharded.keys[rank])] * 2
    for name, x, count in zip(("query", "key", "value"), (query, key, value), counts, strict=True):
        if x.dim() != 4 or x.shape[0] != query.shape[0] or x.shape[2] != count:
            raise RuntimeError(
                f"attnkern: {name} must have the shape (batch, heads, {count}, size) on rank {rank}, of one batch size "
                f"with query, for a mask of {mask.seqlen_q} queries and {mask.seqlen_k} keys; got {tuple(x.shape)}"
            )
    if any(n not in (1, m) for n, m in zip(mask.shape[:2], query.shape[:2], strict=True)):
        raise RuntimeError(
            f"attnkern: attn_mask is a mask of {mask.shape[0]} sequences and {mask.shape[1]} heads, query is "
            f"{tuple(query.shape)}"
        )
    if mask.device != query.device:
        raise RuntimeError(f"attnkern: attn_mask must be on query's device {query.device}, got {mask.device}")


def _check_not_traced(name: str) -> None:
    """Raises if a program is being made of this call, which would hold neither messages nor right gradients, or if a
    transform follows it, whose tensors can't be sent."""
    if exporting() or torch.jit.is_tracing() or (not torch.compiler.is_compiling() and making_graph()):
        raise RuntimeError(
            f"attnkern: {name} exchanges messages between ranks, which torch.export and other tracers can't put into "
            "a program: use torch.compile, which calls it between its graphs"
        )
    if torch._C._are_functorch_transforms_active():
        raise RuntimeError(
            f"attnkern: {name} exchanges messages between ranks, which torch.func's transforms can't follow: use "
            "torch.autograd for gradients"
        )


def check_no_dropout(dropout_p: float, where: str) -> None:
    """Raises if there is dropout, whose pattern depends on where a key is among all keys."""
    if dropout_p != 0:
        raise RuntimeError(f"attnkern: dropout_p must be 0 {where}, got {dropout_p}")
