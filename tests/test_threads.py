"""Work shared between threads: how it is cut depends on their number, the result must not."""

import subprocess
import sys
import threading
from itertools import product

import pytest
import torch

from attnkern import testing
from matrix import FLOATS, in_turn, tagged
from sequences import packed

contract = pytest.mark.contract
pytestmark = pytest.mark.threads

CALLS = tagged("threads")


@contract(61)
@pytest.mark.parametrize(**in_turn(**{"name, dtype": list(product(CALLS, FLOATS))}, threads=[2, 3, 7]), ids=str)
def test_any_number_of_threads(target, name, threads, dtype):
    torch.set_num_threads(threads)
    target.check_call(CALLS[name], dtype)


@contract(42)
@pytest.mark.parametrize("name", CALLS)
def test_repeatable_with_several_threads(target, name):
    torch.set_num_threads(3)
    inputs = CALLS[name].inputs(target.device, dtype=torch.float32)
    leaves = {n: x.requires_grad_() for n, x in inputs.tensors.items() if x.is_floating_point()}
    runs = []
    for _ in range(3):
        out = target.attention(**leaves, **CALLS[name].options)
        runs.append((out, *torch.autograd.grad(out, list(leaves.values()), torch.ones_like(out))))
    for run in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(runs[0], run, strict=True))


@pytest.mark.parametrize("threads", [1, 3])
# Of which values are copied; keys, too; more than the cache has room for.
@pytest.mark.parametrize("sizes", [(2, 200, 8, 64), (2, 600, 8, 64), (1, 500, 4, 256)], ids=str)
def test_heads_of_a_token_side_by_side(kernel_target, sizes, threads, dtype):
    """Rows that lie apart are copied: results and gradients have the bits of rows one after the other."""
    torch.set_num_threads(threads)

    batch, length, heads, head_dim = sizes

    def apart(heads):
        return torch.randn(batch, length, heads, head_dim, dtype=dtype, device=kernel_target.device).transpose(1, 2)

    inputs, grad_out = [apart(heads), apart(heads // 2), apart(heads // 2)], apart(heads)
    # A query without a key, and keys without a query: their numbers reach no sum.
    ranges = torch.tensor([0, length - 5], dtype=torch.int32, device=kernel_target.device).repeat(1, 1, length, 1, 1)
    ranges[:, :, 3] = 0
    inputs[0][:, :, 3], grad_out[:, :, 3], inputs[2][:, :, -3:] = torch.nan, torch.nan, torch.nan
    for options in (
        {"key_ranges": ranges},
        {"key_ranges": ranges, "is_causal": True, "softcap": 3.0},
        {"key_ranges": ranges, "window": (70, 0)},
    ):
        both = []
        for placed in (lambda x: x, torch.Tensor.contiguous):
            leaves = [placed(x).requires_grad_() for x in inputs]
            out, lse = kernel_target.attention(*leaves, **options, enable_gqa=True, return_lse=True)
            both.append([lse, out, *torch.autograd.grad(out, leaves, placed(grad_out))])
        for one, other in zip(*both, strict=True):
            assert torch.equal(one, other)
        assert all(x.isfinite().all() for x in both[0][1:])


@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"window": (9, 3)}], ids=str)
@pytest.mark.parametrize("sizes", [(64, 12, 20, 20), (12, 12, 150, 130)], ids=str)
def test_many_short_heads(kernel_target, sizes, options, dtype):
    """While one is computed, the next one's rows are prefetched: the bits are those of few heads alone."""
    torch.set_num_threads(1)
    batch, heads, seqlen_q, seqlen_k = sizes

    def rows(*sizes):
        return torch.randn(*sizes, dtype=dtype, device=kernel_target.device)

    q, v = rows(batch, heads, seqlen_q, 64), rows(batch, seqlen_k, heads // 2, 48).transpose(1, 2)
    if seqlen_q > 64:  # several tiles: rows that lie apart wouldn't be prefetched
        v = v.contiguous()
    k = rows(1, heads // 4, seqlen_k, 64).expand(batch, -1, -1, -1)
    out, lse = kernel_target.attention(q, k, v, **options, enable_gqa=True, return_lse=True)
    for few in (slice(0, 1), slice(batch - 2, None)):
        alone = kernel_target.attention(q[few], k[few], v[few], **options, enable_gqa=True, return_lse=True)
        assert torch.equal(out[few], alone[0])
        assert torch.equal(lse[few], alone[1])


@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"window": (9, 3)}], ids=str)
@pytest.mark.parametrize("sizes", [(64, 12, 20, 20), (12, 12, 150, 130)], ids=str)
def test_gradients_of_many_short_heads(kernel_target, sizes, options, dtype):
    """While those of one are computed, the rows that the next one's begin with are prefetched: the same bits."""
    torch.set_num_threads(1)
    batch, heads, seqlen_q, seqlen_k = sizes

    def rows(seqlen, columns, apart):
        shape = (batch, seqlen, heads, columns) if apart else (batch, heads, seqlen, columns)
        x = torch.randn(*shape, dtype=dtype, device=kernel_target.device)
        return x.transpose(1, 2) if apart else x

    def grads(q, k, v, grad_out):
        inputs = [x.requires_grad_() for x in (q, k, v)]
        return torch.autograd.grad(kernel_target.attention(*inputs, **options), inputs, grad_out)

    given = rows(seqlen_q, 64, True), rows(seqlen_k, 64, False), rows(seqlen_k, 48, True), rows(seqlen_q, 48, False)
    together = grads(*given)
    for few in (slice(0, 1), slice(batch - 2, None)):
        for all_of_them, alone in zip(together, grads(*(x.detach()[few] for x in given)), strict=True):
            assert torch.equal(all_of_them[few], alone)


