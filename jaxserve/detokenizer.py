"""Text out of tokens as they come: never half a character, never a swallowed tail, never the start of a stop string."""

import codecs
from collections.abc import Sequence

from jaxserve.tokenizer import Tokenizer

_REPLACEMENT = "\ufffd"
_PROMPT_TAIL = 8  # tokens of the prompt that may hold the start of a character, or context for a decoder


class IncrementalDetokenizer:
    """Turns one completion's tokens into text, chunk by chunk.

    All chunks and the flush together are the text that the completion adds to its prompt. That is ``tokenizer.decode``
    of the tokens, with two differences where there is a prompt: a SentencePiece vocabulary keeps the first space, and a
    character begun by the prompt's last token is completed.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_ids: Sequence[int] = (),
        skip_special_tokens: bool = True,
        keep_special_ids: Sequence[int] = (),
    ):
        """``keep_special_ids`` are not skipped with the other special tokens."""
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._dropped: frozenset[int] = frozenset()
        if skip_special_tokens and keep_special_ids:
            self._skip, self._dropped = False, tokenizer.special_ids.difference(keep_special_ids)
        if tokenizer.kind == "other":
            self._window: list[int] = list(prompt_ids[-_PROMPT_TAIL:])
            self._read = len(self._window)
            return
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._strip = tokenizer.strips_first_space and not len(prompt_ids)
        tail = tokenizer.join_bytes(prompt_ids[-_PROMPT_TAIL:], skip_special_tokens) if len(prompt_ids) else b""
        self._begun = _open_character(tail)

    def push(self, ids: Sequence[int]) -> str:
        """The text that ``ids`` complete. Bytes of an unfinished character wait for the next call."""
        if self._dropped:
            ids = [i for i in ids if i not in self._dropped]
        if self._tokenizer.kind == "other":
            return self._push_window(ids)
        data = self._tokenizer.join_bytes(ids, self._skip)
        if self._begun and data:
            data = self._finish_begun(data)
        text = self._utf8.decode(data)
        if self._strip and text:
            self._strip = False
            return text[1:] if text[0] == " " else text
        return text

    def flush(self) -> str:
        """The tail: an unfinished character as U+FFFD. Call once, after the last ``push``."""
        if self._tokenizer.kind == "other":
            return self._flush_window()
        return self._utf8.decode(b"", final=True)

    def _finish_begun(self, data: bytes) -> bytes:
        """Put the prompt's open character before the first bytes, unless they do not continue it."""
        begun, self._begun = self._begun, b""
        try:
            codecs.getincrementaldecoder("utf-8")().decode(begun + data[:1])
        except UnicodeDecodeError:
            return data
        return begun + data

    # Decoders that only the library knows: decode a short window with and without the new tokens, emit the difference.

    def _push_window(self, ids: Sequence[int]) -> str:
        self._window.extend(ids)
        before, after = self._window_texts()
        if len(after) <= len(before) or after.endswith(_REPLACEMENT):
            return ""
        self._window = self._window[self._read :]
        self._read = len(self._window)
        return after[len(before) :]

    def _flush_window(self) -> str:
        before, after = self._window_texts()
        self._read = len(self._window)
        return after[len(before) :]

    def _window_texts(self) -> tuple[str, str]:
        decode, skip = self._tokenizer.decode, self._skip
        return decode(self._window[: self._read], skip), decode(self._window, skip)


def _open_character(data: bytes) -> bytes:
    """The bytes at the end of ``data`` that begin a character and do not complete it."""
    for length in range(1, min(3, len(data)) + 1):
        tail = data[-length:]
        if tail[0] >= 0xC0:
            try:
                return tail if codecs.getincrementaldecoder("utf-8")().decode(tail) == "" else b""
            except UnicodeDecodeError:
                return b""
        if tail[0] < 0x80:
            return b""
    return b""


class StopMatcher:
    """Finds stop strings in text that comes in chunks, and holds back whatever may still become one.

    The stop string that is complete first wins (of those complete at the same character, the longest), so the outcome
    does not depend on where the chunks are cut.
    """

    def __init__(self, stop: Sequence[str], include: bool):
        """``include`` keeps the stop string in the text."""
        if any(not s for s in stop):
            raise ValueError("a stop string must not be empty")
        self._stop = tuple(stop)
        self._include = include
        self._held = ""
        self._done = False

    def push(self, text: str) -> tuple[str, str | None]:
        """(text that may be emitted now, the stop string that fired or None). After a stop nothing more comes out."""
        if not self._stop:
            return text, None
        if self._done:
            return "", None
        text = self._held + text
        found = [(at + len(s), at, s) for s in self._stop if (at := text.find(s)) >= 0]
        if found:
            end, start, stop = min(found)
            self._done, self._held = True, ""
            return text[: end if self._include else start], stop
        cut = min(_begins_at(text, s) for s in self._stop)
        self._held = text[cut:]
        return text[:cut], None

    def flush(self) -> str:
        """What was held back, when the text ends without a stop string."""
        held, self._held = self._held, ""
        return held


def _begins_at(text: str, stop: str) -> int:
    """Where in ``text`` the longest suffix begins that is a beginning of ``stop``; ``len(text)`` where none does."""
    at = text.find(stop[0], max(0, len(text) - len(stop) + 1))
    while at >= 0:
        if stop.startswith(text[at:]):
            return at
        at = text.find(stop[0], at + 1)
    return len(text)
