"""The command line over a tiny model on disk: what goes where, and what a mistake costs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")

pytest.importorskip("typer", reason="the command line is an extra: pip install 'pagetile[cli]'")
pytest.importorskip("transformers", reason="the engine drives Transformers models: pip install 'pagetile[hf]'")

import torch
from typer.testing import CliRunner

from pagetile.cli.app import app
from pagetile.cli.report import saved, size

WORDS = [*"abcdefghij", "the", "cat", "sat", "on", "mat", "why", "is", "sky", "blue", "<s>", "</s>", "<unk>"]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    """A Llama of two layers with a tokenizer of words, and a chat template."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("tiny")
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>", eos_token="</s>", bos_token="<s>")
    tokenizer.chat_template = "{% for m in messages %}the {{ m['content'] }} {% endfor %}"
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(WORDS),
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
        eos_token_id=None,
        bos_token_id=None,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return str(folder)


def pagetile(*arguments: str, stdin: str | None = None):
    return CliRunner().invoke(app, list(arguments), input=stdin)


def answers(result) -> list[list[int]]:
    assert result.exit_code == 0, result.output
    return [r["answers"][0]["token_ids"] for r in json.loads(result.stdout)["results"]]


SMALL = ("--max-tokens", "5", "--num-blocks", "16", "--block-size", "4")


def test_json_is_one_document_and_nothing_else(model: str) -> None:
    result = pagetile("generate", "why is the sky blue", "the cat", "--model", model, "--json", "--n", "2", *SMALL)
    assert result.exit_code == 0, result.output
    assert result.stderr == ""
    document = json.loads(result.stdout)
    assert [r["prompt"] for r in document["results"]] == ["why is the sky blue", "the cat"]
    for entry in document["results"]:
        assert [len(answer["token_ids"]) for answer in entry["answers"]] == [5, 5]
        assert {answer["finish_reason"] for answer in entry["answers"]} == {"length"}
        assert all(isinstance(answer["text"], str) and answer["text"] for answer in entry["answers"])
    stats = document["stats"]
    assert stats["generated_tokens"] == 20
    assert stats["total_blocks"] == 16
    assert 0 < stats["peak_blocks"] <= 16
    assert stats["memory_saved_against_max_length"] > 0.5


def test_plain_answers_go_to_stdout_and_figures_to_stderr(model: str) -> None:
    result = pagetile("generate", "the cat", "--model", model, *SMALL)
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("> the cat\n")
    assert "prefill" not in result.stdout
    for figure in ("prefill", "decode", "blocks", "of 16", "prefix hits", "contiguous buffers of 64", "final length"):
        assert figure in result.stderr


