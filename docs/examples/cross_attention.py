"""Cross-attention: the words of one sequence look for their counterparts in another, whose vectors are wider.

python docs/examples/cross_attention.py [picture.png]
"""

import sys

import torch

import attnkern

torch.manual_seed(0)

german = ["gestern", "sah", "ich", "den", "Hund"]
english = ["I", "saw", "the", "dog", "yesterday", "-"]
counterpart = [4, 1, 0, 2, 3]
real = torch.tensor([1, 1, 1, 1, 1, 0])  # 0/1 or bool: the last position is padding

# Word vectors of 6 and of 10 features, and projections that have learned to send counterparts to the same 8 features:
# here by the pseudo-inverse, in a trained model by gradient descent.
x, context = torch.randn(5, 6), torch.randn(6, 10)
meaning = torch.nn.functional.one_hot(torch.arange(6), 8).float()
module = attnkern.nn.CrossAttention(6, 10, num_heads=1, k_dim=8, v_dim=4, out_dim=3, bias=False)
with torch.no_grad():
    module.q_proj.weight.copy_(9 * (torch.linalg.pinv(x) @ meaning[counterpart]).T)
    module.k_proj.weight.copy_((torch.linalg.pinv(context) @ meaning).T)
    noisy = context + 0.1 * torch.randn(6, 10)
    output, weights = module(x, noisy, padding_mask=real, need_weights=True)

print(f"queries {tuple(x.shape)}, context {tuple(context.shape)}, output {tuple(output.shape)}")
for word, row in zip(german, weights, strict=True):
    best = int(row.argmax())
    print(f"{word:>8} -> {english[best]:<9} {row[best].item():.3f}   weight of the padding {row[5].item():.3f}")

if len(sys.argv) > 1:
    attnkern.plot_attention(weights, german, english, title="German queries, English keys").savefig(
        sys.argv[1], dpi=120
    )
