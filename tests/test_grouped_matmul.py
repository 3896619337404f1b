"""Products with quantized and with grouped weights: implementations against float64, and against the reference."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hopper import MOSAIC

from pallas_kernels import grouped_matmul as package
from pallas_kernels.codecs import mx
from pallas_kernels.dispatch import REFERENCE, KernelError, Kernels, choose
from pallas_kernels.grouped_matmul import Case, grouped_matmul
from pallas_kernels.quant_matmul import quant_matmul

HOPPER = Kernels("auto", "NVIDIA H200", "9.0")


@dataclass(frozen=True)
class Shape:
    """``groups``: of each block; ``total``: of them that count."""

    groups: tuple[int, ...]
    total: int
    rows: int
    outputs: int
    inputs: int
    blocks: tuple[int, int] | None = (128, 128)
    dtype: str = "bfloat16"
    count: int = 4


SHAPES = {
    "one row, others' blocks": Shape((2,), 1, 1, 128, 128),
    "edges of outputs and blocks": Shape((3, 1, 0), 2, 9, 136, 96, (40, 32)),
    "more steps than stages, split": Shape((1,), 1, 3, 64, 480, (64, 32), "float16"),
    "not quantized": Shape((0, 3, 3), 2, 9, 136, 160, None),
    "nothing to do": Shape((0,), 0, 8, 64, 64, (64, 64)),
}


def case(shape: Shape) -> tuple[list[Any], dict[str, Any]]:
    """What does not count is NaN, or no group."""
    rng = np.random.default_rng(shape.inputs)
    size = (shape.count, shape.outputs, shape.inputs)
    x = rng.standard_normal((len(shape.groups), shape.rows, shape.inputs), np.float32)
    x[shape.total :] = np.nan
    kind = jnp.float8_e4m3fn if shape.blocks else shape.dtype
    data, scale = jnp.asarray(rng.standard_normal(size), kind), None
    if shape.blocks:
        sides = (-(-side // block) for side, block in zip(size[1:], shape.blocks, strict=True))
        scale = jnp.asarray(rng.uniform(0.01, 2, (shape.count, *sides)), jnp.float32)
    others = np.setdiff1d(np.arange(shape.count), shape.groups[: shape.total])
    data = data.at[others].set(jnp.nan)
    group = np.where(np.arange(len(shape.groups)) < shape.total, shape.groups, -1)
    args = [jnp.asarray(x), data, scale, jnp.asarray(group, jnp.int32), jnp.int32(shape.total)]
    return args, {"blocks": shape.blocks or (1, 1), "dtype": shape.dtype}


def exactly(x: jax.Array, weight: np.ndarray, dtype: str) -> tuple[np.ndarray, np.ndarray]:
    """The product of ``x`` as ``dtype`` with the weights as they are, and that of the magnitudes."""
    rounded = np.asarray(x.astype(dtype), np.float64)
    return rounded @ weight.T, np.abs(rounded) @ np.abs(weight).T


def whole(data: jax.Array, scale: jax.Array | None, blocks: tuple[int, int]) -> np.ndarray:
    if scale is None:
        return np.asarray(data, np.float64)
    wide = np.repeat(np.repeat(np.asarray(scale, np.float64), blocks[0], 0), blocks[1], 1)
    return np.asarray(data, np.float64) * wide[: data.shape[0], : data.shape[1]]


@pytest.mark.parametrize("kernels", [REFERENCE, MOSAIC], ids=lambda kernels: kernels.mode)
@pytest.mark.parametrize("name", SHAPES)
def test_blocks_meet_the_weights_of_their_group(name: str, kernels: Kernels) -> None:
    """The kernel rounds no weights: only its sums are. The reference also rounds a weight to ``dtype``."""
    shape = SHAPES[name]
    (x, data, scale, group, total), options = case(shape)
    got = np.asarray(grouped_matmul(x, data, scale, group, total, kernels=kernels, **options))
    assert got.shape == (*x.shape[:2], shape.outputs)
    rounding = 2.0**-9 if kernels is REFERENCE and shape.blocks else 0.0
    for block in range(shape.total):
        mine = shape.groups[block]
        weight = whole(data[mine], None if scale is None else scale[mine], options["blocks"])
        want, magnitude = exactly(x[block], weight, shape.dtype)
        assert (np.abs(got[block] - want) <= (rounding + 2e-6) * magnitude).all()


@pytest.mark.parametrize(("tokens", "kernels"), [(1, MOSAIC), (130, MOSAIC), (1, REFERENCE), (130, REFERENCE)])
def test_tokens_meet_quantized_weights(tokens: int, kernels: Kernels) -> None:
    """One token, and more than a block of them."""
    (_, data, scale, _, _), options = case(Shape((0,), 1, 1, 64, 128, (64, 64), count=1))
    x = jnp.asarray(np.random.default_rng(tokens).standard_normal((tokens, 128)), jnp.float32)
    got = np.asarray(quant_matmul(x, data[0], scale[0], kernels=kernels, **options))
    want, magnitude = exactly(x, whole(data[0], scale[0], options["blocks"]), "bfloat16")
    assert got.shape == want.shape
    rounding = 2.0**-9 if kernels is REFERENCE else 0.0
    assert (np.abs(got - want) <= (rounding + 2e-6) * magnitude).all()


def test_every_e4m3_number_is_met_exactly() -> None:
    """Subnormal ones too: every column of the identity picks one. NaN stays NaN."""
    every = jax.lax.bitcast_convert_type(jnp.arange(256, dtype=jnp.uint8), jnp.float8_e4m3fn)
    finite = jnp.where(jnp.isnan(every), 0, every)
    data = jnp.concatenate([jnp.tile(finite, (64, 1)), jnp.tile(every, (64, 1))])
    scale = jnp.ones((2, 1), jnp.float32)
    rows = jnp.asarray([0x00, 0x01, 0x08, 0x40, 0x7E, 0x80, 0x87, 0xFE])
    got = quant_matmul(jax.nn.one_hot(rows, 256), data, scale, blocks=(64, 256), dtype="bfloat16", kernels=MOSAIC)
    want = jnp.broadcast_to(finite[rows].astype(jnp.float32)[:, None], (8, 64))
    np.testing.assert_array_equal(got[:, :64], want)
    assert np.isnan(got[:, 64:]).all()


@pytest.mark.parametrize("kernels", [REFERENCE, MOSAIC], ids=lambda kernels: kernels.mode)
def test_mxfp4_meets_rows_in_float32(kernels: Kernels) -> None:
    """Every number with scales of any size; activations are rounded to 16 bits of mantissa at most. NaN stays NaN."""
    rng = np.random.default_rng(0)
    data = rng.integers(0, 256, (2, 64, 64), np.uint8)
    scale = rng.choice([3, 100, 127, 128, 200], (2, 64, 1)).repeat(4, -1).astype(np.uint8)
    scale[:, :, 1] = rng.integers(120, 130, (2, 64))
    scale[1, 5, 2] = 255
    x = rng.standard_normal((2, 3, 128)).astype(np.float32)
    group = jnp.asarray([1, 0], jnp.int32)
    args = [jnp.asarray(array) for array in (x, data, scale)]
    found = grouped_matmul(*args, group, jnp.int32(2), blocks=(1, 32), dtype="float32", kernels=kernels)
    got = np.asarray(found, np.float64)
    numbers = np.array(mx.E2M1)[np.stack([data & 15, data >> 4], -1).reshape(2, 64, 128)]
    weight = numbers * 2.0 ** (scale.astype(np.int64) - 127).repeat(32, -1)
    want = x.astype(np.float64) @ weight[::-1].swapaxes(1, 2)
    magnitude = np.abs(x.astype(np.float64)) @ np.abs(weight[::-1]).swapaxes(1, 2)
    right = np.abs(got - want) <= 2.0**-16 * magnitude
    right[0, :, 5] = np.isnan(got[0, :, 5])
    assert right.all()


def test_what_declines_says_why() -> None:
    fits = Case("bfloat16", "float8_e4m3fn", 4096, 7168, (128, 128))
    assert choose(package.__name__, fits, HOPPER).name == "mosaic"
    assert choose("pallas_kernels.quant_matmul", fits, HOPPER).name == "mosaic"
    assert str(choose(package.__name__, fits, Kernels())) == "reference (mosaic: the device is no NVIDIA GPU)"
    for wrong, why in (
        (Case("float32", "float8_e4m3fn", 4096, 7168, (128, 128)), "float32"),
        (Case("bfloat16", "uint8", 4096, 3584, (1, 32)), "products of MXFP4 are of bfloat16"),
        (Case("float32", "uint8", 4096, 96, (1, 32)), "96 inputs in blocks of 32 are no multiples of 64"),
        (Case("bfloat16", "float16", 4096, 3584), "weights are float16"),
        (Case("bfloat16", "bfloat16", 32, 7168), "32 outputs are fewer than 64"),
        (Case("bfloat16", "bfloat16", 64, 176), "176 inputs"),
        (Case("bfloat16", "float8_e4m3fn", 64, 128, (64, 24)), "128 inputs in blocks of 24"),
        (Case("bfloat16", "float8_e4m3fn", 64, 128, (4, 128)), "4 outputs share a scale"),
    ):
        assert why in str(choose(package.__name__, wrong, HOPPER))
        with pytest.raises(KernelError, match=why):
            choose(package.__name__, wrong, MOSAIC)
