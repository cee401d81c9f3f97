"""The door: what it shows, what it costs, and what it leaves outside."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
from pathlib import Path

import pytest

import pagetile

SURFACE = [
    "LLM",
    "ArgumentError",
    "AttentionMetadata",
    "BackendError",
    "BlockPool",
    "BlockTableError",
    "DTypeError",
    "DeviceError",
    "Engine",
    "OutOfBlocksError",
    "PagedKVCache",
    "PagetileError",
    "SamplingParams",
    "SequenceTable",
    "ShapeError",
    "SlotError",
    "State",
    "UnsupportedError",
    "build_metadata",
    "convert_fp8",
    "copy_blocks",
    "flash_attn_varlen_func",
    "flash_attn_with_kvcache",
    "from_legacy",
    "gather_cache",
    "merge_attn_states",
    "paged_attention_v1",
    "paged_attention_v2",
    "profile_spans",
    "raise_deferred",
    "reshape_and_cache",
    "reshape_and_cache_flash",
    "reshape_and_cache_flash_per_token_head",
    "rope_and_cache",
    "scatter_cache",
    "shared_prefix_attention",
    "swap_blocks",
    "to_legacy",
    "window_from_sliding",
]
"""Changing this list is changing what people's programs are written against."""

OURS = {"backend": "auto", "validate": False}
ATTENTION = {**OURS, "batch_invariant": False, "kv_cache_dtype": "auto", "workspace": None}

LEGACY = {
    "alibi_slopes": None,
    "kv_cache_dtype": "auto",
    "k_scale": None,
    "v_scale": None,
    "tp_rank": 0,
    "blocksparse_local_blocks": 0,
    "blocksparse_vert_stride": 0,
    "blocksparse_block_size": 64,
    "blocksparse_head_sliding_step": 0,
}
LEGACY_ATTENTION = {**OURS, "batch_invariant": False, "workspace": None}

SIGNATURES = {
    "reshape_and_cache": (
        "key value key_cache value_cache slot_mapping",
        {"kv_cache_dtype": "auto", "k_scale": None, "v_scale": None},
        OURS,
    ),
    "paged_attention_v1": (
        "out query key_cache value_cache num_kv_heads scale block_tables seq_lens block_size max_seq_len",
        LEGACY,
        LEGACY_ATTENTION,
    ),
    "paged_attention_v2": (
        "out exp_sums max_logits tmp_out query key_cache value_cache num_kv_heads scale block_tables seq_lens "
        "block_size max_seq_len",
        LEGACY,
        LEGACY_ATTENTION,
    ),
    "gather_cache": (
        "key_cache value_cache block_table cu_seq_lens",
        {},
        {
            "seq_starts": None,
            "k_scale": None,
            "v_scale": None,
            "out": None,
            "dtype": None,
            "kv_cache_dtype": "auto",
            **OURS,
        },
    ),
    "copy_blocks": ("key_caches value_caches block_mapping", {}, OURS),
    "swap_blocks": ("src dst block_mapping", {}, OURS),
    "reshape_and_cache_flash": (
        "key value key_cache value_cache slot_mapping",
        {"kv_cache_dtype": "auto", "k_scale": None, "v_scale": None},
        OURS,
    ),
    "reshape_and_cache_flash_per_token_head": (
        "key value key_cache value_cache slot_mapping kv_cache_dtype k_scale_cache v_scale_cache",
        {},
        OURS,
    ),
    "convert_fp8": ("dst src", {"scale": 1.0, "kv_dtype": "fp8_e4m3"}, {}),
    "flash_attn_varlen_func": (
        "q k v max_seqlen_q cu_seqlens_q max_seqlen_k",
        {
            "cu_seqlens_k": None,
            "seqused_k": None,
            "q_v": None,
            "dropout_p": 0.0,
            "softmax_scale": None,
            "causal": False,
            "window_size": None,
            "softcap": 0.0,
            "alibi_slopes": None,
            "deterministic": False,
            "return_attn_probs": False,
            "block_table": None,
            "return_softmax_lse": False,
            "out": None,
            "scheduler_metadata": None,
            "q_descale": None,
            "k_descale": None,
            "v_descale": None,
            "num_splits": 0,
            "s_aux": None,
        },
        ATTENTION,
    ),
    "flash_attn_with_kvcache": (
        "q k_cache v_cache",
        {
            "k": None,
            "v": None,
            "rotary_cos": None,
            "rotary_sin": None,
            "cache_seqlens": None,
            "cache_batch_idx": None,
            "cache_leftpad": None,
            "block_table": None,
            "softmax_scale": None,
            "causal": False,
            "window_size": (-1, -1),
            "softcap": 0.0,
            "rotary_interleaved": True,
            "alibi_slopes": None,
            "num_splits": 0,
            "return_softmax_lse": False,
            "k_descale": None,
            "v_descale": None,
            "s_aux": None,
        },
        ATTENTION,
    ),
    "shared_prefix_attention": (
        "q k_cache v_cache cu_seqlens_q max_seqlen_q prefix_table prefix_len block_table seqused_k max_seqlen_k",
        {
            "softmax_scale": None,
            "causal": True,
            "window_size": None,
            "softcap": 0.0,
            "alibi_slopes": None,
            "return_softmax_lse": False,
            "out": None,
            "k_descale": None,
            "v_descale": None,
            "num_splits": 0,
            "s_aux": None,
        },
        ATTENTION,
    ),
    "merge_attn_states": (
        "output prefix_output prefix_lse suffix_output suffix_lse",
        {"output_lse": None},
        OURS,
    ),
}
"""Positional arguments, arguments with their defaults in order, keyword-only arguments."""


