"""The keyed pseudorandom functions behind the mark: (key, last W generated tokens, candidate) to a number in (0, 1).

The arithmetic is of 32-bit words alone and is written once, for numpy's arrays and jax's: bit-equal everywhere. Names
are versioned; what a name stands for never changes. ``docs/watermark.md`` argues what each of them withstands. Imports
no jax.

- ``philox4x32-10-v1``: the peer's, so that detectors read each other's text. Fast, and not cryptographic.
- ``chacha8-v1``: ChaCha with 8 rounds and a key of 256 bits, for keys that are to stay secret.
"""

import functools
import hashlib
from collections.abc import Callable
from typing import Any

import numpy as np

PHILOX, CHACHA = "philox4x32-10-v1", "chacha8-v1"
KEY_BITS = {PHILOX: 64, CHACHA: 256}
"""The functions, and how long their keys are."""
DENOMINATOR = (1 << 24) + 1
MISSING = np.uint32(0xFFFFFFFF)
"""Stands in a context for a position before the generation began."""
LANES = 64
"""``chacha8-v1`` serves sixteen candidates a block, ids this far apart: neighbours then lie in neighbouring blocks."""
KEY_WORDS = 8
"""Words of a prepared key, whatever the function."""
STATE_WORDS = 8
"""Words of what a context becomes under a key."""

Words = tuple[Any, ...]
"""uint32 arrays, numpy's or jax's, that broadcast against each other."""
MulHigh = Callable[[Any, np.uint32], Any]
"""High words of products of 32-bit words: numpy and jax come to them by different ways."""

_M0, _M1 = np.uint32(0xD2511F53), np.uint32(0xCD9E8D57)
_W0, _W1 = 0x9E3779B9, 0xBB67AE85
_PHILOX_CONTEXT, _PHILOX_TOKEN = 0x574D4358, np.uint32(0x574D544B)
_CHACHA_CONSTANTS = tuple(np.uint32(word) for word in (0x61707865, 0x3320646E, 0x79622D32, 0x6B206574))
_CHACHA_CONTEXT = 0x574D4B31


def check_prf(prf: str) -> None:
    """Raise ValueError for a name that is not known."""
    if prf not in KEY_BITS:
        raise ValueError(f"prf must be one of {', '.join(KEY_BITS)}, got {prf!r:.80}")


def check_key(prf: str, key: int) -> None:
    """Raise ValueError for a key that is out of range. The message does not say the key."""
    check_prf(prf)
    if isinstance(key, bool) or not isinstance(key, int) or not 0 <= key < 1 << KEY_BITS[prf]:
        raise ValueError(f"key must be an integer from 0 to 2^{KEY_BITS[prf]} - 1 for {prf}")


# -- keys -------------------------------------------------------------------------------------------------------------


def dual_keys(key: int) -> tuple[int, int]:
    """The two keys of a dual-key mark: the peer's for keys of 64 bits, as long as the key where it is longer."""
    a, b = (_derived(f"key_{half}".encode(), key, b"") for half in "ab")
    return a, b


def stream_key(key: int, index: int) -> int:
    """The key of completion ``index`` of a request for several; that of the first is the key itself."""
    return key if index == 0 else _derived(b"stream", key, index.to_bytes(4, "big"))


def _derived(label: bytes, key: int, suffix: bytes) -> int:
    size = 8 if key < 1 << 64 else 32
    digest = hashlib.sha256(label + key.to_bytes(size, "big") + suffix).digest()
    return int.from_bytes(digest[:size], "big")


@functools.lru_cache(maxsize=4096)
def key_words(prf: str, key: int, width: int) -> np.ndarray:
    """A key prepared for contexts of ``width`` tokens, uint32 ``[KEY_WORDS]``."""
    check_key(prf, key)
    words = np.array([key >> 32 * i & 0xFFFFFFFF for i in range(KEY_WORDS)], np.uint32)
    if prf == CHACHA:
        given = np.array([_CHACHA_CONTEXT, width, 0, 0], np.uint32)
        words = np.concatenate(chacha8(_split(words), _split(given))[:KEY_WORDS])
    words.setflags(write=False)
    return words


def _split(array: np.ndarray) -> Words:
    """The last axis as words, each at least one-dimensional."""
    return tuple(array[..., i : i + 1] if array.ndim == 1 else array[..., i] for i in range(array.shape[-1]))


# -- the functions, of numpy's arrays or jax's ------------------------------------------------------------------------


def philox(counter: Words, key: Words, mul_high: MulHigh) -> Words:
    """Philox4x32-10 (Salmon et al., SC 2011): four words of a counter of four under a key of two."""
    a, b, c, d = counter
    low, high = key
    for turn in range(10):
        k0, k1 = np.uint32(turn * _W0 & 0xFFFFFFFF), np.uint32(turn * _W1 & 0xFFFFFFFF)
        left, right = mul_high(a, _M0), mul_high(c, _M1)
        a, b, c, d = right ^ b ^ (low + k0), c * _M1, left ^ d ^ (high + k1), a * _M0
    return a, b, c, d


def chacha8(key: Words, given: Words) -> Words:
    """A block of ChaCha (Bernstein 2008) with 8 rounds: sixteen words of an input of four under a key of eight."""
    start = (*(constant + (key[0] & np.uint32(0)) for constant in _CHACHA_CONSTANTS), *key, *given)
    x = list(start)
    for _ in range(4):
        for i in range(4):
            _quarter(x, i, 4 + i, 8 + i, 12 + i)
        for i in range(4):
            _quarter(x, i, 4 + (i + 1) % 4, 8 + (i + 2) % 4, 12 + (i + 3) % 4)
    return tuple(word + first for word, first in zip(x, start, strict=True))


