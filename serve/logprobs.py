"""The three shapes in which log-probabilities leave: completions', chat's, and ``prompt_logprobs``."""

from collections.abc import Iterable, Sequence
from typing import Any

from jaxserve.request import MAX_LOGPROBS, TokenLogprob
from serve.state import State

LOWEST = -9999.0
"""Stands for minus infinity, which JSON lacks."""


def _finite(logprob: float) -> float:
    return logprob if logprob > LOWEST else LOWEST


def _label(text: str, raw: bytes) -> str:
    r"""A token as a string; one that is no whole characters as ``bytes:\xe2\x80``, so that two such stay apart."""
    try:
        raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
    return text


class CompletionLogprobs:
    """Builds the ``logprobs`` objects of one completion, whose ``text_offset`` runs on from piece to piece."""

    def __init__(self, state: State):
        self._state, self._offset = state, 0

    def _name(self, token: int) -> str:
        return _label(*self._state.token_text(token))

    def build(self, tokens: Iterable[tuple[int, TokenLogprob | None]], most: int) -> dict[str, list[Any]]:
        """The object for (token id, its log-probabilities or None for a first prompt token); ``most`` alternatives."""
        found: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for token, entry in tokens:
            text = self._state.token_text(token)[0]
            found["tokens"].append(self._name(token))
            found["text_offset"].append(self._offset)
            self._offset += len(text)
            if entry is None:
                found["token_logprobs"].append(None)
                found["top_logprobs"].append(None)
                continue
            found["token_logprobs"].append(_finite(entry.logprob))
            top = {self._name(other): _finite(logprob) for other, logprob in entry.top[:most]}
            found["top_logprobs"].append({self._name(token): _finite(entry.logprob)} | top)
        return found


def chat_logprobs(entries: Sequence[TokenLogprob], most: int, state: State) -> dict[str, Any]:
    """``{"content": [{token, logprob, bytes, top_logprobs}]}``."""

    def one(token: int, logprob: float) -> dict[str, Any]:
        text, raw = state.token_text(token)
        return {"token": text, "logprob": _finite(logprob), "bytes": list(raw)}

    return {
        "content": [
            one(entry.token_id, entry.logprob) | {"top_logprobs": [one(*pair) for pair in entry.top[:most]]}
            for entry in entries
        ]
    }


def prompt_logprobs(
    entries: Sequence[TokenLogprob | None], state: State, most: int = MAX_LOGPROBS
) -> list[dict[str, Any] | None]:
    """For each prompt token but the first, ``{id: {logprob, rank, decoded_token}}`` of itself and ``most`` others."""

    def one(token: int, logprob: float, rank: int) -> dict[str, Any]:
        return {"logprob": _finite(logprob), "rank": rank, "decoded_token": state.token_text(token)[0]}

    found: list[dict[str, Any] | None] = []
    for entry in entries:
        if entry is None:
            found.append(None)
            continue
        item = {str(entry.token_id): one(entry.token_id, entry.logprob, entry.rank)}
        for rank, (token, logprob) in enumerate(entry.top[:most], 1):
            item.setdefault(str(token), one(token, logprob, rank))
        found.append(item)
    return found
