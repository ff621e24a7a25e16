"""Bugs planted in the CUDA C++ kernels, one at a time: what tests/test_cuda_*.py do with the kernels must find each.

The source's text is changed, one instance of the kernel compiled for sm_80, and put in the place of the shipped one;
the launch is the host code's own. What finds a bug is the simulator's checker or the tolerance rule.
"""

import functools
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest
import torch

import launches
import ptxsim
from gate import cache, compilers
from matrix import KINDS, LAST, call
from random_problems import attention_in_bits, in_pages
from simulated import simulated  # noqa: F401

CUDA = launches.ROOT / "csrc/cuda"

# name: file, where its kernels end, instance and argument, and what its name in PTX holds.
FORWARD = ("forward.cu", "}  // namespace\n\nForwardPlan plan_forward", "ForwardParams")
DKDV = ("backward_dkdv.cu", "// Head size, fast path, wide", "BackwardArgs")
DQ = ("backward_dq.cu", "// Head size, fast path, wide", "BackwardArgs")
KERNELS = {
    "forward": (*FORWARD, "forward_kernel<__nv_bfloat16, 64, true, false>", "forward_kernelI13__nv_bfloat16Li64ELb1E"),
    "forward generic": (
        *FORWARD,
        "forward_kernel<__nv_bfloat16, 64, false, false>",
        "forward_kernelI13__nv_bfloat16Li64ELb0ELb0E",
    ),
    "decode": (
        "decode.cu",
        "}  // namespace\n\nDecodePlan plan_decode",
        "SplitParams",
        "decode_kernel<__nv_bfloat16, 64, false>",
        "decode_kernelI13__nv_bfloat16Li64ELb0E",
    ),
    "decode in pages": (
        "decode.cu",
        "}  // namespace\n\nDecodePlan plan_decode",
        "InPages<SplitParams>",
        "decode_kernel<__nv_bfloat16, 64, true>",
        "decode_kernelI13__nv_bfloat16Li64ELb1E",
    ),
    "dkdv": (
        *DKDV,
        "dkdv_kernel<__nv_bfloat16, 64, true, Shape<128, 32, 2, 1, 2>>",
        "dkdv_kernelI13__nv_bfloat16Li64ELb1E",
    ),
    "dkdv generic": (
        *DKDV,
        "dkdv_kernel<__nv_bfloat16, 64, false, Shape<128, 32, 1, 1, 2>>",
        "dkdv_kernelI13__nv_bfloat16Li64ELb0E",
    ),
    "dq": (
        *DQ,
        "dq_kernel<__nv_bfloat16, 64, true, Shape<128, 64, 2, 1, 2>>",
        "dq_kernelI13__nv_bfloat16Li64ELb1E",
    ),
    "chunked dkdv": (
        "backward_chunked.cu",
        "int chunks_of(",
        "ChunkedArgs",
        "chunked_kernel<Single<true>, true>",
        "6SingleILb1EEELb1E",
    ),
}

