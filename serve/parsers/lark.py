"""Grammars in llguidance's dialect of Lark, put together from pieces."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any


class Lark:
    """Rules that are collected one by one. ``special`` gives the id of a text that is one special token, or None."""

    def __init__(self, special: Callable[[str], int | None], markers: Sequence[str] = ()):
        self.special = special
        self._rules: list[str] = []
        self._split = re.compile("(" + "|".join(map(re.escape, sorted(markers, key=len, reverse=True))) + ")")
        self._markers = frozenset(markers)

    def rule(self, name: str, body: str) -> str:
        self._rules.append(f"{name}: {body}")
        return name.partition("[")[0]

    def text(self, text: str) -> str:
        """An expression for exactly ``text``; markers in it are special tokens where the model has them as such."""
        pieces = self._split.split(text) if self._markers else [text]
        return " ".join(self._piece(piece) for piece in pieces if piece) or '""'

    def _piece(self, piece: str) -> str:
        if piece in self._markers and (token := self.special(piece)) is not None:
            return f"<[{token}]>"
        return json.dumps(piece, ensure_ascii=False)

    def schema(self, schema: Mapping[str, Any] | bool) -> str:
        """An expression for JSON of a schema."""
        return f"%json {json.dumps(schema)}"

    def ending(self, name: str, end: str) -> str:
        """An expression for any text up to the first ``end``, and that."""
        found = self.text(end)
        if end in self._markers and self.special(end) is not None:
            return f"{self.rule(name.upper(), '/(?s:.+)/')}? {found}"
        return self.rule(f"{name}[lazy]", f"/(?s:.*){regex(end)}/")

    def grammar(self, start: str) -> str:
        return "\n".join([f"start: {start}", *self._rules]) + "\n"


def choose(expressions: Sequence[str]) -> str:
    return "(" + " | ".join(expressions) + ")"


def regex(text: str) -> str:
    """``text`` as a piece of a regular expression between slashes."""
    return re.escape(text).replace("/", "\\/").replace("\n", "n")
