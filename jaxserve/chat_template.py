"""Chat messages to prompt text through the model's own jinja2 template, as transformers renders it, in a sandbox."""

from collections.abc import Mapping, Sequence
from typing import Any


class ChatTemplateError(ValueError):
    """The template is absent, broken, or refuses these messages."""


class ChatTemplate:
    """A compiled template.

    Raises:
        ChatTemplateError: the source does not compile.
    """

    def __init__(self, source: str):
        import jinja2

        from jaxserve.template_environment import compile_template

        self.source = source
        try:
            self._template = compile_template(source)
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
