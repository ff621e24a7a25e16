"""Calls whose mask, table or ranges are given by a word, and whose options may ask for sinks."""

import torch


def problem(target, options, lengths, sizes, heads, dtype, excluding=""):
    """Its inputs and the options of attention.

    `heads`: of the batch, of queries and of keys. `excluding`: "" for nothing, "relative" for a table, "kind shape" for
    a mask as of make_mask, "kind shape count" for ranges as of with_ranges.
    """
    options = {"enable_gqa": True, **options}
    sinks = options.pop("sinks", None)
    batch, heads_q, heads_k = heads
    kind, *rest = excluding.split() or [""]
    mask = (kind, rest[0]) if len(rest) == 1 else None
    inputs = target.inputs(batch, heads_q, *lengths, *sizes, heads_k=heads_k, dtype=dtype, mask=mask)
    if kind == "relative":
        inputs = inputs.with_relative_bias(heads_q, sum(lengths) - 1, dtype, 0)
    elif len(rest) == 2:
        inputs = inputs.with_ranges(kind, rest[0], int(rest[1]), torch.int32, 0)
    if sinks is not None:
        inputs = inputs.with_sinks(sinks, torch.promote_types(dtype, torch.float32), 0)
    return inputs, options
