"""A character-level GPT trained on packed documents, and its tokens a second beside F.sdpa on a padded batch.

python docs/examples/packed_gpt.py [picture.png [steps]]
"""

# %% Documents: torch's own docstrings, each cut off after 1024 characters.
import statistics
import sys
import time

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import track

import attnkern

torch.manual_seed(0)
steps = int(sys.argv[2]) if len(sys.argv) > 2 else 200
longest, budget = 1024, 3072

found = {x.__doc__ for name, x in sorted(vars(torch).items()) if callable(x) and isinstance(x.__doc__, str)}
texts = sorted(text[:longest] for text in found if text.isascii() and len(text) > 100)
letters = sorted({letter for text in texts for letter in text})
index = {letter: i for i, letter in enumerate(letters)}
documents = [torch.tensor([index[x] for x in text]) for text in texts]
print(f"{len(documents)} documents of {min(map(len, documents))} to {max(map(len, documents))} characters")


def draw():
    """Documents that fill about `budget` tokens."""
    chosen, tokens = [], 0
    while tokens < budget - longest:
        chosen.append(documents[int(torch.randint(len(documents), ()))])
        tokens += len(chosen[-1])
    return chosen


# %% The model. Only attention knows whether its tokens are packed, (tokens, width), or padded, (batch, tokens, width).
class Block(torch.nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norms = torch.nn.ModuleList([torch.nn.LayerNorm(width), torch.nn.LayerNorm(width)])
        self.qkv, self.out = torch.nn.Linear(width, 3 * width), torch.nn.Linear(width, width)
        self.mlp = torch.nn.Sequential(
            torch.nn.Linear(width, 4 * width), torch.nn.GELU(), torch.nn.Linear(4 * width, width)
        )

    def forward(self, x, cu_seqlens=None):
        q, k, v = self.qkv(self.norms[0](x)).unflatten(-1, (3, self.heads, -1)).unbind(-3)
        if cu_seqlens is None:
            q, k, v = (y.transpose(1, 2) for y in (q, k, v))
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
        else:
            mixed = attnkern.varlen_attention(q, k, v, cu_seqlens, is_causal=True)
        x = x + self.out(mixed.flatten(-2))
        return x + self.mlp(self.norms[1](x))


class GPT(torch.nn.Module):
    def __init__(self, letters, width=128, heads=4, depth=2):
        super().__init__()
        self.letter, self.place = torch.nn.Embedding(letters, width), torch.nn.Embedding(longest, width)
        for embedding in (self.letter, self.place):
            torch.nn.init.normal_(embedding.weight, std=0.1)
        self.blocks = torch.nn.ModuleList([Block(width, heads) for _ in range(depth)])
        self.head = torch.nn.Sequential(torch.nn.LayerNorm(width), torch.nn.Linear(width, letters))

    def forward(self, tokens, places, cu_seqlens=None):
        x = self.letter(tokens) + self.place(places)
        for block in self.blocks:
            x = block(x, cu_seqlens)
        return self.head(x)


def packed_loss(model, chosen):
    """One row of tokens. `cu_seqlens` says where documents begin; no document sees another one."""
    lengths = torch.tensor([len(x) - 1 for x in chosen])
    tokens, following = torch.cat([x[:-1] for x in chosen]), torch.cat([x[1:] for x in chosen])
    places = torch.cat([torch.arange(n) for n in lengths])
    return F.cross_entropy(model(tokens, places, F.pad(lengths.cumsum(0), (1, 0))), following)


def padded_loss(model, chosen):
    """A batch. Padding stands at the end, where no earlier token sees it, so `is_causal` is the whole mask."""
    batch = torch.nn.utils.rnn.pad_sequence(chosen, batch_first=True, padding_value=-1)
    tokens, following = batch[:, :-1].clamp(min=0), batch[:, 1:]
    logits = model(tokens, torch.arange(tokens.shape[1]).expand_as(tokens))
    return F.cross_entropy(logits.flatten(0, 1), following.flatten(), ignore_index=-1)


# %% Train on packed documents.
model = GPT(len(letters))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
losses = []
for _ in track(range(steps), "training", console=Console(stderr=True)):
    loss = packed_loss(model, draw())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
print(f"loss {losses[0]:.2f} -> {statistics.mean(losses[-5:]):.2f} in {steps} steps")

# %% The same documents go both ways, so the losses agree. Rounds take turns, so that neither has a quieter machine.
rates = {"attnkern, packed": [], "F.sdpa, padded": []}
differences = []
for _ in range(5):
    chosen, values = draw(), []
    for name, loss_of in zip(rates, (packed_loss, padded_loss), strict=True):
        begin = time.perf_counter()
        loss = loss_of(model, chosen)
        loss.backward()
        rates[name].append(sum(len(x) - 1 for x in chosen) / (time.perf_counter() - begin))
        values.append(loss.item())
    differences.append(abs(values[0] - values[1]))
print(f"largest difference of the losses: {max(differences):.1e}")
medians = {name: statistics.median(found) for name, found in rates.items()}
for name, rate in medians.items():
    print(f"{name}: {rate:,.0f} tokens a second, forward and backward")

# %% The picture.
if len(sys.argv) > 1:
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(8, 3), layout="constrained", width_ratios=[1.5, 1])
    left.plot(losses, color="#c2410c")
    left.set(xlabel="step", ylabel="cross-entropy", title="training on packed documents")
    right.bar(list(medians), list(medians.values()), color=["#c2410c", "#0969da"], width=0.6)
    right.set(title="tokens a second")
    for ax in (left, right):
        ax.spines[["top", "right"]].set_visible(False)
    figure.savefig(sys.argv[1], dpi=120)
