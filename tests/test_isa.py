"""Every instruction set this machine has, forced in a process of its own: the compact matrix of numeric checks."""

import os
import platform
import shutil
import subprocess
import sys

import pytest

import fuzz

contract = pytest.mark.contract

MATRIX = """
import itertools, torch
import attnkern
from attnkern import testing
from random_problems import attention_in_bits, far_key, random_packed, random_problem

torch.set_num_threads(1)
torch.manual_seed({seed})
only = {only!r}
assert torch.ops.attnkern.cpu_isa() == {isa!r} == attnkern.build_info()["cpu_isa"]
dtypes = [getattr(torch, only)] if only else [torch.float32, torch.float64, torch.bfloat16, torch.float16]
count = 0
turn = itertools.count()
def in_turn(*choices):
    # A third of them, at the next call the next; a dtype has a number of calls that 3 doesn't divide.
    return choices[next(turn) % 3 :: 3]
def check_inputs(inputs, **options):
    global count
    count += 1
    testing.check_attention(inputs, backend="cpu", **options)
    if inputs.attn_mask is not None and inputs.attn_mask.dtype == torch.bool:
        testing.check_attention(inputs, function=attention_in_bits, **options)
def check(*sizes, options=None, **more):
    check_inputs(testing.make_inputs(*sizes, **more), **(options or {{}}))
with testing.poisoned_memory():
    for dtype in dtypes:
        for length, keys in [(1, 1), (1, 300), (3, 130), (16, 16), (33, 97), (65, 257), (130, 70)]:
            for options in ({{}}, {{"is_causal": True}}, {{"window": (20, 3), "alignment": "bottom_right"}}):
                check(1, 2, length, keys, 24, dtype=dtype, options=options)
        for head_dim, head_dim_v in [(1, 1), (3, 5), (16, 17), (31, 64), (64, 31), (65, 128), (127, 3), (257, 260)]:
            check(1, 2, 19, 37, head_dim, head_dim_v, dtype=dtype)
            check(1, 2, 1, 70, head_dim, head_dim_v, dtype=dtype)
        for kind, shape in itertools.product(("bool", "float", "holes"), ("BHLS", "1HL1", "B11S")):
            for own in (dtype, torch.float32):
                check(2, 2, 19, 70, 16, dtype=dtype, mask=(kind, shape), mask_dtype=own)
        for length, keys in [(1, 300), (3, 7), (16, 128), (65, 257), (130, 200)]:  # bits of whole words and of parts
            for options in ({{}}, {{"window": (90, 5)}}):
                for shape in in_turn("BHLS", "11L1", "B1LS"):
                    check(2, 2, length, keys, 24, dtype=dtype, mask=("bool", shape), options=options)
        for length, keys in [(1, 300), (3, 130), (16, 90), (33, 97), (65, 257), (130, 170)]:
            begin = torch.randint(keys - 40, (1, 2, length, 1), dtype=torch.int32)
            own = torch.stack([begin, begin + torch.randint(20, keys, begin.shape)], -1).int()
            sinks = torch.tensor([0, 4], dtype=torch.int32).expand(own.shape)
            for ranges in (own, torch.cat([sinks, own], -2)):
                for options in in_turn({{}}, {{"window": (90, None)}}, {{"softcap": 5.0}}):
                    check(2, 2, length, keys, 24, dtype=dtype, options={{**options, "key_ranges": ranges}})
        for layout in testing.LAYOUTS:
            check(2, 2, 19, 70, 20, dtype=dtype, layout=layout)
        for options in ({{"enable_gqa": True}}, {{"enable_gqa": True, "is_causal": True, "softcap": 5.0}}):
            check(2, 6, 19, 70, 16, heads_k=2, dtype=dtype, options=options)
        # Scores that lie far apart, and a maximum that comes late: what an exponential overflows at, and does not.
        for gap, place in itertools.product((60, 88, 90, 128, 178, 250, 300, 709, 720, 1000, 5000), (0, 40, -1)):
            check_inputs(far_key(gap, place, dtype=dtype))
        for length, keys in [(1, 160), (2, 160), (3, 97), (16, 320), (33, 97), (130, 257)]:
            for scale in in_turn(-3.0, 0.0, 1e-3, 3.0, 100.0):
                check(1, 2, length, keys, 64, dtype=dtype, options={{"scale": scale}})
            for product in in_turn(-8e3, -800.0, 800.0, 8e3):  # a log-sum-exp up to 1e3
                check(1, 2, length, keys, 64, dtype=dtype, product=product)
        for seed in range(40):
            inputs, options = random_problem(int(torch.randint(2**31, ())), dtypes=[dtype])
            check_inputs(inputs, **options)
        # Dropout: the same bits whatever the width of a vector.
        inputs = testing.make_inputs(2, 3, 33, 70, 16, dtype=dtype)
        for seed in range(3):
            torch.manual_seed(seed)
            keep = testing.philox_keep(torch.randint(2**63 - 1, (1,)), 2, 3, 33, 70, 0.3)
            torch.manual_seed(seed)
            testing.check_attention(inputs, backend="cpu", dropout_p=0.3, keep=keep)
    for dtype in dtypes:
        for seed in range(10):
            inputs, options = random_problem(int(torch.randint(2**31, ())), dtypes=[dtype], poison=True)
            check_inputs(inputs, **options)
            inputs, options, packed = random_packed(int(torch.randint(2**31, ())), dtypes=[dtype], poison=True)
            testing.check_packed(inputs, packed, backend="cpu", **options)
        for size, amplitude in itertools.product((129, 256), (10, 100)):
            inputs = testing.make_inputs(1, 1, 70, 97, size, dtype=dtype, amplitude=(amplitude, amplitude, 1.0))
            value = inputs.value.requires_grad_()
            out = attnkern.attention(inputs.query, inputs.key, value, scale=1.0)
            grad_out = torch.randn_like(out)
            told = {{"query": inputs.query, "key": inputs.key, "value": value, "scale": 1.0, "grad_out": grad_out}}
            (actual,) = torch.autograd.grad(out, value, grad_out)
            testing.expected(**told)["value"].check(actual, gradient=True, recipe=inputs.recipe)
print("checked", count)
"""


