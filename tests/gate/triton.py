"""Cases of triton_kernels/: as they are launched for a causal problem of every row of the table, at the largest head
size that it serves; and the kernels that have no row."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

import torch
from attnkern.triton_kernels import configs, launch, plan
from attnkern.triton_kernels.configs import Row

from attnkern.params import DECODE_MAX_ROWS, GRAD_BIAS, GRAD_K, GRAD_Q, GRAD_V, AttentionParams
from triton_variants import dense

from .case import Budget, Case, Triton

# What the compile gate lets a row spill, in bytes by architecture.
_FEW = "a few words of 255 registers; without the spill only half the tile, with twice the traffic to shared memory"
_SM120 = (
    "sm_80 spills nothing here, ptxas has fewer registers to spare for sm_120; a tile of its own awaits measurement"
)
_TWO = "a few words of 128 registers, to which ptxas keeps so that two blocks fit onto a multiprocessor"
_ENDS = "the ends of each row's ranges, held beside the tile"
_FP32 = "tf32x3 splits every operand in two: of the tiles from 16 x 16 on, each spills, and this one least"
_BUDGETS: dict[tuple[int, str, int, str, int], dict[str, tuple[int, str]]] = {
    (80, "forward", 2, "plain", 192): {"120a": (148, _SM120)},
    (80, "forward", 2, "tile", 128): {"80": (8, _FEW), "120a": (24, _SM120)},
    (80, "dkdv", 2, "plain", 64): {"80 86": (8, _FEW), "120a": (88, _SM120)},
    (80, "dkdv", 2, "plain", 128): {"120a": (20, _SM120)},
    (80, "dkdv", 2, "plain", 256): {"120a": (8, _SM120)},
    (80, "forward", 2, "plain", 512): {"120a": (56, _SM120)},
    (80, "dkdv", 2, "plain", 512): {"80": (12, _FEW), "120a": (44, _SM120)},
    (80, "dq", 2, "plain", 512): {"120a": (96, _SM120)},
    (80, "forward", 2, "ranges", 128): {"120a": (16, _SM120)},
    (80, "dkdv", 2, "tile", 64): {"120a": (16, _SM120)},
    (80, "dkdv", 2, "tile", 128): {"120a": (44, _SM120)},
    (80, "dq", 2, "tile", 128): {"120a": (8, _SM120)},
    (80, "forward", 4, "plain", 256): {"120a": (68, _SM120)},
    (80, "dkdv", 4, "plain", 256): {"120a": (196, _SM120)},
    (80, "dq", 4, "plain", 256): {"80": (12, _FEW), "120a": (40, _SM120)},
    (80, "dbias", 2, "tile", 128): {"80 86": (16, _FEW), "120a": (72, _SM120)},
    (80, "dbias", 2, "tile", 256): {"86": (24, _FEW)},
    (80, "dbias", 2, "tile", 512): {"80 86": (60, _TWO)},
    (90, "dbias", 2, "tile", 256): {"90a": (24, _FEW)},
    (80, "tangent", 2, "plain", 128): {"80 86": (16, _TWO)},
    (80, "tangent", 4, "plain", 512): {"80": (36, _FP32), "120a": (156, _FP32)},
    (80, "second_dq", 2, "plain", 128): {"80": (8, _TWO)},
    (80, "second_dq", 2, "plain", 256): {"80": (8, _FEW)},
    (80, "second_dkdv", 2, "plain", 128): {"86": (8, _TWO)},
    (80, "second_dbias", 2, "tile", 256): {"80 86": (116, _FEW)},
    (80, "second_dbias", 4, "tile", 64): {"80": (40, _FEW), "86": (32, _FEW)},
    (90, "second_dbias", 2, "tile", 256): {"90a": (44, _FEW)},
    (90, "second_dbias", 4, "tile", 64): {"90a": (24, _FEW)},
    (80, "table", 2, "tile", 128): {"86": (16, _FEW), "120a": (52, _SM120)},
    (80, "second_table", 2, "tile", 64): {"120a": (8, _SM120)},
    (80, "second_table", 2, "tile", 256): {"80 86": (92, _FEW)},
    (90, "table", 2, "tile", 256): {"90a": (16, _FEW)},
    (90, "second_table", 2, "tile", 256): {"90a": (64, _FEW)},
    (90, "second_table", 4, "tile", 64): {"90a": (16, _FEW)},
    (80, "second_dkdv", 4, "plain", 512): {"80": (228, _FP32), "120a": (336, _FP32)},
    (90, "forward", 2, "plain", 512): {"90a": (16, _FEW)},
    (90, "tangent", 2, "plain", 128): {"90a": (8, _FEW), "100a": (32, _TWO)},
    (90, "dkdv", 4, "plain", 256): {"90a": (48, _FEW)},
    (90, "forward", 2, "ranges", 128): {"100a": (64, _ENDS)},
    (90, "dkdv", 2, "plain", 128): {"90a": (12, _FEW), "100a": (84, _FEW)},
}
_MASKS = {"ranges": "key ranges", "mask": "a bool mask", "bits": "a mask of bits"}
_MASKED: dict[tuple[int, str, int, str], dict[str, tuple[int, str]]] = {
    (80, "dkdv", 64, "ranges"): {"120a": (48, _ENDS)},
    (80, "forward", 128, "mask"): {"80": (28, _FEW), "86": (8, _FEW), "120a": (20, _SM120)},
    (80, "dkdv", 64, "mask"): {"120a": (52, _SM120)},
    (90, "dkdv", 64, "ranges"): {"100a": (208, _ENDS)},
    (90, "dkdv", 128, "ranges"): {"90a": (32, _ENDS)},
    (90, "dkdv", 128, "mask"): {"90a": (8, _FEW)},
    (80, "forward", 64, "bits"): {"120a": (16, _SM120)},
    (80, "dkdv", 64, "bits"): {"120a": (60, _SM120)},
}
_PLACES = "addresses of 64 bits, which change with each block's pages, beside the tile"
_IN_PAGES: dict[tuple[int, int, int, int], dict[str, tuple[int, str]]] = {
    (80, 2, 128, 256): {"86": (32, _PLACES)},
    (80, 2, 512, 16): {"120a": (112, _SM120)},
}
_DECODE_IN_PAGES: dict[tuple[int, int, int], dict[str, tuple[int, str]]] = {
    (4, 64, 16): {"80": (40, _PLACES), "90a": (48, _PLACES)},
    (4, 64, 256): {"120a": (16, _SM120)},
    (4, 128, 256): {"80": (76, _PLACES)},
    (4, 512, 16): {"90a": (28, _PLACES), "120a": (16, _SM120)},
    (4, 512, 256): {"80": (16, _PLACES), "90a": (28, _PLACES)},
}
DECODE_BUDGET = (8, _FEW)
_DECODE_RANGES = {(4, 64): {"120a": (32, _ENDS)}, (4, 512): {"90a": (24, _ENDS)}}
BUDGETS = {(Row(*key[:4]), key[4]): budget for key, budget in _BUDGETS.items()}


def cases() -> list[Case]:
    found = [_case_of_row(row, size) for row, by_size in configs.TABLE.items() for size in by_size]
    for capability, archs in ((80, "80 86 120a"), (90, "90a")):
        for itemsize, size in itertools.product((2, 4), (64, 128, 256, 512)):
            problem = _problem(capability, size, itemsize, "tile")
            steps = plan.backward_plan(problem, problem.q, problem.q, True, GRAD_BIAS)
            tangents = plan.TangentSpecs(problem.q, problem.k, problem.v, problem.bias)
            _, second = plan.second_backward_plan(problem, tangents, problem.q, problem.q, True, GRAD_BIAS)
            named = {"delta": steps.delta, "dbias": steps.dbias, "second_dbias": second.dbias}
            for name, step in named.items():
                assert step is not None
                about = f"triton {name} {'bf16' if itemsize == 2 else 'fp32'} d{size} sm_{capability}"
                row = Row(capability, name, itemsize, "tile")
                found.append(_case(about, step.kernel, archs, {archs: {"LDG": 1}}, BUDGETS.get((row, size), {})))
    for itemsize, by_size in configs.DECODE.items():
        for size in by_size:
            found += _decode_cases(size, itemsize)
    return [*found, *_cases_of_two_parts(), *_cases_of_masks(), *_cases_of_tables(), *_cases_of_pages()]


def _cases_of_two_parts() -> list[Case]:
    """A head size that is cut into a power of two and a rest: twice the descriptors, and twice the products. Of float32
    value's alone too, and a bias: with wgmma each of these was miscompiled (`configs._miscompiled`)."""
    found = []
    for itemsize, size, size_v, feature in (
        (2, 96, 96, "plain"),
        (4, 48, 48, "plain"),
        (4, 48, 48, "tile"),
        (4, 8, 40, "plain"),
    ):
        problem = _problem(90, size, itemsize, feature)
        problem = problem._replace(v=dense(*problem.v.shape[:3], size_v))
        for name in ("forward", "dkdv", "dq"):
            step = _step(problem, name)
            assert step is not None
            sizes = f"d{size}" + (f"-{size_v}" if size_v != size else "")
            about = f"triton {name} {'bf16' if itemsize == 2 else 'fp32'} {sizes} {feature} in two parts sm_90"
            products = {"HMMA" if itemsize == 4 else "HGMMA": 1}
            found.append(_case(about, step.kernel, "90a", {"90a": {"UTMALDG": 2, **products}}, {}))
    return found