@contract(34, 61)
@pytest.mark.parametrize("sizes", [(1, 1, 130, 300, 16), (1, 2, 2, 1500, 16)], ids=str)
def test_dropout_with_several_threads(target, sizes, dtype):
    torch.set_num_threads(3)
    target.check_dropout(target.inputs(*sizes, dtype=dtype), dropout_p=0.3)


@contract(24, 41)
@pytest.mark.parametrize("seqlen_q", [1, 3])
def test_a_share_of_the_keys_without_a_live_one(target, seqlen_q, dtype):
    """Whole shares are masked (their maximum is -inf), one row has none at all, and a NaN stays where it is."""
    torch.set_num_threads(4)
    inputs = target.inputs(2, 2, seqlen_q, 3000, 16, dtype=dtype)
    keep = torch.zeros(2, 1, seqlen_q, 3000, dtype=torch.bool, device=target.device)
    keep[0, ..., 2990:] = True
    keep[1, :, 0, :5] = True
    results = target.check(testing.Inputs(inputs.query, inputs.key, inputs.value, keep, inputs.recipe))
    assert results["out"].isfinite().all()
    assert not results["out"][1, :, 1:].any()
    inputs.query[0, 1, 0, 3] = float("nan")
    out = target.sdpa(inputs.query, inputs.key, inputs.value)
    assert out[0, 1, 0].isnan().all()
    assert out.isnan().sum() == 16


def close_enough(runs, dtype):
    """Of one thread, of several, and of these again: the last two are equal."""
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5}.get(dtype, 2e-2)
    for one, many, again in zip(*runs, strict=True):
        assert torch.equal(many, again)
        finite = one.isfinite()
        assert torch.equal(one[~finite], many[~finite])
        assert (many - one)[finite].abs().max() <= tolerance * one[finite].abs().max()


