"""Writes into cache pages: every format, skipped tokens, page borders, in place, and never more than the row itself."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hopper import MOSAIC
from jax.sharding import NamedSharding, PartitionSpec

from pallas_kernels.codecs import records
from pallas_kernels.dispatch import REFERENCE, KernelError, Kernels, choose
from pallas_kernels.kv_write import Case, write_heads, write_keys, write_latent

P, K, G, D = 5, 3, 8, 16
R, ROPE = 32, 8
POISON = 0xA5

each = pytest.mark.parametrize("kernels", [REFERENCE, MOSAIC], ids=lambda kernels: kernels.mode)


def slots_of(count: int, seed: int) -> np.ndarray:
    """Distinct slots in any order, first and last of a page among them, and some -1."""
    rng = np.random.default_rng(seed)
    chosen = rng.permutation(P * G)[:count].astype(np.int32)
    chosen[rng.random(count) < 0.3] = -1
    chosen[:2] = [G - 1, G] if count > 1 else [0]
    chosen[2:][np.isin(chosen[2:], [G - 1, G])] = -1
    return chosen


def poisoned(shape: tuple[int, ...], dtype) -> np.ndarray:
    size = np.dtype(dtype).itemsize
    return np.full((*shape[:-1], shape[-1] * size), POISON, np.uint8).view(dtype)


def same(a, b) -> None:
    np.testing.assert_array_equal(np.asarray(a).view(np.uint8), np.asarray(b).view(np.uint8))


@each
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "uint8"])
@pytest.mark.parametrize("count", [1, 20])
def test_heads(dtype: str, count: int, kernels: Kernels) -> None:
    rng = np.random.default_rng(count)
    k, v = rng.standard_normal((2, count, K, D), np.float32)
    slots = slots_of(count, count)
    fp8 = dtype == "uint8"
    pages = poisoned((P, 2, K, G * (D + 4)) if fp8 else (P, 2, K, G, D), jnp.dtype(dtype))
    expected = pages.copy()
    for token, slot in enumerate(slots):
        for part, x in enumerate((k[token], v[token])) if slot >= 0 else ():
            page, offset = divmod(int(slot), G)
            if not fp8:
                expected[page, part, :, offset] = x.astype(pages.dtype)
                continue
            data, scale = records.quantize_heads(x)
            expected[page, part, :, offset * D : (offset + 1) * D] = np.asarray(data).view(np.uint8)
            start = G * D + 4 * offset
            expected[page, part, :, start : start + 4] = np.asarray(scale)[:, None].view(np.uint8)
    same(jax.jit(partial(write_heads, kernels=kernels))(pages, k, v, slots), expected)


@each
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "uint8"])
@pytest.mark.parametrize("count", [1, 20])
def test_latent(dtype: str, count: int, kernels: Kernels) -> None:
    rng = np.random.default_rng(count)
    latent, rope = rng.standard_normal((count, R), np.float32), rng.standard_normal((count, ROPE), np.float32)
    slots = slots_of(count, count)
    width = records.latent_bytes(R, ROPE) if dtype == "uint8" else R + ROPE
    pages = poisoned((P, G, width), jnp.dtype(dtype))
    expected = pages.copy()
    for token, slot in enumerate(slots):
        if slot >= 0:
            row = np.concatenate([latent[token], rope[token]]).astype(pages.dtype)
            if dtype == "uint8":
                row = records.pack_latent(records.quantize_latent(latent[token], rope[token]))
            expected[divmod(int(slot), G)] = row
    same(jax.jit(partial(write_latent, kernels=kernels))(pages, latent, rope, slots), expected)


@each
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "uint8"])
@pytest.mark.parametrize("channels", [D, 256])
def test_keys(dtype: str, channels: int, kernels: Kernels) -> None:
    keys = np.random.default_rng(channels).standard_normal((20, channels), np.float32)
    slots = slots_of(20, channels)
    fp8 = dtype == "uint8"
    pages = poisoned((P, G * records.key_bytes(channels)) if fp8 else (P, G, channels), jnp.dtype(dtype))
    expected = pages.copy()
    groups = -(-channels // 128)
    for token, slot in enumerate(slots):
        page, offset = divmod(int(slot), G)
        if slot < 0:
            continue
        if not fp8:
            expected[page, offset] = keys[token].astype(pages.dtype)
            continue
        data, scale = records.quantize_keys(keys[token])
        expected[page, offset * channels : (offset + 1) * channels] = np.asarray(data).view(np.uint8)
        start = G * channels + offset * 4 * groups
        expected[page, start : start + 4 * groups] = np.asarray(scale).view(np.uint8)
    same(jax.jit(partial(write_keys, kernels=kernels))(pages, keys, slots), expected)


@each
def test_nothing_is_written_for_no_token(kernels: Kernels) -> None:
    pages = poisoned((P, 2, K, G * (D + 4)), np.uint8)
    new = np.ones((4, K, D), np.float32)
    same(write_heads(jnp.asarray(pages), new, new, np.full(4, -1, np.int32), kernels=kernels), pages)


def test_more_heads_than_are_written_at_once() -> None:
    k, v = np.random.default_rng(0).standard_normal((2, 3, 20, D), np.float32)
    pages = poisoned((P, 2, 20, G, D), jnp.dtype("bfloat16"))
    slots = np.array([G - 1, -1, G], np.int32)
    want, got = (write_heads(jnp.asarray(pages), k, v, slots, kernels=kernels) for kernels in (REFERENCE, MOSAIC))
    same(got, want)


@pytest.mark.parametrize("devices", [1, 2])
def test_pages_are_changed_in_place(devices: int) -> None:
    """Donated, no copy of the cache is made, on one device or on two that share its heads: temporaries stay small."""
    if len(jax.devices()) < devices:
        pytest.skip("needs several devices")
    mesh = jax.make_mesh((devices,), ("heads",), devices=jax.devices()[:devices])

    def shared(shape: tuple[int, ...], dtype, *axes: str | None) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, PartitionSpec(*axes)))

    for shape, dtype in (((400, 2, 2, G * (D + 4)), jnp.uint8), ((400, 2, 2, G, D), jnp.float32)):
        pages = shared(shape, dtype, None, None, "heads")
        new, slots = shared((4, 2, D), jnp.float32, None, "heads"), shared((4,), jnp.int32)
        compiled = jax.jit(write_heads, donate_argnums=0).lower(pages, new, new, slots).compile()
        memory = compiled.memory_analysis()
        assert memory.alias_size_in_bytes == np.prod(shape) * jnp.dtype(dtype).itemsize // devices
        assert memory.temp_size_in_bytes < memory.alias_size_in_bytes / 10


def test_what_declines_says_why() -> None:
    package = "pallas_kernels.kv_write"
    assert choose(package, Case("uint8", 132), Kernels("auto", "NVIDIA H200", "9.0")).name == "mosaic"
    with pytest.raises(KernelError, match="a row has 34 bytes"):
        choose(package, Case("bfloat16", 34), MOSAIC)