def _cases_of_masks() -> list[Case]:
    """Key ranges, bool masks and masks of bits: every pass, at the head sizes of most models."""
    found = []
    kinds = {"ranges": ("dkdv", "dq", "tangent", "visits"), "mask": ("forward", "dkdv", "dq")}
    kinds["bits"] = (*kinds["mask"], "tangent")
    for capability, archs in ((80, "80 86 120a"), (90, "90a 100a")):
        for size, (feature, names) in itertools.product((64, 128), kinds.items()):
            problem = _problem(capability, size, 2, feature)
            visits = plan.backward_plan(problem, problem.q, problem.q, False, GRAD_Q | GRAD_K | GRAD_V).visits
            for name in names:
                step = visits if name == "visits" else _step(problem, name)
                assert step is not None
                about = f"triton {name} bf16 d{size} with {_MASKS[feature]} sm_{capability}"
                budget = _MASKED.get((capability, name, size, feature), {})
                found.append(_case(about, step.kernel, archs, {archs: {"LDG": 1}}, budget))
    return found


def _cases_of_tables() -> list[Case]:
    """The gradient of a bias by distance, and its derivative."""
    found = []
    for capability, archs in ((80, "80 86 120a"), (90, "90a 100a")):
        for itemsize, size in itertools.product((2, 4), (64, 128, 256, 512)):
            problem = _problem(capability, size, itemsize, "tile")
            assert problem.bias is not None
            table = problem.bias._replace(stride=(0, 2047, -1, 1), aligned=False)
            problem = problem._replace(bias=table)
            first = plan.backward_plan(problem, problem.q, problem.q, True, GRAD_BIAS)
            tangents = plan.TangentSpecs(problem.q, problem.k, problem.v, table)
            _, second = plan.second_backward_plan(problem, tangents, problem.q, problem.q, True, GRAD_BIAS)
            for name, step in (("table", first.dbias), ("second_table", second.dbias)):
                assert step is not None
                about = f"triton {name} {'bf16' if itemsize == 2 else 'fp32'} d{size} sm_{capability}"
                row = Row(capability, name, itemsize, "tile")
                found.append(_case(about, step.kernel, archs, {archs: {"LDG": 1}}, BUDGETS.get((row, size), {})))
    return found


