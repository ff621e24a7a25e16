"""PagedCache: sequences that come, grow, are shared and go, against keys and values kept as lists."""

import math
import random

import pytest
import torch

import attnkern

LAYERS, HEADS, SIZE, SIZE_V = 2, 2, 24, 16


def cache(target, pages=40, page_size=16):
    return attnkern.PagedCache(pages, HEADS, SIZE, SIZE_V, layers=LAYERS, page_size=page_size, device=target.device)


class Kept:
    """Keys and values of each sequence by itself."""

    def __init__(self, target, paged):
        self.target, self.paged, self.held = target, paged, {}

    def add(self):
        sequence = self.paged.add()
        self.held[sequence] = [[self.target.randn(0, HEADS, n) for n in (SIZE, SIZE_V)] for _ in range(LAYERS)]
        return sequence

    def fork(self, of, length):
        sequence = self.paged.fork(of, length)
        self.held[sequence] = [[x[:length] for x in layer] for layer in self.held[of]]
        return sequence

    def cut(self, sequence, length):
        self.paged.cut(sequence, length)
        self.held[sequence] = [[x[:length] for x in layer] for layer in self.held[sequence]]

    def free(self, sequence):
        self.paged.free(sequence)
        del self.held[sequence]

    def run(self, sequences, tokens, **options):
        """A step of both, with the same results."""
        step = self.paged.step(sequences, tokens)
        total = sum(tokens)
        for layer in range(LAYERS):
            q, k, v = (self.target.randn(total, h, n) for h, n in ((4, SIZE), (HEADS, SIZE), (HEADS, SIZE_V)))
            out, lse = step.attention(layer, q, k, v, return_lse=True, backend=self.target.backend, **options)
            assert out.shape == (total, 4, SIZE_V)
            at = 0
            for sequence, n in zip(sequences, tokens, strict=True):
                own = self.held[sequence][layer]
                new = slice(at, at + n)
                own[:] = [torch.cat([x, y[new]]) for x, y in zip(own, (k, v), strict=True)]
                at += n
                one, keys, values = (x.transpose(0, 1)[None] for x in (q[new], *own))
                given = {"is_causal": True, "alignment": "bottom_right", "enable_gqa": True} | options
                want = self.target.attention(one, keys, values, return_lse=True, **given)
                torch.testing.assert_close(out[new].transpose(0, 1), want[0][0], rtol=1e-5, atol=1e-5)
                torch.testing.assert_close(lse[:, new], want[1][0], rtol=1e-5, atol=1e-5)
        assert [self.paged.length(s) for s in sequences] == [self.held[s][0][0].shape[0] for s in sequences]


OPTIONS = ({}, {"window": (20, 0)}, {"softcap": 4.0, "scale": 0.3}, {"is_causal": False}, {"sinks": torch.randn(4)})


@pytest.mark.parametrize("page_size", [16, 64])
def test_sequences_come_grow_are_shared_and_go(target, page_size):
    """Any order of calls keeps the numbers apart, and every page is free in the end."""
    rng = random.Random(page_size)
    kept = Kept(target, cache(target, pages=60, page_size=page_size))
    for n in range(40):
        known = list(kept.held)
        what = rng.choice(("add", "run", "run", "run", "fork", "cut", "free"))
        if what == "add" or not known:
            kept.add()
        elif what == "run":
            some = rng.sample(known, rng.randint(1, min(3, len(known))))
            tokens = [1] * len(some) if n % 2 else [rng.choice((0, 1, 2, 17)) for _ in some]
            options = {k: x.to(target.device) if k == "sinks" else x for k, x in OPTIONS[n % len(OPTIONS)].items()}
            kept.run(some, tokens, **options)
        else:
            one = rng.choice(known)
            length = rng.randint(0, kept.paged.length(one))
            if what == "free":
                kept.free(one)
            else:
                getattr(kept, what)(one, length)
    kept.run(list(kept.held), [3] * len(kept.held))
    for sequence in list(kept.held):
        kept.free(sequence)
    assert kept.paged.free_pages == 60


