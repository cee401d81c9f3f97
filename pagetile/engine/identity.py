"""Which weights made a cache's keys and values, as a short text that a file can carry."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SAMPLE = 256
"""Elements of each parameter that are looked at. A model fine-tuned from another differs nearly everywhere; reading
every weight of a large model would take as long as loading it."""


def weights_identity(model: PreTrainedModel) -> str:
    """A digest of the configuration and of a sample of every parameter and buffer: names, shapes, dtypes, values.

    Equal for equal weights in every process; two models that differ only outside the sample are not told apart.
    """
    found = hashlib.blake2b(type(model).__name__.encode(), digest_size=16)
    config = {k: v for k, v in sorted(model.config.to_dict().items()) if k not in ("_name_or_path", "_commit_hash")}
    found.update(repr(config).encode())
    for name, tensor in sorted(model.state_dict().items()):
        found.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        if tensor.numel():
            flat = tensor.detach().flatten()
            index = torch.linspace(0, flat.numel() - 1, min(SAMPLE, flat.numel()), dtype=torch.float64).long()
            found.update(flat[index.to(flat.device)].cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()
