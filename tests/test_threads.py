"""Work shared between threads: how it is cut depends on their number, the result must not."""

import threading

import pytest
import torch

from attnkern import rng, testing

contract = pytest.mark.contract
pytestmark = pytest.mark.threads

# (batch, heads, seqlen_q, seqlen_k, head_dim), key heads, mask, options. Few heads and many keys: a head's keys, or its
# gradient of query, are shared out and summed up afterwards.
PROBLEMS = [
    ((1, 1, 130, 300, 16), 1, None, {}),
    ((1, 1, 200, 200, 24), 1, None, {"is_causal": True}),
    ((1, 3, 70, 200, 64), 3, None, {}),
    ((1, 4, 33, 200, 16), 2, None, {"enable_gqa": True, "is_causal": True}),
    ((1, 6, 33, 150, 24), 1, ("holes", "1HLS"), {"enable_gqa": True}),
    ((2, 2, 450, 70, 8), 2, ("float", "1HLS"), {}),
    ((7, 2, 40, 50, 16), 1, ("float", "1HLS"), {"enable_gqa": True}),
    ((3, 3, 40, 70, 16), 3, ("float", "11LS"), {"is_causal": True}),
    ((3, 4, 40, 70, 16), 2, ("float", "B1LS"), {"enable_gqa": True}),
    ((2, 1, 450, 150, 8), 1, ("holes", "B1L1"), {"window": (60, 20)}),
    ((1, 5, 130, 1, 16), 5, ("float", "11L1"), {}),
    # one or a few queries: the keys of a head are shared out in the forward pass too
    ((1, 1, 1, 3001, 16), 1, None, {}),
    ((1, 2, 3, 2000, 24), 2, None, {"is_causal": True, "alignment": "bottom_right"}),
    ((1, 8, 2, 1500, 16), 2, ("bool", "B11S"), {"enable_gqa": True}),
    ((2, 2, 1, 1500, 16), 2, ("holes", "BHLS"), {"softcap": 3.0}),
    ((1, 1, 4, 2000, 16), 1, None, {"window": (100, None), "alignment": "bottom_right"}),
    ((1, 2, 2, 2000, 16), 2, None, {"scale": -0.4}),
]


@contract(61)
@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
@pytest.mark.parametrize("threads", [2, 3, 7])
def test_any_number_of_threads(target, problem, threads, dtype):
    sizes, heads_k, mask, options = problem
    torch.set_num_threads(threads)
    target.check(target.inputs(*sizes, heads_k=heads_k, dtype=dtype, mask=mask), **options)


@contract(42)
@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_repeatable_with_several_threads(target, problem):
    sizes, heads_k, mask, options = problem
    torch.set_num_threads(3)
    leaves = {
        n: x.requires_grad_()
        for n, x in target.inputs(*sizes, heads_k=heads_k, mask=mask).tensors.items()
        if x.is_floating_point()
    }
    runs = []
    for _ in range(3):
        out = target.attention(**leaves, **options)
        runs.append((out, *torch.autograd.grad(out, list(leaves.values()), torch.ones_like(out))))
    for run in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(runs[0], run, strict=True))


@contract(34, 61)
@pytest.mark.parametrize("sizes", [(1, 1, 130, 300, 16), (1, 2, 2, 1500, 16)], ids=str)
def test_dropout_with_several_threads(target, sizes, dtype):
    batch, heads, seqlen_q, seqlen_k, _ = sizes
    torch.set_num_threads(3)
    inputs = target.inputs(*sizes, dtype=dtype)
    torch.manual_seed(5)
    keep = rng.keep_mask(rng.draw_seed(torch.device(target.device)), 0.3, batch, heads, seqlen_q, seqlen_k)
    torch.manual_seed(5)
    target.check(inputs, dropout_p=0.3, keep=keep)


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