def test_a_prefix_is_held_once():
    paged = attnkern.PagedCache(10, 1, 8, page_size=16)
    first = paged.add()
    paged.step([first], [40])
    assert paged.free_pages == 7
    others = [paged.fork(first) for _ in range(5)]
    assert paged.free_pages == 7
    paged.step(others[:2])  # of the last page, half full, each has its own now
    assert paged.free_pages == 5
    paged.step([first], [8])
    assert paged.free_pages == 4  # three of the others still have the page that it was in
    for sequence in others:
        paged.free(sequence)
    assert paged.free_pages == 7
    paged.cut(first, 16)
    assert paged.free_pages == 9


def test_a_whole_page_is_not_copied():
    paged = attnkern.PagedCache(4, 1, 8, page_size=16)
    first = paged.add()
    paged.step([first], [32])
    second = paged.fork(first)
    paged.step([first, second])
    assert paged.free_pages == 0


def test_a_step_that_finds_no_room_changes_nothing():
    paged = attnkern.PagedCache(4, 1, 8, page_size=16)
    a, b = paged.add(), paged.add()
    paged.step([a], [30])
    with pytest.raises(RuntimeError, match="the cache has 2 free pages, and the step needs 3: free sequences"):
        paged.step([a, b], [3, 20])
    assert (paged.length(a), paged.length(b), paged.free_pages) == (30, 0, 2)
    paged.step([a, b], [2, 20])
    assert (paged.length(a), paged.length(b), paged.free_pages) == (32, 20, 0)


def test_a_cache_and_a_step_say_what_they_hold():
    paged = attnkern.PagedCache(4, 1, 8, layers=2, page_size=16)
    assert repr(paged) == "PagedCache(0 sequences in 0 of 4 pages of 16 tokens, 2 layers, 1 head of 8, float32, cpu)"
    a = paged.add()
    assert repr(paged.step([a])) == "Step(1 token of 1 sequence)"
    assert repr(paged) == "PagedCache(1 sequence in 1 of 4 pages of 16 tokens, 2 layers, 1 head of 8, float32, cpu)"
    assert repr(paged.step([a, paged.add()], [0, 17])) == "Step(17 tokens of 2 sequences)"


