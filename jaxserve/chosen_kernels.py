"""Which implementations of attention, cache writes and products an engine's layers get, said without tracing them."""

import math
from collections.abc import Iterator
from typing import Any

import jax

from jaxserve import experts
from jaxserve.cache_spec import HeadPages, KeyPages, LatentPages, Pages
from jaxserve.config import ConfigError
from jaxserve.layer_spec import Attention
from jaxserve.params import Specs
from jaxserve.programs import ProgramSet
from jaxserve.quantization import QuantArray
from jaxserve.sharding import HeadLayout
from pallas_kernels import grouped_matmul, indexer, kv_write, mla_attention, paged_attention, quant_matmul, sparse_mla
from pallas_kernels.dispatch import KernelError, choose


def chosen(programs: ProgramSet) -> dict[str, str]:
    """The ops of the model's layers, and for each what runs it and why what would be better does not.

    Raises ``ConfigError`` where an implementation was asked for by name that does not run a layer.
    """
    devices = programs.mesh.size
    if programs.kernels.interpreted and devices > 1:  # programs of several devices would wait for each other's threads
        raise ConfigError(
            f"kernels mosaic is interpreted on this device, on one alone: tensor_parallel is {devices}, it must be 1"
        )
    found: dict[str, dict[str, None]] = {}
    parts = jax.tree.map(_own_part, programs.params["layers"])
    for number, (layer, place) in enumerate(zip(programs.cfg.layers, programs.cache.layers, strict=True)):
        mixer, pages = layer.mixer, programs.cache.planes[place.plane][0]
        heads = HeadLayout.of(mixer, programs.mesh.size)
        here = heads.kv_heads // programs.mesh.size
        cases: dict[str, tuple[str, object]] = dict(_written(kept) for kept in programs.cache.planes[place.plane])
        if isinstance(mixer, Attention):
            assert isinstance(pages, HeadPages)
            for name, queries in (("decode", 1), ("prefill", programs.buckets.block)):
                facts = paged_attention.Case(pages.dtype, pages.head_dim, programs.page_size, heads.group * queries)
                cases[f"paged_attention, {name}"] = (paged_attention.__name__, facts)
        else:
            assert isinstance(pages, LatentPages)
            latents = (pages.dtype, pages.rank, pages.rope, here)
            if mixer.sparse:
                cases["sparse_mla"] = (sparse_mla.__name__, sparse_mla.Case(*latents))
                if (own := mixer.indexer) is not None:
                    keys = programs.cache.planes[place.plane][1]
                    sizes = own.heads, own.dim, programs.page_size
                    cases["indexer"] = (indexer.__name__, indexer.Case(keys.dtype, *sizes))
            else:
                cases["mla_attention, decode"] = (mla_attention.__name__, mla_attention.Case(*latents, 1))
        products = list(_products(programs.specs["layers"][number], parts[number]))
        for name, (package, case) in [*cases.items(), *products]:
            try:
                found.setdefault(name, {})[str(choose(package, case, programs.kernels))] = None
            except KernelError as error:
                raise ConfigError(str(error)) from None
    return {name: "; ".join(choices) for name, choices in found.items()}


def _written(pages: Pages) -> tuple[str, tuple[str, object]]:
    """The op that writes such pages, its package, and its case."""
    if isinstance(pages, HeadPages):
        name, rows = "kv_write", 2 * len(pages.kv_source)
    else:
        name, rows = "kv_write, index keys" if isinstance(pages, KeyPages) else "kv_write, latents", 1
    return name, (kv_write.__name__, kv_write.Case(pages.dtype, pages.token_bytes // rows))


def _own_part(array: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    """What one device has of an array."""
    assert array.sharding is not None
    return jax.ShapeDtypeStruct(array.sharding.shard_shape(array.shape), array.dtype)


def _products(specs: Specs, params: dict[str, Any]) -> Iterator[tuple[str, tuple[str, object]]]:
    """The ops that multiply with a layer's quantized weights and experts, with package and case."""
    for name, weight in params.items():
        if name in ("gate_up", "down") and "router" in params:
            yield "grouped_matmul", (grouped_matmul.__name__, experts.case(weight))
        elif isinstance(weight, QuantArray):
            inputs = specs[name].data.inputs
            sides = math.prod(weight.shape[:-inputs]), math.prod(weight.shape[-inputs:])
            case = quant_matmul.Case(weight.dtype, str(weight.data.dtype), *sides, weight.sides(inputs))
            yield "quant_matmul", (quant_matmul.__name__, case)
