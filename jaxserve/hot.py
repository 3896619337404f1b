"""Latents whose home is the host (see ``residency``): how a step writes them, and finds those that were chosen. Pure
functions.

A layer's new latents go to the host's page and, where that has one, to its frame. Chosen ones are read from frames, or
from the region of their sequence, which gets from the host what it lacks.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxserve.context import Context, Fetch, Selected, Setting
from pallas_kernels import host_rows
from pallas_kernels.codecs import records
from pallas_kernels.resolver import Hot, Plan, resolve


class HotPlane(NamedTuple):
    """What the devices hold of a plane whose latents are the host's, a copy on each."""

    latents: jax.Array
    """``[F + R * B / G, G, ...]``, as in ``LatentPages``: frames, then the regions."""
    regions: Hot | None
    """What the regions hold, where the plane's layer chooses; others follow it."""
    sums: jax.Array | None = None
    """uint32 ``[P * G]``: checksums of the host's latents, where they are compared."""


def checksum(rows: jax.Array) -> jax.Array:
    """uint32 ``[...]`` of ``rows [..., n]``, whole words each: their sum, every word times an odd number of its own, so
    that one wrong bit shows, and words that have changed places."""
    words = lax.bitcast_convert_type(rows.reshape(*rows.shape[:-1], -1, 4 // rows.dtype.itemsize), jnp.uint32)
    words = words.reshape(*rows.shape[:-1], -1)
    odd = (jnp.arange(words.shape[-1], dtype=jnp.uint32) * jnp.uint32(0x9E3779B9)) << 1 | jnp.uint32(1)
    return (words * odd).sum(-1, dtype=jnp.uint32)


def write(
    plane: HotPlane, pages: jax.Array, latent: jax.Array, rope: jax.Array, slots: jax.Array, frames: jax.Array
) -> tuple[HotPlane, jax.Array]:
    """The ``plane`` and the host's ``pages`` with new latents in them: ``latent [T, R]`` and ``rope [T, r]`` at
    ``slots`` and ``frames`` int32 ``[T]``; less than 0 is nowhere."""
    rows = records.latent_rows(latent, rope, pages.dtype)
    near, pages = host_rows.write(plane.latents, rows, frames), host_rows.write(pages, rows, slots)
    sums = plane.sums
    if sums is not None:
        sums = sums.at[jnp.where(slots < 0, len(sums), slots)].set(checksum(rows), mode="drop")
    return plane._replace(latents=near, sums=sums), pages


def place(
    at: Setting, group: int, plane: HotPlane, pages: jax.Array, ctx: Context, chosen: Selected, *, own: bool
) -> tuple[HotPlane, Selected]:
    """The ``plane`` with all that was chosen in it, and the choice with the rows where it is. ``pages`` are the host's,
    ``own`` says that the layer has chosen itself, for whose regions it has to be planned."""
    regions = plane.regions
    if own:
        assert regions is not None
        regions, found = _plan(at, group, plane, regions, ctx, chosen)
        chosen = chosen._replace(fetch=found)
    assert chosen.fetch is not None
    latents, wrong = plane.latents, list[jax.Array]()
    for sources, targets in chosen.fetch.moves:
        latents = host_rows.fetch(pages, sources, latents, targets)
        if plane.sums is not None:
            sums = checksum(latents.reshape(-1, latents.shape[-1])[jnp.maximum(targets, 0)])
            wrong.append(((targets >= 0) & (sums != plane.sums[jnp.maximum(sources, 0)])).any(1))
    if wrong:
        chosen = chosen._replace(fetch=chosen.fetch._replace(damaged=jnp.concatenate(wrong)))
    return HotPlane(latents, regions, plane.sums), chosen


def _plan(at: Setting, group: int, plane: HotPlane, hot: Hot, ctx: Context, chosen: Selected) -> tuple[Hot, Fetch]:
    """Where each token finds what it has chosen, and what has to be fetched for that."""
    assert at.hot is not None
    assert ctx.regions is not None
    bucket, size = at.bucket, plane.latents.shape[1]
    find = partial(resolve, page_size=size, first=at.hot.frames * size, kernels=at.kernels)
    parts = []
    for first, last, token, queries in (
        (0, bucket.decodes, 0, 1),
        (bucket.decodes, bucket.rows, bucket.decodes, bucket.block),
    ):
        if first == last:
            continue
        rows = slice(first, last)
        asked = chosen.positions[token : token + (last - first) * queries].reshape(last - first, queries, -1)
        tables = ctx.tables[group, rows], ctx.tables[-1, rows]
        if queries == 1:
            plan, hot = find(asked, *tables, ctx.regions[rows], hot)
        else:  # prompts hardly ever read from the host
            args = (asked, *tables, ctx.regions[rows], hot)
            plan, hot = lax.cond(jnp.any(ctx.regions[rows] != -1), find, partial(_resident, find, size), *args)
        parts.append(plan)
    counts = [jnp.stack([plan.hits.sum(), plan.misses.sum(), plan.lost.sum()]) for plan in parts]
    return hot, Fetch(
        jnp.concatenate([plan.rows.reshape(-1, plan.rows.shape[-1]) for plan in parts]),
        tuple(jnp.stack([plan.sources, plan.targets]) for plan in parts),
        jnp.stack(counts).sum(0),
        jnp.zeros(bucket.rows, bool) if plane.sums is not None else None,
    )


def _resident(
    find: partial, size: int, positions: jax.Array, pages: jax.Array, frames: jax.Array, regions: jax.Array, hot: Hot
) -> tuple[Plan, Hot]:
    """The answer of ``find`` where no row has a region."""
    page = jnp.maximum(positions, 0) // size
    frame = jnp.take_along_axis(frames, page.reshape(len(page), -1), axis=1).reshape(page.shape)
    there = (positions >= 0) & (frame >= 0)
    plan, _ = jax.eval_shape(find, positions, pages, frames, regions, hot)
    nothing = jnp.full(plan.sources.shape, -1, jnp.int32)
    zeros = jnp.zeros(len(page), jnp.int32)
    lost = ((positions >= 0) & ~there).sum((1, 2), dtype=jnp.int32)
    rows = jnp.where(there, frame * size + positions % size, -1).astype(jnp.int32)
    return Plan(rows, nothing, nothing, zeros, zeros, lost), hot


def fill_frames(kv: list[tuple[Any, ...]], pairs: jax.Array) -> tuple[list[tuple[Any, ...]], jax.Array | None]:
    """Of every plane the host's pages ``pairs[0]`` in frames ``pairs[1]``, int32 ``[2, C]``; and bool ``[C]``, which of
    them are damaged, where that is looked for."""
    page, frame = pairs
    filled, wrong = [], []
    for *others, plane in kv:
        found = others[0][page]
        filled.append((*others, plane._replace(latents=plane.latents.at[frame].set(found))))
        if plane.sums is not None:
            sums = plane.sums.reshape(-1, found.shape[1])[page]
            wrong.append((checksum(found) != sums).any(1) & (page > 0))
    return filled, jnp.stack(wrong).any(0) if wrong else None


def seal(kv: list[tuple[Any, ...]], pages: jax.Array) -> list[tuple[Any, ...]]:
    """What the host's ``pages`` int32 ``[C]`` hold by now is what they are to hold."""

    def again(host: jax.Array, plane: HotPlane) -> HotPlane:
        if plane.sums is None:
            return plane
        sums = plane.sums.reshape(-1, host.shape[1]).at[pages].set(checksum(host[pages]))
        return plane._replace(sums=sums.reshape(-1))

    return [(*others, again(others[0], plane)) for *others, plane in kv]