# What is run.
LONG = call("long", "", (1, 1, 70, 150, 64))
CAUSAL = call("causal", "", (1, 1, 70, 150, 64), **LAST)
WINDOW = call("window", "", (1, 1, 160, 150, 64), window=(30, 20))
DEAD = call("dead", "", (1, 1, 150, 50, 64), **LAST)
GROUPED = call("grouped", "", (1, (4, 2), 70, 70, 64))
DROPPED = call("dropped", "", (1, 2, 70, 70, 64), dropout=0.3)
DECODE = call("decode", "", (1, 2, 1, 700, 64))
DECODE_GROUPED = call("decode, grouped", "", (1, (8, 2), 2, 150, 64))
DECODE_WINDOW = call("decode, window", "", (1, 2, 3, 300, 64), window=(90, 20), alignment="bottom_right")
LATE_RANGE = call("one of the key ranges for all", "", (1, 2, 150, 260, 64))
RANGES = call("key ranges", "", (1, 2, 150, 260, 64))
EMPTY_RANGES = call("key ranges, of every third query none", "", (1, 2, 150, 260, 64))
DECODE_RANGES = call("decode, key ranges", "", (1, 2, 3, 700, 64))
DECODE_PAGES = call("decode, pages of 16", "", (2, 2, 3, 144, 64))  # 64 keys a block: the last ends with the table
DECODE_DEAD = call("decode, dead", "", (1, 2, 9, 5, 64), **LAST)
BITS = call("a mask of bits", "", (1, 2, 70, 150, 64), mask="bool BHLS")
DECODE_BITS = call("decode, a mask of bits", "", (1, (8, 2), 3, 150, 64), mask="bool BHLS")
FLOAT = call("float", "", (1, (2, 1), 70, 130, 40), dtype="fp32", causal=True)
FLOAT_WINDOW = call("float, window", "", (1, 1, 160, 150, 40), dtype="fp32", window=(30, 20))
FLOAT_DEAD = call("float, dead", "", (1, 1, 130, 50, 40), dtype="fp32", **LAST)
FLOAT_DROPPED = call("float, dropped", "", (1, 1, 70, 70, 40), dtype="fp32", dropout=0.3)

# What several kernels share.
NO_ZEROS = (
    "smem.cuh",
    "ptx::cp_async<16>(Chunks::address(tile, row + i, chunk), live ? source : head, live ? 16 : 0);",
    "if (live) ptx::cp_async<16>(Chunks::address(tile, row + i, chunk), source, 16);",
)
SWIZZLE = (
    "smem.cuh",
    "ptx::cp_async<16>(Chunks::address(tile, row + i, chunk),",
    "ptx::cp_async<16>(Chunks::address(tile, row + i, chunk ^ 1),",
)
BAND = ("score.cuh", "min(r + high + 1, columns)", "min(r + high, columns)")
NO_LAST_MASK = ("backward_tile.cuh", " || first + kCols > full_end_; }", "; }")
NO_GUARD = ("softmax.cuh", "largest == -kInfinity ? 0.f : ", "")
NO_LSE_GUARD = ("backward.cuh", "return lse == -kInfinity ? kInfinity : lse;", "return lse;")
COUNTER = ("score.cuh", "philox_words(h, col / 32 * 4 + col % 8 / 2,", "philox_words(h, col / 32 * 4 + col % 8,")
COUNTER_OF_COLUMNS = (
    "score.cuh",
    "philox_words(h, row / 32 * 4 + row % 8 / 2,",
    "philox_words(h, row / 32 * 4 + row % 8,",
)