def _cases_of_pages() -> list[Case]:
    """Keys and values in pages, beside a range of keys for each sequence, as serving has them: few queries and many,
    blocks in several pages and in one. Neither copies the keys by descriptors: cp.async, or on Hopper plain loads for
    products that read shared memory."""
    found = []
    for itemsize, size, page in itertools.product((2, 4), (64, 128, 512), (16, 256)):
        of = f"{'bf16' if itemsize == 2 else 'fp32'} d{size} pages of {page}"
        for capability, archs in ((80, "80 86 120a"), (90, "90a 100a" if itemsize == 2 and size <= 128 else "90a")):
            step = plan.forward_plan(_in_pages(capability, size, itemsize, page, 1024), True).step
            assert step is not None
            budget = _IN_PAGES.get((capability, itemsize, size, page), {})
            name = f"triton forward {of} sm_{capability}"
            found.append(_case(name, step.kernel, archs, {archs: {"LDG": 1}}, budget))
        step = plan.forward_plan(_in_pages(80, size, itemsize, page, 4), True, 132).step
        assert step is not None
        spills = dict.fromkeys(["80", "90a", "120a"], DECODE_BUDGET)
        spills |= _DECODE_IN_PAGES.get((itemsize, size, page), {})
        found.append(_case(f"triton decode {of}", step.kernel, "80 90a 120a", {"80 90a 120a": {"LDGSTS": 1}}, spills))
    return found


