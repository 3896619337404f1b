"""Rotary frequencies against the published formulas written out channel by channel, and what configs may say."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny import FIXTURES

from jaxserve.layers import query_scale, rope_table, rotate
from jaxserve.rope import ROPE_TYPES, RopeConfig, RopeError, parse_rope

LLAMA31 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096}


def plain(theta: float, dim: int) -> list[float]:
    return [1 / theta ** (2 * i / dim) for i in range(dim // 2)]


def llama3_by_wavelength(theta: float, dim: int, factor: float, low: float, high: float, original: int) -> list[float]:
    """As Meta publishes it, in wavelengths."""
    out = []
    for freq in plain(theta, dim):
        length = 2 * math.pi / freq
        if length < original / high:
            out.append(freq)
        elif length > original / low:
            out.append(freq / factor)
        else:
            smooth = (original / length - low) / (high - low)
            out.append((1 - smooth) * freq / factor + smooth * freq)
    return out


def yarn_by_turns(
    theta: float, dim: int, factor: float, fast: float, slow: float, original: int, whole: bool
) -> list[float]:
    """As the paper's code has it: a linear ramp between the channels that turn ``fast`` and ``slow`` times."""

    def channel(turns: float) -> float:
        return dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = channel(fast), channel(slow)
    if whole:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    out = []
    for i, freq in enumerate(plain(theta, dim)):
        ramp = min(max((i - low) / ((high - low) or 0.001), 0), 1)
        out.append(freq / factor * ramp + freq * (1 - ramp))
    return out


def frequencies(params: dict[str, Any], dim: int = 128, theta: float = 500000.0, **config: Any) -> np.ndarray:
    return parse_rope({"rope_theta": theta, "rope_scaling": params, **config}, dim).inv_freq()


def test_default_and_linear() -> None:
    expected = np.array(plain(10000.0, 64))
    np.testing.assert_allclose(parse_rope({}, 64).inv_freq(), expected, rtol=1e-6)
    found = frequencies({"rope_type": "linear", "factor": 4.0}, 64, 10000.0)
    np.testing.assert_allclose(found, expected / 4, rtol=1e-6)
    assert found.dtype == np.float32


@pytest.mark.parametrize(("dim", "original", "factor"), [(128, 8192, 8.0), (64, 8192, 32.0), (16, 32, 8.0)])
def test_llama3(dim: int, original: int, factor: float) -> None:
    found = frequencies({**LLAMA31, "factor": factor, "original_max_position_embeddings": original}, dim)
    expected = llama3_by_wavelength(500000.0, dim, factor, 1.0, 4.0, original)
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    untouched, stretched = np.array(plain(500000.0, dim)), np.array(plain(500000.0, dim)) / factor
    kinds = [np.isclose(found, p).sum() for p in (untouched, stretched)]
    assert min(kinds) > 0
    assert sum(kinds) < dim // 2 or dim == 16, "some lie between"


@pytest.mark.parametrize("truncate", [True, False])
@pytest.mark.parametrize(("dim", "theta", "original"), [(128, 150000.0, 4096), (64, 10000.0, 4096), (16, 10000.0, 16)])
def test_yarn(truncate: bool, dim: int, theta: float, original: int) -> None:
    params = {**YARN, "truncate": truncate, "original_max_position_embeddings": original}
    expected = yarn_by_turns(theta, dim, 32.0, 32.0, 1.0, original, truncate)
    np.testing.assert_allclose(frequencies(params, dim, theta), expected, rtol=1e-5)


def test_yarn_ramps_between_its_betas() -> None:
    params = {**YARN, "beta_fast": 16, "beta_slow": 2}
    expected = yarn_by_turns(10000.0, 64, 32.0, 16.0, 2.0, 4096, True)
    np.testing.assert_allclose(frequencies(params, 64, 10000.0), expected, rtol=1e-5)


@pytest.mark.parametrize(
    ("more", "factor"),
    [
        ({}, 0.1 * math.log(32) + 1),
        ({"attention_factor": 1.25}, 1.25),
        ({"mscale": 1.0, "mscale_all_dim": 1.0}, 1.0),
        ({"mscale": 0.707, "mscale_all_dim": 1.0}, (0.0707 * math.log(32) + 1) / (0.1 * math.log(32) + 1)),
        ({"factor": 0.5}, 1.0),
    ],
)
def test_yarns_attention_factor(more: dict[str, float], factor: float) -> None:
    rope = parse_rope({"rope_parameters": {**YARN, **more}}, 64)
    assert rope.attention_factor == pytest.approx(factor)
    table = np.asarray(rope_table(rope, np.arange(3)))
    np.testing.assert_allclose((table**2).sum(0), factor**2, rtol=1e-5)


