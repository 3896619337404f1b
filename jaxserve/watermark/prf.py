"""The keyed pseudorandom functions behind the mark: (key, last W generated tokens, candidate) to a number in (0, 1).

The arithmetic is of 32-bit words and is written once, for numpy's arrays and jax's: bit-equal everywhere. Names are
versioned; what a name stands for never changes. ``docs/watermark.md`` argues what each of them withstands. Imports no
jax.

- ``philox4x32-10-v1``: the peer's, so that detectors read each other's text. Fast, and not cryptographic.
- ``chacha20-threefry-v1``: ChaCha20 with a key of 256 bits turns a context into the key of Threefry, the function of
  ordinary noise, which serves the candidates: as quick as no mark at all, for keys that are to stay secret.
"""

import functools
import hashlib
import re
from collections.abc import Callable
from typing import Any

import numpy as np

from jaxserve.threefry import threefry

PHILOX, CHACHA = "philox4x32-10-v1", "chacha20-threefry-v1"
KEY_BITS = {PHILOX: 64, CHACHA: 256}
"""The functions, and how long their keys are."""
MISSING = np.uint32(0xFFFFFFFF)
"""Stands in a context for a position before the generation began."""
WORDS = 8
"""Words of a prepared key, and of what a context becomes under it, whatever the function."""

Words = tuple[Any, ...]
"""uint32 arrays, numpy's or jax's, that broadcast against each other."""
Loop = Callable[[int, Callable[[Any, Any], Any], Any], Any]
"""``loop(count, body, x)``: ``body(i, x)`` so many times."""

_M0, _M1 = np.uint32(0xD2511F53), np.uint32(0xCD9E8D57)
_W0, _W1 = 0x9E3779B9, 0xBB67AE85
_PHILOX_CONTEXT, _PHILOX_TOKEN = np.uint32(0x574D4358), np.uint32(0x574D544B)
_CHACHA_CONSTANTS = (0x61707865, 0x3320646E, 0x79622D32, 0x6B206574)
_CHACHA_CONTEXT = 0x574D4B31


def check_prf(prf: object) -> str:
    """The name of a function. Raises ValueError where it is not known."""
    if not isinstance(prf, str) or prf not in KEY_BITS:
        raise ValueError(f"prf must be one of {', '.join(KEY_BITS)}, got {prf!r:.80}")
    return prf


def check_key(prf: str, key: object) -> int:
    """A key for a function. Raises ValueError where it is out of range; the message does not say the key."""
    bits = KEY_BITS[check_prf(prf)]
    if isinstance(key, bool) or not isinstance(key, int) or not 0 <= key < 1 << bits:
        longer = isinstance(key, int) and prf != CHACHA and 1 << bits <= key < 1 << KEY_BITS[CHACHA]
        hint = f'; a key of {KEY_BITS[CHACHA]} bits needs "prf": "{CHACHA}"' if longer else ""
        raise ValueError(f"key must be an integer from 0 to 2^{bits} - 1 for {prf}{hint}")
    return key


def parse_key(text: str) -> int:
    """A key as text: a decimal number, or 0x and hexadecimal digits. Raises ValueError that does not say the key."""
    if not re.fullmatch(r"[0-9]{1,80}|0[xX][0-9a-fA-F]{1,80}", text):
        raise ValueError("key must be an integer, or text: a decimal number, or 0x and hexadecimal digits")
    return int(text, 16 if text[:2] in ("0x", "0X") else 10)


def like_a_key(text: str) -> bool:
    """True for a word that may be a key in the wrong place: messages do not repeat it."""
    return re.fullmatch(r"-?(0[xX])?[0-9a-fA-F]{9,}", text.strip()) is not None


# -- keys -------------------------------------------------------------------------------------------------------------


def dual_keys(key: int) -> tuple[int, int]:
    """The two keys of a dual-key mark: the peer's for keys of 64 bits, as long as the key where it is longer."""
    return _derived(b"key_a", key, b""), _derived(b"key_b", key, b"")


