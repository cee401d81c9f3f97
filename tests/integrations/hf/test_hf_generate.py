"""``generate`` over blocks: the tokens of the host's own attention and cache, and what the blocks are doing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hf_kit import (
    FAMILIES,
    LENGTHS,
    NEW,
    WINDOW,
    answers,
    cache_argument,
    cache_in,
    on_pages,
    padded,
    prompts_of,
    tiny,
)

from pagetile.contracts.errors import ArgumentError, OutOfBlocksError, UnsupportedError
from pagetile.contracts.geometry import blocks_for
from pagetile.integrations.transformers import PagedCache

MODES: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "sampling": {"do_sample": True, "top_k": 20},
    "beams": {"do_sample": False, "num_beams": 4},
    "all beams": {"do_sample": False, "num_beams": 3, "num_return_sequences": 3},
    "static": {"do_sample": False, "cache_implementation": "static"},
}


def run(model: Any, inputs: dict, mode: dict, **more: Any) -> Any:
    torch.manual_seed(7)
    return model.generate(
        **inputs, max_new_tokens=NEW, pad_token_id=0, return_dict_in_generate=True, use_cache=True, **mode, **more
    )


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_equal_those_of_the_host(family: str, mode: str) -> None:
    """A batch that is padded on the left, longer than the window and than a block."""
    model, inputs = tiny(family), padded(prompts_of())
    own = {name: value for name, value in MODES[mode].items() if name != "cache_implementation"}
    expected = run(model, inputs, own).sequences
    with on_pages(model):
        out = run(model, inputs, MODES[mode])
        assert torch.equal(out.sequences, expected)
        cache = cache_in(out)
        cache.check()
        assert cache.get_seq_length() == expected.shape[1] - 1


@pytest.mark.parametrize("block_size", [1, 3, 64])
def test_any_block_size(block_size: int) -> None:
    model, inputs = tiny("gemma3"), padded(prompts_of())
    expected = run(model, inputs, MODES["beams"]).sequences
    with on_pages(model, block_size=block_size):
        assert torch.equal(run(model, inputs, MODES["beams"]).sequences, expected)


@pytest.mark.parametrize("family", ["llama", "gemma3", "mistral"])
def test_assisted_decoding_takes_tokens_back(family: str) -> None:
    model, assistant, prompt = tiny(family), tiny("llama", seed=3), prompts_of((40,))
    inputs = padded([(prompt[0] * 2)[:60]])
    expected = model.generate(**inputs, max_new_tokens=NEW, do_sample=False, pad_token_id=0)
    with on_pages(model), on_pages(assistant):
        for help_from in ({"prompt_lookup_num_tokens": 3}, {"assistant_model": assistant}):
            got = model.generate(**inputs, max_new_tokens=NEW, do_sample=False, pad_token_id=0, **help_from)
            assert torch.equal(got, expected), help_from


def test_padding_takes_no_memory_and_beams_share_their_prompt() -> None:
    model, prompts = tiny("llama"), prompts_of()
    with on_pages(model, block_size=4):
        cache = cache_in(run(model, padded(prompts), MODES["greedy"]))
        table = cache.tables[None]
        assert table.stored.tolist() == [length + NEW - 1 for length in LENGTHS]
        assert table.pool is not None
        assert table.pool.num_live == sum(blocks_for(length + NEW - 1, 4) for length in LENGTHS)
        cache = cache_in(run(model, padded(prompts[2:]), {"do_sample": False, "num_beams": 8}))
        table = cache.tables[None]
        assert table.pool is not None
        alone = blocks_for(LENGTHS[2] + NEW - 1, 4)
        assert table.pool.num_live <= LENGTHS[2] // 4 + 8 * (alone - LENGTHS[2] // 4)
        assert table.pool.num_live < 8 * alone


def test_blocks_behind_the_window_are_given_back() -> None:
    model = tiny("gemma3")
    with on_pages(model, block_size=4):
        cache = cache_in(run(model, padded(prompts_of((40,))), MODES["greedy"]))
        window, full = cache.tables[WINDOW], cache.tables[None]
        assert window.pool is not None
        assert full.pool is not None
        assert window.pool.num_live <= blocks_for(WINDOW, 4) + 1
        assert full.pool.num_live == blocks_for(40 + NEW - 1, 4)


def test_a_cache_is_kept_for_the_next_turn() -> None:
    model, (first, second) = tiny("gemma2"), prompts_of((12, 9))
    with on_pages(model):
        cache = PagedCache(model)
        kept = cache_argument(model, cache)
        ids = padded([first])["input_ids"]
        one = model.generate(ids, max_new_tokens=6, do_sample=False, pad_token_id=0, **kept)
        two_prompt = torch.cat([one, torch.tensor([second])], dim=1)
        two = model.generate(two_prompt, max_new_tokens=6, do_sample=False, pad_token_id=0, **kept)
        assert cache.get_seq_length() == two.shape[1] - 1
    assert two[0, two_prompt.shape[1] :].tolist() == answers(model, [two_prompt[0].tolist()], 6)[0]


def test_without_a_known_length_the_cache_grows() -> None:
    model, prompts = tiny("llama"), prompts_of((5, 5, 5))
    ids = torch.tensor(prompts)
    with on_pages(model, block_size=2), torch.no_grad():
        cache = PagedCache(model)
        sizes = set()
        for _ in range(40):
            logits = model(ids if cache.get_seq_length() == 0 else ids[:, -1:], **cache_argument(model, cache)).logits
            ids = torch.cat([ids, logits[:, -1:].argmax(-1)], dim=1)
            sizes.add(cache.tables[None].num_blocks)
        cache.check()
        assert len(sizes) > 2
    assert ids[:, 5:].tolist() == answers(model, prompts, 40)


def test_a_bounded_cache_says_when_it_is_full() -> None:
    model = tiny("llama")
    with on_pages(model):
        cache = PagedCache(model, num_blocks=3)
        kept = cache_argument(model, cache)
        with pytest.raises(OutOfBlocksError, match="of the 3 that the cache was given"):
            model.generate(**padded(prompts_of((40,))), max_new_tokens=NEW, do_sample=False, pad_token_id=0, **kept)
        cache.check()
        assert cache.get_seq_length() == 48
        cache.crop(-3)
        with torch.no_grad():
            model(torch.tensor([[5, 6, 7]]), **kept)
        assert cache.get_seq_length() == 48


def test_padding_on_the_right() -> None:
    """A full-attention model sees around it; under a window it counts, which blocks do not know."""
    prompts = prompts_of((4, 10, 23))
    inputs = padded(prompts, side="right")
    next_token, ones = torch.tensor([[7], [8], [9]]), torch.ones(3, 1, dtype=torch.long)
    later = {"attention_mask": torch.cat([inputs["attention_mask"], ones], dim=1)}
    later["position_ids"] = later["attention_mask"].sum(1, keepdim=True) - 1
    model = tiny("llama")
    with on_pages(model), torch.no_grad():
        cache = PagedCache(model)
        kept = cache_argument(model, cache)
        logits = model(**inputs, **kept).logits
        last = model(next_token, **later, **kept).logits[:, -1]
        assert cache.tables[None].stored.tolist() == [5, 11, 24]
    for row, prompt in enumerate(prompts):
        with torch.no_grad():
            alone = model(torch.tensor([prompt + next_token[row].tolist()])).logits[0]
        torch.testing.assert_close(logits[row, : len(prompt)], alone[:-1], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(last[row], alone[-1], rtol=1e-4, atol=1e-4)
    model = tiny("gemma3")
    with on_pages(model), pytest.raises(UnsupportedError, match="Pad on the left"):
        run(model, inputs, MODES["greedy"])


def test_a_mask_that_changes_its_mind() -> None:
    model, inputs = tiny("llama"), padded(prompts_of((4, 10)))
    with on_pages(model), torch.no_grad():
        cache = PagedCache(model)
        kept = cache_argument(model, cache)
        model(**inputs, **kept)
        mask = torch.ones(2, 11, dtype=torch.long)
        mask[1, 3] = 0
        with pytest.raises(ArgumentError, match=r"attention_mask\[0, 0\] is True, but it was False"):
            model(torch.tensor([[3], [4]]), attention_mask=mask, **kept)
        with pytest.raises(ArgumentError, match="earlier rows of this cache are padding"):
            model(torch.tensor([[3], [4]]), attention_mask=torch.ones(2, 11, dtype=torch.long), **kept)


def test_selecting_and_repeating_sequences() -> None:
    model, prompts = tiny("gemma3"), prompts_of((20, 20, 20))
    with on_pages(model), torch.no_grad():
        cache = PagedCache(model)
        kept = cache_argument(model, cache)
        model(torch.tensor(prompts), **kept)
        cache.batch_select_indices(torch.tensor([2, 0]))
        cache.batch_repeat_interleave(2)
        cache.check()
        assert cache.batch_size == 4
        new = torch.tensor([[9], [10], [11], [12]])
        logits = model(new, **kept).logits[:, -1]
        cache.check()
    with torch.no_grad():
        for row, (prompt, token) in enumerate(zip((prompts[2], prompts[2], prompts[0], prompts[0]), new, strict=True)):
            alone = model(torch.tensor([prompt + token.tolist()])).logits[0, -1]
            torch.testing.assert_close(logits[row], alone, rtol=1e-4, atol=1e-4)


def test_a_forward_that_failed_is_taken_back() -> None:
    model = tiny("gemma3")
    with on_pages(model), torch.no_grad():
        cache = PagedCache(model)
        kept = cache_argument(model, cache)
        model(torch.tensor(prompts_of((9,))), **kept)
        broken = model.model.layers[1].self_attn.o_proj
        handle = broken.register_forward_hook(lambda *_: (_ for _ in ()).throw(ZeroDivisionError))
        with pytest.raises(ZeroDivisionError):
            model(torch.tensor([[5, 6]]), **kept)
        handle.remove()
        handle = model.model.layers[0].self_attn.o_proj.register_forward_hook(
            lambda *_: (_ for _ in ()).throw(ZeroDivisionError)
        )
        cache.crop(-2)
        with pytest.raises(ZeroDivisionError):
            model(torch.tensor([[5, 6]]), **kept)
        handle.remove()
        with pytest.raises(RuntimeError, match="a forward did not finish"):
            model(torch.tensor([[5, 6]]), **kept)
        cache.crop(-2)
        cache.check()
        logits = model(torch.tensor([[5, 6]]), **kept).logits[0, -1]
    with torch.no_grad():
        alone = model(torch.tensor([prompts_of((9,))[0] + [5, 6]])).logits[0, -1]
    torch.testing.assert_close(logits, alone, rtol=1e-4, atol=1e-4)


def test_crop_under_a_window_needs_a_record() -> None:
    model = tiny("mistral")
    with on_pages(model, block_size=4), torch.no_grad():
        cache = PagedCache(model)
        kept = cache_argument(model, cache)
        model(torch.tensor(prompts_of((40,))), **kept)
        model(torch.tensor([[5]]), **kept)
        with pytest.raises(UnsupportedError, match="activate_past_recording"):
            cache.crop(-8)
        with pytest.raises(ArgumentError, match="minus the number"):
            cache.crop(3)