@contract(13, 61)
@pytest.mark.parametrize(
    ("heads", "sizes", "threads", "options"),
    [
        # Tasks of a tile of keys take turns at dQ.
        ((1, 1), (1500, 6000, 128), 24, {}),
        ((4, 2), (600, 2500, 128), 24, {"is_causal": True, "enable_gqa": True}),
        ((5, 5), (130, 200, 24), 3, {"bias": True}),
        ((1, 1), (300, 640, 24), 64, {"bias": True}),
        # More threads than tiles: each meets a piece of the queries.
        ((1, 1), (1100, 8300, 16), 192, {}),
        ((1, 1), (1100, 8300, 16), 192, {"relative": True}),
        ((4, 2), (1100, 8300, 16), 192, {"is_causal": True, "enable_gqa": True}),
        ((2, 1), (1100, 8300, 16), 192, {"window": (5000, 300), "enable_gqa": True}),
        ((3, 3), (900, 1500, 40), 64, {"window": (70, 900)}),
        # Tiles that meet few queries, and queries that meet no key.
        ((2, 1), (900, 1400, 24), 48, {"ranges": 1, "enable_gqa": True}),
        ((3, 3), (500, 700, 24), 8, {"ranges": 2, "is_causal": True}),
        # Sums too large for all heads at once.
        ((6, 3), (9000, 200, 120), 8, {"enable_gqa": True}),
    ],
    ids=str,
)
def test_gradients_of_shared_heads(kernel_target, heads, sizes, threads, options, dtype):
    seqlen_q, seqlen_k, size = sizes
    tensors = kernel_target.inputs(1, heads[0], seqlen_q, seqlen_k, size, heads_k=heads[1], dtype=dtype).tensors
    options = dict(options)
    named = {}
    if count := options.pop("ranges", 0):
        begin = torch.randint(seqlen_k, (1, heads[0], seqlen_q, count))
        begin = torch.where(torch.rand(begin.shape) < 0.1, seqlen_k, begin).sort().values
        found = torch.stack([begin, begin + torch.randint(seqlen_k // 2, begin.shape)], -1)
        options["key_ranges"] = found.to(kernel_target.device, torch.int32)
    if options.pop("relative", False):
        named["relative_bias"] = torch.linspace(
            -1, 1, seqlen_q + seqlen_k - 1, dtype=dtype, device=kernel_target.device
        )
    if options.pop("bias", False):
        named["attn_mask"] = kernel_target.randn(1, heads[0], seqlen_q, seqlen_k).to(dtype)
    leaves = [x.requires_grad_() for x in (*tensors.values(), *named.values())]
    named = dict(zip(named, leaves[3:], strict=True))
    runs = []
    for count in (1, threads, threads):
        torch.set_num_threads(1)
        out = kernel_target.attention(*leaves[:3], **options, **named)
        torch.set_num_threads(count)
        runs.append(torch.autograd.grad(out, leaves, torch.ones_like(out) + out.detach()))
    close_enough(runs, dtype)
    assert torch.equal(runs[0][0], runs[1][0])  # dQ: tiles of keys in their order, however many threads there are


@contract(42, 61)
@pytest.mark.parametrize("threads", [2, 5, 64])
def test_packed_sequences_share_the_threads(target, threads, dtype):
    """Beside each other: sequences that several threads share, forward or decoding, and those of one task."""
    lengths_q, lengths_k = [200, 3, 1, 64, 0, 1, 40, 1, 300], [210, 7, 600, 64, 5, 20, 0, 1, 300]
    sinks = target.randn(4).to(torch.promote_types(dtype, torch.float32)).requires_grad_()
    leaves = [*packed(target, lengths_q, lengths_k, dtype, size=24, size_v=16), sinks]
    options = {"is_causal": True, "alignment": "bottom_right", "enable_gqa": True, "sinks": sinks, "return_lse": True}
    runs = []
    for count in (1, threads, threads):
        torch.set_num_threads(count)
        out, lse = target.varlen_attention(*leaves[:3], target.ends(lengths_q), target.ends(lengths_k), **options)
        grads = torch.autograd.grad((out, lse), leaves, (torch.ones_like(out) + out.detach(), torch.ones_like(lse)))
        runs.append((out.detach(), lse.detach(), *grads))
    close_enough(runs, dtype)


@contract(61)
def test_the_number_of_threads_changes_between_calls(target):
    query, key, value = target.inputs(1, 3, 260, 300, 32).tensors.values()
    leaves = [x.requires_grad_() for x in (query, key, value)]
    first = {}
    for threads in (1, 7, 2, 1, 16, 2, 7, 16, 1):
        torch.set_num_threads(threads)
        out = target.sdpa(*leaves)
        found = [out, *torch.autograd.grad(out.sum(), leaves)]
        for a, b in zip(found, first.setdefault(threads, found), strict=True):
            assert torch.equal(a, b)  # nothing of a call is left for another one
        for a, b in zip(found, first[1], strict=True):
            torch.testing.assert_close(a, b)


ONE_THREAD = """
import os, hashlib, torch, attnkern
torch.set_num_threads(1)
torch.manual_seed(0)
x = [torch.randn(1, 2, 200, 32, requires_grad=True) for _ in range(3)]
children = []
for _ in range(32):
    child = os.fork()
    if child == 0:
        break
    children.append(child)
else:
    failed = [child for child in children if os.waitpid(child, 0)[1] != 0]
    os._exit(len(failed))
out = attnkern.attention(*x, backend="cpu", is_causal=True)
grads = torch.autograd.grad(out.sum(), x)
threads = next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("Threads"))
bits = b"".join(y.detach().numpy().tobytes() for y in (out, *grads))
os.write(1, f"{hashlib.sha256(bits).hexdigest()} {threads}\\n".encode())
os._exit(0)
"""


@contract(61)
def test_processes_of_one_thread():
    """32 of them side by side, as workers of a data loader are: equal bits, and no kernel starts threads of its own."""
    run = subprocess.run([sys.executable, "-c", ONE_THREAD], stdout=subprocess.PIPE, text=True, check=True)
    answers = [line.split() for line in run.stdout.splitlines()]
    assert len(answers) == 32
    assert len({bits for bits, _ in answers}) == 1
    assert {int(threads) for _, threads in answers} <= {1, 2}  # autograd's is the second


@contract(61)
@pytest.mark.parametrize("shapes", ["equal", "different"])
def test_concurrent_calls(target, shapes):
    problems = [target.inputs(2, 2, 33, 70 if shapes == "equal" else 20 + 17 * i, 16) for i in range(6)]
    want = [target.sdpa(*p.tensors.values(), is_causal=True) for p in problems]
    failures = []

    def work(i):
        for _ in range(10):
            x = [x.detach().requires_grad_() for x in problems[i].tensors.values()]
            out = target.sdpa(*x, is_causal=True)
            out.sum().backward()
            if not torch.allclose(out, want[i], atol=1e-5) or any(y.grad.isnan().any() for y in x):
                failures.append(i)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(6)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not failures


@contract(61)
def test_backward_in_another_thread(target):
    leaves = [x.requires_grad_() for x in target.inputs(2, 3, 9, 17, 8).tensors.values()]
    want = torch.autograd.grad(target.sdpa(*leaves).sum(), leaves)
    out = target.sdpa(*leaves)
    got = []
    thread = threading.Thread(target=lambda: got.extend(torch.autograd.grad(out.sum(), leaves)))
    thread.start()
    thread.join()
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b)  # the other thread has its own number of threads
