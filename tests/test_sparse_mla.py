"""Latent attention over chosen rows against numpy: every format, -1 and empty rows, counts, chunks."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hopper import MOSAIC
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels import dispatch
from pallas_kernels.codecs import records
from pallas_kernels.dispatch import KernelError, Kernels, choose
from pallas_kernels.kv_write import write_latent
from pallas_kernels.sparse_mla import Case, sparse_mla

P, G, RANK, ROPE, TOKENS, K = 7, 4, 256, 8, 6, 11
SCALE = 0.1
DTYPES = ["float32", "bfloat16", "uint8"]


def attend(q: np.ndarray, context: np.ndarray, rank: int) -> np.ndarray:
    """Of one token: ``q [H, R + r]`` over ``context [n, R + r]``."""
    scores = q.astype(np.float64) @ context.T.astype(np.float64) * SCALE
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return (weights / weights.sum(-1, keepdims=True)) @ context[:, :rank]


def case(dtype: str, heads: int, rope: int = ROPE, most: int = K, count: int = P, rank: int = RANK):
    """Pages whose unwritten slots are poison, the first one too; rows in any order, the last token's with holes."""
    rng = np.random.default_rng(heads)
    q = rng.standard_normal((TOKENS, heads, rank + rope), np.float32)
    written = rng.permutation(np.arange(1, count * G, dtype=np.int32))[: count * G // 2 + 4]
    latents = rng.standard_normal((len(written), rank + rope), np.float32)
    if dtype == "uint8":
        pages = jnp.full((count, G, records.latent_bytes(rank, rope)), 0x7F, jnp.uint8)  # NaN
        latent, rope = records.dequantize_latent(records.quantize_latent(latents[:, :rank], latents[:, rank:]))
        means = np.concatenate([latent, rope], axis=1)
    else:
        pages = jnp.full((count, G, rank + rope), jnp.nan, dtype)
        means = np.asarray(jnp.asarray(latents, dtype), np.float32)
    pages = write_latent(pages, latents[:, :rank], latents[:, rank:], written)
    counts = np.array([most, 1, 0, 5, 3, most], np.int32)
    rows = np.full((TOKENS, most), -1, np.int32)
    expected = np.zeros((TOKENS, heads, rank))
    for token, chosen in enumerate(counts):
        mine = rng.choice(len(written), chosen, replace=False)
        rows[token, :chosen] = written[mine]
        if token == TOKENS - 1:
            rows[token, [0, 4]] = -1
            mine = np.delete(mine, [0, 4])
        if chosen:
            expected[token] = attend(q[token], means[mine], rank)
    return (q, pages, rows, counts), expected


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "chunk"), [(2, None), (2, 1), (2, 4), (16, 4), (128, 32)])
def test_attention(dtype: str, heads: int, chunk: int | None) -> None:
    args, expected = case(dtype, heads)
    got = jax.jit(lambda *a: sparse_mla(*a, rank=RANK, scale=SCALE, chunk=chunk))(*args)
    exact = heads < 16 or dtype == "float32"
    np.testing.assert_allclose(got, expected, rtol=0, atol=2e-5 if exact else 3e-2)
    assert not np.asarray(got[2]).any()


@pytest.mark.parametrize(("dtype", "heads", "programs"), [("uint8", 65, 1), ("bfloat16", 4, 99)])
def test_the_kernel_for_hopper(dtype: str, heads: int, programs: int) -> None:
    """In the interpreter: more rows than a step, in one program and in several; more heads than a tile; holes, and
    nothing but holes, while the cache's first row is poison."""
    rank = RANK if MOSAIC.interpreted or dtype != "uint8" else 512
    (q, pages, rows, counts), expected = case(dtype, heads, rope=64, most=130, count=70, rank=rank)
    some = [1, 5]
    rows[1] = -1
    expected[1] = 0
    args = (jnp.asarray(x) for x in (q[some], pages, rows[some], counts[some]))
    got = sparse_mla(*args, rank=rank, scale=SCALE, kernels=MOSAIC, programs=programs)
    np.testing.assert_allclose(got, expected[some], rtol=0, atol=3e-2)


run_random = jax.jit(partial(sparse_mla, rank=128, scale=SCALE, kernels=MOSAIC, programs=4))


@settings(max_examples=4, deadline=None, derandomize=True)
@given(st.lists(st.integers(0, 80), min_size=2, max_size=2), st.sampled_from([0.0, 0.3, 0.95]), st.integers(0, 9))
def test_any_rows(counts: list[int], holes: float, seed: int) -> None:
    """One twice, holes anywhere, whole steps of them too; what lies behind the count is poison."""
    rng = np.random.default_rng(seed)
    meant = jnp.asarray(rng.standard_normal((30 * G, 128 + 64)), jnp.bfloat16).at[-1].set(jnp.nan)
    rows = rng.integers(0, 30 * G - 1, (2, 80)).astype(np.int32)
    rows[rng.random(rows.shape) < holes] = -1
    rows[np.arange(80) >= np.array(counts)[:, None]] = 30 * G - 1
    q = rng.standard_normal((2, 3, 128 + 64)).astype(np.float32)
    got = run_random(jnp.asarray(q), meant.reshape(30, G, -1), jnp.asarray(rows), jnp.asarray(counts, jnp.int32))
    for token, count in enumerate(counts):
        mine = rows[token, :count][rows[token, :count] >= 0]
        want = attend(q[token], np.asarray(meant[mine], np.float32), 128) if len(mine) else np.zeros((3, 128))
        np.testing.assert_allclose(got[token], want, rtol=0, atol=3e-2)


def test_what_the_kernel_declines(monkeypatch: pytest.MonkeyPatch) -> None:
    package, record = "pallas_kernels.sparse_mla", Case("uint8", 256, 64, 128)
    hopper = Kernels("auto", "NVIDIA H200", "9.0")
    assert choose(package, Case("uint8", 512, 64, 128), hopper).name == "mosaic"
    assert "16 bytes" in str(choose(package, record, hopper))
    assert choose(package, record, Kernels("mosaic")).name == "mosaic"
    monkeypatch.setattr(dispatch, "INTERPRETER_THREADS", 99)
    with pytest.raises(KernelError, match="needs 99 threads"):
        choose(package, record, Kernels("mosaic"))


def test_nothing_behind_the_count_is_read() -> None:
    (q, pages, rows, counts), expected = case("float32", 2)
    unwritten = int(np.argwhere(np.isnan(np.asarray(pages)).all(-1).reshape(-1))[0, 0])
    rows = np.where(np.arange(K) < counts[:, None], rows, unwritten)
    got = sparse_mla(q, pages, rows, counts, rank=RANK, scale=SCALE)
    np.testing.assert_allclose(got, expected, atol=2e-5)


@pytest.mark.parametrize("tokens", [64, 576])
def test_the_largest_heads_in_little_memory(tokens: int) -> None:
    """V3.2: 128 heads, 2,048 rows of 656 bytes each; whole, their latents would be 300 MB and 2.7 GB."""
    shapes = [
        ((tokens, 128, 576), jnp.float32),
        ((65, 32, 656), jnp.uint8),
        ((tokens, 2048), jnp.int32),
        ((tokens,), jnp.int32),
    ]
    args = [jax.ShapeDtypeStruct(*shape) for shape in shapes]
    compiled = jax.jit(lambda *a: sparse_mla(*a, rank=512, scale=SCALE)).lower(*args).compile()
    beside = 4 * 4 * tokens * 128 * 576  # queries and what is mixed, a few times over
    assert compiled.memory_analysis().temp_size_in_bytes < (200 << 20) + beside
