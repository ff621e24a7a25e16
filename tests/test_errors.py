"""Bad input: the exception type torch raises, one sentence naming the argument, what was got and what is expected."""

import pytest
import torch
import torch.nn.functional as F

import attnkern
from attnkern import testing

contract = pytest.mark.contract
x = torch.randn(2, 3, 5, 8)
kv = torch.randn(2, 3, 7, 8)


def t(*shape, dtype=torch.float32, device="cpu"):
    return torch.zeros(shape, dtype=dtype, device=device)


Q, K = (2, 4, 5, 8), (2, 4, 7, 8)

# name: (shapes of query, key, value and mask; words of the message). A name with "gqa" calls with enable_gqa=True.
BAD = {
    "query of one dimension": ([(8,), (5, 8), (5, 8)], ["query", "2 dim", "(8,)"]),
    "key of one dimension": ([(5, 8), (8,), (5, 8)], ["key", "2 dim", "(8,)"]),
    "value of no dimension": ([(5, 8), (5, 8), ()], ["value", "2 dim", "()"]),
    "batch that does not broadcast": ([Q, (3, 4, 7, 8), (3, 4, 7, 8)], ["key", "batch", "2", "3"]),
    "value's batch": ([Q, K, (3, 4, 7, 8)], ["value", "batch", "2", "3"]),
    "heads that do not broadcast": ([Q, (2, 2, 7, 8), (2, 2, 7, 8)], ["key", "head", "4", "2"]),
    "value's heads": ([Q, K, (2, 3, 7, 8)], ["value", "head", "4", "3"]),
    "head size of key": ([Q, (2, 4, 7, 9), K], ["key", "8", "(2, 4, 7, 9)"]),
    "length of value, longer": ([Q, K, (2, 4, 9, 8)], ["key", "value", "length", "7", "9"]),
    "length of value, shorter": ([Q, K, (2, 4, 6, 8)], ["key", "value", "length", "7", "6"]),
    "gqa, not divisible": ([Q, (2, 3, 7, 8), (2, 3, 7, 8)], ["key", "divide", "4", "3"]),
    "gqa, more key heads": ([(2, 2, 5, 8), K, K], ["key", "divide", "2", "4"]),
    "gqa, one query head": ([(2, 1, 5, 8), K, K], ["key", "divide", "1", "4"]),
    "gqa, value heads": ([Q, K, (2, 3, 7, 8)], ["value", "divide", "4", "3"]),
    "gqa without heads": ([(5, 8), (7, 8), (7, 8)], ["head", "enable_gqa", "(5, 8)"]),
    "gqa, mask of key heads": ([Q, (2, 2, 7, 8), (2, 2, 7, 8), (2, 2, 5, 7)], ["attn_mask", "(2, 2, 5, 7)"]),
    "mask of another length": ([Q, K, K, (5, 6)], ["attn_mask", "(2, 4, 5, 7)", "(5, 6)"]),
    "mask that enlarges": ([(1, 4, 5, 8), (1, 4, 7, 8), (1, 4, 7, 8), (2, 1, 5, 7)], ["attn_mask", "(2, 1, 5, 7)"]),
    "mask of value's batch": ([(1, 4, 5, 8), (1, 4, 7, 8), K, (2, 1, 5, 7)], ["attn_mask", "(2, 1, 5, 7)"]),
    "mask of higher rank": ([Q[1:], K[1:], K[1:], (1, 4, 5, 7)], ["attn_mask", "(1, 4, 5, 7)"]),
}


@pytest.mark.parametrize("name", BAD)
@contract(5, 8, 9, 16, 27, 29, 30)
def test_shapes(name):
    shapes, words = BAD[name]
    arguments, keywords = [t(*shape) for shape in shapes], {"enable_gqa": "gqa" in name}
    with testing.unmodified(*arguments), pytest.raises(RuntimeError) as caught:
        attnkern.scaled_dot_product_attention(*arguments, **keywords)
    text = str(caught.value)
    assert type(caught.value) is RuntimeError
    assert all(word in text for word in words), text
    # One sentence, in our name.
    assert text.startswith("attnkern: ")
    assert "\n" not in text
    assert len(text) < 200
    # torch raises as well, except where it reads out of bounds (item 9) or expands what should not be.
    if not name.startswith("length"):
        with pytest.raises((RuntimeError, IndexError)):
            F.scaled_dot_product_attention(*arguments, **keywords)


@contract(37)
@pytest.mark.parametrize("position", [1, 2], ids=["key", "value"])
@pytest.mark.parametrize("empty", [False, True])
def test_mixed_dtypes(position, empty):
    tensors = [t(2, 3, 0 if empty else 5, 8) for _ in range(3)]
    tensors[position] = tensors[position].double()
    with pytest.raises(RuntimeError, match=f"(?s){['query', 'key', 'value'][position]}.*dtype.*float32.*float64"):
        attnkern.scaled_dot_product_attention(*tensors)


@contract(37)
@pytest.mark.parametrize("position", range(4), ids=["query", "key", "value", "attn_mask"])
def test_mixed_devices(position):
    tensors = [t(2, 3, 5, 8), t(2, 3, 5, 8), t(2, 3, 5, 8), t(5, 5)]
    tensors[position] = tensors[position].to("meta")
    with pytest.raises(RuntimeError, match=r"(?s)device.*(cpu.*meta|meta.*cpu)"):
        attnkern.scaled_dot_product_attention(*tensors)


