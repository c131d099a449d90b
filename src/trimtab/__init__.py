"""Adaptive speculative decoding: verify only the draft tokens that pay for themselves."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trimtab.engine.sampling_params import SamplingParams
    from trimtab.llm import LLM

__version__ = "0.1.0"
__all__ = ["LLM", "SamplingParams", "__version__"]


def __getattr__(name: str) -> Any:
    """Import torch only when something that needs it is asked for: the command line's help stays fast."""
    if name == "LLM":
        from trimtab.llm import LLM

        return LLM
    if name == "SamplingParams":
        from trimtab.engine.sampling_params import SamplingParams

        return SamplingParams
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
