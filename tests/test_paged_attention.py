"""Paged attention: implementations equal the reference, and the reference plain attention over the gathered text."""

from dataclasses import dataclass, replace
from functools import partial
from random import Random
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hopper import MOSAIC
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.codecs import records
from pallas_kernels.dispatch import REFERENCE, KernelError, Kernels, choose
from pallas_kernels.paged_attention import Case, paged_attention


@dataclass(frozen=True)
class Shape:
    """One call. ``lengths``: tokens of each row's context, the queries' own among them; 0: padding."""

    lengths: tuple[int, ...]
    queries: int = 1
    kv_heads: int = 2
    group: int = 3
    dim: int = 64
    page: int = 32
    width: int = 6
    dtype: str = "bfloat16"
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False


SHAPES = {
    "one token": Shape((1,), kv_heads=1, group=1),
    "page borders": Shape((31, 32, 33, 64, 65)),
    "padding rows": Shape((0, 40, 0)),
    "blocks": Shape((33, 5, 130), queries=32, group=4, dim=32, page=16, width=9),
    "more rows than a tile": Shape((70, 96), queries=32, group=5, page=16),
    "verification, sinks": Shape((50, 9), queries=8, group=4, sinks=True),
    "window": Shape((150, 7, 41, 0), window=40),
    "softcap": Shape((100, 33), softcap=20.0),
    "wide heads": Shape((70,), dim=256, group=2, page=16, width=5),
    "narrow heads": Shape((40, 17), dim=16, page=8),
    "large pages": Shape((70, 129, 200), page=128, width=2, kv_heads=1),
    "large pages of records": Shape((70, 129), page=128, width=2, kv_heads=1, dtype="uint8"),
    "more steps than stages": Shape((500,), kv_heads=1, page=64, width=8),
    "half": Shape((40,), dtype="float16"),
    "records": Shape((33, 64, 0), dtype="uint8", width=3),
    "records, blocks": Shape((70, 150), queries=32, kv_heads=1, dim=128, dtype="uint8", window=60),
    "records, more steps than stages": Shape((500,), kv_heads=1, width=16, dtype="uint8"),
}


