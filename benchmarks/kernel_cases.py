"""Cases of every kernel at the sizes of real models: what ``compile_sm90`` compiles, and ``kernels`` measures."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxserve import experts
from jaxserve.executables import Program
from jaxserve.quantization import MxArray, QuantArray
from jaxserve.sharding import sharding
from pallas_kernels import indexer
from pallas_kernels.dispatch import Kernels
from pallas_kernels.kv_write import write_heads, write_keys, write_latent
from pallas_kernels.mla_attention import mla_attention
from pallas_kernels.paged_attention import paged_attention
from pallas_kernels.quant_matmul import quant_matmul
from pallas_kernels.sparse_mla import sparse_mla

HOPPER = Kernels("mosaic", "NVIDIA H200", "9.0")
E4M3 = jnp.float8_e4m3fn
PAGES, PAGE = 8193, 32
Numbers = Callable[[np.random.Generator], np.ndarray]


class Call(NamedTuple):
    """What a case does, and what cannot be spared of it."""

    function: Callable[..., Any]
    """Of the kernels to use, and the arguments."""
    shapes: tuple[Any, ...]
    """The arguments: trees of shapes and dtypes."""
    numbers: dict[int, Numbers]
    """Those of them that are whole numbers; others may be anything."""
    nbytes: float
    """Read and written, each once."""
    flops: float
    donated: tuple[int, ...] = ()


@dataclass(frozen=True)
class Kernel:
    """A case, made when it is wanted."""

    name: str
    call: Callable[[], Call]

    def programs(self, mesh: Mesh) -> list[Program]:
        """For ``compile_sm90``."""
        call = self.call()
        placed = jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=sharding(mesh)), call.shapes)
        return [Program(self.name, partial(call.function, HOPPER), placed, call.donated)]


def array(*shape: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))


def size(tree: Any) -> int:
    """Bytes."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def over_pages(
    first: int, rows: int, queries: int, context: int, page: int = PAGE
) -> tuple[int, tuple[Any, ...], dict[int, Numbers]]:
    """How many pages; and tables, starts and counts, which are the arguments from number ``first`` on: every row ends
    at ``context``, and has pages of its own, so that none comes from a cache of the device's."""
    width = context // page
    shapes = (array(rows, width, dtype=jnp.int32), *[array(rows, dtype=jnp.int32)] * 2)
    numbers: dict[int, Numbers] = {
        first: lambda rng: 1 + rng.permutation(rows * width).reshape(rows, width),
        first + 1: lambda rng: np.full(rows, context - queries),
        first + 2: lambda rng: np.full(rows, queries),
    }
    return rows * width + 1, shapes, numbers


HEADS = {64: (3, 3), 128: (8, 4), 256: (8, 2)}
"""By head_dim: SmolLM2's (9 over 3), Llama 3 8B's (32 over 8), Gemma 3 12B's (16 over 8)."""


def attention(rows: int, queries: int, dim: int, dtype: Any = jnp.bfloat16, page: int = PAGE, **options: Any) -> Call:
    """Contexts of 4,096."""
    heads, group = HEADS[dim]
    head = (page, dim) if dtype != jnp.uint8 else (page * (dim + 4),)

    def call(kernels, q, pages, tables, starts, counts):
        return paged_attention(q, pages, tables, starts, counts, kernels=kernels, scale=dim**-0.5, **options)

    count, where, numbers = over_pages(2, rows, queries, 4096, page)
    q = array(rows, queries, heads, group, dim, dtype=jnp.float32)
    pages = array(count, 2, heads, *head, dtype=dtype)
    seen = options.get("window", 4096)  # by one query; all of a row see a little more
    read = rows * min(4096, seen + queries - 1) * size(pages) / (count * page)
    return Call(call, (q, pages, *where), numbers, read + 2 * size(q), 4 * q.size * seen)


def sparse(tokens: int, heads: int, dtype: Any) -> Call:
    """DeepSeek V3.2's latents: 2,048 of them for each token."""

    def call(kernels, q, pages, rows, counts):
        return sparse_mla(q, pages, rows, counts, kernels=kernels, rank=512, scale=192**-0.5)

    row = 656 if dtype == jnp.uint8 else 576
    q, pages = array(tokens, heads, 576, dtype=jnp.float32), array(PAGES, PAGE, row, dtype=dtype)
    numbers: dict[int, Numbers] = {
        2: lambda rng: np.sort(rng.integers(PAGE, PAGES * PAGE, (tokens, 2048))),
        3: lambda rng: np.full(tokens, 2048),
    }
    shapes = (q, pages, array(tokens, 2048, dtype=jnp.int32), array(tokens, dtype=jnp.int32))
    read = tokens * 2048 * row * jnp.dtype(dtype).itemsize
    flops = 2 * tokens * heads * 2048 * (576 + 512)
    return Call(call, shapes, numbers, read + size(q) + 4 * tokens * heads * 512, flops)


