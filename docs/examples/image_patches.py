"""Attention between the patches of an image: a patch finds the patches that look like it.

python docs/examples/image_patches.py [picture.png]
"""

import sys

import torch

import attnkern

torch.manual_seed(0)

# 32 x 32 pixels: a red disc, a blue bar, a green ground, and noise.
row, column = torch.meshgrid(torch.arange(32), torch.arange(32), indexing="ij")
disc = (row - 9) ** 2 + (column - 10) ** 2 < 42
bar = (row >= 20) & (row < 28) & (column >= 8) & (column < 28)
image = torch.zeros(3, 32, 32)
image[0], image[1], image[2] = disc.float(), (~disc & ~bar).float(), bar.float()
image += 0.1 * torch.randn(image.shape)

# 8 x 8 patches of 4 x 4 pixels, 48 numbers each.
patches = image.unfold(1, 4, 4).unfold(2, 4, 4).permute(1, 2, 0, 3, 4).reshape(64, 48)
names = ["disc", "bar", "ground"]
parts = torch.stack([disc, bar, ~disc & ~bar]).float().unfold(1, 4, 4).unfold(2, 4, 4).mean((-1, -2)).reshape(3, 64)

x = patches - patches.mean(0)
weights = attnkern.attention_weights(x, x, rows=[2 * 8 + 2, 6 * 8 + 4, 0], scale=0.25)
print(f"{len(patches)} patches of {patches.shape[1]} numbers")
for name, patch in zip(names, weights, strict=True):
    shares = ", ".join(f"{other} {share:.3f}" for other, share in zip(names, (parts @ patch).tolist(), strict=True))
    print(f"a patch of the {name} attends to: {shares}")

if len(sys.argv) > 1:
    maps = weights.unflatten(-1, (8, 8))
    labels = [f"from the {name}" for name in names]
    attnkern.plot_attention(maps, range(8), range(8), head_labels=labels).savefig(sys.argv[1], dpi=120)
