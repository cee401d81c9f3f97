"""Compile a launch ahead of time for sm_90a on a machine without a GPU, and read what came out.

    python tests/backends/hopper/hopper_ahead.py            # compile what is not known yet, rewrite known_kernels.json
    python tests/backends/hopper/hopper_ahead.py prefill    # only cases whose name has this in it
    python tests/backends/hopper/hopper_ahead.py --variants # the plans that benchmarks/gpu/hopper.py tries; prints only

A kernel is known by a hash of its sources, its signature, its constants and Triton's version.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).resolve().parents[3]), str(Path(__file__).resolve().parent)]

import hopper_sass as sass

from pagetile.backends.hopper.tuning import AttendPlan, DeviceFacts, plan_attend
from pagetile.backends.protocol import AttendCall
from pagetile.contracts.problem import AttendProblem

HERE = Path(__file__).resolve().parent
SOURCES = HERE.parents[2] / "pagetile/backends/hopper"
DEVICE_FILES = (
    "compat", "device", "facts", "notes", "loading", "tiles", "prefill", "stretch", "decode", "states",
)  # fmt: skip
KNOWN = HERE / "known_kernels.json"

POINTERS = {
    torch.float32: "*fp32", torch.float16: "*fp16", torch.bfloat16: "*bf16", torch.int32: "*i32", torch.int64: "*i64",
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """One attention: what the tables of tuning are to be right for."""

    name: str
    seqs: int
    queries: int
    keys: int
    q_heads: int = 32
    kv_heads: int = 8
    size: int = 128
    size_v: int = 0
    block: int = 16
    mixed: bool = False
    features: tuple[str, ...] = ()
    dtype: torch.dtype = torch.bfloat16
    wide_ids: bool = False


BENCHMARK = (
    Case("decode_1x8192", 1, 1, 8192),
    Case("decode_64x4096", 64, 1, 4096),
    Case("decode_64x4096_16/1", 64, 1, 4096, 16, 1),
    Case("decode_64x4096_9/3_d64", 64, 1, 4096, 9, 3, 64),
    Case("decode_64x4096_d256", 64, 1, 4096, 16, 8, 256),
    Case("decode_64x4096_32/32", 64, 1, 4096, 32, 32),
    Case("decode_64x4096_p64", 64, 1, 4096, block=64),
    Case("decode_16x4@8192", 16, 4, 8192),
    Case("prefill_8192", 1, 8192, 8192),
    Case("prefill_8192_p128", 1, 8192, 8192, block=128),
    Case("prefill_8192_d64", 1, 8192, 8192, size=64),
    Case("prefill_8192_d256", 1, 8192, 8192, 16, 8, 256),
    Case("prefill_32768", 1, 32768, 32768),
    Case("mixed", 64, 2048, 8192, mixed=True),
)
"""What the benchmark runs; two cases of one plan are one kernel."""

FEATURES = ("window", "softcap", "alibi", "sinks", "lse", "key_starts")
EACH_FEATURE = (
    *(Case(f"decode_{feature}", 8, 1, 4096, features=(feature,)) for feature in FEATURES),
    *(Case(f"prefill_{feature}", 8, 512, 4096, features=(feature,)) for feature in FEATURES),
    Case("prefill_all", 8, 512, 4096, features=FEATURES),
    Case("decode_all", 8, 1, 4096, features=FEATURES),
    Case("prefill_p8", 1, 512, 4096, block=8),
    Case("prefill_p48", 1, 512, 4096, block=48),
    Case("prefill_p256", 1, 512, 4096, block=256),
    Case("prefill_d80", 1, 512, 4096, size=80),
    Case("prefill_d192_128", 1, 512, 4096, size=192, size_v=128),
    Case("prefill_15/3", 1, 512, 4096, 15, 3),
    Case("prefill_64/1_ids64", 1, 512, 4096, 64, 1, wide_ids=True),
    Case("prefill_f16", 1, 512, 4096, dtype=torch.float16),
    Case("decode_d96_f16", 64, 1, 4096, size=96, dtype=torch.float16),
    Case("decode_d192_128", 64, 1, 4096, size=192, size_v=128),
    Case("decode_64_rows_ids64", 64, 1, 4096, 64, 1, wide_ids=True),
    Case("decode_64_rows_d256", 64, 8, 4096, 64, 8, 256),
)  # fmt: skip


@dataclass(frozen=True)
class Report:
    """What ptxas and the disassembly say of one kernel.

    Attributes:
        registers, spilled, shared: of ptxas; bytes.
        spilled_in_loops: accesses to local memory in loops that have products or copies.
        products, instructions: of all code.
        loop_products, loop_instructions: of the shortest loop with the products of one step.
        copy_instructions: of the longest loop with copies.
        hazards: see :mod:`hopper_sass`.
    """

    registers: int
    spilled: int
    spilled_in_loops: int
    shared: int
    products: int
    instructions: int
    loop_products: int
    loop_instructions: int
    copy_instructions: int
    hazards: int


def call_of(case: Case) -> AttendCall:
    """A call over tensors without memory."""

    def empty(*shape: int, dtype: torch.dtype = case.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    size_v = case.size_v or case.size
    tokens = case.queries + case.seqs - 1 if case.mixed else case.seqs * case.queries
    on = set(case.features)
    dtype = str(case.dtype).removeprefix("torch.")
    window = (1023 if "window" in on else -1, 0)
    problem = AttendProblem(
        device="cuda", dtype=dtype, kind=dtype, layout="paged", num_seqs=case.seqs, num_tokens=tokens,
        max_q_len=case.queries, max_k_len=case.keys, num_q_heads=case.q_heads, num_kv_heads=case.kv_heads,
        head_size=case.size, head_size_v=size_v, block_size=case.block, window=window, softcap="softcap" in on,
        alibi="alibi" in on, sinks="sinks" in on, lse="lse" in on, key_starts="key_starts" in on,
    )  # fmt: skip
    int32, float32 = torch.int32, torch.float32
    return AttendCall(
        problem=problem, q=empty(tokens, case.q_heads, case.size),
        k=empty(1024, case.block, case.kv_heads, case.size), v=empty(1024, case.block, case.kv_heads, size_v),
        out=empty(tokens, case.q_heads, size_v),
        lse=empty(case.q_heads, tokens, dtype=float32) if "lse" in on else None,
        query_start_loc=empty(case.seqs + 1, dtype=int32), seq_lens=empty(case.seqs, dtype=int32), key_start_loc=None,
        block_table=empty(case.seqs, -(-case.keys // case.block), dtype=torch.int64 if case.wide_ids else int32),
        scale=case.size**-0.5, window=window, softcap=30.0 if "softcap" in on else 0.0,
        key_starts=empty(case.seqs, dtype=int32) if "key_starts" in on else None,
        alibi_slopes=empty(case.q_heads, dtype=float32) if "alibi" in on else None,
        sinks=empty(case.q_heads, dtype=float32) if "sinks" in on else None,
    )  # fmt: skip


def launches(
    call: AttendCall, variant: Callable[[AttendPlan], AttendPlan] = lambda plan: plan
) -> Iterator[tuple[str, Any, tuple[torch.Tensor, ...]]]:
    """``(name, launch, tensors)`` of each kernel that the plan for an H200 launches, or a variant of that plan."""
    from pagetile.backends.hopper.calls import AttendLaunches

    plan = variant(plan_attend(call.problem, DeviceFacts()))
    built = AttendLaunches(call, plan)
    counters, error, f32 = (torch.empty(4, dtype=t, device="meta") for t in (torch.int32, torch.int64, torch.float32))
    tail = (*built.tensors(call, counters), counters, error)
    head = (call.out, counters if call.lse is None else call.lse)
    if built.decode is not None:
        yield "decode", built.decode, (*head, f32, f32, *tail)
    if built.prefill is not None:
        yield "prefill", built.prefill, (*head, *tail)


def signature(launch: Any, call: AttendCall, tensors: tuple[torch.Tensor, ...]) -> tuple[dict, dict, dict]:
    """``(types, constants, attributes)`` that Triton would find at this launch, all pointers 16-byte aligned."""
    from pagetile.backends.hopper.compat import gl

    names = launch.kernel.arg_names
    types: dict[str, str] = {}
    constants: dict[tuple[int, ...], Any] = {}
    attributes: dict[tuple[int, ...], list] = {}
    kind = POINTERS[call.q.dtype][1:]
    for i, box in enumerate(launch.boxes):
        layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=len(box.sizes))
        types[names[i]] = f"tensordesc<{kind}[{','.join(map(str, box.sizes))}],{layout!r}>"
    first = len(launch.boxes)
    for i, tensor in enumerate(tensors, start=first):
        types[names[i]] = POINTERS[tensor.dtype]
        attributes[(i,)] = [["tt.divisibility", 16]]
    for i, value in enumerate(launch.scalars, start=first + len(tensors)):
        if isinstance(value, float):
            types[names[i]] = "fp32"
        elif value == 1 and not launch.kernel.params[i].do_not_specialize:
            types[names[i]], constants[(i,)] = "constexpr", 1
        else:
            types[names[i]] = "i32" if -(2**31) <= value < 2**31 else "i64"
            if value % 16 == 0 and not launch.kernel.params[i].do_not_specialize:
                attributes[(i,)] = [["tt.divisibility", 16]]
    for name, value in launch.constants.items():
        types[name], constants[(names.index(name),)] = "constexpr", value
    return {n: types[n] for n in names}, constants, attributes


def identity(launch: Any, call: AttendCall, tensors: tuple[torch.Tensor, ...]) -> str:
    """The hash that a compiled kernel is known by."""
    import triton

    types, constants, attributes = signature(launch, call, tensors)
    hashed = hashlib.sha256()
    for name in DEVICE_FILES:
        hashed.update((SOURCES / f"{name}.py").read_bytes())
    text = (
        triton.__version__,
        launch.kernel.__name__,
        types,
        sorted(constants.items()),
        sorted(attributes),
        launch.options,
    )
    hashed.update(repr(text).encode())
    return hashed.hexdigest()[:16]


def compile_launch(launch: Any, call: AttendCall, tensors: tuple[torch.Tensor, ...]) -> Report:
    """Compile, assemble, disassemble."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import compile as compile_source
    from triton.experimental.gluon._runtime import GluonASTSource

    types, constants, attributes = signature(launch, call, tensors)
    source = GluonASTSource(fn=launch.kernel, signature=types, constexprs=constants, attrs=attributes)
    compiled = compile_source(source, target=GPUTarget("cuda", 90, 32), options=dict(launch.options))
    tools = Path(triton.__file__).parent / "backends/nvidia/bin"
    with tempfile.TemporaryDirectory() as folder:
        ptx, cubin = Path(folder, "k.ptx"), Path(folder, "k.cubin")
        ptx.write_text(compiled.asm["ptx"])
        cubin.write_bytes(compiled.asm["cubin"])
        log = _run(tools / "ptxas", "-v", "--gpu-name=sm_90a", str(ptx), "-o", os.devnull)
        text = _run(tools / "cuobjdump", "-sass", str(cubin))
        if os.environ.get("SASS"):
            Path(os.environ["SASS"]).write_text(text)
    registers, spilled = re.search(r"Used (\d+) registers", log), re.search(r"(\d+) bytes spill stores", log)
    assert registers, log
    assert spilled, log
    code = sass.parse(text)
    products = launch.constants["KEYS"] // 16 + launch.boxes[1].sizes[3] // 16  # of a step: scores, then values
    steps, copies = sass.step_loops(code, products), sass.copy_loops(code)
    inner = min(steps, key=lambda loop: len(loop.body))
    return Report(
        registers=int(registers[1]),
        spilled=int(spilled[1]),
        spilled_in_loops=sum(loop.count("LDL", "STL") for loop in (*steps, *copies)),
        shared=compiled.metadata.shared,
        products=sum(i.name in sass.PRODUCTS for i in code),
        instructions=len(code),
        loop_products=inner.count(*sass.PRODUCTS),
        loop_instructions=len(inner.body),
        copy_instructions=max(len(loop.body) for loop in copies),
        hazards=len(sass.hazards(code)),
    )


