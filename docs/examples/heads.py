"""What heads attend to: their weights, and how spread these are (entropy), before and after training.

python docs/examples/heads.py [picture.png]
"""

# %% A task of three parts. At every position: the token before, the first token, and how often token 0 came so far.
import sys

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import track

import attnkern

torch.manual_seed(0)
tokens, length, heads, width = 12, 32, 4, 64


def draw(count):
    x = torch.randint(tokens, (count, length))
    x[:, 1:][torch.rand(count, length - 1) < 0.2] = 0
    before = F.pad(x[:, :-1], (1, 0))
    first = x[:, :1].expand_as(x)
    zeros = (x == 0).cumsum(1).clamp(max=tokens - 1)
    return x, torch.stack([before, first, zeros])


# %% One layer of attention, and a linear classifier for each part.
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.token, self.place = torch.nn.Embedding(tokens, width), torch.nn.Embedding(length, width)
        self.qkv, self.out = torch.nn.Linear(width, 3 * width), torch.nn.Linear(width, width)
        self.parts = torch.nn.ModuleList([torch.nn.Linear(width, tokens) for _ in range(3)])

    def queries_keys_values(self, x):
        x = self.token(x) + self.place(torch.arange(length))
        return self.qkv(x).unflatten(-1, (3, heads, -1)).permute(2, 0, 3, 1, 4).unbind()

    def forward(self, x):
        out = attnkern.attention(*self.queries_keys_values(x), is_causal=True)
        out = self.out(out.transpose(1, 2).flatten(2))
        return [part(out) for part in self.parts]


# %% Weights and entropy. The log-sum-exp of the forward pass makes the weights; no second softmax is computed.
def look(model, x):
    """Weights (heads, length, length), the mean over the batch, and entropy in bits (heads, length) likewise."""
    with torch.no_grad():
        q, k, v = model.queries_keys_values(x)
        _, lse = attnkern.attention(q, k, v, is_causal=True, return_lse=True)
        weights = attnkern.attention_weights(q, k, lse=lse, is_causal=True)
    entropy = -torch.xlogy(weights, weights).sum(-1) / torch.log(torch.tensor(2.0))
    return weights.mean(0), entropy.mean(0)


# %% Train.
model = Model()
probe, _ = draw(64)
before = look(model, probe)
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
for _ in track(range(400), "training", console=Console(stderr=True)):
    x, wanted = draw(64)
    losses = [F.cross_entropy(y.flatten(0, 1), part.flatten()) for y, part in zip(model(x), wanted, strict=True)]
    optimizer.zero_grad()
    sum(losses).backward()
    optimizer.step()
after = look(model, probe)
names = ["token before", "first token", "count of zeros"]
print("cross-entropy: " + ", ".join(f"{name} {loss.item():.2f}" for name, loss in zip(names, losses, strict=True)))

# %% What a head does, in numbers: the weight on the position before, on the first, and the entropy, in the mean.
weights, entropy = after
even = torch.arange(1, length + 1).log2().mean()
print(f"entropy of weights that are all alike: {even:.2f} bits")
for head in range(heads):
    previous = weights[head].diagonal(-1).mean()
    first = weights[head, 1:, 0].mean()
    print(
        f"head {head}: position before {previous:.2f}, first position {first:.2f}, "
        f"entropy {before[1][head].mean():.2f} -> {entropy[head].mean():.2f} bits"
    )

# %% The picture.
if len(sys.argv) > 1:  # a notebook has arguments, too
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, heads + 1, figsize=(11, 2.6), layout="constrained", width_ratios=[1] * heads + [1.3])
    for head, ax in enumerate(axes[:-1]):
        ax.imshow(weights[head].numpy(), cmap="Blues", vmin=0, vmax=1)
        ax.set(title=f"head {head}", xlabel="key", xticks=[0, 16, 31], yticks=[0, 16, 31])
        axes[-1].plot(entropy[head].numpy(), label=f"head {head}")
    axes[0].set_ylabel("query")
    axes[-1].plot(torch.arange(1, length + 1).log2().numpy(), color="#999999", linestyle="--", label="all alike")
    axes[-1].set(title="entropy, bits", xlabel="query")
    axes[-1].legend(frameon=False, fontsize=8)
    axes[-1].spines[["top", "right"]].set_visible(False)
    if sys.argv[1].endswith(".png"):
        figure.savefig(sys.argv[1], dpi=120)