@contract(18)
@pytest.mark.parametrize(
    ("query_dtype", "mask_dtype"),
    [
        (torch.float32, torch.float64),
        (torch.float32, torch.bfloat16),
        (torch.float32, torch.float16),
        (torch.bfloat16, torch.float16),
        (torch.float64, torch.bfloat16),
        *((torch.float32, d) for d in (torch.int64, torch.uint8, torch.int8, torch.complex64)),
    ],
    ids=str,
)
def test_mask_dtypes(query_dtype, mask_dtype):
    q = t(2, 3, 5, 8, dtype=query_dtype)
    mask = t(5, 5, dtype=mask_dtype)
    names = [str(d).removeprefix("torch.") for d in (query_dtype, mask_dtype)]
    with pytest.raises(RuntimeError, match=rf"attn_mask.*bool.*float32.*query's dtype {names[0]}, got {names[1]}"):
        attnkern.scaled_dot_product_attention(q, q, q, mask)
    with pytest.raises(RuntimeError):
        F.scaled_dot_product_attention(q, q, q, mask)


@contract(38)
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8, torch.bool], ids=str)
def test_integers_and_bools(dtype):
    q = t(2, 3, 5, 8, dtype=dtype)
    with pytest.raises(RuntimeError, match=f"query.*float32.*{str(dtype)[6:]}"):
        attnkern.scaled_dot_product_attention(q, q, q)


@contract(38)
@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128, torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_dtypes_that_nobody_implements(dtype):
    q = t(2, 3, 5, 8, dtype=dtype)
    with pytest.raises(NotImplementedError, match=f"query.*float32.*{str(dtype)[6:]}"):
        attnkern.scaled_dot_product_attention(q, q, q)


@contract(38)
@pytest.mark.parametrize("position", range(4), ids=["query", "key", "value", "attn_mask"])
def test_sparse_tensors(position):
    tensors = [torch.ones(5, 8), torch.ones(5, 8), torch.ones(5, 8), torch.ones(5, 5)]
    tensors[position] = tensors[position].to_sparse()
    with pytest.raises(
        RuntimeError, match="(?i)" + ("query", "key", "value", "attn_mask")[position] + ".*(sparse|dense)"
    ):
        attnkern.scaled_dot_product_attention(*tensors)


@contract(21)
@pytest.mark.parametrize("mask", [t(5, 7), t(5, 7, dtype=torch.bool)], ids=["float", "bool"])
def test_mask_together_with_is_causal(mask):
    with pytest.raises(RuntimeError, match=r"attn_mask.*is_causal"):
        attnkern.scaled_dot_product_attention(x, kv, kv, mask, is_causal=True)


@contract(33)
@pytest.mark.parametrize("dropout_p", [-0.1, 1.1, 2, -1, float("nan"), float("inf"), float("-inf")])
def test_dropout_outside_its_range(dropout_p):
    with pytest.raises(RuntimeError, match=r"dropout.*between 0 and 1.*" + str(dropout_p).replace(".", r"\.")):
        attnkern.scaled_dot_product_attention(x, kv, kv, dropout_p=dropout_p)


@contract(31)
@pytest.mark.parametrize("scale", [float("nan"), float("inf"), float("-inf")])
def test_scale_that_is_not_finite(scale):
    with pytest.raises((RuntimeError, ValueError), match=f"scale.*finite.*{scale}"):
        attnkern.scaled_dot_product_attention(x, kv, kv, scale=scale)


@pytest.mark.parametrize(
    ("keywords", "exception", "message"),
    [
        ({"window": (-1, 0)}, ValueError, r"window.*-1"),
        ({"window": (0, -3)}, ValueError, r"window.*-3"),
        ({"window": 5}, TypeError, r"window.*5"),
        ({"window": (1,)}, TypeError, r"window.*\(1,\)"),
        ({"window": (1, 2, 3)}, TypeError, r"window.*\(1, 2, 3\)"),
        ({"window": (1.5, 0)}, TypeError, r"window.*float"),
        ({"window": (True, 0)}, TypeError, r"window.*bool"),
        ({"window": ("a", 0)}, TypeError, r"window.*str"),
        ({"alignment": "left"}, ValueError, r"alignment.*top_left.*bottom_right.*left"),
        ({"alignment": None}, ValueError, r"alignment.*None"),
        ({"softcap": -1.0}, ValueError, r"softcap.*-1"),
        ({"softcap": float("nan")}, ValueError, r"softcap.*nan"),
        ({"softcap": float("inf")}, ValueError, r"softcap.*inf"),
        ({"softcap": "a"}, TypeError, r"softcap.*str"),
        ({"backend": "gpu"}, ValueError, r"backend.*cpu.*reference.*gpu"),
        ({"backend": 3}, ValueError, r"backend.*3"),
    ],
    ids=str,
)
def test_options_of_attention(keywords, exception, message):
    with pytest.raises(exception, match=message):
        attnkern.attention(x, kv, kv, **keywords)
    with pytest.raises(exception, match=message):
        attnkern.explain(x, kv, kv, **keywords)


def test_a_refused_call_draws_no_random_numbers():
    before = torch.get_rng_state()
    with pytest.raises(RuntimeError):
        attnkern.scaled_dot_product_attention(x, kv, kv.double(), dropout_p=0.5)
    assert torch.equal(torch.get_rng_state(), before)
