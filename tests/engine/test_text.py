"""Text as it comes: characters of several tokens, stop strings across tokens, deltas that add up."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import generated, prompts_of, tiny, tokens

from pagetile.contracts.errors import ArgumentError
from pagetile.engine import LLM, SamplingParams
from pagetile.engine.detokenize import TextStream


class Bytes:
    """A tokenizer whose tokens are the bytes of UTF-8; 256 is a special token."""

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        text, run = "", bytearray()
        for token in [*token_ids, None]:
            if token is not None and token < 256:
                run.append(token)
                continue
            text += run.decode("utf-8", errors="replace")
            run.clear()
            text += "<end>" if token == 256 and not skip_special_tokens else ""
        return text


class Letters:
    """A tokenizer in which token i is a character of its own; text is its characters."""

    chat_template = None

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:  # noqa: ARG002 - none of these is special
        return "".join(chr(0x4E00 + token) for token in token_ids)

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": [ord(character) - 0x4E00 for character in text]}


def feed(stream: TextStream, ids: Sequence[int]) -> list[str]:
    """The pieces released token by token, then the rest."""
    pieces = []
    for token in ids:
        if stream.append(token) is not None:
            return [*pieces, stream.release(final=True)]
        pieces.append(stream.release(final=False))
    stream.finish()
    return [*pieces, stream.release(final=True)]


def test_an_incomplete_character_waits() -> None:
    pieces = feed(TextStream(Bytes()), "aé漢😀".encode())
    assert pieces == ["a", "", "é", "", "", "漢", "", "", "", "😀", ""]


@given(st.text(max_size=30))
def test_pieces_add_up_to_the_text(text: str) -> None:
    stream = TextStream(Bytes())
    assert "".join(feed(stream, text.encode())) == text == stream.text


@given(st.binary(max_size=24))
def test_pieces_add_up_even_when_the_bytes_are_no_text(data: bytes) -> None:
    stream = TextStream(Bytes())
    assert "".join(feed(stream, data)) == stream.text


@given(st.text("ab", max_size=30), st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3))
def test_the_text_ends_before_the_first_stop_string(text: str, stops: list[str]) -> None:
    """Nothing of a stop string is ever released, and nothing before it is kept back for good."""
    stream = TextStream(Bytes(), stop=stops)
    pieces = feed(stream, text.encode())
    # The first stop string to be complete ends the text; of several that are, the one that begins first.
    ends = [end for end in range(len(text) + 1) if any(text[:end].endswith(stop) for stop in stops)]
    expected = text
    if ends:
        seen = text[: ends[0]]
        expected = seen[: min(seen.find(stop) for stop in stops if stop in seen)]
    assert "".join(pieces) == expected == stream.text


def test_a_stop_string_across_tokens_and_false_starts() -> None:
    stream = TextStream(Bytes(), stop=["\n\nQ:"])
    pieces = feed(stream, b"one\n\ntwo\n\nQ: three")
    assert "".join(pieces) == "one\n\ntwo"
    assert stream.stopped_by == "\n\nQ:"
    assert pieces[3:5] == ["", ""], "the beginning of a stop string waits"
    assert pieces[5] == "\n\nt"


def test_special_tokens() -> None:
    assert "".join(feed(TextStream(Bytes()), [97, 256, 98])) == "ab"
    assert "".join(feed(TextStream(Bytes(), skip_special_tokens=False), [97, 256, 98])) == "a<end>b"


def test_not_live_decodes_once_at_the_end() -> None:
    stream = TextStream(Bytes(), live=False)
    assert feed(stream, b"abc") == ["", "", "", "abc"]


@pytest.fixture
def llm():
    with LLM(tiny("llama"), tokenizer=Letters(), num_blocks=64, max_batch_tokens=32) as model:
        yield model
        model.engine.table.check()
        assert not model.engine.table.sequences


def text_of(ids: Sequence[int]) -> str:
    return Letters().decode(ids, skip_special_tokens=True)


PROMPTS = prompts_of((4, 10, 23))


def test_text_prompts_and_text_answers(llm: LLM) -> None:
    outputs = llm.generate([text_of(prompt) for prompt in PROMPTS], SamplingParams(max_tokens=12))
    assert [o.prompt_token_ids for o in outputs] == PROMPTS
    assert [o.outputs[0].text for o in outputs] == [text_of(ids) for ids in generated("llama", PROMPTS)]


def test_streaming(llm: LLM) -> None:
    expected = generated("llama", PROMPTS)
    texts, ids, order = ["", "", ""], [[], [], []], []
    for number, delta in llm.stream(PROMPTS, SamplingParams(max_tokens=12)):
        texts[number] += delta.text
        ids[number] += delta.token_ids
        order.append(number)
        if delta.finish_reason:
            assert delta.output is not None
            assert delta.output.outputs[0].text == texts[number]
    assert ids == expected
    assert texts == [text_of(answer) for answer in expected]
    assert order != sorted(order), "the answers come side by side, not one after another"


def test_a_callback_sees_the_same(llm: LLM) -> None:
    seen: dict[str, str] = {}
    outputs = llm.generate(
        PROMPTS,
        SamplingParams(max_tokens=12),
        on_delta=lambda delta: seen.update({delta.request_id: seen.get(delta.request_id, "") + delta.text}),
    )
    assert [seen[output.request_id] for output in outputs] == [output.outputs[0].text for output in outputs]


def test_leaving_a_stream_early_gives_everything_back(llm: LLM) -> None:
    for _, delta in llm.stream(PROMPTS, SamplingParams(max_tokens=12)):
        if delta.text:
            break
    assert not llm.engine.has_unfinished()
    assert sum(pool.num_live for pool in llm.engine.table.pools.values()) == 0


def test_a_callback_may_abort(llm: LLM) -> None:
    expected = generated("llama", PROMPTS)
    victim: list[str] = []

    def abort_one(delta) -> None:
        if not victim:
            victim.append(delta.request_id)
        if delta.request_id == victim[0]:
            count.append(1)
            if len(count) == 3:
                llm.engine.abort(delta.request_id)

    count: list[int] = []
    outputs = llm.generate(PROMPTS, SamplingParams(max_tokens=12), on_delta=abort_one)
    assert [o.outputs[0].finish_reason for o in outputs] == ["abort", "length", "length"]
    assert outputs[0].outputs[0].token_ids == expected[0][: len(outputs[0].outputs[0].token_ids)]
    assert len(outputs[0].outputs[0].token_ids) >= 3
    assert tokens(outputs)[1:] == expected[1:]


def test_stop_strings_end_an_answer(llm: LLM) -> None:
    answer = generated("llama", PROMPTS)[2]
    stop = text_of(answer[3:6])
    [output] = llm.generate([PROMPTS[2]], SamplingParams(max_tokens=12, stop=stop))
    completion = output.outputs[0]
    assert completion.token_ids == answer[:6]
    assert completion.text == text_of(answer[:3])
    assert (completion.finish_reason, completion.stop_reason) == ("stop", stop)
    streamed = "".join(d.text for _, d in llm.stream([PROMPTS[2]], SamplingParams(max_tokens=12, stop=stop)))
    assert streamed == completion.text


def test_min_tokens_holds_stop_strings_off(llm: LLM) -> None:
    answer = generated("llama", PROMPTS)[2]
    params = SamplingParams(max_tokens=12, min_tokens=8, stop=text_of(answer[3:6]))
    [output] = llm.generate([PROMPTS[2]], params)
    assert output.outputs[0].token_ids == answer


def test_stop_strings_need_a_tokenizer() -> None:
    with (
        LLM(tiny("llama"), num_blocks=16) as model,
        pytest.raises(ArgumentError, match=r"no tokenizer.*stop_token_ids"),
    ):
        model.generate([PROMPTS[0]], SamplingParams(stop="x"))
