"""Ring attention and Ulysses attention of one's own, in a page each: what attnkern gives to a library that does them.

    torchrun --nproc-per-node 4 docs/examples/ring_attention.py

Ring: every rank keeps its queries; keys and values go round, a part of them arriving at each step.

    forward     attention(..., return_lse=True) of the own queries over each part, joined by merge_attention
    backward    attention_backward over each part again, with the joined out and lse; the gradients of a part's keys and
                values travel along with them and are complete when they are home

Ulysses: an all-to-all turns (all heads, own rows) into (own heads, all rows) and back. Attention needs to know nothing.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

import attnkern


def places(rank: int, size: int, zigzag: bool) -> list[int]:
    """Which parts of the sequence a rank holds: part `rank` of `size`, or parts from both ends of 2 * size.

    Zig-zag shares out the work of a causal mask evenly, of which the first rows have least and the last ones most.
    """
    return [rank, 2 * size - 1 - rank] if zigzag else [rank]


def shard(x: Tensor, group: dist.ProcessGroup, zigzag: bool = False) -> Tensor:
    """The rank's rows of x (B, H, L, E). Raises ValueError where L cannot be cut into equal parts."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    mine = places(rank, size, zigzag)
    if x.shape[2] % (size * len(mine)):
        raise ValueError(f"the sequence length must be divisible by {size * len(mine)}, got {x.shape[2]}")
    parts = x.chunk(size * len(mine), dim=2)
    return torch.cat([parts[n] for n in mine], dim=2)


def pass_on(tensors: list[Tensor], group: dist.ProcessGroup) -> list[Tensor]:
    """Gives the tensors to the next rank and returns those of the rank before."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    after, before = (dist.get_global_rank(group, (rank + step) % size) for step in (1, -1))
    received = [torch.empty_like(x) for x in tensors]
    sends = [dist.P2POp(dist.isend, x, after, group) for x in tensors]
    receives = [dist.P2POp(dist.irecv, x, before, group) for x in received]
    for request in dist.batch_isend_irecv(sends + receives):
        request.wait()
    return received


def steps(group: dist.ProcessGroup, zigzag: bool, is_causal: bool):
    """For each step: (own part, part that has arrived, whether the causal mask cuts through this pair)."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    for step in range(size):
        pairs = []
        for i, own in enumerate(places(rank, size, zigzag)):
            for j, theirs in enumerate(places((rank - step) % size, size, zigzag)):
                if not is_causal or theirs <= own:  # keys in the future: nothing to do
                    pairs.append((i, j, is_causal and theirs == own))
        yield pairs


class RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, query, key, value, group, zigzag, is_causal):
        num_parts = 2 if zigzag else 1
        queries = query.chunk(num_parts, 2)
        results: list = [None] * num_parts
        k, v = key.contiguous(), value.contiguous()
        for n, pairs in enumerate(steps(group, zigzag, is_causal)):
            if n > 0:
                k, v = pass_on([k, v], group)
            for i, j, causal in pairs:
                out, lse = attnkern.attention(
                    queries[i],
                    k.chunk(num_parts, 2)[j],
                    v.chunk(num_parts, 2)[j],
                    is_causal=causal,
                    enable_gqa=True,
                    return_lse=True,
                )
                new = out.to(lse.dtype), lse  # rounded once, at the end
                results[i] = new if results[i] is None else attnkern.merge_attention(results[i], new)
        out = torch.cat([out for out, _ in results], 2).to(query.dtype)
        lse = torch.cat([lse for _, lse in results], 2)
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.how = group, zigzag, is_causal
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_out):
        query, key, value, out, lse = ctx.saved_tensors
        group, zigzag, is_causal = ctx.how
        num_parts = 2 if zigzag else 1
        rows = list(zip(*(x.chunk(num_parts, 2) for x in (grad_out, query, out, lse)), strict=True))
        travelling = [key.contiguous(), value.contiguous()]
        travelling += [torch.zeros_like(x, dtype=lse.dtype) for x in travelling]
        grad_query = torch.zeros_like(query, dtype=lse.dtype)
        for pairs in steps(group, zigzag, is_causal):
            k, v, grad_k, grad_v = ([*x.chunk(num_parts, 2)] for x in travelling)
            for i, j, causal in pairs:
                grad_out_i, query_i, out_i, lse_i = rows[i]
                dq, dk, dv = attnkern.attention_backward(
                    grad_out_i, query_i, k[j], v[j], out_i, lse_i, is_causal=causal, enable_gqa=True
                )
                grad_query.chunk(num_parts, 2)[i].add_(dq)
                grad_k[j].add_(dk)
                grad_v[j].add_(dv)
            travelling = pass_on(travelling, group)
        _, _, grad_key, grad_value = travelling
        return (*(g.to(query.dtype) for g in (grad_query, grad_key, grad_value)), None, None, None)


def ring_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    group: dist.ProcessGroup,
    *,
    is_causal: bool = False,
    zigzag: bool = False,
) -> Tensor:
    """Attention over the whole sequence; each rank has the rows that `shard` gives it, (B, H, L / ranks, E)."""
    if is_causal and query.shape[2] != key.shape[2]:
        raise ValueError(f"is_causal needs as many queries as keys, got {query.shape[2]} and {key.shape[2]}")
    return RingAttention.apply(query, key, value, group, zigzag, is_causal)


class HeadsForRows(torch.autograd.Function):
    """(B, all heads, own rows, E) -> (B, own heads, all rows, E); the other way round is also its gradient."""

    @staticmethod
    def forward(ctx, x, group, cut, join):
        ctx.how = group, cut, join
        given = [part.contiguous() for part in x.chunk(dist.get_world_size(group), cut)]
        received = [torch.empty_like(part) for part in given]
        dist.all_to_all(received, given, group)
        return torch.cat(received, join)

    @staticmethod
    def backward(ctx, grad):
        group, cut, join = ctx.how
        return HeadsForRows.apply(grad, group, join, cut), None, None, None


def ulysses_attention(query: Tensor, key: Tensor, value: Tensor, group: dist.ProcessGroup, **options) -> Tensor:
    """Attention over the whole sequence; each rank has consecutive rows of all heads. `options` are attention's."""
    size = dist.get_world_size(group)
    if query.shape[1] % size or key.shape[1] % size:
        raise ValueError(f"numbers of heads must be divisible by {size}, got {query.shape[1]} and {key.shape[1]}")
    q, k, v = (HeadsForRows.apply(x, group, 1, 2) for x in (query, key, value))
    out = attnkern.attention(q, k, v, enable_gqa=True, **options)
    return HeadsForRows.apply(out, group, 2, 1)


def main() -> None:
    dist.init_process_group("gloo")
    group = dist.group.WORLD
    torch.manual_seed(0)
    query, key, value = torch.randn(1, 8, 512, 64), torch.randn(1, 4, 512, 64), torch.randn(1, 4, 512, 64)
    whole = attnkern.attention(query, key, value, is_causal=True, enable_gqa=True)
    for zigzag in (False, True):
        mine = [shard(x, group, zigzag) for x in (query, key, value)]
        out = ring_attention(*mine, group, is_causal=True, zigzag=zigzag)
        error = (out - shard(whole, group, zigzag)).abs().max()
        print(f"rank {dist.get_rank()}: ring, zigzag={zigzag}: largest difference from one process {error:.1e}")
    out = ulysses_attention(*(shard(x, group) for x in (query, key, value)), group, is_causal=True)
    print(f"rank {dist.get_rank()}: Ulysses: {(out - shard(whole, group)).abs().max():.1e}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
