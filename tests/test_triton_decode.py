"""Few queries against many keys by the Triton kernels that split the keys, in the simulator, against float64 by the one
tolerance rule; and how many splits there are."""

import pytest
import torch
from attnkern.triton_kernels import configs

from attnkern import testing
from test_triton import ALL, BF16, FP16, FP32, LAST, Simulated, routed, row

GQA = {"enable_gqa": True}
MATRIX = {
    "one query": row(1, 2, 1, 600, 64, gpus=ALL),
    "float16, shared keys, causal": row(1, 8, 4, 700, 64, **LAST, **GQA, kinds={"dtype": FP16, "heads_k": 2}),
    "one key head, two tiles of rows": row(1, 12, 3, 530, 64, **GQA, kinds={"heads_k": 1}),
    "float32": row(1, 4, 2, 520, 64, **GQA, kinds={"dtype": FP32, "heads_k": 2}),
    "window": row(1, 2, 3, 1100, 64, window=(700, 0), alignment="bottom_right"),
    "head sizes 80 and 48, softcap": row(2, 2, 2, 530, 80, 48, softcap=3.0),
    "head size 256": row(1, 1, 1, 513, 256),
    "float32, head size 500": row(1, 1, 1, 513, 500, kinds={"dtype": FP32}),
    "bias with holes": row(2, 2, 3, 560, 64, kinds={"mask": ("holes", "BHLS")}),
    "bool mask of keys": row(2, 4, 2, 560, 64, **GQA, kinds={"mask": ("bool", "B11S"), "heads_k": 2}),
    "bias": row(1, 4, 2, 560, 64, **GQA, kinds={"mask": ("float", "1HLS"), "heads_k": 2}),
    "length-major": row(2, 4, 3, 560, 64, **GQA, kinds={"layout": "blhd", "heads_k": 2}),
}


@pytest.mark.parametrize(
    ("name", "gpu"),
    [(name, gpu) for name, r in MATRIX.items() for gpu in r.gpus],
    ids=lambda x: f"sm_{x}" if isinstance(x, int) else x,
)
def test_decode(name, gpu, record_property):
    """Output and log-sum-exp; these kernels ran and not the forward kernel."""
    this = MATRIX[name]
    with routed(gpu) as launched:
        target = Simulated("triton", "cpu", gpu)
        target.check(target.inputs(*this.sizes, **this.more), gradients=False, **this.options)
    assert [kernel.function.__name__ for kernel in launched] == ["decode_kernel", "combine_kernel"]
    record_property("triton", (f"decode: {name} (forward)", f"sm_{gpu} {this}"))


@pytest.mark.parametrize("gpu", [80, 90])
def test_rows_without_keys(gpu):
    """The first query of one batch element has no key in any split, the second none but in the last."""
    inputs = testing.make_inputs(2, 4, 2, 600, 64, heads_k=2, dtype=BF16, mask=("bool", "B1LS"))
    inputs.attn_mask[1, :, 0] = False
    inputs.attn_mask[1, :, 1, :590] = False
    inputs.attn_mask[1, :, 1, 590:] = True
    with routed(gpu) as launched:
        results = Simulated("triton", "cpu", gpu).check(inputs, gradients=False, **GQA)
    assert launched[0].function.__name__ == "decode_kernel"
    assert not results["out"][1, :, 0].any()
    assert (results["lse"][1, :, 0] == -torch.inf).all()


@pytest.mark.parametrize(
    ("sizes", "kinds", "options"),
    [
        ((1, 2, 65, 600, 64), {}, {}),
        ((1, 2, 1, 500, 64), {}, {}),
        ((1, 2, 1, 600, 64), {}, {"dropout_p": 0.5}),
        ((1, 4, 1, 600, 64), {"heads_k": 2, "heads_v": 1}, GQA),
        ((1, 2, 1, 2000, 64), {}, {"window": (300, 0), "alignment": "bottom_right"}),
        ((8, 1, 1, 600, 64), {}, {}),
    ],
    ids=[
        "many queries",
        "few keys",
        "dropout",
        "values shared otherwise",
        "a narrow window",
        "programs enough",
    ],
)
def test_where_the_forward_kernel_serves(monkeypatch, sizes, kinds, options):
    inputs = testing.make_inputs(*sizes, **{"dtype": BF16, **kinds})
    with routed(80) as launched:
        monkeypatch.setattr("attnkern.triton_kernels.launch.run", lambda kernel, *_: launched.append(kernel))
        Simulated("triton", "cpu").attention(**inputs.tensors, **options)
    assert [kernel.function.__name__ for kernel in launched] == ["forward_kernel"]


@pytest.mark.parametrize("processors", [1, 4, 108, 132, 188])
@pytest.mark.parametrize("programs", [1, 3, 32, 1000])
@pytest.mark.parametrize("keys", [512, 513, 4095, 16384, 10**6])
@pytest.mark.parametrize("block_n", [16, 64])
def test_splits(keys, block_n, programs, processors):
    splits = configs.splits(keys, block_n, programs, processors)
    blocks = -(-keys // block_n)
    each = -(-blocks // splits)  # as decode_kernel deals them out
    assert 1 <= splits <= configs.MAX_SPLITS
    assert (splits - 1) * each < blocks  # none is empty
    assert splits == 1 or each * block_n >= configs.SPLIT_KEYS
    assert splits * programs < 2 * processors + programs  # no more than fill the chip twice
    # And that many, where the keys suffice: rounding to whole blocks takes less than half.
    enough = min(2 * processors / programs, keys / configs.SPLIT_KEYS, configs.MAX_SPLITS)
    assert 2 * splits >= int(enough)


def test_a_number_of_splits_makes_no_new_kernel():
    variants = set()
    for length in (600, 1100, 4000):
        q, k, v = (torch.zeros(1, 1, n, 64, dtype=BF16) for n in (1, length, length))
        with routed(80) as launched, pytest.MonkeyPatch.context() as patch:
            patch.setattr("attnkern.triton_kernels.launch.run", lambda kernel, *_, to=launched: to.append(kernel))
            Simulated("triton", "cpu").sdpa(q, k, v)
        variants |= set(launched)
    assert len(variants) == 2
