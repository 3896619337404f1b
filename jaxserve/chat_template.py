"""Chat messages to prompt text through the model's own jinja2 template, as transformers renders it, in a sandbox."""

import datetime
import json
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment


class ChatTemplateError(ValueError):
    """The template is absent, broken, or refuses these messages."""


class _Generation(Extension):
    """``{% generation %}`` marks what the assistant said, for training; here its body is rendered as it stands."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

    def parse(self, parser: Any) -> Any:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.datetime.now().strftime(pattern)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # jinja2's own filter escapes for HTML; models were trained on plain JSON.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


class ChatTemplate:
    """A compiled template.

    Raises:
        ChatTemplateError: the source does not compile.
    """

    def __init__(self, source: str):
        self.source = source
        try:
            self._template = _environment().from_string(source)
        except (jinja2.TemplateError, RecursionError) as error:
            raise ChatTemplateError(f"the chat template does not compile: {error}") from error

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **variables: Any,
    ) -> str:
        """The prompt for ``messages``.

        ``add_generation_prompt`` opens the assistant's turn. ``continue_final_message`` instead ends the prompt where
        the last message's content ends, for the model to go on with it. ``variables`` are seen by the template.

        Raises:
            ChatTemplateError: the template fails or refuses, or the flags do not fit the messages.
        """
        if continue_final_message and add_generation_prompt:
            raise ChatTemplateError("continue_final_message and add_generation_prompt exclude each other")
        if continue_final_message and not messages:
            raise ChatTemplateError("continue_final_message needs a message to continue")
        try:
            text = self._template.render(
                messages=messages, tools=tools, add_generation_prompt=add_generation_prompt, **variables
            )
        except Exception as error:  # a template can raise anything: it is a program that came with the model or request
            raise ChatTemplateError(f"the chat template failed: {error or type(error).__name__}") from error
        return _cut_after_final_message(text, messages[-1]) if continue_final_message else text


def _cut_after_final_message(text: str, message: Mapping[str, Any]) -> str:
    content = message.get("content")
    if isinstance(content, Sequence) and not isinstance(content, str):
        blocks = [part["text"] for part in content if isinstance(part, Mapping) and isinstance(part.get("text"), str)]
        content = blocks[-1] if blocks else None
    if not isinstance(content, str) or not content.strip():
        raise ChatTemplateError("continue_final_message needs text in the last message")
    bare = content.strip()
    start = text.rfind(bare)
    if start < 0:
        raise ChatTemplateError("continue_final_message: the chat template changes the last message, so none can go on")
    # Templates that strip the content lose its trailing space; those that keep it must keep it here too.
    full = content.lstrip()
    return text[: start + (len(full) if text.startswith(full, start) else len(bare))]
