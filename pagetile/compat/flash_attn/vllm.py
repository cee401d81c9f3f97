"""vLLM's fork, ``vllm_flash_attn``: its varlen function is the pagetile function with a few arguments more.

Source: ``vllm/vllm_flash_attn/flash_attn_interface.py`` of vLLM 0.25.1.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

import pagetile.ops as ops
from pagetile.backends.protocol import Backend, Scale
from pagetile.compat.flash_attn.shapes import refuse


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    max_seqlen_q: int,
    cu_seqlens_q: Tensor,
    max_seqlen_k: int,
    cu_seqlens_k: Tensor | None = None,
    seqused_k: Tensor | None = None,
    q_v: Tensor | None = None,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] | None = None,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
    return_softmax_lse: bool = False,
    out: Tensor | None = None,
    scheduler_metadata: Any = None,
    q_descale: Tensor | None = None,
    k_descale: Scale = None,
    v_descale: Scale = None,
    num_splits: int = 0,
    output_scale: Tensor | None = None,
    fa_version: int = 2,
    s_aux: Tensor | None = None,
    cp_world_size: int = 1,
    cp_rank: int = 0,
    cp_tot_seqused_k: Tensor | None = None,
    mask_mod: Any = None,
    aux_tensors: Any = None,
    dynamic_causal: Tensor | None = None,
    *,
    backend: str | Backend = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """As :func:`pagetile.flash_attn_varlen_func`, by the argument order of vLLM. ``fa_version`` is not used.

    Raises:
        UnsupportedError: ``output_scale``, ``cp_world_size`` above 1 (see :mod:`pagetile.distributed`), ``mask_mod``,
            ``aux_tensors`` or ``dynamic_causal``; and as there.
    """
    del fa_version, cp_rank
    refuse(
        output_scale=(output_scale, None, "an fp8 output is not implemented"),
        cp_world_size=(cp_world_size, 1, "causal masks over interleaved keys are not; see pagetile.distributed"),
        cp_tot_seqused_k=(cp_tot_seqused_k, None, "it belongs to cp_world_size"),
        mask_mod=(mask_mod, None, "masks as programs are not implemented"),
        aux_tensors=(aux_tensors, None, "they belong to mask_mod"),
        dynamic_causal=(dynamic_causal, None, "causal is one choice for the whole batch"),
    )
    return ops.flash_attn_varlen_func(
        q,
        k,
        v,
        max_seqlen_q,
        cu_seqlens_q,
        max_seqlen_k,
        cu_seqlens_k,
        seqused_k,
        q_v,
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
        block_table,
        return_softmax_lse,
        out,
        scheduler_metadata,
        q_descale,
        k_descale,
        v_descale,
        num_splits,
        s_aux,
        backend=backend,
    )


def get_scheduler_metadata(*args: Any, **kwargs: Any) -> None:
    """There is no plan step, so there is nothing to compute; ``scheduler_metadata=None`` is what it returns."""
    del args, kwargs


def is_fa_version_supported(fa_version: int, device: Any = None) -> bool:
    """Every version's calls are answered by the same functions."""
    del fa_version, device
    return True


def fa_version_unsupported_reason(fa_version: int, device: Any = None) -> str | None:
    """See :func:`is_fa_version_supported`."""
    del fa_version, device
    return None
