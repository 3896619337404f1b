"""jaxserve: an LLM inference engine in JAX/XLA.

The whole public face: ``generate`` for scripts, ``LLM`` for programs and servers, and the types they speak.
"""

from typing import TYPE_CHECKING, Any

from jaxserve.collector import paused
from jaxserve.config import ConfigError, EngineConfig
from jaxserve.request import (
    CompletionOutput,
    Delta,
    EngineDeadError,
    QueueFullError,
    RequestError,
    RequestOutput,
    SamplingParams,
    TokenLogprob,
)

if TYPE_CHECKING:
    from jaxserve.llm import LLM, generate

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "CompletionOutput",
    "ConfigError",
    "Delta",
    "EngineConfig",
    "EngineDeadError",
    "QueueFullError",
    "RequestError",
    "RequestOutput",
    "SamplingParams",
    "TokenLogprob",
    "generate",
]


def __getattr__(name: str) -> Any:
    """``LLM`` and ``generate`` import jax, which takes most of a second: only where they are used."""
    if name in ("LLM", "generate"):
        with paused():
            from jaxserve import llm

        return getattr(llm, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
