"""Scales for a quantised cache from a run of the model: what its keys and values reach over prompts of your own.

::

    llm = pagetile.LLM(folder)
    calibrate(llm, prompts).scales("fp8_e4m3", "head").save(folder + "/kv_cache_scales.safetensors")
    llm = pagetile.LLM(folder, kv_cache_dtype="fp8_e4m3", kv_scales=folder)
"""

from __future__ import annotations

from collections.abc import Sequence

from pagetile.cache.scales import KVMaxima
from pagetile.contracts.errors import ArgumentError
from pagetile.engine.llm import LLM, Prompt
from pagetile.engine.request import SamplingParams


def calibrate(
    llm: LLM, prompts: Prompt | Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None = None
) -> KVMaxima:
    """Answer prompts, and take the absolute maxima of every key and value that is computed on the way.

    Args:
        llm: best with a cache that is not quantised, since the numbers of later layers depend on earlier ones' caches.
            Its prefix cache is emptied first: tokens that hit it would not be computed.
        prompts, params: see :meth:`pagetile.LLM.generate`.

    Returns:
        Maxima of each layer and KV head; :meth:`KVMaxima.scales` makes scales of them.

    Raises:
        ArgumentError: requests are running, or the prompts are refused.
    """
    engine = llm.engine
    if engine.runner is None or engine.has_unfinished():
        raise ArgumentError("the engine is closed or has unfinished requests; calibrate with an idle one")
    engine.table.reset_prefix_cache()
    maxima = KVMaxima()
    engine.runner.watch = maxima.observe
    try:
        llm.generate(prompts, params)
    finally:
        if engine.runner is not None:
            engine.runner.watch = None
    return maxima