def _run(*command: Any) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout + done.stderr


def read_known() -> dict[str, dict[str, Any]]:
    """The table of compiled kernels, by hash."""
    return json.loads(KNOWN.read_text()) if KNOWN.exists() else {}


def write_known(rows: dict[str, dict[str, Any]]) -> None:
    """Write the table, by name, one kernel a line."""
    lines = [f"{json.dumps(k)}: {json.dumps(v)}" for k, v in sorted(rows.items(), key=lambda item: item[1]["case"])]
    KNOWN.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def in_a_child(name: str, work: Callable[..., object], *arguments: Any) -> None:
    """Run ``work`` in a process of its own, for a compiler that may abort, and say what came of it."""
    child = os.fork()
    if not child:
        try:
            sys.stdout.write(f"{name}: {work(*arguments)}\n")
        except BaseException as error:
            while error.__cause__:
                error = error.__cause__
            why = [line for line in str(error).splitlines() if "fatal" in line or "rror" in line]
            sys.stdout.write(f"{name}: {' | '.join(why)[:600] or str(error)[-600:]}\n")
        sys.stdout.flush()
        os._exit(0)
    if os.waitpid(child, 0)[1]:
        sys.stdout.write(f"{name}: the compiler crashed\n")


def learn(key: str, name: str, *arguments: Any) -> dict[str, Any]:
    """Compile one kernel and add it to the table."""
    row = {"case": name, **asdict(compile_launch(*arguments))}
    write_known(read_known() | {key: row})
    return row