# float32 by two sets that differ in prefetching alone.
BITS = """
import hashlib, itertools, torch
import attnkern
from attnkern import testing
assert attnkern.build_info()["cpu_isa"] == {isa!r}
torch.manual_seed({seed})
found = hashlib.sha256()
for length, keys, dim, threads in itertools.product((1, 4, 7, 9, 13, 33), (1, 5, 8, 9, 40, 300), (16, 64), (1, 2)):
    torch.set_num_threads(threads)
    for layout in ("contiguous", "blhd"):
        leaves = [x.requires_grad_() for x in testing.make_inputs(
            2, 4, length, keys, dim, heads_k=2, layout=layout).tensors.values()]
        out = attnkern.attention(*leaves, enable_gqa=True)
        for x in (out, *torch.autograd.grad(out, leaves, torch.ones_like(out))):
            found.update(x.detach().contiguous().view(torch.uint8).numpy().tobytes())
print(found.hexdigest())
"""


def forced(isa, code, folder="."):
    """Runs code by the kernels of an instruction set, those of the package in this folder, if there is one."""
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "ATTNKERN_CPU_ISA": isa, "PYTHONPATH": os.pathsep.join(sys.path)},
        cwd=folder,  # which comes before PYTHONPATH
        capture_output=True,
        text=True,
        check=False,
    )


@contract(36)
@pytest.mark.parametrize("isa", list(fuzz.ISAS.get(platform.machine(), ["generic"])))
def test_every_instruction_set(isa, fresh_seed):
    """One that the machine lacks is refused by name (test_build shows the text)."""
    result = forced(isa, MATRIX.format(isa=isa, seed=fresh_seed, only=None))
    if "ATTNKERN_CPU_ISA" in result.stderr and isa != "generic":
        assert "RuntimeError" in result.stderr
        return
    assert result.returncode == 0, f"ATTNKERN_CPU_ISA={isa}, seed {fresh_seed}\n{result.stderr[-4000:]}"
    assert result.stdout.startswith("checked")


def test_a_zen_5s_float32_has_the_bits_of_avx512(fresh_seed):
    """Which kernels a call goes to is a matter of its dtype, not of what instructions another dtype has."""
    sets = [isa for isa in ("zen5", "avx512") if isa in fuzz.runnable_isas()]
    results = [forced(isa, BITS.format(isa=isa, seed=fresh_seed)) for isa in sets]
    assert all(result.returncode == 0 for result in results), results[0].stderr[-4000:]
    assert len({result.stdout for result in results}) <= 1, f"seed {fresh_seed}"


if platform.machine() == "x86_64":  # the emulation is AVX2's

    @contract(36)
    @pytest.mark.parametrize(("isa", "dtype"), [("amx", "bfloat16"), ("avx512", None)])
    def test_instructions_emulated(isa, dtype, tmp_path, fresh_seed):
        """The kernels for AMX, with AVX512-BF16's where they take its place, and for AVX-512 without it: instructions
        in plain C++."""
        command = [sys.executable, "setup.py", "-q", "build_emulated"]
        subprocess.run(command, cwd=fuzz.ROOT, env={**os.environ, "ATTNKERN_CPU_ISAS": ""}, check=True)
        package = tmp_path / "attnkern"
        shutil.copytree(fuzz.ROOT / "attnkern", package, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
        (package / "_C.abi3.so").symlink_to(fuzz.ROOT / "build" / "ninja" / "_C.emulated.so")
        result = forced(isa, MATRIX.format(isa=isa, seed=fresh_seed, only=dtype), tmp_path)
        assert result.returncode == 0, f"seed {fresh_seed}\n{result.stderr[-4000:]}"
        assert result.stdout.startswith("checked")


@pytest.mark.parametrize("value", ["sse9", "AVX2", "neon" if platform.machine() == "x86_64" else "avx2"])
def test_a_name_that_means_nothing_here_is_refused(value):
    """By a call, not only by build_info(); the message names the variable, the value and the choices."""
    code = "import attnkern, torch; x = torch.ones(1, 2, 3, 4); attnkern.attention(x, x, x, backend='cpu')"
    result = forced(value, code)
    assert result.returncode != 0
    last = result.stderr.strip().splitlines()[-1]
    for part in ("RuntimeError", "ATTNKERN_CPU_ISA", value, "generic"):
        assert part in last
