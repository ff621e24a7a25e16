"""From an `Instruction` to a function of the machine.

A family registers a decoder per opcode:

    @instruction("add")
    def add(d: Decoder) -> Step:
        d.flag("ftz"); dtype = d.type(); a, b = d.get(1, dtype), d.get(2, dtype); put = d.put(0)
        return lambda m: put(m, a(m) + b(m))

A decoder runs once per instruction of a program, reads modifiers by `flag`, `choice` and `type` (whatever it leaves
unread stops the decoding: an unknown modifier is never ignored), and returns a `Step`. A step works on all lanes of
the machine: sources are arrays of `m.n` elements (or numpy scalars), `put` writes them under the machine's mask.

A step of a plain instruction returns None. One registered with `control=True` may move threads itself: it returns the
index of the next instruction, or `STOP` when no thread of the group goes on now.
"""

from __future__ import annotations

import struct
from collections.abc import Callable

import numpy as np

from .errors import UnsupportedInstruction
from .ptx import Imm, Instruction, Kernel, Label, Mem, Reg, Sink, Special, Symbol, Vec

STOP = -1
Step = Callable  # (machine) -> None | int
Source = Callable  # (machine) -> array of m.n elements, or a numpy scalar

DTYPES = {"pred": np.dtype(bool), "b8": np.dtype("u1"), "u8": np.dtype("u1"), "s8": np.dtype("i1")}
DTYPES |= {"b16": np.dtype("u2"), "u16": np.dtype("u2"), "s16": np.dtype("i2"), "f16": np.dtype("f2")}
DTYPES |= {"bf16": np.dtype("u2"), "b32": np.dtype("u4"), "u32": np.dtype("u4"), "s32": np.dtype("i4")}
DTYPES |= {"f32": np.dtype("f4"), "tf32": np.dtype("u4"), "f16x2": np.dtype("u4"), "bf16x2": np.dtype("u4")}
DTYPES |= {"b64": np.dtype("u8"), "u64": np.dtype("u8"), "s64": np.dtype("i8"), "f64": np.dtype("f8")}
DTYPES |= {"f32x2": np.dtype("u8"), "u16x2": np.dtype("u4"), "s16x2": np.dtype("u4")}
UINT = {1: np.dtype("u1"), 2: np.dtype("u2"), 4: np.dtype("u4"), 8: np.dtype("u8")}

# opcode -> (decoder, control)
DECODERS: dict[str, tuple[Callable, bool]] = {}


def instruction(*opcodes: str, control: bool = False):
    """Registers the decoder of these opcodes (the name up to the first dot)."""

    def register(decoder):
        for opcode in opcodes:
            if opcode in DECODERS:
                raise AssertionError(f"opcode {opcode} is registered twice")
            DECODERS[opcode] = (decoder, control)
        return decoder

    return register