def test_the_same_answers_from_arguments_a_file_and_standard_input(model: str, tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text("why is the sky blue\n\nthe cat\n")
    common = ("--model", model, "--json", *SMALL)
    by_argument = answers(pagetile("generate", "why is the sky blue", "the cat", *common))
    assert answers(pagetile("generate", "--prompts-file", str(file), *common)) == by_argument
    assert answers(pagetile("generate", *common, stdin=file.read_text())) == by_argument
    assert answers(pagetile("generate", "-f", "-", *common, stdin=file.read_text())) == by_argument


def test_chat_is_the_default_when_the_model_has_a_template(model: str) -> None:
    common = ("--model", model, "--json", *SMALL)
    lengths = {}
    for mode in ((), ("--chat",), ("--raw",)):
        result = json.loads(pagetile("generate", "cat sat", *mode, *common).stdout)
        lengths[mode] = result["results"][0]["prompt_tokens"]
    assert lengths == {(): 3, ("--chat",): 3, ("--raw",): 2}


@pytest.mark.parametrize(("kind", "own"), [("fp8_e4m3", False), ("fp8_e5m2", False), ("int8", True)])
def test_a_quantised_cache(kind: str, own: bool, model: str, monkeypatch) -> None:
    from pagetile.engine import Engine

    seen = []
    close = Engine.close
    monkeypatch.setattr(Engine, "close", lambda self: (seen.append(self.cache), close(self))[1])
    found = answers(pagetile("generate", "the cat sat", "--model", model, "--json", "--kv-cache-dtype", kind, *SMALL))
    assert [len(tokens) for tokens in found] == [5]
    assert [(cache.kind, cache.own_scales) for cache in seen] == [(kind, own)]


def test_sampling_options_reach_the_sampler(model: str) -> None:
    common = ("generate", "the cat", "--model", model, "--json", *SMALL)
    warm = ("--temperature", "2", "--seed", "5")
    assert answers(pagetile(*common, *warm)) == answers(pagetile(*common, *warm))
    assert answers(pagetile(*common, *warm)) != answers(pagetile(*common))
    assert answers(pagetile(*common, *warm, "--top-k", "1")) == answers(pagetile(*common))
    assert answers(pagetile(*common, *warm, "--top-p", "0.0001")) == answers(pagetile(*common))
    document = json.loads(pagetile(*common).stdout)["results"][0]["answers"][0]
    stop = document["text"].split()[2]
    stopped = json.loads(pagetile(*common, "--stop", stop).stdout)["results"][0]["answers"][0]
    assert (stopped["finish_reason"], stopped["stop_reason"]) == ("stop", stop)
    assert stop not in stopped["text"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("the cat", "--model", "/nowhere"), "no model folder /nowhere"),
        (("the cat", "--prompts-file", "/nowhere"), "choose one"),
        (("--prompts-file", "/nowhere"), "No such file"),
        (("the cat", "--temperature", "-1"), "temperature is -1"),
        (("the cat", "--top-p", "2"), "top_p is 2"),
        (("the cat", "--num-blocks", "many"), "--num-blocks is 'many'"),
        (("the cat", "--num-blocks", "0"), "num_blocks of group 'full' is 0"),
        (("the cat", "--num-blocks", "2", "--block-size", "1"), "needs 3 blocks of 1"),
        (("the cat", "--dtype", "float8"), "float8"),
        (("the cat", "--kv-cache-dtype", "fp4"), "kv_cache_dtype is 'fp4'; it must be one of auto, fp8"),
        (("the cat", "--kv-cache-dtype", "int8", "--kv-scales", "/nowhere"), "there is no file of scales /nowhere"),
        (("the cat", "--kv-scales", "token_head"), "kv_scales are given, but kv_cache_dtype is 'auto'"),
        (("the cat", "--backend", "nothing"), "nothing"),
        (("the cat", "--max-length", "1000"), "max_length is 1000"),
        ((" ",), "every line is blank"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(arguments: tuple[str, ...], message: str, model: str) -> None:
    named = () if "--model" in arguments else ("--model", model)
    tokens = () if "--block-size" in arguments else ("--num-blocks", "16") if "--num-blocks" not in arguments else ()
    result = pagetile("generate", *arguments, *named, *tokens, "--max-tokens", "1" if "the cat" in arguments else "5")
    assert result.exit_code == 2, result.output
    assert message in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1
    assert result.stdout == ""


def test_without_a_prompt(model: str, monkeypatch) -> None:
    monkeypatch.setattr("pagetile.cli.generate.sys.stdin", type("Terminal", (), {"isatty": lambda _: True})())
    result = pagetile("generate", "--model", model)
    assert result.exit_code == 2
    assert "no prompt" in result.output


def test_panels_grow_on_a_terminal(model: str) -> None:
    """Drives the display of a terminal without one: every answer ends in a panel, under its prompt."""
    import io

    from rich.console import Console

    from pagetile.cli.display import LivePanels
    from pagetile.engine import LLM, SamplingParams

    out, err = (Console(file=io.StringIO(), force_terminal=True, width=80) for _ in range(2))
    prompts = ["the cat", "why is the sky blue"]
    display = LivePanels(prompts, 1, out, err, bar=True)
    with LLM(model, num_blocks=16) as llm, display:
        for number, delta in llm.stream(prompts, SamplingParams(max_tokens=5)):
            display.show(number, delta)
    display.close("done")
    shown = out.file.getvalue()
    assert all(prompt in shown for prompt in prompts)
    assert "cut at max_tokens" in shown
    assert "2/2" in shown
    assert "done" in err.file.getvalue()
    assert all(display.finished(number) for number in range(2))


def test_python_m_pagetile() -> None:
    result = subprocess.run([sys.executable, "-m", "pagetile", "--version"], capture_output=True, text=True, check=True)
    assert result.stdout.startswith("pagetile 0.")


def test_without_typer_the_extra_is_named() -> None:
    code = (
        "import importlib.util as u, sys; real = u.find_spec;"
        "u.find_spec = lambda name, *a: None if name == 'typer' else real(name, *a);"
        "from pagetile.__main__ import main; main()"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 2
    assert result.stderr == "pagetile: the command line needs typer: pip install 'pagetile[cli]'\n"


def test_sizes_and_shares() -> None:
    assert [size(n) for n in (0, 999, 1000, 46080, 3 * 10**9)] == ["0 B", "999 B", "1.0 kB", "46.1 kB", "3.0 GB"]
    assert saved(0.5) == "50.0 % less than"
    assert saved(-0.25) == "25.0 % more than"
