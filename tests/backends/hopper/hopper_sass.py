"""Reading machine code of sm_90a: loops, spills in them, and registers that a product in flight still owns.

ptxas before CUDA 13.3 may reuse the register operand of an asynchronous ``wgmma`` before it has been read (triton
pull request 11781, issue 9433). The code is walked in address order and every loop twice: a hit is a place to look at,
and a clean pass good evidence, not proof.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

_LINE = re.compile(r"/\*([0-9a-f]{4,6})\*/\s+([^;/]*?)\s*;")
_BACK = re.compile(r"BRA\S*.*?(0x[0-9a-f]+)")
_GUARD = re.compile(r"^@!?U?P[T\d]+\s+")
_NO_RESULT = {
    "BRA", "BAR", "SYNCS", "EXIT", "NOP", "WARPGROUP", "STG", "STS", "ST", "STL", "RED", "BSYNC", "BSSY", "UTMALDG",
    "WARPSYNC", "FENCE", "MEMBAR", "CALL", "RET", "STSM",
}  # fmt: skip
PRODUCTS = ("HGMMA", "QGMMA", "IGMMA")


@dataclass(frozen=True)
class Instruction:
    """One line: its address, the operation without its guard, the operands."""

    address: int
    operation: str
    operands: tuple[str, ...]
    text: str

    @property
    def name(self) -> str:
        return self.operation.split(".")[0]


@dataclass(frozen=True)
class Loop:
    """From the target of a backward branch to the branch."""

    body: tuple[Instruction, ...]

    def count(self, *names: str) -> int:
        """Instructions of these names."""
        return sum(i.name in names for i in self.body)


@dataclass
class _Group:
    """Products that are waited for together: registers they read, registers they write."""

    reads: set[int] = field(default_factory=set)
    writes: set[int] = field(default_factory=set)


def parse(sass: str) -> list[Instruction]:
    """The instructions of a disassembly by ``cuobjdump -sass``."""
    found = []
    for match in _LINE.finditer(sass):
        text = _GUARD.sub("", match[2].strip())
        operation, _, rest = text.partition(" ")
        operands = tuple(x.strip() for x in rest.split(",")) if rest else ()
        found.append(Instruction(int(match[1], 16), operation, operands, match[2].strip()))
    return found


def loops(code: list[Instruction], longest: int = 2500) -> list[Loop]:
    """Innermost first; a loop that holds another is listed too, up to a length."""
    found = []
    for at, i in enumerate(code):
        match = _BACK.search(i.text) if i.name == "BRA" else None
        if match and int(match[1], 16) < i.address:
            target = int(match[1], 16)
            start = next(k for k, j in enumerate(code) if j.address >= target)
            if at - start < longest:
                found.append(Loop(tuple(code[start : at + 1])))
    return sorted(found, key=lambda loop: len(loop.body))


def innermost(found: list[Loop]) -> list[Loop]:
    """Those that hold no other of them."""
    ends = [(loop.body[0].address, loop.body[-1].address) for loop in found]
    return [
        loop
        for loop, (first, last) in zip(found, ends, strict=True)
        if not any(first <= a and b <= last and (a, b) != (first, last) for a, b in ends)
    ]


def step_loops(code: list[Instruction], products: int) -> list[Loop]:
    """Loops over key tiles: those with as many products as one step has, the shortest first.

    Waits are put behind the code and branch back into it, so other spans look like loops too.
    """
    return innermost([loop for loop in loops(code) if loop.count(*PRODUCTS) == products])


def copy_loops(code: list[Instruction]) -> list[Loop]:
    """Loops that start copies and compute nothing."""
    return innermost([loop for loop in loops(code) if loop.count("UTMALDG") and not loop.count(*PRODUCTS)])


def hazards(code: list[Instruction]) -> list[str]:
    """Reads and writes of registers that a product in flight owns, in every loop with products."""
    found: list[str] = []
    for loop in loops(code, 1500):
        if loop.count(*PRODUCTS):
            _walk([*loop.body, *loop.body], found)
    return sorted(set(found))


def _walk(code: list[Instruction], found: list[str]) -> None:
    flying: list[_Group] = []
    current = _Group()
    for i in code:
        if i.name in PRODUCTS:
            shape = re.search(r"\.(\d+)x(\d+)x\d+", i.operation)
            assert shape, i.text
            width = int(shape[2]) // 2
            result = _register(i.operands[0])
            assert result is not None, i.text
            current.writes |= set(range(result, result + width))
            weights = _register(i.operands[1])
            if weights is not None:
                current.reads |= set(range(weights, weights + 4))
            if "gsb0" in i.text:
                flying.append(current)
                current = _Group()
        elif i.operation.startswith("WARPGROUP.DEPBAR"):
            keep = int(i.operands[-1], 16)
            flying = flying[len(flying) - keep :] if keep else []
        else:
            _check(i, [*flying, current], found)


def _check(i: Instruction, groups: list[_Group], found: list[str]) -> None:
    reads = set().union(*(g.reads for g in groups))
    writes = set().union(*(g.writes for g in groups))
    if not reads and not writes:
        return
    sources = i.operands
    if i.name not in _NO_RESULT and i.operands:
        first = _register(i.operands[0])
        wide = 4 if ".128" in i.operation else 2 if ".64" in i.operation or "WIDE" in i.operation else 1
        if first is not None:
            for register in range(first, first + wide):
                if register in reads or register in writes:
                    found.append(f"{i.address:#x} writes R{register} of a product in flight: {i.text}")
        sources = i.operands[1:]
    for operand in sources:
        for match in re.finditer(r"\bR(\d+)\b", operand):
            if int(match[1]) in writes:
                found.append(f"{i.address:#x} reads R{match[1]} of a product in flight: {i.text}")


def _register(operand: str) -> int | None:
    match = re.match(r"^R(\d+)", operand)
    return int(match[1]) if match else None