class Decoder:
    """One instruction being decoded: its operands and modifiers, as functions of the machine."""

    def __init__(self, kernel: Kernel, target: int, ins: Instruction):
        self.kernel, self.target, self.ins = kernel, target, ins
        self.left = list(ins.modifiers)
        self.next = ins.index + 1

    # -- modifiers

    def fail(self, message: str):
        raise UnsupportedInstruction(f"PTX line {self.ins.line}: {self.ins.name}: {message}  [{self.ins.text}]")

    def flag(self, name: str) -> bool:
        """Whether the modifier is there; it counts as read."""
        if name in self.left:
            self.left.remove(name)
            return True
        return False

    def choice(self, *names: str, default: str | None = None) -> str | None:
        """The first modifier that is one of these, or the default."""
        for name in self.left:
            if name in names:
                self.left.remove(name)
                return name
        return default

    def type(self, *allowed: str) -> str:
        """The first type among the modifiers (one of `allowed`, if any is given)."""
        for name in self.left:
            if name in DTYPES:
                if allowed and name not in allowed:
                    self.fail(f"type .{name} is not supported here (only {', '.join('.' + a for a in allowed)})")
                self.left.remove(name)
                return name
        self.fail("no type among the modifiers")

    def done(self):
        if self.left:
            self.fail("unknown modifier " + ", ".join("." + name for name in self.left))

    # -- operands

    def operand(self, which):
        if isinstance(which, int):
            if which >= len(self.ins.operands):
                self.fail(f"operand {which} is missing")
            return self.ins.operands[which]
        return which

    def has(self, index: int) -> bool:
        return index < len(self.ins.operands)

    def constant(self, which) -> int:
        operand = self.operand(which)
        if not isinstance(operand, Imm) or isinstance(operand.value, float):
            self.fail(f"operand {which} must be an integer constant")
        return operand.value

    def get(self, which, kind: str | np.dtype) -> Source:
        """A source operand as arrays of this PTX type (or numpy dtype); registers are reinterpreted, not converted."""
        operand = self.operand(which)
        dtype = DTYPES[kind] if isinstance(kind, str) else np.dtype(kind)
        if isinstance(operand, Reg):
            index = operand.index
            if operand.type == "pred":
                if dtype.kind != "b":
                    self.fail(f"predicate {operand.name} used as .{kind}")
                if operand.negated:
                    return lambda m: ~m.regs[index]
                return lambda m: m.regs[index]
            if operand.bytes != dtype.itemsize:
                return self._resized(operand, dtype)

            def read(m):
                array = m.regs[index]
                return array if array.dtype is dtype else array.view(dtype)

            return read
        if isinstance(operand, Imm):
            value = self.immediate(operand, dtype)
            return lambda m: value
        if isinstance(operand, Special):
            name = operand.name
            return lambda m: m.special(name).astype(dtype)
        if isinstance(operand, Symbol):
            symbol = operand
            return lambda m: dtype.type(m.address_of(symbol))
        return self.fail(f"can't read operand {operand}")

    def _resized(self, operand: Reg, dtype: np.dtype) -> Source:
        # A wider register may be the source of a narrower type (PTX ISA 9.4.1): its low bits. Not the reverse.
        if operand.bytes < dtype.itemsize:
            self.fail(f"register {operand.name} (.{operand.type}) is too narrow for a {dtype.itemsize}-byte operand")
        index, wide, narrow = operand.index, UINT[operand.bytes], UINT[dtype.itemsize]
        return lambda m: m.regs[index].view(wide).astype(narrow).view(dtype)

    def immediate(self, operand: Imm, dtype: np.dtype):
        value = operand.value
        if dtype.kind == "b":
            return np.bool_(value != 0)
        if dtype.kind == "f":
            if isinstance(value, float) or not operand.text.lstrip("-").lower().startswith("0x"):
                return dtype.type(value)
            return np.array(value, UINT[dtype.itemsize]).view(dtype)[()]
        if isinstance(value, float):
            form = "<d" if dtype.itemsize == 8 else "<f"
            value = int.from_bytes(struct.pack(form, value), "little")
        return np.array(value & (1 << 8 * dtype.itemsize) - 1, UINT[dtype.itemsize]).view(dtype)[()]

    def put(self, which) -> Callable:
        """A destination: put(m, value) writes arrays (or numpy scalars) of the register's width under the mask."""
        operand = self.operand(which)
        if isinstance(operand, Sink):
            return lambda m, value: None
        if not isinstance(operand, Reg):
            self.fail(f"can't write to operand {operand}")
        index = operand.index
        return lambda m, value: m.put(index, value)

    def put_lanes(self, which) -> Callable:
        """A destination of memory instructions: put(m, values) with one value per active lane, in the order of
        `m.lanes`; narrower values than the register are extended (sign by the values' dtype)."""
        operand = self.operand(which)
        if isinstance(operand, Sink):
            return lambda m, value: None
        if not isinstance(operand, Reg):
            self.fail(f"can't write to operand {operand}")
        index, size, unsigned = operand.index, operand.bytes, UINT[operand.bytes]

        def put(m, values):
            if values.dtype.itemsize < size:
                signed = values.dtype.kind == "i"
                values = values.astype(np.dtype(f"i{size}") if signed else unsigned)
            m.put_lanes(index, values)

        return put

    def items(self, which) -> tuple:
        """A vector operand's parts; a scalar operand is a vector of one."""
        operand = self.operand(which)
        return operand.items if isinstance(operand, Vec) else (operand,)

    def address(self, which) -> Source:
        """The address of a [memory operand]: uint64 arrays of m.n elements."""
        operand = self.operand(which)
        if not isinstance(operand, Mem):
            self.fail(f"operand {operand} is no memory operand")
        base, offset = operand.base, operand.offset
        if isinstance(base, Imm):
            value = np.uint64((base.value + offset) & (1 << 64) - 1)
            return lambda m: m.broadcast(value)
        if isinstance(base, Symbol):
            return lambda m: m.broadcast(np.uint64(m.address_of(base) + offset))
        if not isinstance(base, Reg):
            self.fail(f"can't address by {base}")
        index, width = base.index, UINT[base.bytes]
        wrap = np.uint64(offset & (1 << 64) - 1)
        mask = np.uint64(0xFFFFFFFF)

        def read(m):
            array = m.regs[index]
            address = (array if array.dtype is width else array.view(width)).astype(np.uint64)
            if offset:
                address = address + wrap
                if width.itemsize == 4:
                    address &= mask
            return address

        return read

    def label(self, which) -> int:
        operand = self.operand(which)
        if not isinstance(operand, Label):
            self.fail(f"branch target {operand} is no label of this kernel")
        return operand.index


