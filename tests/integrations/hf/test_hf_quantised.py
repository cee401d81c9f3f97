"""fp8 and int8 blocks: a scale for each token and head, the same tokens from ``generate`` and ``generate_batch``."""

from __future__ import annotations

import pytest
import torch
from hf_kit import answers, batched, batching, cache_argument, greedy, on_pages, padded, prompts_of, several, tiny

from pagetile.integrations.transformers import PagedCache

KINDS = {"fp8": 2**-3, "fp8_e5m2": 2**-2, "int8": 1 / 127}
"""Half a step of the largest values of a row, twice over: keys and values are both rounded."""


@pytest.mark.parametrize("kind", KINDS)
def test_blocks_hold_what_the_model_computed_rounded(kind: str) -> None:
    model, ids = tiny("qwen3"), torch.tensor(prompts_of((37,)))
    with on_pages(model), torch.no_grad():
        plain = PagedCache(model)
        expected = model(ids, **cache_argument(model, plain)).logits
    with on_pages(model, kv_cache_dtype=kind), torch.no_grad():
        cache = PagedCache(model)
        logits = model(ids, **cache_argument(model, cache)).logits
    stored, exact = cache.paged[0].pages, plain.paged[0].pages
    assert stored is not None
    assert exact is not None
    assert stored.key.element_size() == 1
    blocks = cache.tables[None].blocks[0, :2].tolist()
    for quantised, scale, whole in (
        (stored.key, stored.key_scale, exact.key),
        (stored.value, stored.value_scale, exact.value),
    ):
        assert scale is not None
        back = quantised[blocks].float() * scale[blocks][..., None]
        whole = whole[plain.tables[None].blocks[0, :2].tolist()]
        largest = whole.abs().amax(-1, keepdim=True)
        assert ((back - whole).abs() <= KINDS[kind] / 2 * largest + 1e-6).all()
        assert not torch.equal(back, whole)
    assert float((logits - expected).abs().max()) < 0.5 * float(expected.abs().max())
    assert not torch.equal(logits, expected)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize("kind", ["fp8", "int8"])
def test_beams_batches_and_pieces_read_the_same_blocks(family: str, kind: str) -> None:
    """Where every layer reads what was stored, one piece of a prompt or several give the same tokens."""
    model, prompts = tiny(family), prompts_of((4, 10, 40))
    with on_pages(model, kv_cache_dtype=kind):
        expected = answers(model, prompts)
        out = model.generate(**padded(prompts), max_new_tokens=20, do_sample=False, pad_token_id=0)
        assert out[:, 40:].tolist() == expected
        model.generate(**padded(prompts), max_new_tokens=8, do_sample=False, pad_token_id=0, num_beams=3)
        if family == "llama":  # a window reads the piece itself as it was computed
            for tokens in (64, 16):
                found = batched(model, prompts, batching(max_batch_tokens=tokens))
                assert found == [[answer] for answer in expected]
            found = batched(model, prompts, generation=several(2))
            assert found == [[answer] * 2 for answer in expected]
        else:
            assert len(batched(model, prompts, batching(max_batch_tokens=16))) == 3


def test_more_tokens_fit_the_same_memory() -> None:
    model, planned = tiny("llama"), {}
    for kind in ("auto", "fp8"):
        with on_pages(model, kv_cache_dtype=kind):
            manager = model.init_continuous_batching(
                generation_config=greedy(), continuous_batching_config=batching(num_blocks=64)
            )
            cache = manager._create_batch_processor().cache
            pages = cache.pages[0]
            planned[kind] = pages.key.stride(1) * pages.key.element_size()
    assert planned == {"auto": 2 * 16 * 4, "fp8": 2 * (16 + 4)}