def compile_variants() -> None:
    """Compile every plan that the benchmark tries and that differs from those before it."""
    from benchmarks.gpu.hopper import VARIANTS, works

    seen = set(read_known())
    for work in works():
        longest_q, longest_k = max(q for q, _ in work.seqs), max(k for _, k in work.seqs)
        mixed = len({q for q, _ in work.seqs}) > 1
        case = Case(
            work.name,
            len(work.seqs),
            longest_q,
            longest_k,
            work.q_heads,
            work.kv_heads,
            work.size,
            0,
            work.block,
            mixed,
        )
        for title, variant in VARIANTS.get(work.name, {}).items():
            call = call_of(case)
            for name, launch, tensors in launches(call, variant):
                key = identity(launch, call, tensors)
                if key not in seen:
                    seen.add(key)
                    in_a_child(f"{work.name} {title} {name}", compile_launch, launch, call, tensors)


def main() -> None:
    """Compile what is not known, prefill first."""
    wanted = sys.argv[1] if len(sys.argv) > 1 else ""
    if wanted == "--variants":
        compile_variants()
        return
    seen = set()
    for case in sorted((*BENCHMARK, *EACH_FEATURE), key=lambda c: "prefill" not in c.name):
        call = call_of(case)
        for name, launch, tensors in launches(call):
            key = identity(launch, call, tensors)
            seen.add(key)
            if key not in read_known() and wanted in f"{case.name} {name}":
                in_a_child(f"{case.name} {name}", learn, key, f"{case.name} {name}", launch, call, tensors)
    if not wanted:
        write_known({key: row for key, row in read_known().items() if key in seen})


if __name__ == "__main__":
    main()