def test_both_spellings_of_a_config_agree() -> None:
    new = parse_rope({"rope_parameters": {**LLAMA31, "rope_theta": 500000.0}}, 128)
    old = parse_rope({"rope_theta": 500000.0, "rope_scaling": {**LLAMA31, "type": "llama3"}}, 128)
    assert new == old
    assert parse_rope({"rope_theta": 5.0, "rope_scaling": None}, 8) == RopeConfig(theta=5.0, dim=8)


def test_what_is_missing_or_unknown_is_named() -> None:
    for kind in ("dynamic", "longrope", "mrope"):
        with pytest.raises(RopeError, match=f"rope type '{kind}' is not implemented.*{ROPE_TYPES[0]}"):
            parse_rope({"rope_scaling": {"rope_type": kind, "factor": 2.0}}, 64)
    for name in ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"):
        with pytest.raises(RopeError, match=name):
            parse_rope({"rope_scaling": {k: v for k, v in LLAMA31.items() if k != name}}, 64)
    for kind in ("linear", "yarn"):
        with pytest.raises(RopeError, match="'factor'"):
            parse_rope({"rope_scaling": {"rope_type": kind}}, 64)


def test_a_part_of_the_channels_turns() -> None:
    rope = parse_rope({"partial_rotary_factor": 0.5}, 32)
    assert rope.dim == 16
    x = np.random.default_rng(0).normal(size=(3, 2, 32)).astype(np.float32)
    out = np.asarray(rotate(x, rope_table(rope, np.array([0, 1, 9]))))
    assert np.array_equal(out[..., 16:], x[..., 16:])
    np.testing.assert_allclose(out[0], x[0], atol=1e-7)
    assert not np.allclose(out[1, :, :16], x[1, :, :16])


def test_rotation_is_of_complex_numbers() -> None:
    """Channel i and channel i + dim/2 are a number's parts, or those of a pair; scores depend on distances alone."""
    rope = RopeConfig(theta=100.0, dim=8)
    rng = np.random.default_rng(1)
    x = rng.normal(size=(5, 1, 8)).astype(np.float32)
    positions = np.array([0, 3, 10, 100, 1000])
    out = np.asarray(rotate(x, rope_table(rope, positions)))
    turned = (x[..., :4] + 1j * x[..., 4:]) * np.exp(1j * positions[:, None, None] * rope.inv_freq())
    np.testing.assert_allclose(out, np.concatenate([turned.real, turned.imag], -1), atol=1e-4)
    out = np.asarray(rotate(x, rope_table(rope, positions), pairs=True))
    turned = (x[..., ::2] + 1j * x[..., 1::2]) * np.exp(1j * positions[:, None, None] * rope.inv_freq())
    np.testing.assert_allclose(out, np.stack([turned.real, turned.imag], -1).reshape(x.shape), atol=1e-4)
    q, k = (np.tile(v, (4, 1, 1)) for v in x[:2])
    q = np.asarray(rotate(q, rope_table(rope, np.array([5, 6, 50, 500]))))
    k = np.asarray(rotate(k, rope_table(rope, np.array([0, 1, 45, 495]))))
    scores = (q * k).sum(-1)
    np.testing.assert_allclose(scores, np.full_like(scores, scores[0]), atol=1e-4)


def test_far_queries_are_scaled_by_the_logarithm_of_their_distance() -> None:
    rope = RopeConfig(theta=1e4, dim=8, original_max_position=16, query_scale_beta=0.1)
    found = np.asarray(query_scale(rope, np.array([0, 15, 16, 31, 32, 255])))
    expected = [1 + 0.1 * math.log(1 + position // 16) for position in (0, 15, 16, 31, 32, 255)]
    np.testing.assert_allclose(found, expected, rtol=1e-6)


@pytest.mark.parametrize(
    ("family", "kind", "beta"), [("llama3", "llama3", 0.0), ("ministral3", "yarn", 0.1), ("qwen3", "default", 0.0)]
)
def test_the_fixtures_configs(family: str, kind: str, beta: float) -> None:
    """Their numbers are held by test_parity; here, that the rule they exercise is the one they name."""
    config = json.loads((Path(FIXTURES) / family / "config.json").read_text())
    rope = parse_rope(config, config.get("head_dim", 16))
    assert (rope.type, rope.query_scale_beta) == (kind, beta)
    if kind != "default":
        assert not np.allclose(rope.inv_freq(), plain(rope.theta, rope.dim))