BUGS = {
    ("forward", "waits for too few copies"): (LONG, "forward_tile.cuh", "cp_async_wait<1>()", "cp_async_wait<2>()"),
    ("forward", "doesn't fill the tail with zeros"): (LONG, *NO_ZEROS),
    ("forward", "swizzles the tiles one way and reads them another"): (LONG, *SWIZZLE),
    ("forward", "doesn't mask the last block"): (LONG, "visits.cuh", " || first + kBlock > full_end_; }", "; }"),
    ("forward", "reads the first key head for all"): (GROUPED, "forward_tile.cuh", "at.head / p.group_k)", "0)"),
    ("forward", "loads the next keys over the values"): (
        LONG,
        "forward_tile.cuh",
        "    if (more) load_block(k_tile,",
        "    if (more) load_block(v_tile,",
    ),
    ("forward", "ends the band a key early"): (CAUSAL, *BAND),
    ("forward", "takes a row without keys for one with keys"): (DEAD, *NO_GUARD),
    ("forward generic", "counts Philox wrongly"): (DROPPED, *COUNTER),
    ("forward generic", "takes a block that is begun for a full one"): (
        LATE_RANGE,
        "visits.cuh",
        "covered |= bits_between((begin + kBlock - 1) / kBlock",
        "covered |= bits_between(begin / kBlock",
    ),
    ("forward generic", "passes over a block that ranges end in"): (
        RANGES,
        "visits.cuh",
        "seen |= bits_between(begin / kBlock - window_, (end + kBlock - 1) / kBlock",
        "seen |= bits_between(begin / kBlock - window_, end / kBlock",
    ),
    ("forward generic", "takes a pair's bits for those of the pair before"): (
        BITS,
        "score.cuh",
        "bits >> (n * 8 + e) & 1",
        "bits >> (n * 8 + e + 2) & 1",
    ),
    ("decode", "takes one row's bits for two rows"): (
        DECODE_BITS,
        "packed.cuh",
        "(p, rows[half].bias, col)",
        "(p, rows[0].bias, col)",
    ),
    ("decode", "passes over the blocks of the second ranges"): (
        DECODE_RANGES,
        "packed.cuh",
        " || max(own.begin[1], begin) < min(own.end[1], end);",
        ";",
    ),
    ("decode", "waits for too few copies"): (
        DECODE,
        "decode.cu",
        "cp_async_wait<kStages - 1>()",
        "cp_async_wait<kStages>()",
    ),
    ("decode", "doesn't fill the tail with zeros"): (DECODE, *NO_ZEROS),
    ("decode", "swizzles the tiles one way and reads them another"): (DECODE, *SWIZZLE),
    ("decode", "doesn't mask the last block"): (
        DECODE,
        "packed.cuh",
        "static_cast<int>(own.end)",
        "static_cast<int>(own.end) + 64",
    ),
    ("decode", "packs one head of a group twice"): (
        DECODE_GROUPED,
        "decode.cu",
        "at.first_head(p) + (live ? r % p.pack : 0)",
        "at.first_head(p) + (live ? r % p.pack & ~1 : 0)",
    ),
    ("decode", "loads into the other stage"): (
        DECODE,
        "decode.cu",
        "kThreads, false>(table, v_tile(n), p.v",
        "kThreads, false>(table, v_tile(n + 1), p.v",
    ),
    ("decode", "begins the band a key late"): (
        DECODE_WINDOW,
        "packed.cuh",
        "static_cast<int>(own.begin)",
        "static_cast<int>(own.begin) + 1",
    ),
    ("decode", "takes a row without keys for one with keys"): (DECODE_DEAD, *NO_GUARD),
    ("decode in pages", "reads the table past its end"): (
        DECODE_PAGES,
        "pages.cuh",
        "pages.of(min(of_page, end - 1))",
        "pages.of(of_page)",
    ),
    ("decode in pages", "takes all keys of a block from one page"): (
        DECODE_PAGES,
        "pages.cuh",
        "first + i / kPage * kPage : key",
        "first : key",
    ),
    ("decode in pages", "takes the first rows of every page"): (
        DECODE_PAGES,
        "pages.cuh",
        "return key & ((1 << shift) - 1);",
        "return key & ((1 << shift) / 2 - 1);",
    ),
    ("decode in pages", "reads a page that isn't there"): (
        DECODE_PAGES,
        "pages.cuh",
        "return number < count ? number : 0;",
        "return number;",
    ),
    ("decode in pages", "reads the table of the first sequence"): (
        DECODE_PAGES,
        "pages.cuh",
        "p.pages.table + batch * p.pages.stride",
        "p.pages.table",
    ),
    ("dkdv", "waits for too few copies"): (
        LONG,
        "backward_tile.cuh",
        "ptx::cp_async_wait<0>();\n    __syncthreads();\n    if constexpr (S::kStages == 2)",
        "ptx::cp_async_wait<1>();\n    __syncthreads();\n    if constexpr (S::kStages == 2)",
    ),
    ("dkdv", "doesn't fill the tail with zeros"): (LONG, *NO_ZEROS),
    ("dkdv", "swizzles the tiles one way and reads them another"): (LONG, *SWIZZLE),
    # Without a band it needn't: queries past the end are zeros, and so are their gradients. (As are keys, for dq.)
    ("dkdv", "doesn't mask the last block"): (WINDOW, *NO_LAST_MASK),
    ("dkdv", "drops a head of the group"): (
        GROUPED,
        "backward_tile.cuh",
        "walk.blocks(kCols) * heads;",
        "walk.blocks(kCols) * max(1, heads - 1);",
    ),
    ("dkdv", "loads into the stage in use"): (LONG, "backward_tile.cuh", "load(1 - stage);", "load(stage);"),
    ("dkdv", "ends the band a query early"): (WINDOW, *BAND),
    # On the fast path only a band leaves rows without keys, and the walk over queries passes them by.
    ("dkdv generic", "takes a row without keys for one with keys"): (EMPTY_RANGES, *NO_LSE_GUARD),
    ("dkdv generic", "counts Philox wrongly"): (DROPPED, *COUNTER_OF_COLUMNS),
    ("dkdv generic", "reads bits behind a row's last word"): (
        BITS,
        "score.cuh",
        "min(key >> 3, (p.seqlen_k - 1) >> 3 & -kBytes)",
        "(key >> 3)",
    ),
    ("dkdv generic", "forgets the second ranges in the summary"): (
        RANGES,
        "visits.cuh",
        " || (hull.z < end_ && hull.w > begin_);",
        ";",
    ),
    ("dkdv generic", "asks a block of queries for their first ranges alone"): (
        RANGES,
        "visits.cuh",
        "some |= max(",
        "some |= !which && max(",
    ),
    ("dkdv generic", "takes the keys of the query before"): (
        RANGES,
        "score.cuh",
        "(kTransposed ? col : row) + n);",
        "(kTransposed ? max(col - 1, 0) : row) + n);",
    ),
    ("dq", "doesn't mask the last block"): (CAUSAL, *NO_LAST_MASK),
    ("dq", "takes a row without keys for one with keys"): (DEAD, *NO_LSE_GUARD),
    ("chunked dkdv", "waits for too few copies"): (
        FLOAT,
        "backward_chunked.cu",
        "cp_async_wait<0>();\n    __sync",
        "cp_async_wait<1>();\n    __sync",
    ),
    ("chunked dkdv", "reads the constants of the other step"): (
        FLOAT,
        "backward_chunked.cu",
        "shared + (tiles.constants(step % 2, 0)",
        "shared + (tiles.constants(1 - step % 2, 0)",
    ),
    ("chunked dkdv", "doesn't fill the tail with zeros"): (FLOAT, *NO_ZEROS),
    ("chunked dkdv", "doesn't mask the last block"): (
        FLOAT_WINDOW,
        "visits.cuh",
        " || end_ - 1 - first_ > p_.high;",
        ";",
    ),
    ("chunked dkdv", "drops a head of the group"): (
        FLOAT,
        "backward_chunked.cu",
        "first_head, p.kv_group, first_row",
        "first_head, 1, first_row",
    ),
    ("chunked dkdv", "reads the scores before they are handed over"): (
        FLOAT,
        "backward_chunked.cu",
        "own.col, ds);\n    __syncthreads();",
        "own.col, ds);",
    ),
    ("chunked dkdv", "takes a row without keys for one with keys"): (FLOAT_DEAD, *NO_LSE_GUARD),
    ("chunked dkdv", "counts Philox wrongly"): (FLOAT_DROPPED, *COUNTER_OF_COLUMNS),
}


