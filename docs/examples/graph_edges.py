"""Attention along the edges of a graph: the adjacency matrix, 0 or 1, is the mask.

python docs/examples/graph_edges.py [picture.png]
"""

import sys

import torch

import attnkern

torch.set_printoptions(precision=3, sci_mode=False)
torch.manual_seed(0)

nodes = ["A", "B", "C", "D", "E", "F"]
edges = [("A", "B"), ("A", "C"), ("B", "C"), ("C", "D"), ("D", "E")]  # F has none
adjacency = torch.zeros(6, 6, dtype=torch.int)
for a, b in edges:
    adjacency[nodes.index(a), nodes.index(b)] = adjacency[nodes.index(b), nodes.index(a)] = 1
print("edges\n", adjacency)

# Two rounds of messages between neighbours, by two heads. Every node keeps its own features beside what it gathers.
module = attnkern.nn.CrossAttention(8, num_heads=2, bias=False)
x = torch.randn(6, 8)
with torch.no_grad():
    gathered, weights = module(x, attn_mask=adjacency, need_weights=True)
    again = x + gathered
    again = again + module(again, attn_mask=adjacency)

print("weights, the mean of two heads\n", weights)
print("sums of the rows", weights.sum(-1))
print("F has no neighbour and gathers", gathered[5].abs().max().item())

# Two rounds carry news two edges far: A and B, three away from E, have heard nothing of a change there.
changed = x.clone()
changed[4] += 1
with torch.no_grad():
    other = changed + module(changed, attn_mask=adjacency)
    other = other + module(other, attn_mask=adjacency)
reached = [node for node, difference in zip(nodes, (other - again).abs().amax(-1), strict=True) if difference > 0]
print("a change of E has reached", " ".join(reached))

if len(sys.argv) > 1:
    attnkern.plot_attention(weights, nodes, nodes, title="weights along edges").savefig(sys.argv[1], dpi=120)
