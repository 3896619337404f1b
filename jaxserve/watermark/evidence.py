"""From token ids to evidence: which tokens are scored, and -log(1 - u) of each under a candidate key."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from jaxserve.watermark.config import MAX_CONTEXT_WIDTH, WatermarkConfig, WatermarkKey, shown
from jaxserve.watermark.prf import PHILOX, check_key, check_prf, dual_keys, stream_key, uniforms
from jaxserve.watermark.tails import Floats

BLOCK = 32_768
"""Tokens worked on at a time, so that what is in between stays in the processor's cache."""
ID_END = 2**31

type Ids = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class Scheme:
    """How a text may have been marked. Raises ValueError that names the field, and never says the key.

    ``name`` is what a detection calls the key.
    """

    key: int = field(repr=False)
    context_width: int = 4
    alpha: float | None = None
    """Share of tokens that a dual key's second half chooses; None for a single key."""
    prf: str = PHILOX
    name: str = ""

    def __post_init__(self) -> None:
        check_prf(self.prf)
        check_key(self.prf, self.key)
        width = self.context_width
        if isinstance(width, bool) or not isinstance(width, int) or not 1 <= width <= MAX_CONTEXT_WIDTH:
            raise ValueError(f"context_width must be an integer from 1 to {MAX_CONTEXT_WIDTH}, got {width!r:.80}")
        alpha = self.alpha
        if alpha is None:
            return
        if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not 0 < alpha < 1:
            raise ValueError(f"alpha must be a number between 0 and 1, or None for a single key, got {alpha!r:.80}")

    def keys(self, stream: int) -> tuple[int, ...]:
        """The keys that chose the tokens of completion ``stream``: two where the key is dual."""
        key = stream_key(self.key, stream)
        return (key,) if self.alpha is None else dual_keys(key)

    @classmethod
    def of(cls, config: WatermarkConfig, key_ids: Sequence[str] | None = None) -> list[Self]:
        """One scheme for each of a configuration's keys, or of those named. Raises ValueError for an unknown id."""
        known = {key.id: key for key in config.keys}
        chosen = list(dict.fromkeys(known if key_ids is None else key_ids))
        for place, name in enumerate(chosen):
            if name not in known:
                raise ValueError(f"keys[{place}]: no key has the id {shown(name)}; known: {', '.join(known)}")
        return [cls._of(known[name]) for name in chosen]

    @classmethod
    def _of(cls, key: WatermarkKey) -> Self:
        width, prf = key.context_width, key.prf
        assert width is not None, "a configuration fills it in"
        assert prf is not None, "a configuration fills it in"
        return cls(key=key.secret, name=key.id, context_width=width, alpha=key.alpha, prf=prf)


def as_ids(value: Any, name: str = "token_ids") -> Ids:
    """Token ids as an array. Raises ValueError that names the place of what is none."""
    if isinstance(value, np.ndarray):
        if value.ndim != 1 or value.dtype.kind not in "iu":
            raise ValueError(f"{name} must be a flat array of integers, got {value.dtype} {list(value.shape)}")
        found = value.astype(np.int64)
    else:
        if isinstance(value, str | bytes) or not isinstance(value, Sequence):
            raise ValueError(f"{name} must be a list of token ids, got {type(value).__name__}")
        for place, item in enumerate(value):
            if isinstance(item, bool) or not isinstance(item, int | np.integer):
                raise ValueError(f"{name}[{place}] must be a token id, got {type(item).__name__}")
            if not 0 <= item < ID_END:
                raise ValueError(f"{name}[{place}] is out of range: token ids are from 0 to {ID_END - 1}")
        found = np.array(value, np.int64)
    outside = np.flatnonzero((found < 0) | (found >= ID_END))
    if len(outside):
        raise ValueError(f"{name}[{outside[0]}] is out of range: token ids are from 0 to {ID_END - 1}")
    return found


@dataclass(frozen=True)
class Windows:
    """Some documents' tokens that are scored, one after the other, each with the W tokens before it (-1 where there
    was none yet)."""

    documents: slice
    """Which of all documents."""
    contexts: NDArray[np.uint32]
    """``[N, W]``"""
    tokens: NDArray[np.uint32]
    """``[N]``"""
    document: NDArray[np.int64]
    """``[N]``, counted from the first here."""
    position: NDArray[np.int64]
    """``[N]``, in its document."""

    def evidence(self, scheme: Scheme, stream: int) -> Floats:
        """``[N, K]``: -log(1 - u) under each of the scheme's keys."""
        columns = [uniforms(scheme.prf, key, self.contexts, self.tokens) for key in scheme.keys(stream)]
        return -np.log1p(-np.stack(columns, axis=1))


def windows(documents: Sequence[Ids], width: int, *, dedup: bool) -> Iterator[Windows]:
    """The documents in blocks. With ``dedup`` a token counts only where its context is new in its document: elsewhere
    the sampler used other noise, and without a mark equal contexts would count one chance several times."""
    first = 0
    while first < len(documents):
        last, size = first + 1, len(documents[first])
        while last < len(documents) and size + len(documents[last]) <= BLOCK:
            size += len(documents[last])
            last += 1
        yield _block(documents, slice(first, last), width, dedup)
        first = last


def _block(documents: Sequence[Ids], part: slice, width: int, dedup: bool) -> Windows:
    chosen = documents[part]
    before = np.full(width, -1, np.int64)
    padded = np.concatenate([piece for ids in chosen for piece in (before, ids)])
    sizes = np.array([len(ids) for ids in chosen])
    document = np.repeat(np.arange(len(chosen)), sizes)
    position = np.arange(sizes.sum()) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    ends = np.arange(len(document)) + width * (document + 1)  # where each token lies in ``padded``
    contexts = padded[ends[:, None] - np.arange(width, 0, -1)].astype(np.uint32)
    tokens = padded[ends].astype(np.uint32)
    if dedup:
        kept = _first_of_each(document, contexts)
        contexts, tokens, document, position = contexts[kept], tokens[kept], document[kept], position[kept]
    return Windows(part, contexts, tokens, document, position)


def _first_of_each(document: NDArray[np.int64], contexts: NDArray[np.uint32]) -> NDArray[np.int64]:
    """Where each context of each document comes first, in order. Exact: pairs become ranks, a column at a time."""
    rank: Any = document
    first = np.zeros(0, np.int64)
    for column in contexts.T:
        pair = rank.astype(np.uint64) << np.uint64(32) | column
        _, first, rank = np.unique(pair, return_index=True, return_inverse=True)
    return np.sort(first)