def test_errors():
    for given, message in (
        ({"pages": 0}, "pages must be 1 or more, got 0"),
        ({"page_size": 24}, "page_size must be a power of two from 16 on, got 24"),
        ({"head_dim_v": 0}, "head_dim_v must be 1 or more"),
        ({"dtype": torch.int32}, "dtype must be float32, float64, bfloat16 or float16, got int32"),
    ):
        with pytest.raises(ValueError, match=message):
            attnkern.PagedCache(**({"pages": 4, "heads": 1, "head_dim": 8} | given))
    for given, message in (
        ({"pages": "4"}, "'pages' must be int, not str"),
        ({"head_dim": 8.0}, "'head_dim' must be int, not float"),
        ({"page_size": 16.0}, "'page_size' must be int, not float"),
        ({"pages": True}, "'pages' must be int, not bool"),
        ({"dtype": "float32"}, "'dtype' must be torch.dtype, not str"),
        ({"device": None}, "'device' must be torch.device, str or int, not NoneType"),
    ):
        with pytest.raises(TypeError, match=message):
            attnkern.PagedCache(**({"pages": 4, "heads": 1, "head_dim": 8} | given))
    paged = attnkern.PagedCache(4, 1, 8, page_size=16)
    a = paged.add()
    for call, message in (
        (lambda: paged.step([7]), "sequence must be one that add or fork made, and free hasn't ended, got 7"),
        (lambda: paged.step([a, a]), "sequences must be different"),
        (lambda: paged.step([a], [1, 2]), "tokens must be a number for each of 1 sequences"),
        (lambda: paged.step([a], [-1]), "tokens must be 0 or more"),
        (lambda: paged.fork(a, 3), "length must be from 0 to the sequence's 0 tokens, got 3"),
        (lambda: paged.free(9), "sequence must be one that"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
    for call, message in (
        (lambda: paged.step(a), "'sequences' must be a sequence of ints, not int"),
        (lambda: paged.step([a], 1.5), "'tokens' must be int or a sequence of ints, not float"),
        (lambda: paged.step([a], [1.5]), "'tokens' must be int, not float"),
        (lambda: paged.step([a], True), "'tokens' must be int, not bool"),
        (lambda: paged.cut(a, 0.5), "'length' must be int, not float"),
        (lambda: paged.length([a]), "'sequence' must be int, not list"),
    ):
        with pytest.raises(TypeError, match=message):
            call()
    with pytest.raises(RuntimeError, match=r"Storage size|DefaultCPUAllocator|can't allocate|overflow"):
        attnkern.PagedCache(10**15, 64, 128, layers=100)
    with torch.device("meta"):  # the default one isn't asked
        step = paged.step([a], [3])
    assert step.positions.tolist() == [0, 1, 2]
    q = torch.randn(3, 2, 8)
    for call, message in (
        (lambda: step.attention(0, None), "'query' must be Tensor, not NoneType"),
        (lambda: step.write(0, [1], q), "'key' must be Tensor, not list"),
        (lambda: step.attention(q, q), "'layer' must be int, not Tensor"),
        (lambda: step.write(slice(1), q[:, :1], q[:, :1]), "'layer' must be int, not slice"),
        # Which a step decides itself, or for which it knows no places.
        (lambda: step.attention(0, q, alignment="top_left"), "unexpected keyword argument 'alignment'"),
        (lambda: step.attention(0, q, relative_bias=q[0]), "unexpected keyword argument 'relative_bias'"),
    ):
        with pytest.raises(TypeError, match=message):
            call()
    for layer in (1, -1):
        with pytest.raises(ValueError, match=f"layer must be from 0 to 0, got {layer}"):
            step.attention(layer, q)
    for call, message in (
        (lambda: step.attention(0, q[:2]), r"query must be \(3, Hq, E\), got \(2, 2, 8\)"),
        (lambda: step.attention(0, q.double()), "query must be float32 cpu, as the cache, got float64 cpu"),
        (lambda: step.attention(0, q.to("meta")), "query must be float32 cpu, as the cache, got float32 meta"),
        (lambda: step.attention(0, q, q), "key and value must be given together"),
        (lambda: step.write(0, q, q), r"key must be \(3, 1, 8\) float32 cpu, got \(3, 2, 8\)"),
        (lambda: step.write(0, q[:, :1].double(), q[:, :1]), r"key must be \(3, 1, 8\) float32 cpu, got .* float64"),
    ):
        with pytest.raises(RuntimeError, match=message):
            call()


def test_a_value_that_does_not_fit_leaves_the_keys_as_they_were():
    paged = attnkern.PagedCache(4, 1, 8, page_size=16)
    step = paged.step([paged.add()], [3])
    kept = torch.ones(3, 1, 8)
    step.write(0, kept, kept)
    with pytest.raises(RuntimeError, match="value must be"):
        step.write(0, -kept, kept[:2])
    assert torch.equal(paged.keys[0, step.block_table[0, 0], 0, :3], kept[:, 0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_autocast_leaves_the_pages_as_they_are(dtype):
    """The query goes to their dtype."""
    paged = attnkern.PagedCache(4, 1, 8, page_size=16, dtype=dtype)
    step = paged.step([paged.add()], [3])
    q, k, v = (torch.randn(3, heads, 8, dtype=dtype) for heads in (2, 1, 1))
    want = step.attention(0, q, k, v)
    with torch.autocast("cpu", torch.bfloat16):
        for given in (q, q.float()):
            assert torch.equal(step.attention(0, given), want)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("freed", "sequence 1 of this step has been freed since$"),
        ("cut", r"sequence 1 of this step has been cut.*: to give it these tokens, call PagedCache.cut\(1, 0\), then"),
        ("given a page of its own", "sequence 1 of this step has been cut, or got a page of its own, since: to give"),
    ],
)
def test_a_step_of_pages_that_a_sequence_has_lost(change, said):
    """They may be another sequence's by now, which would read what the step writes."""
    paged = attnkern.PagedCache(8, 1, 4, page_size=16)
    first, second = paged.add(), paged.add()
    step = paged.step([first, second], [20, 3])
    rows = [torch.randn(23, 1, 4) for _ in range(3)]
    want = step.attention(0, *rows)
    if change == "freed":
        paged.free(first)
    elif change == "cut":
        paged.cut(first, 16)
    else:
        paged.fork(first)
        paged.step([first])
    kept = paged.keys.view(torch.uint8).clone()  # with the NaN of new memory
    for use in (lambda: step.attention(0, *rows), lambda: step.write(0, *rows[1:]), lambda: step.attention(0, rows[0])):
        with pytest.raises(RuntimeError, match=said):
            use()
    assert torch.equal(paged.keys.view(torch.uint8), kept)
    # What others give back changes nothing.
    third = paged.add()
    again = paged.step([third], [23])
    found = again.attention(0, *rows)
    paged.free(second)
    assert torch.equal(again.attention(0, *rows), found)
    assert found.shape == want.shape


def test_a_remedy_gives_the_tokens_their_places():
    paged = attnkern.PagedCache(4, 1, 4, page_size=16)
    sequence = paged.add()
    step = paged.step([sequence], 5)
    paged.cut(sequence, 0)
    x = torch.randn(5, 1, 4)
    with pytest.raises(RuntimeError, match=r"since: call PagedCache\.step again$"):
        step.write(0, x, x)
    assert paged.step([sequence], 5).positions.tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("forks_first", [True, False])
def test_a_page_that_is_copied_before_its_tokens_are_written(forks_first):
    """Whichever of the two leaves the page, the copy would lack them; one of tokens that are written lacks nothing."""
    paged = attnkern.PagedCache(8, 1, 4, page_size=16)
    first = paged.add()
    x = torch.randn(5, 1, 4)
    paged.step([first], 5).write(0, x, x)
    late = paged.step([first], 5)
    fork = paged.fork(first)
    paged.step([fork, first] if forks_first else [first, fork], 1)
    with pytest.raises(
        RuntimeError, match="got a copy of its page before this" if forks_first else "a page of its own"
    ):
        late.write(0, x, x)
    paged.free(fork)
    paged.cut(first, 5)
    late = paged.step([first], 5)
    other = paged.fork(first, 5)
    paged.step([other], 1)  # the copy has nothing of `late`
    late.write(0, x, x)


def test_a_cache_made_in_inference_mode():
    with torch.inference_mode():
        paged = attnkern.PagedCache(8, 1, 4, page_size=16)
    first = paged.add()
    x = torch.randn(3, 1, 4)
    paged.step([first], 3).write(0, x, x)
    second = paged.fork(first)
    out = paged.step([first, second], 1).attention(0, x[:2], x[:2], x[:2])
    assert out.isfinite().all()
    assert paged.length(second) == 4


def test_a_step_of_tokens_that_a_sequence_has_lost():
    """The page came back to it, with another token in the place that the step would write to."""
    paged = attnkern.PagedCache(4, 1, 4, page_size=16)
    sequence = paged.add()
    x = torch.randn(5, 1, 4)
    step = paged.step([sequence], 5)
    step.write(0, x, x)
    paged.step([sequence], 3)
    paged.cut(sequence, 6)
    paged.cut(sequence, 5)  # nothing of the step is lost
    step.attention(0, x, x, x)
    paged.cut(sequence, 0)
    again = paged.step([sequence], 7)
    assert torch.equal(again.block_table, step.block_table)
    with pytest.raises(RuntimeError, match=f"sequence {sequence} of this step has been cut, or got a page"):
        step.write(0, x, x)


@pytest.mark.parametrize("window", [None, (3, 0), (0, 0)])
def test_a_long_sequence_beside_many_short_ones(window):
    """More keys than 2**31, if all were as long. As many tokens each are no more than a batch; else it is an error
    before any is counted."""
    size, pages, others = 2048, 1024, 1023
    paged = attnkern.PagedCache(pages + others, 1, 8, page_size=size, dtype=torch.float16)
    long, *short = (paged.add() for _ in range(1 + others))
    paged.step([long], size * pages - 1)
    paged.keys.zero_(), paged.values.zero_()
    x = torch.ones(1 + others, 1, 8, dtype=torch.float16)
    out = paged.step([long, *short]).attention(0, x, x, x, window=window)
    assert torch.equal(out[1:], x[1:])  # of one key
    seen = size * pages if window is None else window[0] + 1
    weight = math.exp(8**0.5) / (math.exp(8**0.5) + seen - 1)
    torch.testing.assert_close(out[0].double(), torch.full((1, 8), weight).double(), rtol=2e-3, atol=1e-7)
    paged.cut(long, size * pages - 1)
    with pytest.raises(
        RuntimeError, match=rf"than 2\*\*31 keys, got {1 + others} x {pages} pages of {size}: make a step"
    ):
        paged.step([long, *short], [1] + [2] * others)
    assert [paged.length(long), paged.length(short[0])] == [size * pages - 1, 1]


def test_positions():
    """Of rotary embeddings: the place of each token in its sequence."""
    paged = attnkern.PagedCache(8, 1, 8, page_size=16)
    a, b = paged.add(), paged.add()
    paged.step([a], [20])
    step = paged.step([b, a], [3, 2])
    assert step.positions.tolist() == [0, 1, 2, 20, 21]
    assert step.cu_seqlens_q.tolist() == [0, 3, 5]
    assert step.seqused_k.tolist() == [3, 22]


def test_numbers_in_tensors():
    """Are taken as they are at the time, and stay the caller's."""
    paged = attnkern.PagedCache(8, 1, 8, page_size=16)
    a, b = paged.add(), paged.add()
    counts, both = torch.tensor([3, 5]), torch.tensor([a, b])
    assert paged.step([a, b], counts).positions.tolist() == [0, 1, 2, 0, 1, 2, 3, 4]
    assert paged.step(both, list(counts)).positions.tolist() == [3, 4, 5, 5, 6, 7, 8, 9]
    assert paged.step(list(both), counts[0]).positions.tolist() == [6, 7, 8, 10, 11, 12]
    assert paged.step(both.numpy(), counts.numpy()).positions.tolist() == [9, 10, 11, 13, 14, 15, 16, 17]
    c = paged.fork(both[0], counts[0])
    paged.cut(both[1], counts[1])
    assert paged.step([c, b]).positions.tolist() == [3, 5]
    paged.free(both[0])
    assert [paged.length(c), paged.length(both[1])] == [4, 6]
    assert counts.tolist() == [3, 5]


def test_no_tokens_and_no_sequences():
    paged = attnkern.PagedCache(8, 1, 8, page_size=16)
    a = paged.add()
    for step in (paged.step([]), paged.step([a], [0])):
        none = torch.randn(0, 1, 8)
        assert step.attention(0, none, none, none).shape == (0, 1, 8)


def test_large_pools_are_memory_like_any_other():
    paged = attnkern.PagedCache(600, 2, 64, page_size=64, dtype=torch.bfloat16)
    assert paged.keys.shape == (1, 600, 2, 64, 64)
    assert paged.keys.is_contiguous()
    assert paged.keys.data_ptr() % 64 == 0
    a = paged.add()
    step = paged.step([a], [70])
    k = torch.randn(70, 2, 64, dtype=torch.bfloat16)
    step.write(0, k, -k)
    kept = paged.keys.clone(), paged.values[0, step.block_table[0].long()]
    assert torch.equal(kept[0][0, step.block_table[0].long()].transpose(1, 2).flatten(0, 1)[:70], k)
    keys = paged.keys
    del paged, step
    assert torch.equal(keys, kept[0])
