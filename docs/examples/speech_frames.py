"""Sliding-window attention over the frames of a long recording: each frame sees its neighbours only.

python docs/examples/speech_frames.py [picture.png]
"""

import math
import sys

import torch

import attnkern

torch.manual_seed(0)

# 2000 frames of 40 bands (20 s at 100 frames a second): two resonances that wander, and noise.
frames, bands, reach = 2000, 40, 6
time = torch.arange(frames)[:, None] / 100
band = torch.arange(bands)
clean = sum(
    torch.exp(-(((band - centre) / 3) ** 2))
    for centre in (12 + 6 * torch.sin(0.9 * time), 28 + 5 * torch.sin(1.4 * time + 1))
)
noisy = clean + 0.3 * torch.randn(frames, bands)

# Like finds like: frames are their own queries, keys and values. The window leaves out every tile beyond it.
smooth, lse = attnkern.attention(noisy, noisy, noisy, window=(reach, reach), scale=0.25, return_lse=True)


def error(x: torch.Tensor) -> float:
    return math.sqrt((x - clean).square().mean().item())


pairs = sum(min(frames, i + reach + 1) - max(0, i - reach) for i in range(frames))
print(f"pairs of frames: {pairs} of {frames * frames} ({100 * pairs / frames**2:.2f} %)")
print(f"error of the noisy frames: {error(noisy):.4f}")
print(f"error after attention to {2 * reach + 1} neighbours: {error(smooth):.4f}")

# The weights of one frame out of 2000: the memory of one row.
row = attnkern.attention_weights(noisy, noisy, lse=lse, rows=1000, window=(reach, reach), scale=0.25)[0]
seen = row.nonzero().flatten()
print(f"frame 1000 sees frames {int(seen[0])} to {int(seen[-1])}")
print("their weights:", " ".join(f"{x:.3f}" for x in row[seen].tolist()))

if len(sys.argv) > 1:
    some = slice(980, 1020)
    rows = attnkern.attention_weights(noisy, noisy, lse=lse, rows=some, window=(reach, reach), scale=0.25)
    names = range(980, 1020)
    title = f"40 of {frames} frames, window of {reach} to either side"
    attnkern.plot_attention(rows[:, some], names, names, title=title).savefig(sys.argv[1], dpi=120)