def stream_key(key: int, index: int) -> int:
    """The key of completion ``index`` of a request for several; that of the first is the key itself."""
    return key if index == 0 else _derived(b"stream", key, index.to_bytes(4, "big"))


def _derived(label: bytes, key: int, suffix: bytes) -> int:
    size = 8 if key < 1 << 64 else 32
    digest = hashlib.sha256(label + key.to_bytes(size, "big") + suffix).digest()
    return int.from_bytes(digest[:size], "big")


@functools.lru_cache(maxsize=1024)
def prepared(prf: str, key: int, width: int) -> np.ndarray:
    """A key made ready for contexts of ``width`` tokens, uint32 ``[WORDS]``. Raises ValueError."""
    check_key(prf, key)
    words = np.array([key >> 32 * i & 0xFFFFFFFF for i in range(WORDS)], np.uint32)
    if prf == CHACHA:
        words = chacha20(words, np.array([_CHACHA_CONTEXT, width, 0, 0], np.uint32), _python_loop)[:WORDS]
    words.setflags(write=False)
    return words


# -- the functions, of numpy's arrays or jax's ------------------------------------------------------------------------


def philox(counter: Words, key: Words) -> Words:
    """Philox4x32-10 (Salmon et al., SC 2011): four words of a counter of four under a key of two.

    jax has to be told to allow 64-bit integers (``jax.enable_x64``) around it.
    """
    a, b, c, d = counter
    low, high = key
    for turn in range(10):
        k0, k1 = np.uint32(turn * _W0 & 0xFFFFFFFF), np.uint32(turn * _W1 & 0xFFFFFFFF)
        left, right = _mul_high(a, _M0), _mul_high(c, _M1)
        a, b, c, d = right ^ b ^ (low + k0), c * _M1, left ^ d ^ (high + k1), a * _M0
    return a, b, c, d


def _mul_high(a: Any, b: np.uint32) -> Any:
    """High words of 32-bit products."""
    return ((a.astype(np.uint64) * np.uint64(b)) >> np.uint64(32)).astype(np.uint32)


def chacha20(key: Any, given: Any, loop: Loop) -> Any:
    """A block of ChaCha20 (Bernstein 2008): ``[16, ...]`` words of an input ``[4, ...]`` under a key ``[8, ...]``."""
    constants = np.array(_CHACHA_CONSTANTS, np.uint32).reshape(4, *(1,) * (key.ndim - 1))
    start = (constants | (key[:4] & np.uint32(0)), key[:4], key[4:], given)
    rows = loop(10, lambda _, rows: _diagonals(_quarters(rows)), start)
    return _stacked([row + first for row, first in zip(rows, start, strict=True)])


def _quarters(rows: Words) -> Words:
    """Four quarter rounds at once, one a column."""
    a, b, c, d = rows
    for turn_d, turn_b in ((16, 12), (8, 7)):
        a = a + b
        d = _turn(d ^ a, turn_d)
        c = c + d
        b = _turn(b ^ c, turn_b)
    return a, b, c, d


def _diagonals(rows: Words) -> Words:
    """The other four, one a diagonal."""
    turned = _quarters(tuple(_stacked([row[i:], row[:i]]) for i, row in enumerate(rows)))
    return tuple(_stacked([row[4 - i :], row[: 4 - i]]) for i, row in enumerate(turned))


def _turn(x: Any, by: int) -> Any:
    return (x << np.uint32(by)) | (x >> np.uint32(32 - by))


def _stacked(parts: list[Any]) -> Any:
    """Concatenate along the first axis, by the library the arrays are of."""
    return parts[0].__array_namespace__().concat(parts)


def _python_loop(count: int, body: Callable[[Any, Any], Any], x: Any) -> Any:
    for i in range(count):
        x = body(i, x)
    return x


