"""The indexer of sparse attention against numpy: scores in every format, and exactly which positions are chosen."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hopper import MOSAIC

from pallas_kernels.codecs import records
from pallas_kernels.dispatch import REFERENCE, Kernels, choose
from pallas_kernels.indexer import Case, best, index_scores, mosaic, mosaic_best, select

G, W, HEADS, DIM = 4, 9, 3, 16
DTYPES = ["float32", "bfloat16", "uint8"]


def chosen(scores: np.ndarray, top_k: int) -> tuple[list[int], int]:
    """The contract, spelled out: the best, of equal ones the first; rising; -1 behind them."""
    order = sorted((i for i in range(len(scores)) if scores[i] > -np.inf), key=lambda i: (-scores[i], i))
    kept = sorted(order[:top_k])
    return kept + [-1] * (top_k - len(kept)), len(kept)


def case(dtype: str, queries: int, seed: int = 0, heads: int = HEADS, dim: int = DIM, page: int = G, width: int = W):
    """Rows with contexts of every length; whole scores, so that their sums are exact and ties abound."""
    rng = np.random.default_rng(seed)
    starts = np.array([0, 1, page - 1, page, 28, width * page - queries, 5, 0], np.int32)
    counts = np.array([queries, queries, 1, queries, max(queries - 1, 1), queries, 0, 1], np.int32)
    rows = len(starts)
    q = rng.integers(-2, 3, (rows, queries, heads, dim)).astype(np.float32)
    gates = rng.integers(-1, 3, (rows, queries, heads)).astype(np.float32)
    keys = rng.integers(-1, 2, (rows * width + 1, page, dim)).astype(np.float32)
    tables = 1 + rng.permutation(rows * width).reshape(rows, width).astype(np.int32)
    for row in range(rows):  # as the engine leaves them: behind the context, page 0
        tables[row, -(-int(starts[row] + counts[row]) // page) :] = 0
    keys[0] = np.nan
    if dtype == "uint8":
        pages = records.pack_key_pages(*records.quantize_keys(keys))
        keys = np.asarray(records.dequantize_keys(*records.quantize_keys(keys)))
    else:
        pages = jnp.asarray(keys, dtype)
    scores = np.full((rows, queries, width * page), -np.inf, np.float32)
    for row in range(rows):
        context = keys[tables[row]].reshape(width * page, dim)
        for i in range(counts[row]):
            seen = context[: starts[row] + i + 1]
            dots = np.maximum(np.einsum("hd,sd->hs", q[row, i], seen), 0)
            scores[row, i, : len(seen)] = (gates[row, i] @ dots) * dim**-0.5
    return (q, gates, pages, tables, starts, counts), scores


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("queries", "chunk"), [(1, None), (5, 2 * G)])
def test_scores(dtype: str, queries: int, chunk: int | None) -> None:
    args, expected = case(dtype, queries)
    got = jax.jit(lambda *a: index_scores(*a, chunk=chunk))(*args)
    np.testing.assert_allclose(got, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("queries", "top_k", "chunk"),
    [(1, 8, None), (5, 8, G), (5, 1, 4 * G), (5, 20, 4 * G), (1, W * G, None), (5, W * G + 5, G)],
)
def test_what_is_chosen(dtype: str, queries: int, top_k: int, chunk: int | None) -> None:
    """With ties, short contexts, rows of no token; fewer positions than may be chosen, and more."""
    args, scores = case(dtype, queries, seed=top_k)
    positions, counts = jax.jit(lambda *a: select(*a, top_k=top_k, chunk=chunk))(*args)
    alone, alone_counts = jax.jit(best, static_argnums=1)(jnp.asarray(scores), top_k)
    for index in np.ndindex(scores.shape[:2]):
        wanted, count = chosen(scores[index], top_k)
        for got, found in ((positions, counts), (alone, alone_counts)):
            assert got[index].tolist() == wanted, index
            assert found[index] == count


@pytest.mark.parametrize("seed", range(5))
def test_best_of_anything(seed: int) -> None:
    """Random scores of few values: many ties, both zeros, rows that see little or nothing."""
    rng = np.random.default_rng(seed)
    size, top_k = int(rng.integers(1, 200)), int(rng.integers(1, 120))
    scores = rng.choice(np.array([-1, -0.0, 0.0, 0.5, 2], np.float32), (6, size))
    for row, seen in enumerate(rng.integers(0, size + 1, 6)):
        scores[row, seen:] = -np.inf
    positions, counts = jax.jit(best, static_argnums=1)(scores, top_k)
    for row, found, count in zip(scores, positions, counts, strict=True):
        assert (found.tolist(), int(count)) == chosen(row, top_k)


@pytest.mark.parametrize("chunk", [None, G])
def test_both_zeros_tie(chunk: int | None) -> None:
    """What gates below zero make of a product too small to be told from zero may be -0, where the others are 0."""
    q = np.eye(2, DIM, dtype=np.float32)[None, None]
    gates = np.array([-1, 1], np.float32)[None, None]
    keys = np.zeros((5, G, DIM), np.float32)
    keys[1, [0, 2], 0] = 2e-38, 3.0
    args = (q, gates, keys, np.arange(1, 5, dtype=np.int32)[None], np.array([15], np.int32), np.array([1], np.int32))
    scores = np.asarray(jax.jit(lambda *a: index_scores(*a, chunk=chunk))(*args))[0, 0]
    positions, _ = jax.jit(lambda *a: select(*a, top_k=2, chunk=chunk))(*args)
    assert scores[2] < 0
    assert positions[0, 0].tolist() == chosen(scores, 2)[0]


def test_short_contexts_are_not_scored() -> None:
    """No key is read where all are chosen anyway: were they, scores of NaN would choose nothing."""
    (q, gates, pages, tables, _, _), _ = case("float32", 5)
    starts, counts = np.array([0, 1, 2, 3, 0, 3, 1, 2], np.int32), np.full(8, 5, np.int32)
    positions, _ = jax.jit(lambda *a: select(*a, top_k=8))(q, gates, pages * jnp.nan, tables, starts, counts)
    assert positions[3, 4].tolist() == list(range(8))
    assert positions[0, 1].tolist() == [0, 1, -1, -1, -1, -1, -1, -1]


def test_the_largest_heads_in_little_memory() -> None:
    """V3.2's indexer over 64 blocks of 32 queries and 16k tokens: scores of heads would be 8 GB, those of all tokens
    134 MB."""
    rows, queries, heads, dim, size = 64, 32, 64, 128, 32
    shapes = [
        ((rows, queries, heads, dim), jnp.float32),
        ((rows, queries, heads), jnp.float32),
        ((513, size * records.key_bytes(dim)), jnp.uint8),
        ((rows, 512), jnp.int32),
        ((rows,), jnp.int32),
        ((rows,), jnp.int32),
    ]
    args = [jax.ShapeDtypeStruct(*shape) for shape in shapes]
    compiled = jax.jit(lambda *a: select(*a, top_k=2048)).lower(*args).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 420 << 20


KERNELS: dict[str, dict[str, Any]] = {
    "records, 64 heads": {"dtype": "uint8", "queries": 1, "heads": 64, "dim": 128, "page": 32, "width": 5},
    "blocks, half a page a step": {"dtype": "bfloat16", "queries": 10, "dim": 32, "page": 48, "width": 3},
    "blocks of records": {"dtype": "uint8", "queries": 9, "dim": 128, "page": 64, "width": 2},
}


@pytest.mark.parametrize("name", KERNELS)
def test_the_kernel_scores_as_the_reference_does(name: str) -> None:
    """In the interpreter: one token, page borders, rows of no token, several parts and steps of a context."""
    args, expected = case(**KERNELS[name])
    got = jax.jit(lambda *a: index_scores(*a, kernels=MOSAIC))(*args)
    np.testing.assert_allclose(got, expected, rtol=1e-6, atol=1e-6)


def test_the_kernel_takes_queries_of_any_size() -> None:
    """Heads far beyond float16's range, and far below it: each has as many bits as the others."""
    (q, *rest), _ = case("uint8", 1, heads=4, dim=128, page=32, width=2)
    q = q * np.array([3e5, 0.3, 3e-9, 0], np.float32)[:, None]
    ours, theirs = (jax.jit(lambda *a, k=kernels: index_scores(*a, kernels=k)) for kernels in (MOSAIC, REFERENCE))
    for head in range(4):
        alone = np.zeros_like(rest[0])
        alone[..., head] = 1
        got, want = ours(q, alone, *rest[1:]), theirs(q, alone, *rest[1:])
        np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-3 * np.abs(q[:, :, head]).max())


