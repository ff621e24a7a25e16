"""A window with attention sinks over a long stream: a mask for all of it, or a small cache, chunk by chunk.

python docs/examples/long_stream.py [picture.png]
"""

# %% 8192 tokens. Each sees the first 4, the sinks, and the last 512, its own among them.
import statistics
import sys
import time

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import track

import attnkern
from attnkern import masks

torch.manual_seed(0)
window, sinks, chunk, length = 512, 4, 256, 8192
q, k, v = torch.randn(3, 1, 4, length, 64).unbind()

mask = masks.sliding_window(window - 1, 0, length, sinks=sinks)
print(mask)
print(f"{100 * mask.sparsity:.1f} % of the scores are excluded")
whole = attnkern.attention(q, k, v, mask)

# %% In chunks, as the stream arrives: the cache holds sinks, window and the new chunk, however long the stream gets.
parts, most = [], 0
for begin in track(range(0, length, chunk), "stream", console=Console(stderr=True)):
    end = begin + chunk
    first = max(sinks, begin - window + 1)  # the oldest key that the chunk's first query sees, besides the sinks
    new = slice(begin, end)
    if begin == 0:
        out = attnkern.attention(q[:, :, new], k[:, :, new], v[:, :, new], is_causal=True)
    else:
        recent = slice(first, end)
        keys, values = (torch.cat([x[:, :, :sinks], x[:, :, recent]], 2) for x in (k, v))
        # Two ranges of the cache for each query: the sinks, and its window behind them.
        at = torch.arange(begin, end)
        low = (at - window + 1).clamp(min=sinks) - first + sinks
        ranges = torch.stack([0 * at, 0 * at + sinks, low, at + 1 - first + sinks], -1).view(chunk, 2, 2)
        out = attnkern.attention(q[:, :, new], keys, values, key_ranges=ranges)
        most = max(most, keys.shape[2])
    parts.append(out)
difference = (torch.cat(parts, 2) - whole).abs().max().item()
print(f"chunk by chunk: largest difference {difference:.1e}, at most {most} keys in the cache")

# %% Time over the length: the window's grows with it, a causal call's with its square.
times = {"window and sinks": [], "causal": [], "F.sdpa, causal": []}
lengths = [1024, 2048, 4096, 8192]
for n in track(lengths, "timing", console=Console(stderr=True)):
    some = [x[:, :, :n] for x in (q, k, v)]
    mask = masks.sliding_window(window - 1, 0, n, sinks=sinks)
    calls = {
        "window and sinks": lambda some=some, mask=mask: attnkern.attention(*some, mask),
        "causal": lambda some=some: attnkern.attention(*some, is_causal=True),
        "F.sdpa, causal": lambda some=some: F.scaled_dot_product_attention(*some, is_causal=True),
    }
    seconds = {name: [] for name in calls}
    for _ in range(5):
        for name, call in calls.items():
            begin = time.perf_counter()
            call()
            seconds[name].append(time.perf_counter() - begin)
    for name, found in seconds.items():
        times[name].append(1000 * statistics.median(found))
for name, found in times.items():
    print(f"{name:>16}: " + ", ".join(f"{x:.1f} ms at {n}" for n, x in zip(lengths, found, strict=True)))

# %% The picture.
if len(sys.argv) > 1:
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(8, 3.4), layout="constrained")
    masks.sliding_window(window - 1, 0, 2048, sinks=sinks).plot(ax=left, title="the first 2048 tokens")
    for (name, found), color in zip(times.items(), ["#c2410c", "#e69f00", "#0969da"], strict=True):
        right.plot(lengths, found, marker="o", color=color, label=name)
    right.set_xscale("log", base=2)
    right.set_yscale("log", base=2)
    right.set_xticks(lengths, [f"{n // 1024}k" for n in lengths])
    right.set(xlabel="sequence length", title="milliseconds, forward")
    right.yaxis.set_major_formatter("{x:g}")
    right.legend(frameon=False)
    right.spines[["top", "right"]].set_visible(False)
    figure.savefig(sys.argv[1], dpi=120)
