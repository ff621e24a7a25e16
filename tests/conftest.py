"""Backends under test, seeds, poisoned memory, and the rule that a test is skipped only for want of a GPU."""

import ctypes
import dataclasses
import importlib
import math
import os
import random
import sys
import zlib

import pytest
import torch

import attnkern
from attnkern import rng, testing
from sequences import ends

pytest_plugins = ["tiers", "proofs"]
DRAW = os.environ.get("ATTNKERN_TEST_SEED") or "0"  # any other draws other numbers
DEVICES = ["cpu"] + (["cuda"] if torch.cuda.is_available() else [])


# Without a GPU torch.manual_seed notes the stack of every call, for devices that may be initialised later.
seed_torch = torch.manual_seed if torch.cuda.is_available() else torch.default_generator.manual_seed


@dataclasses.dataclass(frozen=True)
class Target:
    """One backend on one device, and the calls that tests make on it."""

    backend: str
    device: str

    def sdpa(self, *args, **kwargs):
        return attnkern.scaled_dot_product_attention(*args, **kwargs, backend=self.backend_for(*args, **kwargs))

    def attention(self, *args, **kwargs):
        return attnkern.attention(*args, **kwargs, backend=self.backend_for(*args, **kwargs))

    def varlen_attention(self, *args, **kwargs):
        return attnkern.varlen_attention(*args, **kwargs, backend=self.backend_for(*args, **kwargs))

    def backend_for(self, query, *_, **__):
        """No kernel of a GPU takes float64, rows without an element or head sizes above 512."""
        refused = self.device == "cuda" and (query.dtype == torch.float64 or not 0 < query.size(-1) <= 512)
        return "reference" if refused else self.backend

    def inputs(self, *args, **kwargs):
        return testing.make_inputs(*args, device=self.device, **kwargs)

    def random(self, *shapes, dtype=torch.float32, mask=None):
        """Inputs of these three shapes (or one for all); `mask` is a tensor."""
        shapes = shapes if len(shapes) == 3 else shapes * 3
        seed = int(torch.randint(2**31, ()))
        generator = torch.Generator().manual_seed(seed)
        tensors = [torch.randn(s, generator=generator, dtype=torch.float64).to(self.device, dtype) for s in shapes]
        return testing.Inputs(*tensors, mask, f"randn of {shapes}, {dtype}, torch.Generator().manual_seed({seed})")

    def randn(self, *shape, dtype=torch.float32, **kwargs):
        return torch.randn(*shape, dtype=dtype, device=self.device, **kwargs)

    def ends(self, lengths, dtype=torch.int32):
        """Of sequences one after the other, as cu_seqlens has them."""
        return ends(lengths, dtype, self.device)

    def check_call(self, call, dtype=None, **options):
        """A call of tests/matrix.py, with other inputs for every test."""
        check = self.check_dropout if call.dropout else self.check
        return check(call.inputs(self.device, dtype=dtype), **call.options, **options)

    def check(self, inputs, **options):
        return testing.check_attention(inputs, backend=self.backend_for(inputs.query, **options), **options)

    def kept(self, dropout_p, batch, heads, seqlen_q, seqlen_k):
        """What the next call with dropout keeps, as `rng.keep_mask` says."""
        seed = int(torch.randint(2**31, ()))
        seed_torch(seed)
        drawn = rng.draw_seed(torch.device(self.device))
        seed_torch(seed)
        return rng.keep_mask(drawn, dropout_p, batch, heads, seqlen_q, seqlen_k)

    def check_dropout(self, inputs, **options):
        """`check`, of what `kept` says."""
        *leading, seqlen_q, _ = inputs.query.shape
        sizes = math.prod(leading[:-1]), leading[-1] if leading else 1, seqlen_q, inputs.key.size(-2)
        keep = self.kept(options["dropout_p"], *sizes).view(*leading, *sizes[2:])
        return self.check(inputs, keep=keep, **options)

    def check_dropped_entries(self, head_dim, dtype, **more):
        """Bit for bit what `kept` says, in the forward and the backward pass."""
        inputs = self.inputs(2, 4, 70, 90, head_dim, 90, heads_k=2, dtype=dtype)
        inputs = dataclasses.replace(inputs, value=torch.eye(90, dtype=dtype).expand(2, 2, 90, 90))
        options = {"dropout_p": 0.3, "enable_gqa": True}
        keep = self.kept(0.3, 2, 4, 70, 90)
        assert torch.equal(self.sdpa(*inputs.tensors.values(), **options) != 0, keep)
        self.check_dropout(inputs, **options, **more)

    def check_hidden_keys(self, by, inputs, **options):
        """Infinities and NaN in keys that no query attends to, `by` a "bool mask" or "band", change no bit, and neither
        do numbers."""
        q, k, v = inputs.tensors.values()
        keys = torch.arange(k.size(-2))
        keep = keys.expand(1, 1, q.size(-2), -1) % 3 > 0
        hidden = ~keep[0, 0, 0] if by == "bool mask" else keys >= q.size(-2)
        options |= {"attn_mask": keep} if by == "bool mask" else {"is_causal": True}
        found = []
        for value in (1.0, torch.inf, -torch.inf, torch.nan):
            k[:, :, hidden] = value
            found.append(self.attention(q, k, v, **options, return_lse=True))
        for out, lse in found:
            assert out.isfinite().all()
            assert torch.equal(out, found[0][0])
            assert torch.equal(lse, found[0][1])

    def check_no_numbers(self, inputs, **options):
        """NaN in a query's row, NaN or infinity in a row of a float mask: its output, log-sum-exp and gradient of the
        query are NaN, those of other rows keep their bits. With dropout, whatever it keeps."""

        def results(given):
            seed_torch(7)
            leaf = given.query.detach().requires_grad_()
            tensors = {**given.tensors, "query": leaf}
            found = self.attention(**tensors, **options, return_lse=True)
            return *found, *torch.autograd.grad(found, leaf, [torch.ones_like(x) for x in found])

        at = (inputs.query.size(0) - 1, inputs.query.size(1) - 1, inputs.query.size(2) // 2)
        places = [("query", math.nan, (*at, 0))]
        if inputs.attn_mask is not None:
            places += [("attn_mask", value, (*at, inputs.key.size(2) // 2)) for value in (math.nan, math.inf)]
        clean = results(inputs)
        for name, value, entry in places:
            changed = getattr(inputs, name).clone()
            changed[entry] = value
            for got, want in zip(results(dataclasses.replace(inputs, **{name: changed})), clean, strict=True):
                assert got[at].isnan().all(), (name, value)
                others = torch.ones(got.shape[:3], dtype=torch.bool)
                others[at] = False
                assert torch.equal(got[others], want[others]), (name, value)


# A backend is added to every test by being available in attnkern.backends().
TARGETS = [
    Target(info.name, device)
    for device in DEVICES
    for info in attnkern.backends()
    if info.available and {device, "any"} & set(info.device_types)
]


def name_of(target):
    return target.backend if target.device == "cpu" else f"{target.backend}-{target.device}"


@pytest.fixture(params=TARGETS, ids=name_of)
def target(request):
    return request.param


@pytest.fixture(params=[t for t in TARGETS if t.backend != "reference"], ids=name_of)
def kernel_target(request):
    """Backends behind the operators; the reference is plain torch and has none."""
    return request.param


@pytest.fixture(params=[torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=lambda d: str(d)[6:])
def dtype(request):
    return request.param


def pytest_configure(config):
    config.addinivalue_line("markers", "contract(*items): the items of the contract with F.sdpa that the test shows")
    config.addinivalue_line("markers", "prove: what .ci/run leaves to make prove, but for a part of it at a time")
    config.addinivalue_line("markers", "landing: a GPU proof of which .ci/run has all cases, however long they take")
    config.addinivalue_line("markers", "threads: runs with torch's default number of threads")
    config.addinivalue_line("markers", "real_memory: memory is neither poisoned nor kept (huge allocations, timings)")


def pytest_collection_modifyitems(items):
    for item in items:
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a GPU"))


@pytest.fixture
def set_precision():
    """Sets what torch allows float32 products on a GPU, "tf32" or "ieee"."""
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    yield lambda value: setattr(matmul, "fp32_precision", value)
    matmul.fp32_precision = before


@pytest.fixture(scope="session", autouse=True)
def kept_compilations():
    """Sources of simulated kernels are compiled by the product's flags, once for each content."""
    if "ptxsim" not in sys.modules:
        return
    import ptxsim
    from gate import compilers
    from gate.binary import GateError

    def compiled(source, arch, flags):
        try:
            return compilers.ptx(str(source), arch, flags)[0]
        except GateError as error:
            raise ptxsim.LaunchError(str(error)) from error

    ptxsim.use_compiler(compiled)


@pytest.fixture
def surprise():
    """surprise(share, p, n): of all draws at most 2 exp(-surprise) have a share of n events as far from their chance p.

    Chernoff's bound, which holds for every n and p: n times the relative entropy of the two.
    """

    def bound(share, p, n):
        share, p = torch.as_tensor(share, dtype=torch.float64), torch.as_tensor(p, dtype=torch.float64)
        parts = (torch.xlogy(x, x) - torch.xlogy(x, y) for x, y in ((share, p), (1 - share, 1 - p)))
        return n * sum(parts)

    return bound


class _Torch:
    """torch's generator, for hypothesis to seed: an example draws the same numbers when it comes again."""

    seed, getstate, setstate = map(staticmethod, (seed_torch, torch.get_rng_state, torch.set_rng_state))


TORCH = _Torch()
BACKENDS = importlib.import_module("attnkern.backends").TABLE  # attnkern.backends is a function


@pytest.fixture(autouse=True)
def fresh_seed(request):
    """The test's own seed, made of its name and of DRAW: it draws the same numbers in every run, alone or with others.

    So a test cannot pass here and fail there by chance. With another DRAW, or where a machine rounds otherwise:
    - a test that counts random events, or that needs a draw without a tie, says in its docstring how likely right code
      fails it: below 1e-9;
    - a test that compares by a tolerance cannot say so, because rounding errors have no known distribution. It leaves
      room: what a comparison uses of its allowance stays below 0.9 over ten DRAWs, or the test is mended.
    """
    seed = zlib.crc32(f"{DRAW} {request.node.nodeid}".encode())
    seed_torch(seed)
    random.seed(seed)
    if getattr(request.node.obj, "is_hypothesis_test", False):
        import hypothesis

        hypothesis.register_random(TORCH)
        hypothesis.seed(seed)(request.node.obj)  # and no database of examples
    return seed


def _keep_freed(on):
    """glibc's malloc gives nothing back to the system: fresh pages are a sixth of the time of the references' tensors.
    Else its defaults, and nothing is kept."""
    libc = ctypes.CDLL(None)
    if sys.platform == "linux" and hasattr(libc, "mallopt"):
        libc.mallopt(-3, 2**25 if on else 2**17)  # M_MMAP_THRESHOLD
        libc.mallopt(-1, 2**30 if on else 2**17)  # M_TRIM_THRESHOLD
        if not on:
            libc.malloc_trim(0)


@pytest.fixture(autouse=True)
def surroundings(request):
    """One thread (the machine may run several tests at once) and fresh memory full of NaN. A test that leaves the
    table of backends changed fails: others after it would go wrong."""
    threads, rows = torch.get_num_threads(), dict(BACKENDS)
    if not request.node.get_closest_marker("threads"):
        torch.set_num_threads(1)
    real = request.node.get_closest_marker("real_memory")
    _keep_freed(not real)
    if real:
        yield
    else:
        with testing.poisoned_memory():
            yield
    torch.set_num_threads(threads)
    assert rows == BACKENDS


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if report.failed:
        simulated = call.excinfo is not None and call.excinfo.type.__module__.startswith("ptxsim")
        lines = "ATTNKERN_LINES=1 " if simulated else ""  # says where in the CUDA source
        report.sections.append(("repeat", f"{lines}ATTNKERN_TEST_SEED={DRAW} python -m pytest '{item.nodeid}'"))
    if report.skipped and not hasattr(report, "wasxfail") and "needs a GPU" not in str(report.longrepr):
        report.outcome = "failed"
        report.longrepr = f"skipped for another reason than a missing GPU: {report.longrepr}"
    return report


TABLES = {
    "feature": "torch's features: eager, aot_eager, inductor",  # tests/test_features.py
    "triton": "the Triton kernels in the simulator, forward and all gradients",  # tests/test_gpu_calls.py
    "cuda": "the CUDA C++ kernels in the simulator",  # tests/test_gpu_calls.py
}


def pytest_terminal_summary(terminalreporter):
    """The rows that tests found, as tables."""
    passed = [report for report in terminalreporter.stats.get("passed", []) if report.when == "call"]
    for table, title in TABLES.items():
        rows = [value for report in passed for name, value in report.user_properties if name == table]
        if rows:
            terminalreporter.section(title)
            for row in _grouped(rows):
                terminalreporter.write_line(row)


def _grouped(rows):
    """Rows that are pairs, a name and what it ran with, as one line for each name."""
    found = {}
    for row in rows:
        name, column = (row, None) if isinstance(row, str) else row
        found.setdefault(name, []).append(column)
    for name, columns in found.items():
        told = ", ".join(dict.fromkeys(c for c in columns if c is not None))
        yield f"{name}: {told}" if told else name
