"""Number formats of caches and weights equal a second implementation, in numpy and ml_dtypes, bit for bit."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.codecs import fp8, mx, records

E4M3 = ml_dtypes.float8_e4m3fn
SMALL = [0.0, -0.0, 1e-45, -1e-45, 1e-38, 1e-5, 1e-4, 2**-9, 2**-10, 3 * 2**-10, 0.5, 1]
MIDDLE = [1.75, 1.75 + 2**-22, 1.75 - 2**-23, 240, 447, 448, 449, 464, 480, 1e4, 65504]
LARGE = [3e38, np.finfo(np.float32).max, np.inf, -np.inf, np.nan, -np.nan]
EDGES = np.array([*SMALL, *MIDDLE, *LARGE], np.float32)


def scales(amax: np.ndarray, *, latent: bool) -> np.ndarray:
    """The published rules, taken literally: divide, limit from below, round up to a power of two."""
    one = np.float32(1e-4)
    with np.errstate(over="ignore"):
        wanted = np.maximum(amax / np.float32(448), one) if latent else np.maximum(amax, one) / np.float32(448)
    fraction, exponent = np.frexp(wanted.astype(np.float64))  # fraction in [0.5, 1)
    return np.ldexp(np.float32(1), exponent - (fraction == 0.5)).astype(np.float32)


def quantized(x: np.ndarray, group: int, *, latent: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """Bytes of e4m3 ``[..., n]`` and float32 scales ``[..., ceil(n / group)]``."""
    x = x.astype(np.float32)
    x = np.where(np.abs(x) < np.finfo(np.float32).tiny, np.copysign(np.float32(0), x), x)
    data, found = [], []
    for start in range(0, x.shape[-1], group):
        part = x[..., start : start + group]
        amax = np.where(np.isfinite(part), np.abs(part), 0).max(-1).astype(np.float32)
        scale = scales(amax, latent=latent)
        with np.errstate(invalid="ignore"):
            exact = np.clip(part.astype(np.float64) / scale[..., None], -448, 448).astype(np.float32)
            raw = exact.astype(E4M3).view(np.uint8)
        data.append(np.where(np.isnan(part), np.uint8(0x7F), raw))
        found.append(scale)
    return np.concatenate(data, -1), np.stack(found, -1)


def awkward(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Rows of every size, some with zeros, edges, infinities and NaN in them."""
    size = np.exp2(rng.integers(-40, 40, (*shape[:-1], 1)))
    x = (rng.standard_normal(shape) * size).astype(np.float32)
    x[rng.random(shape) < 0.02] = 0
    spots = rng.random(shape) < 0.01
    x[spots] = rng.choice(EDGES, spots.sum())
    x[0] = 0
    return x


def product(data: np.ndarray, scale: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):  # a number within a rounding of 2^128
        return data.view(E4M3).astype(np.float32) * scale


def raw(x) -> np.ndarray:
    return np.asarray(x).view(np.uint8)


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
@pytest.mark.parametrize(("channels", "rope"), [(512, 64), (32, 8), (160, 16)])
def test_latent_records(dtype, channels: int, rope: int) -> None:
    """V3.2's geometry takes 656 bytes; others, with a last group cut short, follow the same layout."""
    rng = np.random.default_rng(channels)
    latent = awkward(rng, (300, channels)).astype(dtype)
    tail = rng.standard_normal((300, rope)).astype(dtype)
    packed = np.asarray(jax.jit(lambda c, r: records.pack_latent(records.quantize_latent(c, r)))(latent, tail))
    data, scale = quantized(latent, 128, latent=True)
    expected = np.concatenate([data, raw(scale), raw(tail.astype(ml_dtypes.bfloat16))], axis=-1)
    np.testing.assert_array_equal(packed, expected)
    assert packed.shape[1] == records.latent_bytes(channels, rope)
    assert records.latent_bytes(512, 64) == 656
    record = records.unpack_latent(jnp.asarray(packed), channels)
    np.testing.assert_array_equal(records.pack_latent(record), packed)
    values, rotated = records.dequantize_latent(record)
    wide = np.repeat(scale, 128, -1)[:, :channels]
    np.testing.assert_array_equal(values, product(data, wide))
    np.testing.assert_array_equal(rotated, tail.astype(ml_dtypes.bfloat16).astype(np.float32))


@pytest.mark.parametrize("channels", [128, 16])
def test_index_key_pages(channels: int) -> None:
    """A page holds all its rows, then all its scales: 132 bytes a token of 128 channels."""
    keys = awkward(np.random.default_rng(1), (5, 32, channels))
    packed = np.asarray(jax.jit(lambda k: records.pack_key_pages(*records.quantize_keys(k)))(keys))
    data, scale = quantized(keys, 128)
    np.testing.assert_array_equal(packed[:, : 32 * channels], data.reshape(5, -1))
    np.testing.assert_array_equal(packed[:, 32 * channels :], raw(scale).reshape(5, -1))
    assert packed.shape[1] == 32 * records.key_bytes(channels)
    assert records.key_bytes(128) == 132
    again, scale_again = records.unpack_key_pages(jnp.asarray(packed), channels)
    np.testing.assert_array_equal(raw(again), data)
    np.testing.assert_array_equal(scale_again, scale)
    values = records.dequantize_keys(again, scale_again)
    np.testing.assert_array_equal(values, product(data, scale))