def latents(rows: int, dtype: Any) -> Call:
    """DeepSeek V3's heads and latents, contexts of 4,096."""

    def call(kernels, q, pages, tables, starts, counts):
        return mla_attention(q, pages, tables, starts, counts, kernels=kernels, rank=512, scale=192**-0.5)

    count, where, numbers = over_pages(2, rows, 1, 4096)
    row = 656 if dtype == jnp.uint8 else 576
    q, pages = array(rows, 1, 128, 576, dtype=jnp.float32), array(count, PAGE, row, dtype=dtype)
    read = rows * 4096 * row * jnp.dtype(dtype).itemsize
    flops = 2 * rows * 128 * 4096 * (576 + 512)
    return Call(call, (q, pages, *where), numbers, read + size(q) + 4 * rows * 128 * 512, flops)


def index(rows: int, queries: int, dtype: Any) -> Call:
    """DeepSeek V3.2's indexer, contexts of 32,768."""

    def call(kernels, q, gates, pages, tables, starts, counts):
        return indexer.select(q, gates, pages, tables, starts, counts, kernels=kernels, top_k=2048)

    count, where, numbers = over_pages(3, rows, queries, 32768)
    q, gates = (array(rows, queries, *shape, dtype=jnp.float32) for shape in ((64, 128), (64,)))
    pages = array(count, *((PAGE * 132,) if dtype == jnp.uint8 else (PAGE, 128)), dtype=dtype)
    moved = rows * 32768 * size(pages) / (count * PAGE) + size((q, gates)) + 4 * rows * queries * 2048
    return Call(call, (q, gates, pages, *where), numbers, moved, 2 * q.size * 32768)


def writes(write: Callable[..., Any], pages: Any, row: int, *new: tuple[int, ...]) -> Call:
    """``pages``, donated, get the ``new`` numbers of tokens: ``row`` bytes of a page each."""

    def call(kernels, pages, *new):
        return write(pages, *new, kernels=kernels)

    tokens = new[0][0]
    made = tuple(array(*shape, dtype=jnp.float32) for shape in new)
    slots: Numbers = lambda rng: rng.permutation(PAGES * PAGE)[:tokens]  # noqa: E731
    shapes = (pages, *made, array(tokens, dtype=jnp.int32))
    return Call(call, shapes, {1 + len(new): slots}, size(made) + tokens * row, 0.0, (0,))


