"""A kernel as compiled: what ptxas says of it, and its instructions as the disassembler lists them."""

from __future__ import annotations

import base64
import functools
import math
import re
import subprocess
import zlib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any


class GateError(Exception):
    """What keeps the gate from a verdict, in one sentence: a tool that is missing, a source that doesn't compile."""


@dataclass
class Kernel:
    """One entry function of one binary.

    Memory is in bytes and, but for shared, per thread; threads are the launch bounds, 0 without any; notes are
    ptxas' lines on the kernel beside the figures; sass counts the instructions by full name ("HMMA.16816.F32.BF16");
    packed is the whole listing (`unpack`), for sass.py.
    """

    name: str
    registers: int
    stack: int
    spill_stores: int
    spill_loads: int
    static_shared: int
    dynamic_shared: int
    threads: int
    notes: list[str]
    sass: dict[str, int]
    packed: str = ""

    def count(self, opcode: str) -> int:
        return sum(n for name, n in self.sass.items() if name == opcode or name.startswith(f"{opcode}."))


@functools.cache
def disassembler() -> tuple[str, str]:
    """cuobjdump of the pip package (nvdisasm, which it calls, lies beside it), and both versions."""
    wheels = ["nvidia-cuda-cuobjdump", "nvidia-cuda-nvdisasm"]
    try:
        found = [distribution(name) for name in wheels]
    except PackageNotFoundError as error:
        raise GateError(f"the compile gate needs the disassemblers: pip install {' '.join(wheels)}.") from error
    path = next(file for file in found[0].files or () if file.name == "cuobjdump")
    return str(found[0].locate_file(path)), " ".join(one.version for one in found)


def run(*command: str | Path, cwd: str | Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(list(map(str, command)), cwd=cwd, capture_output=True, text=True)


def first_error(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return next((line for line in lines if re.search(r"error|fatal", line)), lines[0] if lines else "no message")


def dump(option: str, cubin: str | Path) -> dict[str, str]:
    """A listing of cuobjdump, cut into its functions."""
    done = run(disassembler()[0], option, cubin)
    if done.returncode:
        raise GateError(f"cuobjdump {option} failed: {first_error(done.stderr + done.stdout)}")
    header = {"-sass": r"^\s*Function : (\S+)", "-elf": r"^\.nv\.info\.(\S+)"}[option]
    parts = re.split(header, done.stdout, flags=re.M)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def parse_log(log: str) -> dict[str, dict[str, Any]]:
    """What ``ptxas -v`` printed on each entry function, as fields of `Kernel`.

    A function that isn't inlined has stack and spills of its own, and the log doesn't say who calls it: they count
    for every kernel of the log. So do notes that name no kernel.
    """
    memory = ("stack", "spill_stores", "spill_loads")
    kernels: dict[str, dict[str, Any]] = {}
    functions: dict[str, dict[str, int]] = {}
    notes: dict[str, None] = {}
    kernel: dict[str, Any] = {}
    function = ""
    for line in log.splitlines():
        if match := re.search(r"Compiling entry function '(\S+)' for", line):
            kernel = kernels[match[1]] = {"static_shared": 0}
        elif match := re.search(r"Function properties for (\S+)", line):
            function = match[1]
        elif match := re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", line):
            functions[function] = dict(zip(memory, map(int, match.groups()), strict=True))
        elif match := re.search(r"Used (\d+) registers", line):
            kernel["registers"] = int(match[1])
            if match := re.search(r"(\d+) bytes smem", line):
                kernel["static_shared"] = int(match[1])
        elif re.search(r"ptxas warning|\(C\d+\)", line):
            notes[re.sub(r"^ptxas\s+(info|warning)\s*:\s*", "", line.strip())] = None
    for name, kernel in kernels.items():
        others = [called for function, called in functions.items() if function not in kernels]
        for what in memory:
            kernel[what] = sum(of[what] for of in [functions.get(name, {what: 0}), *others])
        kernel["notes"] = [note for note in notes if name in note.split("'") or not set(note.split("'")) & set(kernels)]
    return kernels


def instructions(listing: str) -> dict[str, int]:
    """Of a function's SASS, where a line holds the address, a predicate if there is one, and the instruction."""
    return dict(Counter(re.findall(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?\w+\s+)?([A-Z][\w.]*)", listing)))


def jump_tables(info: str) -> dict[int, str]:
    """Where the jump at an address may go by its table, from a function's .nv.info: "0x8f60 0x8690"."""
    pattern = r"Offset of Indirect Branch: (0x[0-9a-f]+)\s+Number of targets: \d+\s+Targets:((?:\s+0x[0-9a-f]+)+)"
    return {int(at, 16): " ".join(targets.split()) for at, targets in re.findall(pattern, info)}


def pack(listing: str, tables: Mapping[int, str]) -> str:
    """A function's SASS without the encodings, compressed: text that fits in a cache of JSON. A jump by a table ends
    with where it may go: "BRX R124 -0x73d0 -> 0x8f60 0x8690 ;"."""
    lines = []
    for line, at in re.findall(r"(/\*([0-9a-f]{4,})\*/[^;]*;)", listing):
        targets = tables.get(int(at, 16))
        lines.append(line if targets is None else f"{line[:-1]} -> {targets} ;")
    return base64.b64encode(zlib.compress("\n".join(" ".join(line.split()) for line in lines).encode())).decode()


def unpack(packed: str) -> str:
    """What `pack` packed."""
    return zlib.decompress(base64.b64decode(packed)).decode()


def launch_bounds(info: str) -> int:
    """Threads of a block, from a function's .nv.info; 0 where the source bounds nothing."""
    pattern = r"EIATTR_(?:MAX_THREADS|REQNTID)\s+Format:\s+\S+\s+Value:\s+([0-9a-fx ]+)"
    bounds = re.search(pattern, info)
    return math.prod(int(size, 16) for size in bounds[1].split()) if bounds else 0


def read(cubin: str | Path, log: str, dynamic_shared: int = 0) -> list[Kernel]:
    """Every kernel of a binary. log is what ptxas printed on it with -v."""
    sass, info = dump("-sass", cubin), dump("-elf", cubin)
    kernels = []
    for name, said in parse_log(log).items():
        if "registers" not in said or name not in sass:
            raise GateError(f"{name}: ptxas' report or the SASS lacks it; ptxas said: {first_error(log)}")
        threads = launch_bounds(info.get(name, ""))
        counts, packed = instructions(sass[name]), pack(sass[name], jump_tables(info.get(name, "")))
        kernels.append(
            Kernel(name=name, dynamic_shared=dynamic_shared, threads=threads, sass=counts, packed=packed, **said)
        )
    return kernels