@pytest.mark.parametrize("dim", [64, 128])
def test_head_pages(dim: int) -> None:
    """The scale is amax / 448: the largest number of a row comes back within a rounding of it."""
    heads = awkward(np.random.default_rng(2), (7, 2, 3, 8, dim))  # [P, 2, K, G, D]
    packed = np.asarray(jax.jit(lambda x: records.pack_head_pages(*records.quantize_heads(x)))(heads))
    finite = np.where(np.isfinite(heads), np.abs(heads), 0)
    scale = np.maximum(finite.max(-1), np.float32(1e-4)) * np.float32(1 / 448)
    tiny = np.abs(heads) < np.finfo(np.float32).tiny
    with np.errstate(invalid="ignore", over="ignore"):
        exact = np.clip(np.where(tiny, np.copysign(np.float32(0), heads), heads) / scale[..., None], -448, 448)
        data = np.where(np.isnan(heads), np.uint8(0x7F), exact.astype(E4M3).view(np.uint8))
    np.testing.assert_array_equal(packed[..., : 8 * dim], data.reshape(7, 2, 3, -1))
    np.testing.assert_array_equal(packed[..., 8 * dim :], raw(scale))
    assert packed.shape[-1] == 8 * records.head_bytes(dim)
    again, scale_again = records.unpack_head_pages(jnp.asarray(packed), dim)
    values = np.asarray(records.dequantize_heads(again, scale_again))
    np.testing.assert_array_equal(values, product(data, scale[..., None]))
    largest = np.take_along_axis(np.abs(values), finite.argmax(-1)[..., None], -1)[..., 0]
    normal = (finite.max(-1) > 1e-4) & (finite.max(-1) < 1e38)
    np.testing.assert_allclose(largest[normal], finite.max(-1)[normal], rtol=3e-7)


def test_one_bad_number_spoils_no_other() -> None:
    """Infinity saturates, NaN stays in its place, and neither moves the scale of its group."""
    row = np.linspace(-3, 3, 128, dtype=np.float32)
    bad = row.copy()
    bad[[3, 70, 71]] = np.inf, -np.inf, np.nan
    clean, clean_scale = records.quantize_keys(row)
    data, scale = records.quantize_keys(bad)
    assert scale == clean_scale
    others = np.delete(np.arange(128), [3, 70, 71])
    np.testing.assert_array_equal(raw(data)[others], raw(clean)[others])
    values = np.asarray(records.dequantize_keys(data, scale))
    assert values[3] == 448 * scale[0] == -values[70]
    assert np.isnan(values[71])
    assert raw(data)[71] == 0x7F


_quantize = jax.jit(fp8.quantize, static_argnums=1)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.floats(width=32), min_size=4, max_size=4))
def test_any_row(row: list[float]) -> None:
    x = np.array(row, np.float32)
    for latent, floor in ((True, records.LATENT_FLOOR), (False, records.KEY_FLOOR)):
        data, exponent = _quantize(x, floor)
        expected, scale = quantized(x, 4, latent=latent)
        np.testing.assert_array_equal(raw(data), expected)
        assert fp8.power_of_two(exponent) == scale[0]


def test_the_error_is_within_half_a_step() -> None:
    """3 bits of mantissa: within 1/16 of the number, or half the smallest step below the normal numbers."""
    x = np.random.default_rng(3).standard_normal((1000, 64)).astype(np.float32)
    data, scale = records.quantize_heads(x)
    error = np.abs(np.asarray(records.dequantize_heads(data, scale)) - x)
    step = np.asarray(scale)[:, None] * 2**-10
    assert (error <= np.maximum(np.abs(x) / 15.9, step)).all()
    assert error.max() > np.abs(x).max() / 100  # and it is not the identity


def test_ue8m0() -> None:
    every = np.arange(256, dtype=np.uint8)
    expected = every.view(ml_dtypes.float8_e8m0fnu).astype(np.float32)
    got = np.asarray(fp8.from_ue8m0(jnp.asarray(every)))
    normal = slice(1, 255)
    np.testing.assert_array_equal(got[normal], expected[normal])
    assert got.view(np.uint32)[0] == 0x400000
    assert np.isnan(got[255])
    np.testing.assert_array_equal(fp8.to_ue8m0(jnp.arange(-127, 128)), every[:255])


def test_mxfp4_decodes_every_code() -> None:
    blocks = np.arange(256, dtype=np.uint8).reshape(16, 1, 16)
    scale = np.arange(120, 136, dtype=np.uint8).reshape(16, 1)
    low, high = blocks & 15, blocks >> 4
    codes = np.stack([low, high], -1).reshape(16, 32).astype(np.uint8)
    expected = codes.view(ml_dtypes.float4_e2m1fn).astype(np.float32) * np.ldexp(1.0, scale.astype(np.int32) - 127)
    got = np.asarray(mx.dequantize(jnp.asarray(blocks), jnp.asarray(scale)))
    np.testing.assert_array_equal(got, expected.astype(np.float32))
    assert (np.signbit(got) == np.signbit(expected)).all()


def test_mxfp4_encodes_by_the_rule() -> None:
    rng = np.random.default_rng(4)
    x = rng.standard_normal((200, 64)).astype(np.float32) * np.exp2(rng.integers(-30, 30, (200, 1))).astype(np.float32)
    x[0], x[1, :16] = 0, np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0, 7.9, 0.2, 0.3, 5.1, 4.9, -0.25, -5, 7])
    x[1, 16:] = 0
    blocks, scale = jax.jit(mx.quantize)(x)
    groups = x.reshape(200, 2, 32)
    amax = np.abs(groups).max(-1)
    exponent = np.maximum(np.frexp(amax)[1] - 1 - 2, -126)
    exponent[amax == 0] = -126
    np.testing.assert_array_equal(scale, (exponent + 127).astype(np.uint8))
    scaled = np.clip(groups / np.ldexp(1.0, exponent)[..., None], -6, 6).astype(np.float32)
    codes = scaled.astype(ml_dtypes.float4_e2m1fn).view(np.uint8)
    np.testing.assert_array_equal(blocks, codes[..., ::2] | codes[..., 1::2] << 4)
