"""How large what the devices hold is, where latents are the host's (see ``residency``): pages, frames and regions."""

import itertools
import math
from dataclasses import dataclass

from jaxserve import memory
from jaxserve.cache_spec import CacheSpec, KeyPages, LatentPages
from jaxserve.config import ConfigError, EngineConfig, ModelConfig
from jaxserve.layer_spec import Latent
from jaxserve.residency import TAIL, HotShape

LOCKED = 0.95
"""Share of the free host memory that may be asked for."""


@dataclass(frozen=True)
class Bytes:
    """What a token takes."""

    latents: int
    """In all planes: on the host, and in a frame or a region."""
    keys: int
    """The indexers' keys, always on the devices."""
    regions: int
    """In a region beside its latents: what the resolver remembers of it."""

    @property
    def row(self) -> int:
        """In a region, altogether."""
        return self.latents + self.regions

    @classmethod
    def of(cls, cache: CacheSpec) -> "Bytes":
        latents = sum(pages.token_bytes for pages in cache.arrays if isinstance(pages, LatentPages))
        choosers = sum(isinstance(pages, KeyPages) for pages in cache.arrays)  # checksums do not count: they are rare
        return cls(latents, cache.token_bytes - latents, 8 * choosers)


def check(config: EngineConfig, model: ModelConfig, *, gpu: bool) -> None:
    """Raises ``ConfigError`` where ``sparse_host`` is asked for and cannot be had."""
    if config.sparse_host == "off":
        return
    if not all(isinstance(mixer, Latent) and mixer.sparse for mixer in model.mixers):
        raise ConfigError(
            f"sparse_host {config.sparse_host}: {model.model_type} attends to all tokens; it is for models whose "
            "indexer chooses some (deepseek_v32, glm_moe_dsa)"
        )
    if gpu:
        raise ConfigError(
            f"sparse_host {config.sparse_host} does not run on a GPU yet: steps there do not reach pinned host memory"
        )


def hot_shape(
    config: EngineConfig,
    model: ModelConfig,
    cache: CacheSpec,
    *,
    budget: int,
    pool: int,
    longest: int,
    max_num_seqs: int,
    block: int,
) -> tuple[HotShape, int]:
    """What the devices hold in ``budget`` bytes each, and how many pages there are, in ``pool`` bytes of the host.

    There are regions for as many of the ``longest`` sequences as can be host-backed at once, or for a quarter of the
    budget, whichever is more; and as many pages as the host's memory and the keys allow that leave frames for one of
    the longest sequences, or at least for the ends of all. Raises ``ConfigError`` naming what is too small.
    """
    size, each = config.page_size, Bytes.of(cache)
    top_k = max(mixer.indexer.top_k for mixer in model.mixers if isinstance(mixer, Latent) and mixer.indexer)
    wanted = config.hot_buffer_tokens or 2 * top_k
    if wanted < top_k:
        raise ConfigError(f"hot_buffer_tokens must be at least {top_k}, what the indexer chooses, got {wanted}")
    rows = -(-wanted // size) * size
    region = rows * each.row
    sequence = -(-longest // size)
    backed = region + sequence * size * each.keys + TAIL * size * each.latents
    at_once = (budget - sequence * size * each.latents) // backed
    wished = min(max_num_seqs, max(1, at_once, budget // 4 // region))
    most = min(pool // (size * each.latents), max_num_seqs * sequence + 1)
    row, chunk, always = each.latents // len(cache.planes), min(block, rows // top_k), config.sparse_host == "always"
    for regions in range(wished, 0, -1):
        left, ends = budget - regions * region, TAIL * regions + 2
        for frames in (sequence + ends, ends):
            pages = memory.step_below(min(most, (left - frames * size * each.latents) // (size * each.keys)))
            if pages > sequence:
                frames = min(pages, (left - pages * size * each.keys) // (size * each.latents))
                frames, planes = memory.step_below(frames), len(cache.planes)
                return HotShape(frames, regions, rows, chunk, row, planes, always, config.kv_checksums), pages
    if most <= sequence:
        least = math.ceil((sequence + 1) * size * each.latents / 2**30 * 1e6) / 1e6
        raise ConfigError(f"sparse_host_gib is too small for a sequence of {longest} tokens: it takes {least:g} GiB")
    least_pages = next(pages for pages in itertools.count(sequence + 1) if memory.step_below(pages) > sequence)
    least_bytes = region + (TAIL + 2) * size * each.latents + least_pages * size * each.keys
    raise ConfigError(
        f"sparse_host {config.sparse_host}: {budget} bytes of KV cache are too few, {least_bytes} would do: a hot "
        f"buffer of {rows} tokens takes {region}, the index keys of {longest} tokens and a few latents the rest; "
        "lower max_model_len or hot_buffer_tokens, or raise kv_cache_memory_bytes"
    )


def device_bytes(shape: HotShape, cache: CacheSpec, size: int, pages: int) -> int:
    """What each device holds beside the keys: frames and regions, and checksums where they are compared."""
    each = Bytes.of(cache)
    sums = 4 * pages * size * shape.planes if shape.checked else 0
    return shape.frames * size * each.latents + shape.regions * shape.rows * each.row + sums


def describe(shape: HotShape, cache: CacheSpec, size: int, pages: int, longest: int) -> dict[str, object]:
    """For the report: what fits, and what would fit into the same memory with all latents on the devices. ``pages`` are
    all, the dump among them."""
    each, usable = Bytes.of(cache), (pages - 1) * size
    held = pages * size * each.keys + device_bytes(shape, cache, size, pages)
    region = shape.rows * each.row
    without = held // (size * (each.keys + each.latents)) * size
    return {
        "mode": "always" if shape.always else "auto",
        "tokens_that_fit": usable,
        "tokens_that_would_fit_without": without,
        "host_bytes": pages * size * each.latents,
        "device_bytes": held,
        "frames": f"{shape.frames - 1}, {(shape.frames - 1) * size} tokens",
        "hot_buffers": f"{shape.regions} of {shape.rows} tokens, {region} bytes each",
        "sequences_that_fit": f"{min(usable // longest, shape.regions)} of {longest} tokens, "
        f"{without // longest} without",
    }


def pool_bytes(config: EngineConfig, cache: CacheSpec, longest: int, max_num_seqs: int) -> int:
    """Bytes of host memory for latents. Raises ``ConfigError`` where there are not so many."""
    all_of_them = max_num_seqs * (longest + config.page_size) * Bytes.of(cache).latents
    free = memory.host().free
    if config.sparse_host_gib is None:
        return min(all_of_them, free // 2)
    wanted = int(config.sparse_host_gib * 2**30)
    if wanted > LOCKED * free:
        raise ConfigError(
            f"sparse_host_gib {config.sparse_host_gib:g} does not fit: {free / 2**30:.1f} GiB of host memory are free"
        )
    return wanted