def case(shape: Shape) -> tuple[list[jax.Array], dict[str, Any]]:
    rng = np.random.default_rng(sum(shape.lengths))
    rows = len(shape.lengths)
    count = np.minimum(shape.lengths, shape.queries)
    pages = rows * shape.width + 1
    tables = rng.permutation(np.arange(1, pages)).reshape(rows, shape.width)
    held = -(-np.array(shape.lengths) // shape.page)
    tables[np.arange(shape.width) >= held[:, None]] = 0
    content = rng.standard_normal((pages, 2, shape.kv_heads, shape.page, shape.dim), np.float32)
    content[0] = 1e4  # nobody's
    held = jnp.asarray(content)
    if shape.dtype == "uint8":
        sizes = jnp.asarray(4 ** rng.uniform(-1, 1, (*content.shape[:-1], 1)), jnp.float32)
        held = records.pack_head_pages(*records.quantize_heads(held * sizes))
    q = rng.standard_normal((rows, shape.queries, shape.kv_heads, shape.group, shape.dim), np.float32)
    arrays = [
        jnp.asarray(q),
        held.astype(shape.dtype),
        jnp.asarray(tables, jnp.int32),
        jnp.asarray(np.array(shape.lengths) - count, jnp.int32),
        jnp.asarray(count, jnp.int32),
    ]
    sinks = jnp.asarray(rng.standard_normal((shape.kv_heads, shape.group)), jnp.float32) if shape.sinks else None
    options = {"scale": shape.dim**-0.5, "window": shape.window, "softcap": shape.softcap, "sinks": sinks}
    return arrays, options


def plain(arrays: list[jax.Array], options: dict[str, Any]) -> np.ndarray:
    """In numpy and float64, row by row; padding is NaN."""
    if arrays[1].dtype == jnp.uint8:
        numbers = records.dequantize_heads(*records.unpack_head_pages(arrays[1], arrays[0].shape[-1]))
        arrays = [arrays[0], numbers, *arrays[2:]]
    q, pages, tables, starts, counts = (np.asarray(array, np.float64) for array in arrays)
    out = np.full(q.shape, np.nan)
    for row, (start, count) in enumerate(zip(starts.astype(int), counts.astype(int), strict=True)):
        text = pages[tables[row].astype(int)]  # [W, 2, K, G, D]
        k, v = (text[:, part].swapaxes(1, 2).reshape(-1, *text.shape[2:3], text.shape[4]) for part in (0, 1))
        for query in range(count):
            seen = np.arange(max(0, start + query + 1 - (options["window"] or 10**9)), start + query + 1)
            scores = np.einsum("kgd,skd->kgs", q[row, query], k[seen]) * options["scale"]
            if options["softcap"] is not None:
                scores = options["softcap"] * np.tanh(scores / options["softcap"])
            weights = np.exp(scores)
            total = weights.sum(-1)
            if options["sinks"] is not None:
                total = total + np.exp(np.asarray(options["sinks"], np.float64))
            out[row, query] = np.einsum("kgs,skd->kgd", weights, v[seen]) / total[..., None]
    return out


@pytest.mark.parametrize("kernels", [REFERENCE, MOSAIC], ids=lambda kernels: kernels.mode)
@pytest.mark.parametrize("name", SHAPES)
def test_equals_plain_attention(name: str, kernels: Kernels) -> None:
    """Within the rounding of 16-bit weights, and much nearer on average; padding rows are finite."""
    arrays, options = case(SHAPES[name])
    got = np.asarray(paged_attention(*arrays, kernels=kernels, **options))
    want = plain(arrays, options)
    assert np.isfinite(got).all()
    np.testing.assert_allclose(np.where(np.isnan(want), 0, got), np.nan_to_num(want), atol=2e-2, rtol=2e-2)
    errors = np.abs(got - want)[~np.isnan(want)]
    assert errors.mean() < (4e-3 if SHAPES[name].dtype == "uint8" else 2e-3)


RANDOM = Shape((0, 0, 0), queries=3, kv_heads=1, group=2, dim=16, page=8, width=10, window=30)
run_random = jax.jit(partial(paged_attention, kernels=MOSAIC, scale=RANDOM.dim**-0.5, window=RANDOM.window))


@settings(max_examples=6, deadline=None, derandomize=True)
@given(st.lists(st.integers(0, 80), min_size=3, max_size=3), st.randoms(use_true_random=False))
def test_any_table(lengths: list[int], random: Random) -> None:
    """Pages anywhere, the first ones shared, contexts of every length: one program for all."""
    arrays, options = case(replace(RANDOM, lengths=tuple(lengths)))
    tables = np.asarray(arrays[2]).copy()
    random.shuffle(order := list(range(1, len(arrays[1]))))
    tables = np.where(tables > 0, np.array([0, *order])[tables], 0)
    both = min(lengths[:2]) // RANDOM.page
    tables[1, :both] = tables[0, :both]
    arrays[2] = jnp.asarray(tables)
    want = plain(arrays, options)
    got = np.asarray(run_random(*arrays))
    assert np.isfinite(got).all()
    np.testing.assert_allclose(np.where(np.isnan(want), 0, got), np.nan_to_num(want), atol=2e-2, rtol=2e-2)


def test_what_declines_says_why() -> None:
    bf16, f32 = Case("bfloat16", 64, 32, 4), Case("float32", 64, 32, 4)
    package = "pallas_kernels.paged_attention"
    hopper = Kernels("auto", "NVIDIA H200", "9.0")
    assert choose(package, bf16, hopper).name == "mosaic"
    assert str(choose(package, bf16, Kernels())) == "reference (mosaic: the device is no NVIDIA GPU)"
    assert "float32" in str(choose(package, f32, hopper))
    assert "capability 9.0" in str(choose(package, bf16, Kernels("auto", "NVIDIA B200", "10.0")))
    with pytest.raises(KernelError, match="float32"):
        choose(package, f32, Kernels("mosaic"))
    assert choose(package, Case("uint8", 64, 32, 4), hopper).name == "mosaic"
    wrongs = (("bfloat16", 100, 32), ("bfloat16", 64, 4), ("uint8", 32, 32), ("uint8", 64, 96), ("bfloat16", 64, 48))
    for wrong in (Case(*facts, 4) for facts in wrongs):
        assert choose(package, wrong, hopper).name == "reference"
