"""Attention over pages of latents: both forms are what plain attention says, over floats and over records."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hopper import MOSAIC

from pallas_kernels.codecs import records
from pallas_kernels.dispatch import REFERENCE
from pallas_kernels.kv_write import write_latent
from pallas_kernels.mla_attention import mla_attention, mla_prefill

R, r, H, N, D, G, Q = 24, 8, 3, 6, 5, 4, 8  # rank, rotated, heads, not rotated, value channels, page, block
SCALE = 0.3
KERNELS = (MOSAIC, REFERENCE)


class Case(NamedTuple):
    """Rows of several sequences over one pool of pages."""

    pages: jax.Array
    meant: np.ndarray  # [P * G, R + r]: the numbers in the pages
    tables: np.ndarray
    starts: np.ndarray
    counts: np.ndarray
    k_up: np.ndarray  # [H, N, R]
    v_up: np.ndarray  # [H, D, R]

    def plain(self, row: int, q: np.ndarray) -> np.ndarray:
        """``q [Q, H, N + r]`` of a row, as the papers have it, in float64; only the real ones."""
        slots = (self.tables[row][:, None] * G + np.arange(G)).reshape(-1)
        out = np.zeros((self.counts[row], H, D))
        for i in range(self.counts[row]):
            seen = self.meant[slots[: self.starts[row] + i + 1]].astype(np.float64)
            for h in range(H):
                k = np.concatenate([seen[:, :R] @ self.k_up[h].T, seen[:, R:]], axis=-1)
                scores = k @ q[i, h] * SCALE
                weights = np.exp(scores - scores.max())
                out[i, h] = weights / weights.sum() @ (seen[:, :R] @ self.v_up[h].T)
        return out


def case(dtype: str, tables: list[list[int]], starts: list[int], counts: list[int]) -> Case:
    rng = np.random.default_rng(0)
    size = max(map(max, tables)) + 1
    latents = rng.standard_normal((size * G, R + r), np.float32)
    width = records.latent_bytes(R, r) if dtype == "uint8" else R + r
    empty = jnp.full((size, G, width), 0x11 if dtype == "uint8" else 7, dtype)
    pages = write_latent(empty, latents[:, :R], latents[:, R:], jnp.arange(size * G))
    if dtype == "uint8":
        meant = jnp.concatenate(records.dequantize_latent(records.unpack_latent(pages, R)), axis=-1)
    else:
        meant = pages.astype(jnp.float32)
    ups = (rng.standard_normal(shape, np.float32) / 3 for shape in ((H, N, R), (H, D, R)))
    where = (np.array(numbers, np.int32) for numbers in (tables, starts, counts))
    return Case(pages, np.asarray(meant).reshape(size * G, R + r), *where, *ups)


KINDS = [("float32", 1e-5, G), ("float32", 1e-5, 3 * G), ("bfloat16", 0.06, 64), ("uint8", 0.06, 64)]
"""Dtypes of pages, and how near the results are (records are read as bfloat16, which holds them); tokens a step."""


@pytest.mark.parametrize(("dtype", "near", "chunk"), KINDS)
def test_absorbed_is_plain_attention(dtype: str, near: float, chunk: int) -> None:
    """One query a row and several, from the first token on; padding is finite."""
    at = case(dtype, [[3, 1, 4], [2, 0, 0], [5, 6, 7], [0, 0, 0]], [11, 0, 5, 0], [1, 1, 1, 0])
    rng = np.random.default_rng(1)
    for queries in (1, 4):
        counts = np.minimum(at.counts * queries, np.array([1, 4, 4, 4]))
        q = rng.standard_normal((4, queries, H, N + r), np.float32)
        absorbed = np.concatenate([np.einsum("bqhn,hnr->bqhr", q[..., :N], at.k_up), q[..., N:]], -1)
        run = jax.jit(partial(mla_attention, rank=R, scale=SCALE, chunk=chunk))
        mixed = np.asarray(run(absorbed, at.pages, at.tables, at.starts, counts))
        assert mixed.shape == (4, queries, H, R)
        assert mixed.dtype == np.float32
        assert np.isfinite(mixed).all()
        out = np.einsum("bqhr,hdr->bqhd", mixed, at.v_up)
        for row in range(3):
            want = at._replace(counts=counts).plain(row, q[row])
            np.testing.assert_allclose(out[row, : counts[row]], want, atol=near)


def blocks(dtype: str) -> Case:
    """Three blocks of one sequence, one of another that begins with the same page, two of a third, padding."""
    first, second, third = [3, 1, 4, 9, 2, 8, 0], [3, 5, 6, 7, 0, 0, 0], [10, 11, 12, 13, 14, 15, 16]
    tables = [first] * 3 + [second] + [third] * 2 + [[0] * 7] * 2
    return case(dtype, tables, [0, Q, 2 * Q, 5, 12, 12 + Q, 0, 0], [Q, Q, 3, Q, Q, 6, 0, 0])


@pytest.mark.parametrize(("dtype", "near", "chunk"), KINDS)
def test_not_absorbed_is_plain_attention(dtype: str, near: float, chunk: int) -> None:
    at = blocks(dtype)
    rows = len(at.tables)
    q = np.random.default_rng(1).standard_normal((rows, Q, H, N + r), np.float32)
    made: list[int] = []

    def expand(latents: jax.Array) -> tuple[jax.Array, jax.Array]:
        jax.debug.callback(lambda: made.append(len(latents)))
        x = latents.astype(jnp.float32)
        return jnp.einsum("cr,hnr->chn", x, at.k_up), jnp.einsum("cr,hdr->chd", x, at.v_up)

    run = jax.jit(partial(mla_prefill, expand=expand, rank=R, values=D, scale=SCALE, chunk=chunk))
    out = np.asarray(run(q, at.pages, at.tables, at.starts, at.counts))
    jax.effects_barrier()
    assert out.shape == (rows, Q, H, D)
    assert np.isfinite(out).all()
    for row in range(rows):
        want = at.plain(row, q[row])
        np.testing.assert_allclose(out[row, : at.counts[row]], want, atol=near)
    span = min(chunk // G, at.tables.shape[1]) * G
    assert sum(made) == sum(-(-end // span) * span for end in (19, 13, 26)), "what a sequence sees is made once"


def test_both_forms_agree() -> None:
    """On every block, in float32: one is the other with the products in another order."""
    at = blocks("float32")
    q = np.random.default_rng(2).standard_normal((len(at.tables), Q, H, N + r), np.float32)
    absorbed = np.concatenate([np.einsum("bqhn,hnr->bqhr", q[..., :N], at.k_up), q[..., N:]], -1)
    mixed = jax.jit(partial(mla_attention, rank=R, scale=SCALE))(absorbed, *at[:1], *at[2:5])
    expand = lambda x: (jnp.einsum("cr,hnr->chn", x, at.k_up), jnp.einsum("cr,hdr->chd", x, at.v_up))  # noqa: E731
    out = jax.jit(partial(mla_prefill, expand=expand, rank=R, values=D, scale=SCALE))(q, *at[:1], *at[2:5])
    real = np.arange(Q) < at.counts[:, None]
    np.testing.assert_allclose(np.asarray(out)[real], np.einsum("bqhr,hdr->bqhd", mixed, at.v_up)[real], atol=2e-5)


@pytest.mark.parametrize(("dtype", "heads", "queries"), [("uint8", 128, 1), ("bfloat16", 3, 2)])
def test_the_kernel_for_hopper_equals_the_reference(dtype: str, heads: int, queries: int) -> None:
    """In the interpreter: padding rows, contexts of one token, at a page's border and longer than a step of it."""
    rank, rope, size = 128 if MOSAIC.interpreted else 512, 64, 16
    rng = np.random.default_rng(2)
    tables = rng.permutation(np.arange(1, 19)).reshape(3, 6)
    starts, counts = np.array([80 - queries, 0, 15], np.int32), np.array([queries, queries, 0], np.int32)
    latents = rng.standard_normal((19 * size, rank + rope), np.float32)
    width = records.latent_bytes(rank, rope) if dtype == "uint8" else rank + rope
    pages = write_latent(
        jnp.zeros((19, size, width), dtype), latents[:, :rank], latents[:, rank:], np.arange(19 * size)
    )
    q = rng.standard_normal((3, queries, heads, rank + rope), np.float32)
    args = [jnp.asarray(x) for x in (q, pages, tables.astype(np.int32), starts, counts)]
    got, want = (np.asarray(mla_attention(*args, rank=rank, scale=0.1, kernels=kernels)) for kernels in KERNELS)
    assert np.isfinite(got).all()
    assert not got[2].any(), "of a row that is padding"
    for row, count in enumerate(counts):
        np.testing.assert_allclose(got[row, :count], want[row, :count], atol=2e-2)
