"""The small building blocks: linear maps, norms and rotary embedding. Pure functions; activations are float32."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxserve.layer_spec import Activation, Dense
from jaxserve.quantization import MxArray, QuantArray, Weight
from jaxserve.rope import RopeConfig
from pallas_kernels.dispatch import REFERENCE, Kernels


def linear(x: jax.Array, weight: Weight, inputs: int = 1, kernels: Kernels = REFERENCE) -> jax.Array:
    """``x [T, in]`` times ``weight [..., in]``, accumulated and returned in float32 as ``[T, ...]``; ``in`` are the
    last ``inputs`` axes of the weight. Of several devices, each may only call it with ``kernels`` and a quantized
    weight for its own part: see ``Setting.linear``.

    Weights keep the orientation they have on disk, and are contracted as matrices: XLA's CPU backend copies a weight of
    more dimensions, transposed, every time. A single 16-bit row is doubled: it has no fast path there (25 times
    slower).
    """
    rows, outer = x.shape[0], weight.shape[: len(weight.shape) - inputs]
    if isinstance(weight, QuantArray):
        return weight.matmul(x, inputs, kernels).reshape(rows, *outer)
    if isinstance(weight, MxArray):
        weight = weight.dequantize()
    x = x.astype(weight.dtype)
    if rows == 1 and weight.dtype.itemsize < 4:
        x = jnp.concatenate([x, x])
    matrix = weight.reshape(math.prod(outer), -1)
    out = lax.dot_general(x, matrix, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
    return out[:rows].reshape(rows, *outer)


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """Root-mean-square norm over the last axis, times ``weight`` (arXiv 1910.07467), in float32."""
    x = x.astype(jnp.float32)
    return x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + eps) * weight


def layer_norm(x: jax.Array, weight: jax.Array, bias: jax.Array, eps: float) -> jax.Array:
    """Layer norm over the last axis, times ``weight``, plus ``bias`` (arXiv 1607.06450), in float32."""
    x = x.astype(jnp.float32)
    x = x - jnp.mean(x, -1, keepdims=True)
    return x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + eps) * weight + bias


def gated(activation: Activation, gate: jax.Array, up: jax.Array) -> jax.Array:
    """Join the two halves of a gated feed-forward network, ``[..., F]`` each."""
    if activation.limit is not None:
        gate, up = jnp.minimum(gate, activation.limit), jnp.clip(up, -activation.limit, activation.limit)
    if activation.kind == "swish_up_one":
        return gate * jax.nn.sigmoid(activation.alpha * gate) * (up + 1)
    return (jax.nn.gelu(gate, approximate=True) if activation.kind == "gelu_tanh" else jax.nn.silu(gate)) * up


def mlp(spec: Dense, params: dict[str, Any], x: jax.Array, linear: Callable[..., jax.Array] = linear) -> jax.Array:
    """A gated feed-forward network over ``x [T, E]``, float32 ``[T, E]``."""
    gate, up = linear(x, params["gate"]), linear(x, params["up"])  # [T, F]
    if spec.bias:
        gate, up = gate + params["gate_bias"], up + params["up_bias"]
    out = linear(gated(spec.activation, gate, up), params["down"])
    return out + params["down_bias"] if spec.bias else out


def rope_table(rope: RopeConfig, positions: jax.Array) -> jax.Array:
    """cos and sin, float32 ``[2, T, dim / 2]``, for int32 positions ``[T]``."""
    angle = positions.astype(jnp.float32)[:, None] * rope.inv_freq()
    return jnp.stack([jnp.cos(angle), jnp.sin(angle)]) * rope.attention_factor


def rotate(x: jax.Array, table: jax.Array, *, pairs: bool = False) -> jax.Array:
    """Rotate the first channels of ``x [T, heads, ..., D]`` by ``table [2, T, dim / 2]``.

    Channel i turns with channel i + dim / 2, or, in ``pairs``, channel 2i with 2i + 1.
    """
    half = table.shape[-1]
    cos, sin = (t.reshape(t.shape[0], *(1,) * (x.ndim - 2), half) for t in table)
    turning, rest = x[..., : 2 * half], x[..., 2 * half :]
    if pairs:
        a, b = turning[..., ::2], turning[..., 1::2]
        turned = jnp.stack([a * cos - b * sin, b * cos + a * sin], axis=-1).reshape(turning.shape)
        return jnp.concatenate([turned, rest], axis=-1)
    a, b = turning[..., :half], turning[..., half:]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin, rest], axis=-1)


def query_scale(rope: RopeConfig, positions: jax.Array) -> jax.Array:
    """Llama 4's temperature of queries at far positions, float32 ``[T]``."""
    return 1.0 + rope.query_scale_beta * jnp.log1p(jnp.floor(positions / rope.original_max_position))