def fresh(code: str) -> dict:
    """What a new interpreter prints as JSON after running ``code``."""
    root = str(Path(pagetile.__file__).resolve().parent.parent)
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {root!r}); import json\n{code}"],
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


def test_the_public_names() -> None:
    assert pagetile.__all__ == SURFACE
    assert set(SURFACE) <= set(dir(pagetile))


@pytest.mark.parametrize("name", SURFACE)
def test_a_public_name_is_there_and_says_what_it_is(name: str) -> None:
    value = getattr(pagetile, name)
    assert value.__doc__
    assert value.__name__ == name


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'pagetile' has no attribute 'flash'"):
        pagetile.flash  # noqa: B018
    assert not hasattr(pagetile, "paged_attention")


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures(name: str) -> None:
    positional, defaults, keyword_only = SIGNATURES[name]
    parameters = inspect.signature(getattr(pagetile, name)).parameters.values()
    ordinary = [p for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert [p.name for p in ordinary if p.default is p.empty] == positional.split()
    assert {p.name: p.default for p in ordinary if p.default is not p.empty} == defaults
    assert [p.name for p in ordinary] == [*positional.split(), *defaults]
    assert {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY} == keyword_only


def test_importing_costs_little_and_brings_nothing_heavy() -> None:
    """Beyond torch's own import; the best of up to three processes, since the machine may be busy."""
    code = """
import time, torch
before = set(sys.modules)
start = time.perf_counter()
import pagetile
spent = time.perf_counter() - start
new = sorted({name.partition(".")[0] for name in set(sys.modules) - before})
print(json.dumps({"ms": spent * 1e3, "new": new}))
"""
    for _ in range(3):
        run = fresh(code)
        assert run["new"] == ["pagetile"]
        if run["ms"] < 50:
            return
    pytest.fail(f"import pagetile took {run['ms']:.0f} ms beyond torch")


HEAVY = ["numba", "llvmlite", "triton", "transformers", "typer", "rich"]


def test_the_ops_and_the_cache_bring_nothing_heavy_either() -> None:
    code = f"""
import pagetile
pagetile.flash_attn_varlen_func, pagetile.PagedKVCache, pagetile.build_metadata, pagetile.State, pagetile.BackendError
print(json.dumps([name for name in {HEAVY} if name in sys.modules]))
"""
    assert fresh(code) == []


def test_the_reference_runs_where_no_extra_is_installed() -> None:
    """numba, triton and transformers cannot be imported; the ops say so and fall back to plain torch."""
    code = f"""
for name in {HEAVY}:
    sys.modules[name] = None
import torch, pagetile
cache = torch.zeros(2, 4, 1, 8)
pagetile.reshape_and_cache_flash(torch.ones(1, 1, 8), torch.ones(1, 1, 8), cache, cache.clone(), torch.tensor([5]))
try:
    pagetile.reshape_and_cache_flash(torch.ones(1, 1, 8), torch.ones(1, 1, 8), cache, cache.clone(), torch.tensor([5]),
                                     backend="cpu")
except pagetile.BackendError as error:
    print(json.dumps([cache.sum().item(), str(error)]))
"""
    total, message = fresh(code)
    assert total == 8
    assert "the package numba is not installed; pip install 'pagetile[cpu]'" in message


def test_version() -> None:
    from importlib.metadata import PackageNotFoundError, version

    try:
        assert version("pagetile") == pagetile.__version__
    except PackageNotFoundError:
        assert pagetile.__version__.count(".") == 2
