"""Compile a launch ahead of time for a GPU that is not here, and read registers and spills off the result."""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

POINTERS = {
    torch.float32: "*fp32",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.uint8: "*u8",
    torch.int32: "*i32",
    torch.int64: "*i64",
}


@dataclass(frozen=True)
class Report:
    """What ptxas says of one kernel."""

    kernel: str
    target: int
    registers: int
    spilled: int
    shared: int

    def __str__(self) -> str:
        return (
            f"sm_{self.target} {self.kernel}: {self.registers} registers, {self.spilled} bytes spilled, "
            f"{self.shared} bytes shared"
        )


def compile_launch(launch: Any, tensors: tuple[torch.Tensor, ...], capability: int, aligned: bool = True) -> Report:
    """Compile the variant that ``launch(device, *tensors)`` would ask for, pointers 16-byte aligned or not."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import compile as compile_source
    from triton.compiler.compiler import ASTSource

    names = launch.kernel.arg_names
    signature: dict[str, str] = {}
    attributes: dict[tuple[int, ...], list] = {}
    constants: dict[tuple[int, ...], Any] = {}
    for i, tensor in enumerate(tensors):
        signature[names[i]] = POINTERS[tensor.dtype]
        if aligned and (tensor.is_meta or tensor.data_ptr() % 16 == 0):
            attributes[(i,)] = [["tt.divisibility", 16]]
    for i, value in enumerate(launch.scalars, start=len(tensors)):
        if isinstance(value, float):
            signature[names[i]] = "fp32"
        elif launch.kernel.params[i].do_not_specialize:
            signature[names[i]] = "i32" if -(2**31) <= value < 2**31 else "i64"
        elif value == 1:
            signature[names[i]], constants[(i,)] = "constexpr", 1
        else:
            signature[names[i]] = "i32" if -(2**31) <= value < 2**31 else "i64"
            if value % 16 == 0:
                attributes[(i,)] = [["tt.divisibility", 16]]
    for name, value in launch.constants.items():
        signature[name], constants[(names.index(name),)] = "constexpr", value
    source = ASTSource(
        fn=launch.kernel, signature={n: signature[n] for n in names}, constexprs=constants, attrs=attributes
    )
    compiled = compile_source(source, target=GPUTarget("cuda", capability, 32), options=dict(launch.options))
    tools = Path(triton.__file__).parent / "backends/nvidia/bin"
    arch = f"sm_{capability}a" if capability >= 90 else f"sm_{capability}"
    tools_at_hand = [tools / name for name in ("ptxas", "ptxas-blackwell") if (tools / name).exists()]
    if capability >= 100:
        tools_at_hand.reverse()
    with tempfile.NamedTemporaryFile("w", suffix=".ptx", delete=False) as f:
        f.write(compiled.asm["ptx"])
    log = ""
    try:
        for ptxas in tools_at_hand:  # Triton 3.9 writes PTX that the first of its two assemblers is too old for
            command = [ptxas, "-v", f"--gpu-name={arch}", f.name, "-o", os.devnull]
            log = subprocess.run(command, capture_output=True, text=True, check=False).stderr
            if "Unsupported .version" not in log:
                break
    finally:
        os.unlink(f.name)
    registers, spilled = re.search(r"Used (\d+) registers", log), re.search(r"(\d+) bytes spill stores", log)
    assert registers, log
    assert spilled, log
    return Report(launch.kernel.__name__, capability, int(registers[1]), int(spilled[1]), compiled.metadata.shared)


def attend_reports(call: Any, plan: Any, capability: int) -> list[Report]:
    """Compile every launch of a plan for a call whose tensors may live anywhere (their values are not read)."""
    from pagetile.backends.triton.calls import AttendLaunches
    from pagetile.backends.triton.scales import as_bytes

    launches = AttendLaunches(call, plan)
    f32, error = torch.empty(4), torch.empty(8, dtype=torch.int64)
    q = call.q
    lse = q if call.lse is None else call.lse
    lens = call.key_start_loc if call.block_table is None else call.seq_lens
    table = q if call.block_table is None else call.block_table
    given = (call.key_starts, call.alibi_slopes, call.sinks, call.k_scale, call.v_scale)
    optional = tuple(t if isinstance(t, torch.Tensor) else q for t in given)
    k, v = as_bytes(call.k), as_bytes(call.v)
    partial = (f32, f32, f32) if launches.partials else (q, q, q)
    reports = []
    for name, launch in launches.stages:
        if name == "combine":
            tensors = (call.out, lse, *partial, call.query_start_loc, lens, optional[0], optional[2])
        else:
            middle = () if name == "attend" else partial
            tensors = (q, k, v, call.out, lse, *middle, call.query_start_loc, lens, table, *optional, error)
        reports.append(compile_launch(launch, tensors, capability))
    return reports