def test_what_the_kernels_choose(monkeypatch: pytest.MonkeyPatch) -> None:
    """With ties, rows that see no more than may be chosen, one whose last query alone sees more; three at a time."""
    monkeypatch.setattr(mosaic, "BUDGET", 3 * 3 * 512 * 4)
    args, scores = case("uint8", 3, heads=4, dim=128, page=32, width=3)
    positions, counts = jax.jit(lambda *a: select(*a, top_k=29, kernels=MOSAIC))(*args)
    for index in np.ndindex(scores.shape[:2]):
        assert (positions[index].tolist(), int(counts[index])) == chosen(scores[index], 29), index


def test_the_kernel_finds_the_best_of_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few values, or none twice; some of the scores in shared memory; what is not seen is poison."""
    monkeypatch.setattr(mosaic_best, "CHUNK", 512)
    monkeypatch.setattr(mosaic_best, "SHARED", 1)
    rng = np.random.default_rng(0)
    size, top_k = mosaic_best.padded(1100), 100
    find = jax.jit(lambda scores, seen: mosaic_best.best(scores, seen, top_k, MOSAIC))
    for values in ([-1, -0.0, 0.0, 0.5, -np.inf], [1, 1 + 2**-23], rng.standard_normal(10_000)):
        scores = rng.choice(np.array(values, np.float32), (5, size))
        seen = np.array([0, top_k, top_k + 1, 520, 1100], np.int32)
        scores[1] = np.abs(scores[1], where=np.isfinite(scores[1]), out=np.zeros_like(scores[1]))
        scores = np.where(np.arange(size) < seen[:, None], scores, np.nan)
        positions, counts = find(scores, seen)
        for row in range(5):
            wanted = chosen(np.nan_to_num(scores[row, : seen[row]], nan=-np.inf, neginf=-np.inf), top_k)
            assert (positions[row].tolist(), int(counts[row])) == wanted


def test_what_declines_says_why() -> None:
    hopper = Kernels("auto", "NVIDIA H200", "9.0")
    assert choose("pallas_kernels.indexer", Case("uint8", 64, 128, 32), hopper).name == "mosaic"
    for facts, reason in [
        (("float32", 64, 128, 32), "float32"),
        (("uint8", 64, 128, 16), "page_size 16"),
        (("bfloat16", 64, 128, 20), "page_size 20"),
        (("bfloat16", 96, 128, 32), "96 heads"),
        (("uint8", 64, 64, 32), "64 channels"),
    ]:
        choice = choose("pallas_kernels.indexer", Case(*facts), hopper)
        assert choice.name == "reference"
        assert reason in str(choice)
