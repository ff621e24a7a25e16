"""Attention by hand: three tokens of four features, three given weight matrices, every number printed.

python docs/examples/three_tokens.py [picture.png]
"""

import sys

import torch

import attnkern

torch.set_printoptions(precision=4, sci_mode=False)

x = torch.tensor([[1.0, 0.0, 2.0, 1.0], [0.0, 1.0, 1.0, 0.0], [2.0, 1.0, 0.0, 1.0]])
w_q = torch.tensor([[0.5, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.5, 0.5], [1.0, 0.0, 0.5]])
w_k = torch.tensor([[0.0, 1.0, 0.0], [1.0, 0.0, 0.5], [0.5, 0.0, 1.0], [1.0, 0.5, 0.0]])
w_v = torch.tensor([[0.0, 2.0, 0.0], [1.0, 0.0, 3.0], [0.0, 1.0, 1.0], [1.0, 1.0, 0.0]])

q, k, v = x @ w_q, x @ w_k, x @ w_v
print("queries, x W_q\n", q)
print("keys, x W_k\n", k)
print("values, x W_v\n", v)
print("scores, q k^T / sqrt(3)\n", q @ k.T / 3**0.5)

# One call makes the output; the scores above are never in memory as a whole.
output, lse = attnkern.attention(q, k, v, return_lse=True)
print("log-sum-exp of each row of scores\n", lse)
weights = attnkern.attention_weights(q, k, lse=lse)
print("weights, exp(scores - log-sum-exp): every row sums to 1\n", weights)
print("output, weights v\n", output)

# The same in a module that holds the matrices. nn.Linear multiplies by its weight's transpose.
module = attnkern.nn.CrossAttention(4, k_dim=3, v_dim=3, out_dim=3, bias=False)
with torch.no_grad():
    for layer, matrix in ((module.q_proj, w_q), (module.k_proj, w_k), (module.v_proj, w_v)):
        layer.weight.copy_(matrix.T)
    module.out_proj.weight.copy_(torch.eye(3))
    print("output of the module\n", module(x))

if len(sys.argv) > 1:
    attnkern.plot_attention(weights, ["x0", "x1", "x2"], ["x0", "x1", "x2"]).savefig(sys.argv[1], dpi=120)
