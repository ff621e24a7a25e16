"""PTX text to instructions: the lexical structure of the PTX ISA (chapters 4, 5, 11), not the meaning.

`parse` returns a `Module`: its variables and its kernels. A `Kernel` holds its parameters' layout, its registers
(renamed apart where nested scopes reuse a name), and a list of `Instruction`s in which labels are resolved to indices.
"""

from __future__ import annotations

import dataclasses
import functools
import re
import struct
from dataclasses import dataclass, field

from .errors import PtxError

TYPE_BYTES = {"pred": 1, "b8": 1, "u8": 1, "s8": 1, "b16": 2, "u16": 2, "s16": 2, "f16": 2, "bf16": 2, "b32": 4}
TYPE_BYTES |= {"u32": 4, "s32": 4, "f32": 4, "tf32": 4, "f16x2": 4, "bf16x2": 4, "b64": 8, "u64": 8, "s64": 8, "f64": 8}
TYPE_BYTES |= {"f32x2": 8, "b128": 16}


@dataclass(frozen=True, slots=True)
class Reg:
    """A register: its place in the register file, and its declared type (pred, b32, f32, ...)."""

    index: int
    type: str
    name: str
    negated: bool = False  # !%p

    @property
    def bytes(self) -> int:
        return TYPE_BYTES[self.type]


@dataclass(frozen=True, slots=True)
class Imm:
    """A constant: int, or float with the text's exact bits (0f..., 0d...)."""

    value: int | float
    text: str


@dataclass(frozen=True, slots=True)
class Symbol:
    """A variable, a parameter or a function by name, plus a byte offset."""

    name: str
    offset: int = 0


@dataclass(frozen=True, slots=True)
class Special:
    """A special register such as %tid.x (PTX ISA chapter 10)."""

    name: str


