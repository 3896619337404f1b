"""The mark's keyed functions: the peer's vectors, published answers, and one arithmetic on numpy's arrays and jax's."""

import hashlib
import json
import random
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jaxserve.threefry import threefry
from jaxserve.watermark import marking, prf
from jaxserve.watermark.prf import CHACHA, KEY_BITS, PHILOX

VECTORS = json.loads((Path(__file__).parent / "fixtures" / "watermark_vectors.json").read_text())
MASK = 0xFFFFFFFF


def loop(count, body, x):
    for i in range(count):
        x = body(i, x)
    return x


# -- answers of others ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", VECTORS["uniforms"], ids=lambda case: f"{len(case['context'])}-{case['token']}")
def test_the_peers_vectors(case) -> None:
    found = prf.uniforms(VECTORS["prf"], int(case["key"]), [case["context"]], [case["token"]])
    assert found.tolist() == [case["u"]]


@pytest.mark.parametrize("case", VECTORS["detections"], ids=lambda case: case["key"])
def test_the_peers_scores(case) -> None:
    width, tokens, alpha, key = case["context_width"], case["tokens"], case["alpha"], int(case["key"])
    text = [-1] * width + tokens
    contexts = [text[i : i + width] for i in range(len(tokens))]
    keys = (key,) if alpha is None else prf.dual_keys(key)
    scores = [-np.log1p(-prf.uniforms(VECTORS["prf"], each, contexts, tokens)).sum() for each in keys]
    weights = [1.0] if alpha is None else [1 - alpha, alpha]
    assert np.dot(scores, weights) == pytest.approx(case["all_positions"]["score"], abs=1e-9)