class Program:
    """A decoded kernel: one step per instruction. Made once, run by any number of machines."""

    def __init__(self, kernel: Kernel, target: int):
        from . import families

        self.kernel, self.target = kernel, target
        self.steps = []
        self.control = []
        self.explain: dict[int, Callable] = {}  # words on what threads parked there wait for
        self.deliver: dict[int, Callable] = {}  # what bar.red does for those it releases
        self.notes: dict[str, object] = {}  # what a family works out once for all machines
        wrappers = families.wrappers(kernel, target)
        for ins in kernel.instructions:
            if ins.opcode not in DECODERS:
                raise UnsupportedInstruction(f"PTX line {ins.line}: unknown instruction {ins.name}  [{ins.text}]")
            decoder, control = DECODERS[ins.opcode]
            d = Decoder(kernel, target, ins)
            step = decoder(d)
            d.done()
            if hasattr(step, "explain"):
                self.explain[ins.index] = step.explain
            if hasattr(step, "deliver"):
                self.deliver[ins.index] = step.deliver
            for wrap in wrappers:
                step = wrap(d, step)
            if ins.guard is not None and ins.opcode != "bra":
                step = _guarded_control(ins, step) if control else _guarded(ins, step)
            self.steps.append(step)
            self.control.append(control)


def _guarded(ins: Instruction, step: Step) -> Step:
    index, negated = ins.guard.index, ins.guard.negated

    def run(m):
        predicate = m.regs[index]
        mask = m.mask & ~predicate if negated else m.mask & predicate
        if not np.count_nonzero(mask):
            return
        outer = m.enter(mask)
        step(m)
        m.leave(outer)

    return run


def _guarded_control(ins: Instruction, step: Step) -> Step:
    index, negated, following = ins.guard.index, ins.guard.negated, ins.index + 1

    def run(m):
        predicate = m.regs[index]
        mask = m.mask & ~predicate if negated else m.mask & predicate
        if not np.count_nonzero(mask):
            return following
        rest = m.mask & ~mask
        if np.count_nonzero(rest):
            m.resume(rest, following)
            m.enter(mask)
        following_or_none = step(m)
        return following if following_or_none is None else following_or_none

    return run