@dataclass(frozen=True, slots=True)
class Label:
    """A branch target: the index of the instruction that it stands before."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class Vec:
    """{a, b, ...}"""

    items: tuple


@dataclass(frozen=True, slots=True)
class Mem:
    """[base + offset], or [base, {coordinates}] where `more` holds what follows the base."""

    base: object
    offset: int
    more: tuple = ()


@dataclass(frozen=True, slots=True)
class Pair:
    """a|b: two destinations."""

    first: object
    second: object


@dataclass(frozen=True, slots=True)
class Sink:
    """_: a destination nobody wants."""


@dataclass(slots=True)
class Instruction:
    opcode: str  # before the first dot
    modifiers: tuple[str, ...]  # the other parts, in order
    operands: tuple
    guard: Reg | None
    line: int  # of the PTX text, from 1
    text: str
    source: tuple[int, int] | None = None  # number in the module's `files`, and line, of the nearest .loc
    index: int = -1

    @property
    def name(self) -> str:
        return ".".join((self.opcode, *self.modifiers))


@dataclass(slots=True)
class Variable:
    name: str
    space: str  # shared, global, const, local, param
    bytes: int
    align: int
    init: bytes | None = None
    extern: bool = False
    offset: int = 0  # in its space; assigned by `_lay_out`
    line: int = 0


@dataclass(slots=True)
class Kernel:
    name: str
    params: list[Variable]
    module: Module
    instructions: list[Instruction] = field(default_factory=list)
    registers: list[Reg] = field(default_factory=list)
    variables: dict[str, Variable] = field(default_factory=dict)
    required_threads: tuple[int, ...] | None = None
    max_threads: tuple[int, ...] | None = None
    branch_targets: dict[str, list[str]] = field(default_factory=dict)

    @property
    def param_bytes(self) -> int:
        return max((p.offset + p.bytes for p in self.params), default=0)

    @property
    def local_bytes(self) -> int:
        return max((v.offset + v.bytes for v in self.variables.values() if v.space == "local"), default=0)

    @property
    def static_shared_bytes(self) -> int:
        everything = (*self.variables.values(), *self.module.variables.values())
        return max((v.offset + v.bytes for v in everything if v.space == "shared"), default=0)

    def opcodes(self) -> set[str]:
        return {instruction.opcode for instruction in self.instructions}


@dataclass(slots=True)
class Module:
    text: str
    target: str = ""
    version: str = ""
    variables: dict[str, Variable] = field(default_factory=dict)
    kernels: dict[str, Kernel] = field(default_factory=dict)
    files: dict[int, str] = field(default_factory=dict)

    def kernel(self, name: str | None = None) -> Kernel:
        """The kernel of that name (or the only one whose name contains it); the only one if name is None."""
        if name in self.kernels:
            return self.kernels[name]
        found = [k for k in self.kernels if name is None or name in k]
        if len(found) != 1:
            what = "has no kernel" if not found else f"has {len(found)} kernels"
            raise PtxError(f"the PTX module {what} named like {name!r}; it has: {', '.join(self.kernels) or 'none'}")
        return self.kernels[found[0]]


_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.S)
_SPACE = re.compile(r"\s*")
_BRACE = re.compile(r"[{}]")
_BRANCH_TARGETS = re.compile(r"\s*\.branchtargets\b")
_LABEL = re.compile(r"([A-Za-z_$%][\w$]*)\s*:(?!:)")
_LOC = re.compile(r"\.loc\s+(\d+)\s+(\d+)[^\n]*")
_LINE_DIRECTIVE = re.compile(r"\.(version|target|address_size|file)\b([^\n;]*);?")
# What isn't an instruction doesn't match: a label has one colon behind its name, all else begins with no small letter.
_INSTRUCTION = re.compile(
    r"\s*((?:@(!?)\s*([\w$%]+)\s+)?([a-z][\w.]*(?:::[\w.]*)*)(?![\w$%.:])(?!\s*:)\s*([^;]*));", re.S
)
_INTEGER = re.compile(r"-?(0[xX][0-9a-fA-F]+|0[bB][01]+|\d+)U?$")
_NAME = re.compile(r"[A-Za-z_$%.][\w$]*(\.[xyzw])?$")
_VARIABLE = re.compile(
    r"(?P<head>(?:\.\w+(?:\s+\d+)?\s+)*?)\.(?P<type>[bsuf]\d+)\s+(?P<name>[\w$%]+)\s*(?P<dims>(?:\[\s*\d*\s*\])*)"
    r"\s*(?:=\s*(?P<init>.*))?$",
    re.S,
)
_SPECIAL = {"tid", "ntid", "laneid", "warpid", "nwarpid", "ctaid", "nctaid", "smid", "nsmid", "gridid", "clock"}
_SPECIAL |= {"clock64", "clock_hi", "globaltimer", "globaltimer_lo", "globaltimer_hi", "lanemask_eq", "lanemask_le"}
_SPECIAL |= {"lanemask_lt", "lanemask_ge", "lanemask_gt", "dynamic_smem_size", "total_smem_size", "aggr_smem_size"}
_SPECIAL |= {"clusterid", "nclusterid", "cluster_ctaid", "cluster_nctaid", "cluster_ctarank", "cluster_nctarank"}
_SPECIAL |= {"is_explicit_cluster", "reserved_smem_offset_begin", "reserved_smem_offset_end"}


def parse(text: str, only: str | None = None) -> Module:
    """Reads one PTX module. `only`: the one kernel whose body is wanted (others cost nothing).

    Raises:
        PtxError: the text isn't PTX as this reader knows it; the message names the line.
    """
    if not isinstance(text, str) or ".version" not in text:
        raise PtxError("this is no PTX module: it has no .version directive")
    return _Parser(text, only).module


@functools.lru_cache(maxsize=16)
def _prepared(text: str) -> tuple[str, dict[int, int]]:
    """The text without comments, and where the functions end that `skip_body` has passed: kept, for a module of many
    kernels is read once for each."""
    # Comments go, their newlines stay, so that positions still count lines.
    if "/*" in text:
        text = _COMMENT.sub(lambda m: "\n" * m[0].count("\n") or " ", text)
    else:
        text = _COMMENT.sub(" ", text)
    return text, {}


class _Parser:
    def __init__(self, text: str, only: str | None):
        self.module, self.only = Module(text), only
        self.text, self.ends = _prepared(text)
        self.position = 0
        self.counted, self.lines = 0, 1  # a position, and the line that it is in
        self.read_module()

    def line(self, position: int | None = None) -> int:
        position = self.position if position is None else position
        if position < self.counted:
            return self.text.count("\n", 0, position) + 1
        self.lines += self.text.count("\n", self.counted, position)
        self.counted = position
        return self.lines

    def fail(self, message: str, position: int | None = None):
        raise PtxError(f"PTX line {self.line(position)}: {message}")

    def skip_space(self) -> bool:
        self.position = _SPACE.match(self.text, self.position).end()
        return self.position < len(self.text)

    def until(self, end: str) -> str:
        stop = self.text.find(end, self.position)
        if stop < 0:
            self.fail(f"no {end!r} ends this statement")
        chunk = self.text[self.position : stop]
        self.position = stop + len(end)
        return chunk

    def read_module(self):
        while self.skip_space():
            start = self.position
            if m := _LINE_DIRECTIVE.match(self.text, start):
                self.position = m.end()
                self.line_directive(m[1], m[2].strip())
            elif self.text.startswith(".section", start):
                self.until("}")
            elif re.match(r"(\.(visible|extern|weak)\s+)*\.(entry|func)\b", self.text[start : start + 80]):
                self.read_function()
            elif self.text.startswith("."):
                self.read_variable(self.until(";"), self.module.variables, start)
            else:
                chunk = self.until(";").strip()
                if chunk and not chunk.startswith("."):
                    self.fail(f"expected a directive, got {chunk[:40]!r}", start)
                self.read_variable(chunk, self.module.variables, start)
        _lay_out(self.module.variables.values())

    def line_directive(self, word: str, rest: str):
        if word == "version":
            self.module.version = rest
        elif word == "target":
            self.module.target = rest.split(",")[0].strip()
        elif word == "address_size" and rest != "64":
            self.fail(f"address_size {rest}: only 64 is supported")
        elif word == "file" and (m := re.match(r"(\d+)\s+\"([^\"]*)\"", rest)):
            self.module.files[int(m[1])] = m[2]

    def read_variable(self, chunk: str, into: dict[str, Variable], start: int) -> Variable | None:
        chunk = chunk.strip()
        if re.match(r"\.(pragma|alias|noreturn)\b", chunk):
            return None
        m = _VARIABLE.match(chunk)
        if not m:
            self.fail(f"can't read the declaration {chunk[:60]!r}", start)
        head = m["head"].split()
        space = next((h[1:] for h in head if h in (".shared", ".global", ".const", ".local", ".param")), "")
        if not space:
            self.fail(f"no state space in the declaration {chunk[:60]!r}", start)
        size = TYPE_BYTES[m["type"]]
        align = int(head[head.index(".align") + 1]) if ".align" in head else size
        dims = [int(d) if d.strip() else 0 for d in re.findall(r"\[([^\]]*)\]", m["dims"])]
        count = 1
        for d in dims:
            count *= d
        init = None
        if m["init"]:
            values = re.findall(r"[^\s,{}]+", m["init"])
            if not all(_INTEGER.match(v) or re.match(r"0[fFdD][0-9a-fA-F]+$", v) for v in values):
                self.fail(f"initialiser of {m['name']} isn't a list of numbers", start)
            bits = [int(v[2:], 16) if v[:2].lower() in ("0f", "0d") else int(v.rstrip("U"), 0) for v in values]
            init = b"".join((b & (1 << 8 * size) - 1).to_bytes(size, "little") for b in bits).ljust(count * size, b"\0")
        variable = Variable(m["name"], space, count * size, align, init, ".extern" in head, line=self.line(start))
        into[variable.name] = variable
        return variable

    def read_function(self):
        start = self.position
        head = self.until("(")
        words = head.split()
        name = words[-1]
        depth, p = 1, self.position
        while depth:
            if p == len(self.text):
                self.fail(f"no ')' ends the parameters of {name}", start)
            depth += {"(": 1, ")": -1}.get(self.text[p], 0)
            p += 1
        inside = self.text[self.position : p - 1]
        self.position = p
        stops = [q for q in (self.text.find("{", p), self.text.find(";", p)) if q >= 0]
        if not stops:
            self.fail(f"function {name} has no body", start)
        if ".entry" not in words:
            # A declaration of a function (vprintf, __assertfail) is harmless until something calls it.
            body = self.text.find("{", p)
            semicolon = self.text.find(";", p)
            if semicolon >= 0 and (body < 0 or semicolon < body):
                self.position = semicolon + 1
                return
            self.fail(f".func {name}: functions that aren't inlined are not supported", start)
        params: dict[str, Variable] = {}
        for chunk in inside.split(","):
            if chunk.strip():
                chunk = re.sub(r"\.ptr\b(\s+\.(global|shared|const|local|param))?(\s+\.align\s+\d+)?", "", chunk)
                self.read_variable(chunk, params, start)
        _lay_out(params.values())
        kernel = Kernel(name, list(params.values()), self.module)
        directives = self.text[p : min(stops)]
        for word, numbers in re.findall(r"\.(reqntid|maxntid)\s+([\d\s,]+)", directives):
            sizes = tuple(int(n) for n in numbers.split(","))
            if word == "reqntid":
                kernel.required_threads = sizes
            else:
                kernel.max_threads = sizes
        self.position = self.text.find("{", p) + 1
        if self.only in (None, name):
            _Body(self, kernel).read()
        else:
            self.skip_body()
        self.module.kernels[name] = kernel

    def skip_body(self):
        start = self.position
        if start not in self.ends:
            depth = 1
            for m in _BRACE.finditer(self.text, start):
                depth += 1 if m[0] == "{" else -1
                if not depth:
                    self.ends[start] = m.end()
                    break
            else:
                self.fail("no '}' ends this function")
        self.position = self.ends[start]


class _Scope:
    """The names between two braces: they hide the same names of `outer`."""

    def __init__(self, outer: _Scope | None = None):
        self.outer = outer
        self.registers: dict[str, Reg] = {}
        self.ranges: list[tuple[str, str, int]] = []  # %r<445>: prefix, type, count
        self.labels: dict[str, int] = {}
        self.operands: dict[str, object] = {}  # what the texts read before stand for

    def outwards(self):
        scope = self
        while scope is not None:
            yield scope
            scope = scope.outer


class _Body:
    """A kernel's statements."""

    def __init__(self, parser: _Parser, kernel: Kernel):
        self.parser, self.kernel = parser, kernel
        self.outermost = self.scope = _Scope()
        self.pending: list[tuple[Instruction, list[str], _Scope]] = []  # operands are read when all labels are known
        self.source: tuple[int, int] | None = None

    def read(self):
        parser, text = self.parser, self.parser.text
        while True:
            while m := _INSTRUCTION.match(text, parser.position):
                self.instruction(m)
                parser.position = m.end()
            if not parser.skip_space():
                break
            start = parser.position
            c = text[start]
            if c == "{":
                parser.position += 1
                self.scope = _Scope(self.scope)
            elif c == "}":
                parser.position += 1
                if self.scope is self.outermost:
                    break
                self.scope = self.scope.outer
            elif c == ";":
                parser.position += 1
            elif m := _LOC.match(text, start):
                parser.position = m.end()
                self.source = (int(m[1]), int(m[2]))
            elif m := _LABEL.match(text, start):
                parser.position = m.end()
                self.scope.labels[m[1]] = len(self.kernel.instructions)
                following = _BRANCH_TARGETS.match(text, parser.position)
                if following:
                    parser.position = following.end()
                    names = [n.strip() for n in parser.until(";").split(",")]
                    self.kernel.branch_targets[m[1]] = names
            else:
                self.statement(parser.until(";").strip(), start)
        module = self.parser.module.variables
        # A module's dynamic array starts after the arrays of the kernel, too.
        dynamic = {n: dataclasses.replace(v) for n, v in module.items() if v.space == "shared" and v.extern}
        self.kernel.variables |= dynamic
        _lay_out(self.kernel.variables.values(), [v for n, v in module.items() if n not in dynamic])
        for instruction, texts, scope in self.pending:
            known = scope.operands.get
            instruction.operands = tuple([known(t) or self.operand(t, scope, instruction.line) for t in texts])
        for name, targets in self.kernel.branch_targets.items():
            self.kernel.branch_targets[name] = [self.outermost.labels.get(t, -1) for t in targets]
        last = len(self.kernel.instructions)
        if not last or self.kernel.instructions[-1].opcode not in ("ret", "exit", "bra", "trap"):
            line = self.parser.line()
            self.kernel.instructions.append(Instruction("ret", (), (), None, line, "ret (end of kernel)", self.source))
        for index, instruction in enumerate(self.kernel.instructions):
            instruction.index = index

    def statement(self, chunk: str, start: int):
        parser = self.parser
        if chunk.startswith(".reg"):
            self.declare_registers(chunk, start)
            return
        if chunk.startswith("."):
            if re.match(r"\.(pragma|branchtargets|callprototype)\b", chunk):
                return
            variable = parser.read_variable(chunk, self.kernel.variables, start)
            if variable is not None and variable.space not in ("shared", "local", "param", "const", "global"):
                parser.fail(f"variable {variable.name} in state space .{variable.space}", start)
            return
        parser.fail(f"can't read the instruction {chunk[:60]!r}", start)

    def instruction(self, m: re.Match):
        chunk, negated, guard, name, operands = m.groups()
        line = self.parser.line(m.start(1))
        if guard:
            guard = self.register(guard, self.scope, line)
            guard = Reg(guard.index, guard.type, guard.name, negated == "!")
        opcode, modifiers = _name_parts(name)
        text = " ".join(chunk.split())
        instruction = Instruction(opcode, modifiers, (), guard, line, text, self.source)
        self.kernel.instructions.append(instruction)
        self.pending.append((instruction, _split(operands), self.scope))

    def declare_registers(self, chunk: str, start: int):
        m = re.match(r"\.reg\s*\.(\w+)\s+(.*)$", chunk, re.S)
        if not m or m[1] not in TYPE_BYTES:
            self.parser.fail(f"can't read the register declaration {chunk[:60]!r}", start)
        for name in (n.strip() for n in m[2].split(",")):
            if r := re.match(r"([\w$%]+)<(\d+)>$", name):
                self.scope.ranges.append((r[1], m[1], int(r[2])))
            else:
                self.scope.registers[name] = self.new_register(name, m[1])

    def new_register(self, name: str, kind: str) -> Reg:
        reg = Reg(len(self.kernel.registers), kind, name)
        self.kernel.registers.append(reg)
        return reg

    def find_register(self, name: str, innermost: _Scope) -> Reg | None:
        for scope in innermost.outwards():
            if name in scope.registers:
                return scope.registers[name]
            for prefix, kind, count in scope.ranges:
                if name.startswith(prefix):
                    number = name[len(prefix) :]
                    if number.isdigit() and int(number) < count:
                        scope.registers[name] = self.new_register(name, kind)
                        return scope.registers[name]
        return None

    def register(self, name: str, scope: _Scope, line: int) -> Reg:
        reg = self.find_register(name, scope)
        if reg is None:
            raise PtxError(f"PTX line {line}: register {name} was not declared")
        return reg

    def operand(self, text: str, scope: _Scope, line: int):
        operand = scope.operands.get(text)
        if operand is None:
            operand = scope.operands[text] = self.read_operand(text.strip(), scope, line)
        return operand

    def read_operand(self, text: str, scope: _Scope, line: int):
        if text == "_":
            return Sink()
        if text.startswith("{"):
            return Vec(tuple(self.operand(t, scope, line) for t in _split(text[1:-1])))
        if text.startswith("["):
            base, *more = (part.strip() for part in _split(text[1:-1]))
            offset = 0
            if m := re.match(r"(.+?)\s*\+\s*(-?\w+)$", base, re.S):
                base, offset = m[1], int(m[2].rstrip("U"), 0)
            elif m := re.match(r"([\w$%.]+)\s*(-\s*\d+)$", base):
                base, offset = m[1], int(m[2].replace(" ", ""))
            return Mem(
                self.operand(base, scope, line),
                offset,
                tuple(self.operand(t, scope, line) for t in more),
            )
        if "|" in text:
            first, second = (self.operand(t, scope, line) for t in text.split("|"))
            return Pair(first, second)
        if text.startswith("!"):
            reg = self.register(text[1:].strip(), scope, line)
            return Reg(reg.index, reg.type, reg.name, True)
        reg = self.find_register(text, scope)
        if reg is not None:
            return reg
        if _INTEGER.match(text):
            sign = -1 if text[0] == "-" else 1
            body = text.lstrip("-").rstrip("U")
            base = 8 if re.match(r"0\d+$", body) else 0
            return Imm(sign * int(body, base), text)
        if m := re.match(r"(-?)0([fFdD])([0-9a-fA-F]+)$", text):
            form = ("<I", "<f") if m[2] in "fF" else ("<Q", "<d")
            value = struct.unpack(form[1], struct.pack(form[0], int(m[3], 16)))[0]
            return Imm(-value if m[1] else value, text)
        if re.match(r"-?\d+\.\d*([eE][-+]?\d+)?$", text):
            return Imm(float(text), text)
        if text.startswith("%") and text[1:].split(".")[0] in _SPECIAL:
            return Special(text[1:])
        if text == "WARP_SZ":
            return Imm(32, text)
        for inner in scope.outwards():
            if text in inner.labels:
                return Label(inner.labels[text], text)
        if text in self.kernel.branch_targets:
            return Symbol(text)
        if m := re.match(r"([\w$%.]+)\s*\+\s*(-?\d+)$", text):
            return Symbol(m[1], int(m[2]))
        if _NAME.match(text):
            if text.startswith("%"):
                raise PtxError(f"PTX line {line}: {text} is neither a declared register nor a special one")
            return Symbol(text)
        raise PtxError(f"PTX line {line}: can't read the operand {text!r}")


@functools.cache
def _name_parts(name: str) -> tuple[str, tuple[str, ...]]:
    opcode, *modifiers = name.split(".")
    return opcode, tuple(modifiers)


def _split(text: str) -> list[str]:
    """At the commas that no bracket encloses."""
    if "{" not in text and "[" not in text and "(" not in text:
        parts = text.split(",")
        return parts if parts[-1].strip() else parts[:-1]
    parts, depth, start = [], 0, 0
    for i, c in enumerate(text):
        if c in "{[(":
            depth += 1
        elif c in ")]}":
            depth -= 1
        elif c == "," and not depth:
            parts.append(text[start:i])
            start = i + 1
    if text[start:].strip():
        parts.append(text[start:])
    return parts


def _lay_out(variables, before=()):
    """Offsets within each space, in order of declaration; a dynamic (extern, unsized) array starts after all others."""
    ends = {"shared": 0, "local": 0, "param": 0, "const": 0, "global": 0}
    for v in before:
        ends[v.space] = max(ends[v.space], v.offset + v.bytes)
    for v in sorted(variables, key=lambda v: v.extern):
        v.offset = -(-ends[v.space] // v.align) * v.align
        if not v.extern:
            ends[v.space] = v.offset + v.bytes