def _quarter(x: list[Any], a: int, b: int, c: int, d: int) -> None:
    for first, second, third, turn in ((a, b, d, 16), (c, d, b, 12), (a, b, d, 8), (c, d, b, 7)):
        x[first] = x[first] + x[second]
        mixed = x[third] ^ x[first]
        x[third] = (mixed << np.uint32(turn)) | (mixed >> np.uint32(32 - turn))


def context_state(prf: str, key: Words, context: Words, mul_high: MulHigh) -> Words:
    """What the candidates' function is keyed by: STATE_WORDS words of a prepared key and a context of W tokens."""
    zero = key[0] & np.uint32(0)
    if prf == CHACHA:
        for start in range(0, len(context), 4):
            block = context[start : start + 4]
            key = chacha8(key, (*block, *(zero | MISSING for _ in range(4 - len(block)))))[:KEY_WORDS]
        return key
    state: Words = (zero | np.uint32(_PHILOX_CONTEXT), zero | np.uint32(len(context)), zero, zero)
    for start in range(0, len(context), 4):
        block = context[start : start + 4]
        block = (*block, *(zero | np.uint32(0xFFFFFFFF - lane) for lane in range(len(block), 4)))
        given = tuple(word ^ token for word, token in zip(state, block, strict=True))
        state = philox(given, (key[0] ^ np.uint32(start), key[1]), mul_high)
    return (*state, key[0], key[1], zero, zero)


def token_words(prf: str, state: Words, block: Any, mul_high: MulHigh) -> Words:
    """The words of a block of candidates: sixteen or four, see ``place``."""
    if prf == CHACHA:
        zero = block & np.uint32(0)
        return chacha8(state, (block, zero, zero, zero))
    s0, s1, s2, s3, low, high = state[:6]
    return philox((block, s0, s1, s2), (low ^ s3, high ^ _PHILOX_TOKEN), mul_high)


def place(prf: str, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Block and word of each candidate. Sixteen runs of LANES ids share LANES blocks, or four ids one block."""
    if prf == CHACHA:
        return tokens // np.uint32(16 * LANES) * np.uint32(LANES) + tokens % np.uint32(LANES), tokens // LANES % 16
    return tokens >> np.uint32(2), tokens & np.uint32(3)


def blocks_of(prf: str, vocab: int) -> int:
    """Blocks that serve ``vocab`` candidates."""
    return -(-vocab // (16 * LANES)) * LANES if prf == CHACHA else -(-vocab // 4)


def in_order(prf: str, drawn: Any) -> Any:
    """Words of consecutive blocks ``[word, ..., block]`` in the order of the candidates, ``[..., candidate]``."""
    shape = drawn.shape[1:-1]
    if prf == CHACHA:
        runs = drawn.reshape(16, *shape, -1, LANES).transpose(*range(1, len(shape) + 2), 0, len(shape) + 2)
        return runs.reshape(*shape, -1)
    return drawn.transpose(*range(1, len(shape) + 2), 0).reshape(*shape, -1)


# -- in numpy ---------------------------------------------------------------------------------------------------------


def mul_high(a: np.ndarray, b: np.uint32) -> np.ndarray:
    """High words of 32-bit products."""
    return ((a.astype(np.uint64) * np.uint64(b)) >> np.uint64(32)).astype(np.uint32)


def as_context(tokens: Any) -> np.ndarray:
    """Token ids, -1 where there was none, as uint32."""
    return np.asarray(tokens, np.int64).astype(np.uint32)


def words(prf: str, key: int, contexts: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """The 32 bits drawn for each candidate, uint32 ``[N]``; as ``uniforms``."""
    contexts, tokens = as_context(contexts), as_context(tokens)
    prepared = _split(key_words(prf, key, contexts.shape[1]))
    state = context_state(prf, prepared, tuple(contexts.T), mul_high)
    block, word = place(prf, tokens)
    drawn = token_words(prf, state, block, mul_high)
    return np.choose(word, np.broadcast_arrays(*drawn))


def uniforms(prf: str, key: int, contexts: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """float64 ``[N]`` in (0, 1) for candidates ``tokens [N]`` after ``contexts [N, W]`` (-1 or FFFFFFFFh: no token).

    Raises ValueError for a function that is not known, or a key out of range.
    """
    return as_uniform(words(prf, key, contexts, tokens))


def all_uniforms(prf: str, key: int, context: np.ndarray, vocab: int) -> np.ndarray:
    """float64 ``[V]`` for every candidate after one ``context [W]``."""
    prepared = _split(key_words(prf, key, len(context)))
    state = context_state(prf, prepared, _split(as_context(context)), mul_high)
    blocks = np.arange(blocks_of(prf, vocab), dtype=np.uint32)
    return as_uniform(in_order(prf, np.stack(token_words(prf, state, blocks, mul_high)))[:vocab])


def as_uniform(words: np.ndarray) -> np.ndarray:
    """The upper 24 bits of words as numbers in (0, 1): (1 .. 2^24) / (2^24 + 1)."""
    return ((words >> np.uint32(8)).astype(np.float64) + 1) / DENOMINATOR
