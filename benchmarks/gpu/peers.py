"""Contenders whose binaries lie in a folder, for a machine that has no package index.

The folder holds ``contenders/<name>.py`` with ``write(inputs, case)`` and ``attend(inputs, case)``; this file hands
them the workloads of ``pagetile bench`` under the names that they use.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pagetile.cli.bench.cases import AttendWork, WriteWork
from pagetile.cli.bench.contenders import Contender

NAMES = {"vllm": "vllm25", "vllm-triton": "vtriton", "flashinfer": "flashinfer_"}
"""What a row says -> the module."""


def peer(name: str, folder: Path) -> Contender:
    """One of :data:`NAMES`; with a reason where it cannot be loaded."""
    try:
        sys.path.insert(0, str(folder.resolve()))
        module = importlib.import_module(f"contenders.{NAMES[name]}")
    except Exception as error:  # a missing binary may raise anything
        return Contender(name, missing=f"{type(error).__name__}: {str(error)[:200]}")
    return Contender(name, _writer(module), _attender(module))


def _writer(module: Any) -> Any:
    if not hasattr(module, "write"):
        return None

    def write(work: WriteWork, x: dict[str, Tensor]) -> Callable[[], object]:
        del work
        one = torch.ones(1, device=x["key"].device)
        names = {"key": "key", "val": "value", "kc": "key_cache", "vc": "value_cache", "slots": "slots"}
        return module.write(
            {short: x[name] for short, name in names.items()} | {"ks": one, "vs": one, "kv": "auto"}, {}
        )

    return write


def _attender(module: Any) -> Any:
    def attend(work: AttendWork, x: dict[str, Tensor]) -> Callable[[], object] | None:
        need = [-(-keys // work.block) for _, keys in work.seqs]
        pages = torch.cat([row[:n] for row, n in zip(x["table"], need, strict=True)])
        inputs = {
            "q": x["q"], "k": x["k"], "v": x["v"], "out": x["out"], "cu": x["starts"], "seq": x["lens"],
            "table": x["table"], "perm": pages, "need": need, "qlens": [q for q, _ in work.seqs],
            "ctxs": [keys for _, keys in work.seqs], "scale": work.size**-0.5,
        }  # fmt: skip
        case = {
            "name": work.name, "b": len(work.seqs), "hq": work.q_heads, "hk": work.kv_heads, "d": work.size,
            "bs": work.block, "kv": "auto", "causal": True,
        }  # fmt: skip
        return module.attend(inputs, case)

    return attend
