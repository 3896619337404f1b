"""Text that arrives in pieces, read as if it were whole.

A family's reader is a generator: it asks a ``Source`` for what it expects and waits (``yield from``) while that is not
all there. What has been read but not committed can be given back as plain text, so that nothing is lost where text
only looked like a call. Where the pieces are cut makes no difference to what comes out, all in all.
"""

import json
import re
from collections.abc import Callable, Generator

from serve.parsers.parts import Part, Text

type Wait[T] = Generator[None, None, T]

MAX_HELD_SPACE = 64
"""White space that is held back because a marker may follow; more is no decoration and goes out."""
MAX_STRING = 4096
"""Longest string that is read as a name or key."""

_SPACE = " \t\r\n"
_ENDS = re.compile(r"[,\]}\s]")
_IN_STRING = re.compile(r'["\\]')
_OUTSIDE = re.compile(r'["{}\[\]]')


class Source:
    """The text of one completion. ``parts`` collects what has become of it."""

    def __init__(self) -> None:
        self.parts: list[Part] = []
        self.ends_in_space = False
        """White space at the end is decoration, not text."""
        self._text = ""
        self._at = 0
        self._behind_marker = 0
        self.ended = False
        """No more text will come. Whoever reads has then waited for it in vain."""

    def feed(self, text: str) -> None:
        self._text += text

    def end(self) -> None:
        self.ended = True

    # What was read.

    def emit(self, part: Part) -> None:
        self.parts.append(part)

    def commit(self) -> None:
        """What was read up to here is dealt with."""
        self._text, self._at, self._behind_marker = self._text[self._at :], 0, 0

    def give_up(self) -> None:
        """The marker that ``text_until`` found since the last commit is text after all; read again what follows it."""
        self._at = self._behind_marker
        if self._at:
            self.emit(Text(self._text[: self._at]))
        self.commit()

    # Reading.

    def _more(self) -> Wait[bool]:
        """Wait for more text; False at its end."""
        if self.ended:
            return False
        yield
        return True

    def peek(self) -> Wait[str]:
        """The next character; empty at the end."""
        while self._at >= len(self._text):
            if not (yield from self._more()):
                return ""
        return self._text[self._at]

    def back(self, count: int) -> None:
        """Unread ``count`` characters."""
        self._at -= count

    def spaces(self) -> Wait[None]:
        while (char := (yield from self.peek())) and char in _SPACE:
            self._at += 1

    def expect(self, *literals: str) -> Wait[str]:
        """Read the first of ``literals`` that comes next, and return it; empty, and nothing read, where none does."""
        for literal in literals:
            while True:
                seen = self._text[self._at : self._at + len(literal)]
                if seen == literal:
                    self._at += len(literal)
                    return literal
                if not literal.startswith(seen) or not (yield from self._more()):
                    break
        return ""

    def until(self, *markers: str, most: int = MAX_STRING) -> Wait[tuple[str, str]]:
        """(text, the marker behind it), both read; ("", "") where none comes within ``most`` characters."""
        start = self._at
        while True:
            found = [(at, marker) for marker in markers if (at := self._text.find(marker, start)) >= 0]
            if found:
                at, marker = min(found, key=lambda item: (item[0], -len(item[1])))
                self._at = at + len(marker)
                return (self._text[start:at], marker) if at - start <= most else ("", "")
            if len(self._text) - start > most or not (yield from self._more()):
                return "", ""

    def text_until(
        self,
        *markers: str,
        write: Callable[[str], None] | None = None,
        trim: str = _SPACE,
        most: int = MAX_HELD_SPACE,
        cut_short: bool = False,
    ) -> Wait[str]:
        """Pass everything since the last commit on until a marker comes, which is returned, and empty at the end.

        The marker and the characters of ``trim`` before it (at most ``most``) are read and not committed. Where the
        text ends in what may be the beginning of that, it is passed on too, unless it is ``cut_short`` then.
        """
        write = write or (lambda text: self.emit(Text(text)))
        longest = max(map(len, markers), default=0)
        self._at = searched = 0
        while True:
            found = [(at, marker) for marker in markers if (at := self._text.find(marker, searched)) >= 0]
            if found:
                at, marker = min(found, key=lambda item: (item[0], -len(item[1])))
                self._pass(_before(self._text, at, trim, most), write)
                self._at = self._behind_marker = self._text.index(marker) + len(marker)
                return marker
            cut = min((_begins_at(self._text, marker) for marker in markers), default=len(self._text))
            self._pass(_before(self._text, cut, trim, most), write)
            searched = max(0, len(self._text) - longest)
            if not (yield from self._more()):
                if cut_short or (self.ends_in_space and not self._text.strip()):
                    self._at = len(self._text)
                    self.commit()
                self._pass(len(self._text), write)
                return ""

    def _pass(self, end: int, write: Callable[[str], None]) -> None:
        if end > 0:
            write(self._text[:end])
        self._at = end
        self.commit()

    def value(self, write: Callable[[str], None] | None = None, most: int | None = None) -> Wait[str | None]:
        """Read one JSON value and return it; None where the text ends within it or it is longer than ``most``.

        With ``write`` it is passed on and committed as it comes, and what is returned is empty.
        """
        start, depth, quoted = self._at, 0, False
        plain = (yield from self.peek()) not in ('"', "{", "[")
        while True:
            text, at, done = self._text, self._at, False
            while at < len(text) and not done:
                found = (_IN_STRING if quoted else _ENDS if plain else _OUTSIDE).search(text, at)
                if found is None:
                    at = len(text)
                elif quoted and found.group() == "\\":
                    if found.end() == len(text):
                        break  # what it escapes has not come yet
                    at = found.end() + 1
                elif plain:
                    at, done = found.start(), True
                else:
                    at, sign = found.end(), found.group()
                    if sign == '"':
                        quoted = not quoted
                    else:
                        depth += 1 if sign in "{[" else -1
                    done = depth <= 0 and not quoted
            self._at = at
            if write is not None and at > start:
                write(text[start:at])
                self.commit()
                start = 0
            if most is not None and self._at - start > most:
                return None
            if done:
                return self._text[start : self._at]
            seen = len(self._text)
            while True:
                if not (yield from self._more()):
                    return self._text[start : self._at] if plain and self._at > start else None
                if len(self._text) > seen:
                    break

    def string(self) -> Wait[str | None]:
        """Read a JSON string; None where none comes."""
        if (yield from self.peek()) != '"':
            return None
        raw = yield from self.value(most=MAX_STRING)
        try:
            found = None if raw is None else json.loads(raw, strict=False)
        except ValueError:
            return None
        return found if isinstance(found, str) else None


class Reader:
    """A ``TurnParser`` around a generator that reads a source."""

    def __init__(self, source: Source, run: Wait[None]):
        self._source, self._run, self._done = source, run, False
        self._resume()

    def push(self, text: str) -> list[Part]:
        if text:
            self._source.feed(text)
            self._resume()
        return self._take()

    def finish(self) -> list[Part]:
        self._source.end()
        while not self._done:
            self._resume()
        return self._take()

    def _resume(self) -> None:
        try:
            next(self._run)
        except StopIteration:
            self._done = True

    def _take(self) -> list[Part]:
        parts, self._source.parts = self._source.parts, []
        return parts


def _begins_at(text: str, marker: str) -> int:
    """Where in ``text`` the longest suffix begins that is a beginning of ``marker``; ``len(text)`` where none does."""
    at = text.find(marker[0], max(0, len(text) - len(marker) + 1))
    while at >= 0:
        if marker.startswith(text[at:]):
            return at
        at = text.find(marker[0], at + 1)
    return len(text)


def _before(text: str, end: int, trim: str, most: int) -> int:
    """Where the characters of ``trim`` before ``end`` begin, at most ``most`` of them."""
    start = end
    while start > max(0, end - most) and text[start - 1] in trim:
        start -= 1
    return start