def compiled(kernel, patch=None):
    """One instance of a kernel for sm_80, with `old` in one of csrc/cuda's files replaced by `new`."""
    source, until, argument, instance, name = KERNELS[kernel]
    product, (nvcc, version) = compilers.product(), compilers.nvcc()
    flags = [*product.NVCCFLAGS.split(), "-lineinfo", "-arch=sm_80", "-ptx"]

    def make():
        with tempfile.TemporaryDirectory() as folder:
            here = Path(folder)
            for part in ("cuda", "common"):
                (here / part).mkdir()
                for path in (CUDA.parent / part).glob("*h"):
                    shutil.copy(path, here / part)
            text = (CUDA / source).read_text()
            assert text.count(until) == 1, f"{source} has no {until!r}"
            text = text[: text.index(until)]
            instantiation = f"template __global__ void {instance}(const __grid_constant__ {argument});\n}}\n}}\n"
            (here / "cuda" / source).write_text(text + instantiation)
            if patch is not None:
                where, old, new = patch
                patched = here / "cuda" / where
                text = patched.read_text()
                assert text.count(old) == 1, f"{where} has {old!r} {text.count(old)} times; plant the bug anew"
                patched.write_text(text.replace(old, new))
            command = [nvcc, *flags, f"-I{folder}", f"{folder}/cuda/{source}", "-o", f"{folder}/ptx"]
            done = subprocess.run(command, capture_output=True, text=True)
            assert done.returncode == 0, done.stderr
            return (here / "ptx").read_text(), []

    texts = [path.read_text() for path in (*sorted(CUDA.parent.glob("c*/*h")), CUDA / source)]
    text = cache.cached(cache.key_of(version, flags, KERNELS[kernel], patch, *texts), make)
    return ptxsim.from_ptx(text, name, target=80)


