"""What answers say of their own mark."""

import dataclasses
from typing import Any

from jaxserve.request import SamplingParams, Watermark
from serve.state import State


def announced(state: State, params: SamplingParams) -> str:
    """What the header says before anything is generated: the status, or nothing where the engine has no mark."""
    config = state.llm.config.watermark
    if config is None:
        return ""
    try:
        status = config.decide(params.watermarking, params.greedy, params.choiceless).status
    except ValueError:  # the engine will refuse it
        return ""
    return "skipped" if status == "watermarked" and params.max_tokens == 0 else status


def mark_fields(mark: Watermark | None) -> dict[str, Any]:
    """What a choice says of its mark; nothing where the engine has none."""
    return {} if mark is None else {"watermark": dataclasses.asdict(mark)}
