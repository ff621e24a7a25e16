"""Ring attention on four processes: keys and values go round, and each process merges what it sees of them.

python docs/examples/ring_attention.py [picture.png]

Training needs no such loop: `context_parallel` and `sharded_attention` of attnkern.integrations.distributed do it.
"""

# %% Rank r holds the queries, keys and values of tokens [512 r, 512 r + 512).
import os
import sys
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing

import attnkern

ranks, own = 4, 512
torch.manual_seed(0)
q, k, v = torch.randn(3, 1, 4, ranks * own, 64).unbind()  # the whole, to cut from and to compare with


# %% A step of the ring: attend to the block that is here, merge, and pass it on.
def ring(rank, q, k, v):
    """Causal attention of this rank's queries, and whose keys it met: 1 in full, 0.5 under the causal mask, 0 none."""
    block, merged, met = torch.stack([k, v]), None, []
    for step in range(ranks):
        owner = (rank - step) % ranks
        # Later tokens than ours are not seen; earlier ones need no mask; our own block needs the causal one.
        met.append(0.0 if owner > rank else 0.5 if owner == rank else 1.0)
        following = torch.empty_like(block)
        waiting = []
        if step < ranks - 1:
            sent = dist.P2POp(dist.isend, block, (rank + 1) % ranks)
            received = dist.P2POp(dist.irecv, following, (rank - 1) % ranks)
            waiting = dist.batch_isend_irecv([sent, received])  # on its way while we compute
        if owner <= rank:
            part = attnkern.attention(q, *block, is_causal=owner == rank, return_lse=True)
            merged = part if merged is None else attnkern.merge_attention(merged, part)
        for work in waiting:
            work.wait()
        block = following
    return merged[0], met


def work(rank, store, results):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    mine = slice(rank * own, (rank + 1) * own)
    out, met = ring(rank, q[:, :, mine], k[:, :, mine], v[:, :, mine])
    torch.save((out, met), os.path.join(results, str(rank)))
    dist.destroy_process_group()


# %% Run it, and compare with one call over everything.
def main():
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(work, (os.path.join(folder, "store"), folder), nprocs=ranks)
        outs, met = zip(*(torch.load(os.path.join(folder, str(rank))) for rank in range(ranks)), strict=True)
    whole = attnkern.attention(q, k, v, is_causal=True)
    print(f"largest difference from one process: {(torch.cat(outs, 2) - whole).abs().max().item():.1e}")
    for rank, row in enumerate(met):
        words = {0.0: "nothing", 0.5: "causal", 1.0: "all"}
        print(f"rank {rank}: " + ", ".join(f"{words[x]} of {(rank - n) % ranks}" for n, x in enumerate(row)))
    return met


def draw(met):
    import matplotlib.pyplot as plt
    from matplotlib.colors import ListedColormap

    figure, ax = plt.subplots(figsize=(6, 3.4), layout="constrained")
    ax.imshow(met, cmap=ListedColormap(["#f1f1f1", "#9cc9e3", "#4c86a8"]), vmin=0, vmax=1, aspect="auto")
    for rank, row in enumerate(met):
        for step, x in enumerate(row):
            word = {0.0: "skipped", 0.5: "causal", 1.0: "full"}[x]
            ax.text(step, rank, f"keys of {(rank - step) % ranks}\n{word}", ha="center", va="center")
    ax.set(xticks=range(ranks), yticks=range(ranks), xlabel="step", ylabel="rank")
    ax.set_title("What each rank attends to, step by step")
    return figure


if __name__ == "__main__":
    met = main()
    if len(sys.argv) > 1:
        draw(met).savefig(sys.argv[1], dpi=120)
