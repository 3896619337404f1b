"""Reasoning between tags, before the answer."""

from dataclasses import dataclass

from serve.parsers.parts import PlainParser, Reasoning, TurnParser
from serve.parsers.source import Reader, Source, Wait


@dataclass(frozen=True)
class Thinking:
    """How a family marks what it thinks."""

    name: str
    opening: str
    closing: str
    always: bool = False
    """The model thinks from the start, even where nobody has written ``opening``."""

    def opened_by(self, prompt: str) -> bool:
        """The prompt ends within the reasoning."""
        return self.always or prompt.rstrip().endswith(self.opening)

    def settled_by(self, prompt: str) -> bool:
        """The prompt itself has closed the reasoning, so that none follows."""
        return prompt.rstrip().endswith(self.closing)


THINK = Thinking("think", "<think>", "</think>")
DEEPSEEK_R1 = Thinking("deepseek_r1", "<think>", "</think>", always=True)
MISTRAL = Thinking("mistral", "[THINK]", "[/THINK]")


class ThinkingParser(Reader):
    """A ``TurnParser`` that takes the reasoning off and leaves the rest to ``then``.

    The white space around the reasoning, and the line breaks before the answer, go with the tags.
    """

    def __init__(self, thinking: Thinking, *, opened: bool, then: TurnParser | None = None):
        self.thinking = opened
        """The next token belongs to the reasoning, so far as is known."""
        source = Source()
        super().__init__(source, self._read(source, thinking, then or PlainParser()))

    def _read(self, source: Source, thinking: Thinking, then: TurnParser) -> Wait[None]:
        if not self.thinking:
            yield from source.spaces()
            self.thinking = bool((yield from source.expect(thinking.opening)))
        if self.thinking:
            yield from source.spaces()
            source.commit()
            found = yield from source.text_until(thinking.closing, write=lambda text: source.emit(Reasoning(text)))
            source.commit()
            self.thinking = not found
            while (yield from source.expect("\n")):
                source.commit()
        yield from source.text_until(write=lambda text: source.parts.extend(then.push(text)), trim="")
        source.parts.extend(then.finish())
