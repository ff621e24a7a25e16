"""A small vision transformer learns to tell shapes apart, and shows which patches it looks at.

python docs/examples/shapes_vit.py [picture.png [steps]]
"""

# %% Images of 32 x 32 pixels, made here: one of four shapes, anywhere, of any size, in noise.
import sys

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import track

import attnkern

torch.manual_seed(0)
steps = int(sys.argv[2]) if len(sys.argv) > 2 else 250
names = ["disc", "ring", "square", "cross"]


def draw(count):
    """(count, 32, 32) images and their classes."""
    kind = torch.randint(4, (count,))
    radius = 4 + 4 * torch.rand(count, 1, 1)
    centre = 9 + 14 * torch.rand(count, 2, 1, 1)
    row = (torch.arange(32).view(1, 32, 1) - centre[:, 0]).abs()
    column = (torch.arange(32).view(1, 1, 32) - centre[:, 1]).abs()
    distance = (row**2 + column**2).sqrt()
    disc = distance < radius
    ring = disc & (distance > radius - 2.5)
    square = torch.maximum(row, column) < radius
    cross = square & (torch.minimum(row, column) < 1.5)
    image = torch.stack([disc, ring, square, cross], 1)[torch.arange(count), kind].float()
    return image + 0.2 * torch.randn(count, 32, 32), kind


# %% The model: 64 patches of 4 x 4 pixels and a token that gathers what the classifier reads.
class Layer(torch.nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.attention = attnkern.nn.MultiheadAttention(width, heads, batch_first=True)
        self.norms = torch.nn.ModuleList([torch.nn.LayerNorm(width), torch.nn.LayerNorm(width)])
        self.mlp = torch.nn.Sequential(
            torch.nn.Linear(width, 2 * width), torch.nn.GELU(), torch.nn.Linear(2 * width, width)
        )

    def forward(self, x, need_weights=False):
        y = self.norms[0](x)
        y, weights = self.attention(y, y, y, need_weights=need_weights)
        x = x + y
        return x + self.mlp(self.norms[1](x)), weights


class ViT(torch.nn.Module):
    def __init__(self, width=64, heads=4, depth=2):
        super().__init__()
        self.patch = torch.nn.Conv2d(1, width, 4, stride=4)
        self.gather = torch.nn.Parameter(torch.zeros(1, 1, width))
        self.place = torch.nn.Parameter(0.02 * torch.randn(1, 65, width))
        self.layers = torch.nn.ModuleList([Layer(width, heads) for _ in range(depth)])
        self.head = torch.nn.Sequential(torch.nn.LayerNorm(width), torch.nn.Linear(width, 4))

    def forward(self, image, need_weights=False):
        x = self.patch(image[:, None]).flatten(2).transpose(1, 2)
        x = torch.cat([self.gather.expand(len(x), -1, -1), x], 1) + self.place
        for layer in self.layers:
            x, weights = layer(x, need_weights)
        return self.head(x[:, 0]), weights  # the last layer's, (batch, 65, 65)


# %% Train.
model = ViT()
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
losses = []
for _ in track(range(steps), "training", console=Console(stderr=True)):
    image, kind = draw(128)
    loss = F.cross_entropy(model(image)[0], kind)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())

# %% Images that were not trained on, and where the gathering token looks. Weights are computed for these calls alone.
with torch.no_grad():
    image, kind = draw(500)
    logits, weights = model(image, need_weights=True)
accuracy = (logits.argmax(-1) == kind).float().mean().item()
print(f"loss {losses[0]:.2f} -> {losses[-1]:.2f} in {steps} steps, {100 * accuracy:.0f} % of 500 new images right")
maps = weights[:, 0, 1:].unflatten(-1, (8, 8))  # of the gathering token, over the patches

# %% The picture.
if len(sys.argv) > 1:
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(2, 5, figsize=(8, 3.4), layout="constrained", width_ratios=[1.6, 1, 1, 1, 1])
    chart = figure.add_subplot(axes[0, 0].get_gridspec()[:, 0])
    for ax in axes[:, 0]:
        ax.remove()
    chart.plot(losses, color="#c2410c")
    chart.set(xlabel="step", title="cross-entropy")
    chart.spines[["top", "right"]].set_visible(False)
    for n, (above, below) in enumerate(axes[:, 1:].T):
        example = int((kind == n).nonzero()[0])
        above.imshow(image[example].numpy(), cmap="gray")
        above.set_title(f"{names[n]}: {names[int(logits[example].argmax())]}", fontsize=10)
        below.imshow(maps[example].numpy(), cmap="Blues")
        for ax in (above, below):
            ax.set(xticks=[], yticks=[])
    axes[1, 1].set_ylabel("attends to")
    figure.savefig(sys.argv[1], dpi=120)
