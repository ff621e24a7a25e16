"""Few queries against many keys by the Triton kernels that split the keys, in the simulator: rows without keys, where
other kernels serve, and how many splits there are. (The calls: test_gpu_calls.py.)"""

import pytest
import torch
from attnkern.triton_kernels import configs

import simulated
from attnkern import testing
from matrix import tagged
from simulated import BF16

GQA = {"enable_gqa": True}


@pytest.mark.parametrize("gpu", [80, 90])
def test_rows_without_keys(gpu):
    """The first query of one batch element has no key in any split, the second none but in the last."""
    inputs = testing.make_inputs(2, 4, 2, 600, 64, heads_k=2, dtype=BF16, mask=("bool", "B1LS"))
    inputs.attn_mask[1, :, 0] = False
    inputs.attn_mask[1, :, 1, :590] = False
    inputs.attn_mask[1, :, 1, 590:] = True
    with simulated.triton(gpu) as target:
        results = target.check(inputs, gradients=False, **GQA)
    assert target.kernels() == ["decode_kernel", "combine_kernel"]
    assert not results["out"][1, :, 0].any()
    assert (results["lse"][1, :, 0] == -torch.inf).all()


@pytest.mark.parametrize("name", tagged("triton-not-decode"))
def test_where_the_forward_kernel_serves(monkeypatch, name):
    call = tagged("triton-not-decode")[name]
    with simulated.triton() as target:
        monkeypatch.setattr("attnkern.triton_kernels.launch.run", lambda kernel, *_: target.launched.append(kernel))
        target.attention(**call.inputs().tensors, **call.options)
    assert target.kernels() == ["forward_kernel"]


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
        with simulated.triton() as target, pytest.MonkeyPatch.context() as patch:
            to = target.launched
            patch.setattr("attnkern.triton_kernels.launch.run", lambda kernel, *_, to=to: to.append(kernel))
            target.sdpa(q, k, v)
        variants |= set(target.launched)
    assert len(variants) == 2