def context_words(prf: str, key: Any, context: Any, loop: Loop = _python_loop) -> Any:
    """What a context ``[W, ...]`` becomes under a prepared key ``[WORDS, ...]``: uint32 ``[WORDS, ...]``."""
    width = context.shape[0]
    zero = key[:1] & np.uint32(0)
    if prf == CHACHA:
        for start in range(0, width, 4):
            block = [context[start : start + 4], *[zero | MISSING] * (start + 4 - width)]
            key = chacha20(key, _stacked(block) | zero, loop)[:WORDS]
        return key
    state: Words = (zero | _PHILOX_CONTEXT, zero | np.uint32(width), zero, zero)
    for start in range(0, width, 4):
        block = [
            context[i : i + 1] if i < width else zero | (MISSING - np.uint32(i - start))
            for i in range(start, start + 4)
        ]
        given = tuple(word ^ token for word, token in zip(state, block, strict=True))
        state = philox(given, (key[:1] ^ np.uint32(start), key[1:2]))
    return _stacked([*state, key[:2], zero, zero])


def context_tag(prf: str, words: Any) -> Any:
    """64 bits ``[2, ...]`` of ``context_words`` that tell contexts apart, and nothing of what is drawn after them."""
    return words[6:8] if prf == CHACHA else words[:2]


def philox_words(words: Any, block: Any) -> Words:
    """The words of candidates ``4 * block`` to ``4 * block + 3``."""
    s0, s1, s2, s3, low, high = words[:6]
    return philox((block, s0, s1, s2), (low ^ s3, high ^ _PHILOX_TOKEN))


def candidate_words(prf: str, words: Any, tokens: Any) -> Any:
    """The word of one candidate each: uint32 of ``words [WORDS, ...]`` and ``tokens [...]``."""
    if prf == CHACHA:
        return threefry(words[0], words[1], words[2], tokens)
    return np.choose(tokens & np.uint32(3), np.broadcast_arrays(*philox_words(words, tokens >> np.uint32(2))))


# -- in numpy ---------------------------------------------------------------------------------------------------------


def as_context(tokens: Any) -> np.ndarray:
    """Token ids, -1 where there was none, as uint32."""
    return np.asarray(tokens, np.int64).astype(np.uint32)


def as_uniform(prf: str, words: np.ndarray) -> np.ndarray:
    """Words as float64 in (0, 1): 1 to 2^24 of 2^24 + 1 parts, or the middles of 2^23 parts."""
    if prf == CHACHA:
        return ((words >> np.uint32(9)) + 0.5) * 2.0**-23
    return ((words >> np.uint32(8)) + 1.0) / (2.0**24 + 1)


def uniforms(prf: str, key: int, contexts: Any, tokens: Any) -> np.ndarray:
    """float64 ``[N]`` in (0, 1) for candidates ``tokens [N]`` after ``contexts [N, W]`` (-1 or FFFFFFFFh: no token).

    Raises ValueError for a function that is not known, or a key out of range.
    """
    contexts, tokens = as_context(contexts), as_context(tokens)
    key_words = prepared(prf, key, contexts.shape[1])[:, None]
    words = context_words(prf, np.broadcast_to(key_words, (WORDS, len(tokens))), contexts.T)
    return as_uniform(prf, candidate_words(prf, words, tokens))


def all_uniforms(prf: str, key: int, context: Any, vocab: int) -> np.ndarray:
    """float64 ``[V]`` for every candidate after one ``context [W]``."""
    context = as_context(context)
    words = context_words(prf, prepared(prf, key, len(context))[:, None], context[:, None])
    if prf == PHILOX:
        drawn = np.stack(philox_words(words, np.arange(-(-vocab // 4), dtype=np.uint32)), axis=-1)
        return as_uniform(prf, drawn.ravel()[:vocab])
    return as_uniform(prf, candidate_words(prf, words, np.arange(vocab, dtype=np.uint32)))
