"""What a completion's text consists of, and what splits it."""

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Text:
    """What is said to the user."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """What stood between think tags."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallBegin:
    """Tool call ``index`` (from 0) of this completion starts; its name is whole."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class ToolCallArguments:
    """More of the arguments of tool call ``index``; all fragments together parse as a JSON object."""

    index: int
    json: str


type Part = Text | Reasoning | ToolCallBegin | ToolCallArguments


class TurnParser(Protocol):
    """Splits one completion's text into parts as it comes. Whatever arrives, nothing is lost and nothing repeated."""

    def push(self, text: str) -> list[Part]: ...

    def finish(self) -> list[Part]:
        """The text has ended: what was held back."""
        ...


class PlainParser:
    """All is text."""

    def push(self, text: str) -> list[Part]:
        return [Text(text)] if text else []

    def finish(self) -> list[Part]:
        return []