PI = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344, 0xA4093822, 0x299F31D0)
PHILOX_ANSWERS = [  # Random123's
    ((0,) * 6, "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ((MASK,) * 6, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    (PI, "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


@pytest.mark.parametrize(("given", "answer"), PHILOX_ANSWERS)
def test_philox_gives_the_known_answers(given, answer) -> None:
    array = [np.array([word], np.uint32) for word in given]
    drawn = prf.philox(tuple(array[:4]), tuple(array[4:]))
    assert " ".join(f"{word[0]:08x}" for word in drawn) == answer


def test_chacha20_gives_the_answer_of_rfc_8439() -> None:
    """Section 2.3.2."""
    key = np.arange(32, dtype=np.uint8).view("<u4")
    given = np.frombuffer(bytes.fromhex("01000000 00000009 0000004a 00000000"), "<u4")
    found = prf.chacha20(key, given, loop).astype("<u4").tobytes()
    assert found.hex().startswith("10f1e7e4d13b5915500fdd1fa32071c4c7d1f4c733c06803")
    assert found.hex().endswith("b5129cd1de164eb9cbd083e8a2503c4e")


# -- what the names stand for -----------------------------------------------------------------------------------------


def chacha_in_integers(key: list[int], given: list[int]) -> list[int]:
    start = [0x61707865, 0x3320646E, 0x79622D32, 0x6B206574, *key, *given]
    x = list(start)
    columns = [(i, 4 + i, 8 + i, 12 + i) for i in range(4)]
    diagonals = [(i, 4 + (i + 1) % 4, 8 + (i + 2) % 4, 12 + (i + 3) % 4) for i in range(4)]
    for _ in range(10):
        for a, b, c, d in columns + diagonals:
            for p, q, r, by in ((a, b, d, 16), (c, d, b, 12), (a, b, d, 8), (c, d, b, 7)):
                x[p] = (x[p] + x[q]) & MASK
                mixed = x[r] ^ x[p]
                x[r] = (mixed << by | mixed >> (32 - by)) & MASK
    return [(a + b) & MASK for a, b in zip(x, start, strict=True)]


def word_in_integers(key: int, context: list[int], token: int) -> int:
    """``chacha20-threefry-v1`` as the documentation says it."""
    words = chacha_in_integers([key >> 32 * i & MASK for i in range(8)], [0x574D4B31, len(context), 0, 0])[:8]
    padded = [t & MASK for t in context] + [MASK] * (-len(context) % 4)
    for i in range(0, len(padded), 4):
        words = chacha_in_integers(words, padded[i : i + 4])[:8]
    one = [np.array([word], np.uint32) for word in (*words[:3], token)]
    return int(threefry(*one)[0])


def test_chacha20_threefry_v1_is_what_it_is_said_to_be() -> None:
    rng = random.Random(0)
    for width in (1, 2, 3, 4, 5, 8, 9):
        key, token = rng.getrandbits(256), rng.randrange(200_000)
        context = [rng.choice([-1, rng.randrange(200_000)]) for _ in range(width)]
        expected = ((word_in_integers(key, context, token) >> 9) + 0.5) / 2**23
        assert prf.uniforms(CHACHA, key, [context], [token]).tolist() == [expected]


FROZEN = {
    PHILOX: [0.09905301934164647, 0.4363630749962881],
    CHACHA: [0.8975033164024353, 0.3851791024208069],
}


def test_what_a_name_stands_for_never_changes() -> None:
    contexts = np.array([[1, 2, 3, 4], [-1, -1, -1, 49151]])
    found = {name: prf.uniforms(name, 42, contexts, [7, 49151]).tolist() for name in KEY_BITS}
    assert found == FROZEN


def test_dual_keys_are_the_peers_and_long_keys_have_long_ones() -> None:
    for key, size in ((0, 8), (2**64 - 1, 8), (2**64, 32), (2**256 - 1, 32)):
        expected = []
        for half in (b"key_a", b"key_b"):
            digest = hashlib.sha256(half + key.to_bytes(size, "big")).digest()
            expected.append(int.from_bytes(digest[:size], "big"))
        assert prf.dual_keys(key) == tuple(expected)


def test_the_first_stream_is_the_key_and_the_others_are_of_their_own() -> None:
    for key in (42, 2**200 + 1):
        streams = [prf.stream_key(key, i) for i in range(128)]
        assert streams[0] == key
        assert len(set(streams)) == 128
        assert len({(s >= 1 << 64) for s in streams}) == 1, "as long as the key"


@pytest.mark.parametrize("name", KEY_BITS)
def test_keys_out_of_range_are_refused_and_not_repeated(name: str) -> None:
    for key in (-1, 1 << KEY_BITS[name], True, 1.5, "12345678901", None):
        with pytest.raises(ValueError, match="key must be an integer from 0") as caught:
            prf.uniforms(name, key, [[1]], [2])  # type: ignore[arg-type]
        assert "12345678901" not in str(caught.value)
    with pytest.raises(ValueError, match=r"prf must be one of philox4x32-10-v1"):
        prf.uniforms("md5", 1, [[1]], [2])


# -- one arithmetic ---------------------------------------------------------------------------------------------------


def rows(name: str, width: int, count: int, seed: int):
    rng = np.random.default_rng(seed)
    keys = [int.from_bytes(rng.bytes(KEY_BITS[name] // 8), "little") for _ in range(count)]
    contexts = rng.integers(-1, 200_000, (count, width))
    return keys, contexts, np.stack([prf.prepared(name, key, width) for key in keys], axis=1)


@pytest.mark.parametrize("name", KEY_BITS)
@pytest.mark.parametrize("width", [1, 3, 4, 7, 16])
def test_jax_and_numpy_draw_the_same_bits(name: str, width: int) -> None:
    count, vocab = 5, 1003
    keys, contexts, prepared = rows(name, width, count, seed=width)

    @jax.jit
    def draw(keys, contexts):
        ids = lax.broadcasted_iota(jnp.uint32, (count, vocab + 1), 1)
        with jax.enable_x64(True):
            words = prf.context_words(name, keys, contexts.T, marking._loop)[:, :, None]
            if name == CHACHA:
                return words, threefry(words[0], words[1], words[2], ids)
            return words, jnp.stack(prf.philox_words(words, ids[:, : (vocab + 1) // 4]), -1).reshape(count, -1)

    words, bits = draw(prepared, prf.as_context(contexts))
    assert words.dtype == bits.dtype == jnp.uint32
    for i, key in enumerate(keys):
        theirs = prf.context_words(name, prepared[:, i : i + 1], prf.as_context(contexts[i])[:, None])
        assert np.array_equal(np.asarray(words)[:, i, 0], theirs[:, 0])
        expected = prf.candidate_words(name, theirs, np.arange(vocab, dtype=np.uint32))
        assert np.array_equal(np.asarray(bits)[i, :vocab], expected)
        uniforms = prf.all_uniforms(name, key, contexts[i], vocab)
        assert np.array_equal(uniforms, prf.as_uniform(name, expected))
        some = np.array([0, 5, vocab - 1])
        assert np.array_equal(uniforms[some], prf.uniforms(name, key, [contexts[i]] * 3, some))


def test_noise_holds_its_precision_where_float32_cannot_hold_u() -> None:
    """Near u = 1, where winners are, the last of the 24 bits still tells tokens apart."""
    n = np.concatenate([np.arange(5000), 2**23 + np.arange(-2500, 2500), 2**24 - 5000 + np.arange(5000)])
    bits = (n.astype(np.uint32) << 8) | 0x5A
    noise = np.asarray(jax.jit(marking.gumbel)(bits)).astype(np.float64)
    exact = -np.log(-np.log(prf.as_uniform(PHILOX, bits)))
    np.testing.assert_allclose(noise, exact, atol=3e-6)
    assert np.isfinite(noise).all()
    assert (np.diff(noise[-1000:]) > 0).all()


@pytest.mark.parametrize("name", KEY_BITS)
def test_numbers_look_independent(name: str) -> None:
    """Of key, context (and the order in it) and candidate, each alone gives uniform and unrelated numbers."""
    count = 20_000
    ids = np.arange(count)
    one = np.zeros((count, 4), np.int64)
    near = {
        "candidate": prf.all_uniforms(name, 42, [1, 2, 3, 4], count),
        "oldest": prf.uniforms(name, 42, one + ids[:, None] * [1, 0, 0, 0], ids * 0),
        "newest": prf.uniforms(name, 42, one + ids[:, None] * [0, 0, 0, 1], ids * 0),
        "key": np.concatenate([prf.uniforms(name, key, one[:10], ids[:10]) for key in range(count // 10)]),
    }
    for what, u in near.items():
        counts, _ = np.histogram(u, bins=64, range=(0, 1))
        assert ((counts - count / 64) ** 2 / (count / 64)).sum() < 120, what  # 63 degrees
        assert abs(np.corrcoef(u[1:], u[:-1])[0, 1]) < 4 / count**0.5, what
    apart = [abs(np.corrcoef(near[a], near[b])[0, 1]) for a in near for b in near if a < b]
    assert max(apart) < 4 / count**0.5
    assert len(set(prf.uniforms(name, 42, [[1, 2, 3, 4], [1, 2, 4, 3], [2, 1, 3, 4], [1, 2, 3, 5]], [5] * 4))) == 4


@pytest.mark.parametrize("name", KEY_BITS)
def test_every_bit_of_the_key_counts(name: str) -> None:
    base = prf.uniforms(name, 0, [[9, 9, 9, 9]] * 8, np.arange(8))
    for bit in range(KEY_BITS[name]):
        other = prf.uniforms(name, 1 << bit, [[9, 9, 9, 9]] * 8, np.arange(8))
        assert (other != base).all(), bit
