"""Expanded GGUF models, kept on disk.

A GGUF file is quantised, and Transformers reads it slowly: expanding the smallest useful model takes it some twenty
seconds, nearly all of them in parsing. So the expanded model is kept as safetensors, to be loaded in a second the
next time, in ``PAGETILE_CACHE_DIR`` or ``pagetile`` in the user's cache folder. ``PAGETILE_GGUF_CACHE=0`` turns it off.

The folder's name is made from the file's path, size and time of change, the dtype and the version of Transformers. It
appears complete or not at all. Nothing here is a reason to fail: whatever goes wrong, the file itself is read.
"""

from __future__ import annotations

import copy
import hashlib
import logging
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch

log = logging.getLogger("pagetile")

ENOUGH = 4
"""Keep an expanded model only where the disk has this many times its size free."""


def cache_folder() -> Path:
    """Where files go that can be made again."""
    own = os.environ.get("PAGETILE_CACHE_DIR")
    return Path(own) if own else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pagetile"


def place_for(file: Path, dtype: torch.dtype) -> Path | None:
    """The folder of an expanded file, whether it is there or not; None when this is turned off."""
    if os.environ.get("PAGETILE_GGUF_CACHE") == "0":
        return None
    import transformers

    status = file.stat()
    identity = (str(file.resolve()), status.st_size, status.st_mtime_ns, str(dtype), transformers.__version__, 1)
    digest = hashlib.sha256(repr(identity).encode()).hexdigest()[:16]
    return cache_folder() / "gguf" / f"{file.stem}-{str(dtype).removeprefix('torch.')}-{digest}"


def keep(model: Any, tokenizer: Any, place: Path) -> None:
    """Save a model that was read from GGUF, and its tokenizer, for the next time."""
    partial: Path | None = None
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        num_bytes = sum(p.numel() * p.element_size() for p in model.parameters())
        if shutil.disk_usage(place.parent).free < ENOUGH * num_bytes:
            return
        partial = Path(tempfile.mkdtemp(dir=place.parent, prefix=".partial-"))
        _plain(model).save_pretrained(partial)
        tokenizer.save_pretrained(partial)
        partial.rename(place)
        log.info("the expanded model is kept in %s (%d MB)", place, num_bytes // 10**6)
    except Exception as error:  # whatever it is, the model in memory is fine
        log.info("the expanded model was not kept in %s: %s", place, error)
    finally:
        if partial is not None and partial.exists():
            shutil.rmtree(partial, ignore_errors=True)


def _plain(model: Any) -> Any:
    """The same weights in a model that does not know that they were quantised: one that did cannot be saved."""
    config = copy.deepcopy(model.config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    with torch.device("meta"):
        plain = type(model)(config)
    plain.load_state_dict(model.state_dict(), assign=True)
    plain.tie_weights()
    plain.generation_config = model.generation_config
    return plain
