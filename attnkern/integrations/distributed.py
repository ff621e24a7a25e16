"""Sequences sharded over ranks, by torch's own ring: `context_parallel`, with attnkern's kernels and with checks.

Batches and heads need nothing from here: attention of DTensors (sharding rules in ops.py). What a ring of one's own
needs is `attnkern.attention(..., return_lse=True)`, `attnkern.merge_attention` and `attnkern.attention_backward`.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from .sdpa import use_as_sdpa


@contextlib.contextmanager
def context_parallel(
    mesh: Any,
    *,
    buffers: Sequence[Tensor],
    buffer_seq_dims: Sequence[int],
    no_restore_buffers: set[Tensor] | None = None,
    load_balance: bool = True,
) -> Iterator[Callable[[list[Tensor], list[int]], list[Tensor]]]:
    """torch's `context_parallel` over attnkern's kernels, on CPU (gloo) as on CUDA, with GQA.

    Inside, every rank holds its part of the buffers, and F.scaled_dot_product_attention of (B, H, L / ranks, E) parts
    is attention over the whole sequence: keys and values go round the ranks, results are merged by their log-sum-exp.
    No attn_mask, no dropout.

    Args:
        mesh: a 1-D DeviceMesh, whose process group serves the buffers' device.
        buffers, buffer_seq_dims: tensors with a sequence dimension, and which dimension that is. They are sharded in
            place and restored at the end, but for `no_restore_buffers`.
        load_balance: rank r of n gets parts r and 2n - 1 - r of 2n (zig-zag), which evens out the work of a causal
            mask; F.sdpa must then be called with is_causal=True. False: part r of n, for any F.sdpa.

    Yields:
        unshard(tensors, seq_dims): gathers parts like those of the buffers, such as outputs, in the original order.

    Raises:
        TypeError: mesh is not a DeviceMesh. RuntimeError: torch.distributed is not initialised, the mesh is not 1-D or
        its group does not serve the device. ValueError: a sequence length that is not divisible by the parts.

    Source: H. Liu et al., "Ring attention with blockwise transformers for near-infinite context", 2023.
    """
    check_mesh(mesh, buffers)
    parts = mesh.size() * (2 if load_balance else 1)
    for n, (buffer, dim) in enumerate(zip(buffers, buffer_seq_dims, strict=True)):
        check_length(f"buffers[{n}]", buffer.shape[dim], mesh.size(), parts)

    from torch.distributed.tensor.experimental import _attention as engine

    options = engine._cp_options  # the only way to the order of the parts
    was = options.enable_load_balance
    replace = functools.partial(setattr, F, "scaled_dot_product_attention")
    with contextlib.ExitStack() as stack:
        stack.enter_context(use_as_sdpa())
        stack.callback(replace, F.scaled_dot_product_attention)
        replace(_of_dtensors)
        stack.callback(setattr, options, "enable_load_balance", was)
        options.enable_load_balance = load_balance
        ring = engine.context_parallel(
            mesh,
            buffers=list(buffers),
            buffer_seq_dims=list(buffer_seq_dims),
            no_restore_buffers=no_restore_buffers,
        )
        stack.enter_context(ring)
        torchs = F.scaled_dot_product_attention  # makes DTensors of the parts, and calls _of_dtensors
        stack.callback(replace, torchs)
        replace(functools.partial(scaled_dot_product_attention, torchs))
        yield functools.partial(engine.context_parallel_unshard, mesh)


def scaled_dot_product_attention(
    ring: Callable[..., Tensor],
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
    """F.sdpa inside `context_parallel`: refuses what the ring doesn't support, before any rank waits for another."""
    if attn_mask is not None:
        raise RuntimeError("attnkern: attn_mask must be None under context_parallel, whose ranks see parts of the keys")
    if dropout_p > 0:
        raise RuntimeError(f"attnkern: dropout_p must be 0 under context_parallel, got {dropout_p}")
    if not enable_gqa and not query.shape[1] == key.shape[1] == value.shape[1]:
        raise RuntimeError(
            "attnkern: query, key and value must have as many heads as each other without enable_gqa, "
            f"got {query.shape[1]}, {key.shape[1]}, {value.shape[1]}"
        )
    return ring(query, key, value, is_causal=is_causal, scale=scale)


def _of_dtensors(query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool, scale: float | None) -> Tensor:
    """The one operator that torch's ring supports on every device; F.sdpa itself would choose another one on CPU."""
    return torch.ops.aten._scaled_dot_product_flash_attention(query, key, value, 0.0, is_causal, scale=scale)[0]


_of_dtensors.__name__ = "scaled_dot_product_attention"  # what torch's context_parallel replaces in F


def check_mesh(mesh: Any, tensors: Sequence[Tensor]) -> None:
    """Raises unless `mesh` is a 1-D DeviceMesh over a process group that serves the tensors' device."""
    if not dist.is_available() or not dist.is_initialized():
        raise RuntimeError("attnkern: context_parallel needs torch.distributed.init_process_group to be called first")
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
        if x.device.type != mesh.device_type:
            raise RuntimeError(
                f"attnkern: buffers[{n}] must be on the mesh's device {mesh.device_type}, got {x.device}"
            )
    served = dist.get_backend_config(mesh.get_group())  # "cpu:gloo,cuda:nccl"
    if mesh.device_type not in [entry.split(":")[0] for entry in served.split(",")]:
        raise RuntimeError(
            f"attnkern: the mesh's process group must serve {mesh.device_type} tensors, got one for {served}"
        )


def check_length(name: str, length: int, ranks: int, parts: int) -> None:
    """Raises unless a sequence can be cut into equal parts for all ranks."""
    if length % parts:
        zigzag = "" if parts == ranks else f" in {parts // ranks} parts each (load_balance=False: one)"
        raise ValueError(
            f"attnkern: {name}'s sequence length must be divisible by {parts}, for {ranks} ranks{zigzag}, got {length}"
        )
