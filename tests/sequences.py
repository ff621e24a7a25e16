"""Packed batches: sequences one after the other, as cu_seqlens or jagged nested tensors say, and a call for each."""

import itertools

import torch

LENGTHS = {  # of the queries and of the keys
    "one": ([50], [50]),
    "alike": ([32, 32, 32], [32, 32, 32]),
    "short": ([3, 20, 1, 47, 33, 5], [3, 20, 1, 47, 33, 5]),
    "empty ones": ([0, 20, 0, 0, 30, 0], [0, 20, 0, 0, 30, 0]),
    "crossed": ([5, 70, 1, 130], [90, 12, 33, 250]),
    "no keys": ([5, 70, 3], [90, 0, 33]),
    "long": ([300, 17, 200], [300, 17, 200]),
}


def ends(lengths, dtype=torch.int32, device=None):
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=dtype, device=device)


def packed(target, lengths_q, lengths_k, dtype=torch.float32, heads=4, heads_k=2, size=16, size_v=24):
    """query, key and value (tokens, heads, size), which require gradients."""
    shapes = (sum(lengths_q), heads, size), (sum(lengths_k), heads_k, size), (sum(lengths_k), heads_k, size_v)
    return [target.randn(*shape).to(dtype).requires_grad_() for shape in shapes]


def jagged(values, lengths):
    """(B, n, heads, size) of (T, heads, size)."""
    return torch.nested.nested_tensor_from_jagged(values, ends(lengths, torch.int64, values.device))


def nested(q, k, v, lengths_q, lengths_k):
    """(B, heads, n, size), keys and values with offsets of their own."""
    parts = (q, lengths_q), (k, lengths_k), (v, lengths_k)
    return [jagged(x, lengths).transpose(1, 2) for x, lengths in parts]


def flat(x):
    """(T, heads, size) of (B, heads, n, size)."""
    return x.transpose(1, 2).values()


def one_by_one(attention, q, k, v, lengths_q, lengths_k, used=None, **options):
    """out (T, heads, size) and lse (heads, T) by a call for each sequence, of which the first `used` keys count."""
    outs, lses = [], []
    sequences = zip(q.split(lengths_q), k.split(lengths_k), v.split(lengths_k), used or lengths_k, strict=True)
    for *tensors, n in sequences:
        a, b, c = (x.transpose(0, 1) for x in tensors)
        out, lse = attention(a, b[:, :n], c[:, :n], enable_gqa=True, return_lse=True, **options)
        outs.append(out.transpose(0, 1))
        lses.append(lse)
    return torch.cat(outs), torch.cat(lses, -1)
