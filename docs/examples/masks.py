"""Padding and causal masks: what a token may see, and where the weights are exactly 0.

python docs/examples/masks.py [picture.png]
"""

import sys

import torch

import attnkern

torch.set_printoptions(precision=3, sci_mode=False)
torch.manual_seed(0)

tokens = [["the", "cat", "sat", "down", "."], ["dogs", "bark", ".", "-", "-"]]
length = torch.tensor([5, 3])
x = torch.randn(2, 5, 8)
real = torch.arange(5) < length[:, None]
print("real tokens\n", real.int())

# attnkern's functions take True = attend. (2, 1, 1, 5): the same keys for every head and query of a sentence.
heads = x.unflatten(-1, (2, 4)).transpose(1, 2)
padding = attnkern.attention_weights(heads, heads, real[:, None, None, :], heads=0)[:, 0]
print("second sentence, padding masked\n", padding[1])

causal = attnkern.attention_weights(heads, heads, is_causal=True, heads=0)[:, 0]
print("first sentence, causal: token i sees tokens 0..i\n", causal[0])

both = attnkern.attention_weights(heads, heads, real[:, None, None, :], is_causal=True, heads=0)[:, 0]
print("second sentence, both\n", both[1])

# torch's modules take the opposite, True = hidden, and so does attnkern.nn.MultiheadAttention.
module = attnkern.nn.MultiheadAttention(8, 2, batch_first=True)
with torch.no_grad():
    _, weights = module(x, x, x, key_padding_mask=~real, is_causal=True)
print("a module's weights on padding:", weights[1, :, 3:].abs().max().item())
print("and on later tokens:", weights[0].triu(1).abs().max().item())

if len(sys.argv) > 1:
    picture = torch.stack([padding[1], causal[1], both[1]])
    names = ["padding", "causal", "both"]
    attnkern.plot_attention(picture, tokens[1], tokens[1], head_labels=names).savefig(sys.argv[1], dpi=120)