def heads_written(tokens: int, dtype: Any) -> Call:
    """Llama 3 8B's heads."""
    head = (PAGE, 128) if dtype != jnp.uint8 else (PAGE * 132,)
    pages = array(PAGES, 2, 8, *head, dtype=dtype)
    return writes(write_heads, pages, size(pages) // (PAGES * PAGE), *[(tokens, 8, 128)] * 2)


def quantized(tokens: int, outputs: int = 2048, inputs: int = 7168) -> Call:
    """One of DeepSeek V3's projections, a scale for 128x128 weights."""

    def call(kernels, x, data, scale):
        return quant_matmul(x, data, scale, blocks=(128, 128), dtype="bfloat16", kernels=kernels)

    scale = array(-(-outputs // 128), -(-inputs // 128), dtype=jnp.float32)
    shapes = (array(tokens, inputs, dtype=jnp.float32), array(outputs, inputs, dtype=E4M3), scale)
    return Call(call, shapes, {}, size(shapes) + 4 * tokens * outputs, 2 * tokens * outputs * inputs)


def mixture(tokens: int, dtype: Any, count: int = 256, width: int = 2048, hidden: int = 7168, k: int = 8) -> Call:
    """DeepSeek V3's experts, or others. All of ``experts.mix``."""
    sides = {"gate_up": (count, 2, width, hidden), "down": (count, hidden, width)}

    def weight(*shape: int) -> Any:
        if dtype == jnp.uint8:
            data, scale = (array(*shape[:-1], shape[-1] // each, dtype=dtype) for each in (2, 32))
            return MxArray(data, scale)
        if dtype != E4M3:
            return array(*shape, dtype=dtype)
        blocks = (*(1,) * (len(shape) - 2), 128, 128)
        scales = (length // block for length, block in zip(shape, blocks, strict=True))
        return QuantArray(array(*shape, dtype=E4M3), array(*scales, dtype=jnp.float32), blocks, "bfloat16")

    def call(kernels, params, x, chosen, weights):
        return experts.mix(params, x, chosen, weights, lambda gate, up: jax.nn.silu(gate) * up, "tensor", kernels)

    def choices(rng: np.random.Generator) -> np.ndarray:
        return rng.random((tokens, count)).argsort(axis=1)[:, :k]

    params = {name: weight(*shape) for name, shape in sides.items()}
    x = array(tokens, hidden, dtype=jnp.float32)
    shapes = (params, x, array(tokens, k, dtype=jnp.int32), array(tokens, k, dtype=jnp.float32))
    asked = count * (1 - (1 - k / count) ** tokens)  # experts that somebody chooses, on average
    return Call(call, shapes, {2: choices}, size(params) * asked / count + 2 * size(x), 6 * tokens * k * width * hidden)


KERNELS = (
    Kernel("paged_attention decode bf16 128", lambda: attention(64, 1, 128)),
    Kernel("paged_attention decode bf16 64", lambda: attention(64, 1, 64)),
    Kernel("paged_attention decode bf16 256", lambda: attention(64, 1, 256)),
    Kernel("paged_attention decode bf16 128, pages of 128", lambda: attention(64, 1, 128, page=128)),
    Kernel("paged_attention verify bf16 128", lambda: attention(64, 8, 128, window=1024, softcap=30.0)),
    Kernel("paged_attention prefill bf16 128", lambda: attention(64, 32, 128)),
    Kernel("paged_attention decode fp8 128", lambda: attention(64, 1, 128, jnp.uint8)),
    Kernel("paged_attention decode fp8 64", lambda: attention(64, 1, 64, jnp.uint8)),
    Kernel("mla_attention decode fp8_ds_mla", lambda: latents(64, jnp.uint8)),
    Kernel("mla_attention decode bf16", lambda: latents(64, jnp.bfloat16)),
    Kernel("sparse_mla fp8_ds_mla 128 heads", lambda: sparse(64, 128, jnp.uint8)),
    Kernel("sparse_mla bf16 128 heads", lambda: sparse(64, 128, jnp.bfloat16)),
    Kernel("indexer decode fp8 64 heads", lambda: index(64, 1, jnp.uint8)),
    Kernel("indexer prefill fp8 64 heads", lambda: index(32, 32, jnp.uint8)),
    Kernel("indexer prefill bf16 64 heads", lambda: index(32, 32, jnp.bfloat16)),
    Kernel("kv_write heads bf16", lambda: heads_written(64, jnp.bfloat16)),
    Kernel("kv_write heads fp8, 8192 tokens", lambda: heads_written(8192, jnp.uint8)),
    Kernel(
        "kv_write fp8_ds_mla",
        lambda: writes(write_latent, array(PAGES, PAGE, 656, dtype=jnp.uint8), 656, (64, 512), (64, 64)),
    ),
    Kernel("quant_matmul decode, 1 token", lambda: quantized(1)),
    Kernel("quant_matmul decode, 64 tokens", lambda: quantized(64)),
    Kernel("quant_matmul prefill, 2048 tokens", lambda: quantized(2048)),
    Kernel("grouped_matmul decode fp8, 64 tokens", lambda: mixture(64, E4M3)),
    Kernel("grouped_matmul decode bf16, 64 tokens", lambda: mixture(64, jnp.bfloat16)),
    Kernel("grouped_matmul decode mxfp4, 64 tokens", lambda: mixture(64, jnp.uint8, 128, 2880, 2880, 4)),
    Kernel("grouped_matmul prefill mxfp4, 2048 tokens", lambda: mixture(2048, jnp.uint8, 128, 2880, 2880, 4)),
    Kernel("grouped_matmul prefill fp8, 2048 tokens", lambda: mixture(2048, E4M3)),
    Kernel(
        "kv_write index keys", lambda: writes(write_keys, array(PAGES, PAGE * 132, dtype=jnp.uint8), 132, (64, 128))
    ),
)