def _in_pages(capability: int, size: int, itemsize: int, page: int, queries: int) -> plan.PlanKey:
    """`_problem` of so many queries with 1024 keys in pages, and a range of keys."""
    problem = _problem(capability, size, itemsize, "plain")
    pool = plan.TensorSpec((300, 4, 1024, size), (4 * page * size, page * size, size, 1), True)
    ranges = plan.TensorSpec((2, 1, 1, 1, 2), (2, 0, 0, 0, 1), True)
    q = problem.q._replace(shape=(2, 4, queries, size))
    pages = plan.Pages(page, 1024 // page)
    params = problem.params._replace(band_offset=1024 - queries)
    return problem._replace(q=q, k=pool, v=pool, params=params, ranges=ranges, pages=pages)


def _decode_cases(size: int, itemsize: int) -> list[Case]:
    """decode_kernel with the most rows in a tile and with the fewest, and with everything that scores can have besides;
    and combine_kernel for few parts and many."""
    archs = "80 90a 120a"
    of = f"{'bf16' if itemsize == 2 else 'fp32'} d{size}"
    most = configs.decode(DECODE_MAX_ROWS, size, size, itemsize).block_m
    found: dict[str, Case] = {}
    spills = {archs: DECODE_BUDGET}
    kinds = ((most, "plain", 1024), (16, "plain", 2**17), *((most, f, 1024) for f in _DECODED))
    for rows, feature, keys in kinds:
        problem = _problem(80, size, itemsize, "mods" if feature == "mods" else "plain")
        shape = (2, 4, rows, size)
        bias = None
        if feature in ("tile", "mask", "bits"):
            entries = keys // 8 if feature == "bits" else keys
            bias = plan.Layout((1, 4, rows, entries), (0, rows * entries, entries, 1)).spec()
        k = dense(2, 4, keys, size)
        problem = problem._replace(
            q=problem.q._replace(shape=shape),
            k=k,
            v=k,
            bias=bias,
            bias_dtype=None if bias is None else _BIASES.get(feature, problem.dtype),
            params=problem.params._replace(band_offset=keys - rows),  # causal, aligned to the last key
            ranges=dense(1, 1, rows, 2) if feature == "ranges" else None,
        )
        forward = plan.forward_plan(problem, True, 132)
        assert forward.step is not None
        assert forward.combine is not None
        kernel, combine = forward.step.kernel, forward.combine.kernel
        constants, options = kernel.constants, kernel.options
        scores = constants["BLOCK_M"] * constants["BLOCK_N"] // options["num_warps"]
        hmma = (size + (constants["CHUNK"] or size)) * scores // 2048 * (1 if itemsize == 2 else 6)
        counts = {"HMMA": hmma, **({"LDGSTS": 1} if options["num_stages"] > 1 else {})}
        name = f"triton decode {of} {constants['BLOCK_M']} rows {feature}"
        own = _DECODE_RANGES.get((itemsize, size), {}) if feature == "ranges" else {}
        budgets = {arch: own.get(arch, DECODE_BUDGET) for arch in archs.split()}
        found.setdefault(name, _case(name, kernel, archs, {archs: counts}, budgets))
        name = f"triton combine {of} {combine.constants['SPLITS']} parts"
        found.setdefault(name, _case(name, combine, archs, {archs: {"LDG": 1}}, spills))
    return list(found.values())


_DECODED = ("tile", "mask", "mods", "ranges", "bits")
_BIASES = {"mask": torch.bool, "bits": torch.uint8}  # of a feature; otherwise the dtype of q


def _problem(capability: int, size: int, itemsize: int, feature: str) -> plan.PlanKey:
    """A problem of the kind that a row of the table is for; "tile": a bias shared by the batch, "mask" and "bits": a
    mask so shared, "ranges": two key ranges of each row."""

    dtype = torch.bfloat16 if itemsize == 2 else torch.float32
    x = dense(2, 4, 1024, size)
    bias = dense(1, 4, 1024, 128 if feature == "bits" else 1024) if feature in ("tile", *_BIASES) else None
    bias_dtype = _BIASES.get(feature, dtype) if bias else None
    ranges = dense(1, 1, 1024, 2) if feature == "ranges" else None
    params = AttentionParams(size**-0.5, 30.0 if feature == "mods" else 0.0, window_right=0)
    return plan.PlanKey(capability, dtype, x, x, x, bias, bias_dtype, 0, params, False, ranges)


def _step(problem: plan.PlanKey, kernel: str) -> plan.Step | None:
    """The launch of a kernel of the table for everything that it can be asked for."""
    if kernel == "forward":
        return plan.forward_plan(problem, True).step
    mask = GRAD_Q | GRAD_K | GRAD_V
    if kernel in ("dkdv", "dq"):
        out = dense(*problem.q.shape[:3], problem.v.shape[3])
        backward = plan.backward_plan(problem, out, out, False, mask)
        return backward.dkdv if kernel == "dkdv" else backward.dq
    tbias = None if problem.bias_dtype in _BIASES.values() else problem.bias
    tangents = plan.TangentSpecs(problem.q, problem.k, problem.v, tbias)
    first, second = plan.second_backward_plan(problem, tangents, problem.q, problem.q, False, mask)
    return {"tangent": first.step, "second_dkdv": second.dkdv, "second_dq": second.dq}[kernel]


def _case_of_row(row: Row, size: int) -> Case:
    problem = _problem(row.arch, size, row.itemsize, row.feature)
    step = _step(problem, row.kernel)
    assert step is not None
    common = row.itemsize == 2 and row.feature in ("plain", "ranges") and size <= 128
    if row.arch == 90:
        archs = "90a 100a" if common else "90a"
    elif row.arch == 86:
        archs = "86 120a"
    elif size in configs.TABLE.get(row._replace(arch=86), {}):
        archs = "80"
    else:  # sm_86's instructions are sm_80's
        archs = "80 86 120a" if common else "80 120a"
    config = configs.TABLE[row][size]
    dots = {"forward": 2, "dkdv": 4, "dq": 3, "tangent": 5, "second_dkdv": 8, "second_dq": 7}[row.kernel]
    chunk = step.kernel.constants.get("CHUNK", 0)
    if step.kernel.constants["TMA"]:
        rows = config.block_n if row.kernel.endswith("dkdv") else config.block_m
        products = {"HGMMA": dots * (size // 16)} if rows >= 64 and row.itemsize == 2 else {}
        require = {"90a": {"UTMALDG": 2, **products}}
    else:
        # Of one loop: m16n8k16 does 2048 multiplications of a warp's share; tf32 has m16n8k8, and three for a product.
        scores = config.block_m * config.block_n // config.num_warps
        columns = dots * size
        if chunk:
            products = {"forward": 1, "dkdv": 2, "dq": 2, "tangent": 3, "second_dkdv": 5, "second_dq": 5}[row.kernel]
            columns -= products * (size - chunk)
        hmma = columns * scores // 2048 * (1 if row.itemsize == 2 else 6)
        require = {archs: {"HMMA": hmma, **({"LDGSTS": 1} if config.num_stages > 1 else {})}}
    name = f"triton {row.kernel} {'bf16' if row.itemsize == 2 else 'fp32'} d{size} {row.feature} sm_{row.arch}"
    return _case(name, step.kernel, archs, require, BUDGETS.get((row, size), {}))


def _case(
    name: str,
    kernel: launch.Kernel,
    archs: str,
    require: Mapping[str, Mapping[str, int]],
    spills: Mapping[str, tuple[int, str]],
) -> Case:
    passed = {argument: kind for argument, kind in kernel.signature.items() if kind != "constexpr"}
    names = kernel.function.arg_names
    fixed = {names[path[0]] if len(path) == 1 else path: value for path, value in kernel.fixed.items()}
    types = dict(launch.leaves(tuple(kernel.signature.values())))
    aligned = tuple(path for path in kernel.divisors if not types[path].startswith("*"))
    source = Triton(kernel.function, passed, fixed, kernel.options, aligned)
    budgets = {x: Budget(*budget) for x, budget in spills.items()}
    again = bool(kernel.constants.get("UNATTENDED"))
    return Case(name, source, archs, require=require, spills=budgets, walks_again=again)
