"""A long row of documents, sharded over processes: each has as many tokens and as many live scores as the others.

    torchrun --nproc-per-node 4 docs/examples/sharded_documents.py

The mask is made and cut once. Every layer then calls `sharded_attention` with its own tokens. The same mask, given to
`context_parallel`, carries a model that calls F.scaled_dot_product_attention and knows nothing of it.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

import attnkern
from attnkern import masks
from attnkern.integrations.distributed import even_shards, live_scores, shard_mask, sharded_attention

LENGTHS = [1024, *[64] * 16]  # tokens of each document


def compare(group: dist.ProcessGroup) -> float:
    """The largest difference from one process, of the result and of the gradients."""
    ends = torch.tensor([0, *LENGTHS]).cumsum(0)
    mask = masks.document(cu_seqlens=ends, is_causal=True)
    sharded = shard_mask(mask, group)
    if dist.get_rank(group) == 0:
        size = dist.get_world_size(group)
        for name, shards in (("even", even_shards(mask.seqlen_q, size)), ("balanced", sharded.queries)):
            live = live_scores(mask, shards)
            print(f"{name} shards: the most live scores of a rank are {max(live) * size / sum(live):.2f} of the mean")

    torch.manual_seed(0)
    whole = [torch.randn(1, heads, mask.seqlen_q, 64, requires_grad=True) for heads in (8, 4, 4)]
    out = attnkern.attention(*whole, mask, enable_gqa=True)
    grad_out = torch.randn_like(out)
    expected = out, *torch.autograd.grad(out, whole, grad_out)

    own = [sharded.shard(x.detach(), 2).requires_grad_() for x in whole]
    out = sharded_attention(*own, sharded, enable_gqa=True)
    results = out, *torch.autograd.grad(out, own, sharded.shard(grad_out, 2))
    pairs = zip(results, expected, strict=True)
    return max(float((x - sharded.shard(y, 2)).detach().abs().max()) for x, y in pairs)


def main() -> None:
    dist.init_process_group("gloo")
    print(f"rank {dist.get_rank()}: largest difference from one process {compare(dist.group.WORLD):.1e}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
