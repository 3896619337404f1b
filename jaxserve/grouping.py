"""How the layers of a model share planes of the cache: groups that look equally far back take turns. Imports no jax.

A page is a slice through all planes, so the layers of one group can be at most as many as there are planes, and a group
of fewer leaves some unused. Twelve layers with a window and twelve without make two groups over twelve planes; ten
without and fifty with a window make six groups over ten.
"""

import dataclasses
from collections.abc import Sequence

from jaxserve.cache_spec import FP8, CacheSpec, HeadPages, LayerCache, Pages

MOST_GROUPS = 8
"""Every group has page tables of its own, which every step uploads."""
REFERENCE = 8
"""Planes are chosen for sequences of this many windows."""


def arrange(kept: Sequence[tuple[Pages, ...]], windows: Sequence[int | None], longest: int) -> CacheSpec:
    """The cache of layers that keep ``kept`` of every token and look ``windows`` back, in sequences of at most
    ``longest`` tokens. Where no plane would do for all, they make one group, and no window counts."""
    seen = [None if window is None or window >= longest else window for window in windows]
    kinds = sorted(set(seen), key=lambda window: (window is not None, window))
    fit = _fit(kept)
    if len(kinds) == 1 or fit is None:
        window = kinds[0] if len(kinds) == 1 else None
        return CacheSpec(tuple(kept), tuple(LayerCache(number, 0) for number in range(len(kept))), (window,))
    planes = plane_count({window: seen.count(window) for window in kinds})
    places: dict[int, LayerCache] = {}
    groups: list[int | None] = []
    for window in kinds:
        layers = [number for number, looks in enumerate(seen) if looks == window]
        whole = len(layers) // planes
        for turn, number in enumerate(layers):  # layer after layer to another group: they repeat as the layers do
            full = turn < whole * planes
            plane, group = divmod(turn, whole) if full else (turn - whole * planes, whole)
            places[number] = LayerCache(plane, len(groups) + group)
        groups += [window] * -(-len(layers) // planes)
    return CacheSpec((fit,) * planes, tuple(places[number] for number in range(len(kept))), tuple(groups))


def plane_count(layers: dict[int | None, int]) -> int:
    """Over how many planes to group so many layers of each window: those that a sequence of some windows fills least
    of, and of equals the most, which make the fewest groups."""
    longest = REFERENCE * max(window for window in layers if window is not None)
    allowed = [
        planes
        for planes in range(max(layers.values()), 0, -1)
        if sum(-(-count // planes) for count in layers.values()) <= max(MOST_GROUPS, len(layers))
    ]

    def taken(planes: int) -> int:
        return sum(planes * -(-count // planes) * min(window or longest, longest) for window, count in layers.items())

    return min(allowed, key=taken)


def _fit(kept: Sequence[tuple[Pages, ...]]) -> tuple[Pages, ...] | None:
    """What a plane has to be so that each of the layers can use it: narrower heads have their first channels. None
    where there is no such thing."""
    first = kept[0]
    if all(one == first for one in kept):
        return first
    heads = [one[0] for one in kept if len(one) == 1 and isinstance(one[0], HeadPages)]
    same = {(pages.kv_source, pages.dtype) for pages in heads}
    if len(heads) < len(kept) or len(same) > 1 or heads[0].dtype == FP8:
        return None
    return (dataclasses.replace(heads[0], head_dim=max(pages.head_dim for pages in heads)),)
