"""What the resolver remembers and what it answers."""

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp

NO_REGION = -1
"""Of a row that has none: all its latents are on the device, or it is padding."""


@dataclass(frozen=True)
class Case:
    """What implementations choose by."""

    entries: int
    """Of a row: queries times what each chooses."""
    slots: int
    """Of a region."""

    @classmethod
    def of(cls, positions: jax.Array, hot: "Hot") -> "Case":
        return cls(positions.shape[1] * positions.shape[2], hot.held.shape[1])


class Hot(NamedTuple):
    """What the hot regions hold, of one layer or of layers that share their choices."""

    held: jax.Array  # int32 [R, B]: the position whose latent each slot holds, -1 for none
    lru: jax.Array  # int32 [R, B]: the slots, from that unused for longest to those used last


class Plan(NamedTuple):
    """Where the chosen latents are, and what must be fetched before."""

    rows: jax.Array  # int32 [N, Q, k]: rows of the latents, -1 for none
    sources: jax.Array  # int32 [N, min(Q * k, B)]: rows of the host pool that are missing, in order, then -1
    targets: jax.Array  # int32 [N, min(Q * k, B)]: the rows of the latents that they are to be copied to
    hits: jax.Array  # int32 [N]: positions that the region had
    misses: jax.Array  # int32 [N]: those it had not; so many of sources and targets are real
    lost: jax.Array  # int32 [N]: entries that can be found nowhere; 0 unless pages were misplaced


def empty(regions: int, slots: int) -> Hot:
    """Regions that hold nothing."""
    order = jnp.broadcast_to(jnp.arange(slots, dtype=jnp.int32), (regions, slots))
    return Hot(jnp.full((regions, slots), -1, jnp.int32), order)


def emptied(region: int) -> int:
    """How ``regions`` names a region that is to be emptied first."""
    return -2 - region
