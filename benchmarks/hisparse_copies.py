"""Assumed patterns of choices, replayed through the engine's resolver and copies, beside a gather on the host.

How choices of a trained indexer follow each other has not been measured. Here a share of them stays from one step to
the next, and the rest comes from all other positions, evenly or by a Zipf law of the sequence's own.
"""

import statistics
import time
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.compute_on import compute_on

from pallas_kernels import host_rows
from pallas_kernels.resolver import empty, resolve

SIZE, RECORD = 64, 656


@dataclass(frozen=True)
class Replay:
    """Of the last quarter of the steps. Seconds are a step's, of all sequences and one layer."""

    hits: float
    resolver: float
    copies: float
    gather: float
    """On the host, of all that was chosen."""


def choices(
    rng: np.random.Generator, *, tokens: int, top_k: int, steps: int, stays: float, zipf: float
) -> np.ndarray[Any, Any]:
    """int32 ``[steps, top_k]``, what a query of each step chooses. ``stays`` is the share that the next chooses again;
    others are drawn in proportion to their rank, a random one, to the power of ``-zipf``: 0 is evenly."""
    weight = -zipf * np.log(rng.permutation(tokens) + 1)
    chosen = np.empty((steps, top_k), np.int32)
    now = np.empty(0, np.int32)
    for step in range(steps):
        keys = weight + rng.gumbel(size=tokens)  # the largest are a draw without replacement
        keys[now] = -np.inf
        kept = rng.permutation(now)[: round(stays * top_k)]
        drawn = np.argpartition(keys, len(kept) - top_k)[len(kept) - top_k :] if len(kept) < top_k else now[:0]
        now = np.concatenate([kept, drawn]).astype(np.int32)
        chosen[step] = now
    return chosen


def host_gather(pool: jax.Array, rows: jax.Array) -> jax.Array:
    """Records ``[N, k, n]`` of the ``pool`` in pinned host memory, gathered by the host's processor."""

    def gather(pool: jax.Array, rows: jax.Array) -> jax.Array:
        return pool.reshape(-1, pool.shape[-1])[rows]

    there = compute_on(gather, compute_type="device_host", out_memory_spaces=jax.memory.Space.Host)
    found = there(pool, jax.device_put(rows, jax.memory.Space.Host))
    return jax.device_put(found, jax.memory.Space.Device)


plan_step = jax.jit(partial(resolve, page_size=SIZE, first=SIZE), donate_argnames="hot")
copy_step = jax.jit(host_rows.fetch, donate_argnums=2)
gather_step = jax.jit(host_gather)


def replay(chosen: np.ndarray[Any, Any], *, tokens: int, buffer: int) -> Replay:
    """``chosen [steps, N, k]`` of N sequences of ``tokens``, all on the host, with regions of ``buffer`` rows. Raises
    ``RuntimeError`` where attention would read anything but what was chosen."""
    steps, rows, _ = chosen.shape
    width = -(-tokens // SIZE)
    pages = jnp.arange(rows * width, dtype=jnp.int32).reshape(rows, width)
    frames, regions = jnp.full_like(pages, -1), jnp.arange(rows, dtype=jnp.int32)
    words = np.random.default_rng(0).integers(0, 256, (rows * width, SIZE, RECORD), np.uint8)
    pool = jnp.asarray(words)
    pinned = jax.device_put(pool, pool.sharding.with_memory_kind("pinned_host"))
    latents = jnp.zeros((1 + rows * buffer // SIZE, SIZE, RECORD), jnp.uint8)  # one frame, then the regions
    hot = empty(rows, buffer)
    offsets = np.arange(rows, dtype=np.int32)[:, None] * width * SIZE
    hits = misses = 0
    spent: dict[str, list[float]] = {"resolver": [], "copies": [], "gather": []}

    def timed(name: str, function: Any, *args: Any, **kwargs: Any) -> Any:
        begun = time.perf_counter()
        found = jax.block_until_ready(function(*args, **kwargs))
        spent[name].append(time.perf_counter() - begun)
        return found

    for step, positions in enumerate(chosen):
        asked, where = jnp.asarray(positions[:, None]), jnp.asarray(positions + offsets)
        if step == steps - steps // 4:
            hits = misses = 0
            spent = {name: [] for name in spent}
        plan, hot = timed("resolver", plan_step, asked, pages, frames, regions, hot=hot)
        latents = timed("copies", copy_step, pool, plan.sources, latents, plan.targets)
        gathered = timed("gather", gather_step, pinned, where)
        hits, misses = hits + int(plan.hits.sum()), misses + int(plan.misses.sum())
    read = np.asarray(latents).reshape(-1, RECORD)[np.asarray(plan.rows[:, 0])]
    if int(plan.lost.sum()) or not np.array_equal(read, np.asarray(gathered)):
        raise RuntimeError("the regions do not hold what was chosen")
    return Replay(hits / (hits + misses), **{name: statistics.median(times) for name, times in spent.items()})


def table(tokens: int, sequences: int, steps: int) -> list[list[Any]]:
    """Rows of: pattern, share that stays, buffer, share of hits, milliseconds of the resolver, copies and gather."""
    found = []
    for name, zipf in (("evenly", 0.0), ("Zipf, 1", 1.0)):
        for stays in (0.5, 0.8, 0.95):
            sizes: dict[str, Any] = {"tokens": tokens, "top_k": 2048, "steps": steps, "stays": stays, "zipf": zipf}
            chosen = np.stack([choices(np.random.default_rng(n), **sizes) for n in range(sequences)], axis=1)
            for buffer in (2048, 4096, 8192):
                of = replay(chosen, tokens=tokens, buffer=buffer)
                found.append([name, stays, buffer, of.hits, 1e3 * of.resolver, 1e3 * of.copies, 1e3 * of.gather])
    return found
