"""One step: admit, reserve blocks, metadata, model forward, sample; and :class:`LLM`, which repeats it.

Source of the whole: vLLM's engine, in a few small rooms.
"""

from pagetile.engine.calibrate import calibrate
from pagetile.engine.engine import Engine
from pagetile.engine.llm import LLM
from pagetile.engine.loader import ModelNotFoundError, default_model
from pagetile.engine.probe import UnsupportedModelError
from pagetile.engine.request import (
    CompletionOutput,
    Delta,
    RequestMetrics,
    RequestOutput,
    SamplingParams,
    TokenLogprobs,
)
from pagetile.engine.sizing import EngineConfig
from pagetile.engine.stats import EngineStats

__all__ = [
    "LLM",
    "CompletionOutput",
    "Delta",
    "Engine",
    "EngineConfig",
    "EngineStats",
    "ModelNotFoundError",
    "RequestMetrics",
    "RequestOutput",
    "SamplingParams",
    "TokenLogprobs",
    "UnsupportedModelError",
    "calibrate",
    "default_model",
]