def paged(simulated, query, key, value, **options):  # noqa: F811
    """The call with pages of 16; of the first sequence those behind its 30 keys have no page's number."""
    pools, table = in_pages(16, key, value)
    table[0, 2:] = 2**31 - 1
    return simulated.attention(query, *pools, block_table=table, **options)


def run(simulated, monkeypatch, kernel, run_of, patch=None):  # noqa: F811
    """The call with this kernel in the place of the shipped one."""
    planted, name, taken = compiled(kernel, patch), KERNELS[kernel][4], []
    launch = ptxsim.launch

    def instead(shipped, *args, **kwargs):
        if name in shipped.name:
            taken.append(shipped.name)
            shipped = planted
        return launch(shipped, *args, **kwargs)

    monkeypatch.setattr(ptxsim, "launch", instead)
    ranges, more = None, {}
    if run_of is DECODE_PAGES:
        ranges = torch.tensor([[0, 30], [0, 144]]).view(2, 1, 1, 1, 2)
        more["function"] = functools.partial(paged, simulated)
    elif run_of in (BITS, DECODE_BITS):
        more["function"] = functools.partial(attention_in_bits, backend="cuda")
    elif run_of is LATE_RANGE:
        ranges = torch.tensor([[70, 260]]).view(1, 1, 1, 1, 2)
    elif run_of is EMPTY_RANGES:
        ranges = torch.stack([torch.zeros(150).long(), (torch.arange(150) % 3 > 0) * 260], -1).view(1, 1, 150, 1, 2)
    elif run_of in (RANGES, DECODE_RANGES):
        ranges = KINDS["window and sinks"](run_of.seqlen_q, run_of.seqlen_k)
    try:
        gradients = "forward" not in kernel and "decode" not in kernel
        simulated.check_call(run_of, key_ranges=ranges, gradients=gradients, **more)
    finally:
        assert taken, f"{kernel} wasn't launched"


@pytest.mark.parametrize("kernel", KERNELS)
def test_without_a_bug_nothing_is_found(simulated, monkeypatch, kernel):  # noqa: F811
    """The kernel compiled here is the shipped one."""
    first = next(bug for (of, _), bug in BUGS.items() if of == kernel)
    run(simulated, monkeypatch, kernel, first[0])


@pytest.mark.parametrize(("kernel", "bug"), BUGS)
def test_a_planted_bug_is_found(simulated, monkeypatch, kernel, bug):  # noqa: F811
    run_of, *patch = BUGS[kernel, bug]
    with pytest.raises((ptxsim.Hazard, ptxsim.Fault, AssertionError)) as found:
        run(simulated, monkeypatch, kernel, run_of, tuple(patch))
    if found.type is AssertionError:
        assert "times what is allowed" in str(found.value)
