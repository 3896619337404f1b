"""Which families a model speaks: by the operator's word, else by its chat template."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from serve.parsers.deepseek import CALLS, DEEPSEEK_V3, DEEPSEEK_V31
from serve.parsers.family import Family
from serve.parsers.generic import GENERIC
from serve.parsers.glm import GLM
from serve.parsers.hermes import HERMES
from serve.parsers.llama3 import LLAMA3
from serve.parsers.mistral import MISTRAL, MISTRAL_ARRAY
from serve.parsers.qwen3_coder import QWEN3_CODER
from serve.parsers.reasoning import DEEPSEEK_R1, THINK, Thinking
from serve.parsers.reasoning import MISTRAL as MISTRAL_THINKING

_FAMILIES = (HERMES, QWEN3_CODER, LLAMA3, MISTRAL, MISTRAL_ARRAY, DEEPSEEK_V3, DEEPSEEK_V31, GLM, GENERIC)
FAMILIES = {family.name: family for family in _FAMILIES}
THINKING = {thinking.name: thinking for thinking in (THINK, DEEPSEEK_R1, MISTRAL_THINKING)}


@dataclass(frozen=True)
class Formats:
    """How the served model writes what is not plain text."""

    tools: Family | None
    thinking: Thinking | None
    template: str
    """Source of the template for conversations with tools, to see what variables it knows."""
    special: Callable[[str], int | None]
    """The id of a text that is one special token."""

    def report(self) -> dict[str, str]:
        return {
            "tool_parser": "none" if self.tools is None else self.tools.name,
            "reasoning_parser": "none" if self.thinking is None else self.thinking.name,
        }


def choose_formats(tokenizer: Any, tool_parser: str, reasoning_parser: str) -> Formats:
    """``auto`` goes by the template. ``tokenizer`` may be None. Raises ValueError for names that do not exist."""
    template = "" if tokenizer is None else tokenizer.tool_template or ""

    def special(text: str) -> int | None:
        ids = tokenizer.encode(text, add_special_tokens=False)
        return ids[0] if len(ids) == 1 and ids[0] in tokenizer.special_ids else None

    tools = _pick("tool_parser", tool_parser, FAMILIES, lambda: _tools(template))
    thinking = _pick("reasoning_parser", reasoning_parser, THINKING, lambda: _thinking(template))
    return Formats(tools, thinking, template, special)


def check_names(tool_parser: str, reasoning_parser: str) -> None:
    """Raise ValueError for families that do not exist."""
    _pick("tool_parser", tool_parser, FAMILIES, lambda: None)
    _pick("reasoning_parser", reasoning_parser, THINKING, lambda: None)


def _pick[T](option: str, name: str, known: dict[str, T], find: Callable[[], T | None]) -> T | None:
    if name == "auto":
        return find()
    if name == "none":
        return None
    if name not in known:
        raise ValueError(f"{option} must be auto, none or one of {', '.join(known)}; got {name!r}")
    return known[name]


def _tools(template: str) -> Family | None:
    if not template:
        return None
    if "tools" not in template:
        return GENERIC
    if "<arg_key>" in template:
        return GLM
    if "<function=" in template:
        return QWEN3_CODER
    if CALLS in template:
        return DEEPSEEK_V3 if "```json" in template else DEEPSEEK_V31
    if "[TOOL_CALLS]" in template:
        return MISTRAL if "[ARGS]" in template else MISTRAL_ARRAY
    if "<tool_call>" in template:
        return HERMES
    if "<|python_tag|>" in template or ("<|start_header_id|>" in template and '"parameters"' in template):
        return LLAMA3
    return GENERIC


def _thinking(template: str) -> Thinking | None:
    if "</think>" in template:
        return THINK
    if "[/THINK]" in template:
        return MISTRAL_THINKING
    return None
