"""Which implementations of attention an engine's layers get, said without tracing them."""

from jaxserve.cache_spec import HeadPages, LatentPages
from jaxserve.config import ConfigError
from jaxserve.layer_spec import Attention
from jaxserve.programs import ProgramSet
from jaxserve.sharding import HeadLayout
from pallas_kernels import mla_attention, paged_attention, sparse_mla
from pallas_kernels.dispatch import KernelError, choose


def chosen(programs: ProgramSet) -> dict[str, str]:
    """The ops of the model's attention, and for each what runs it and why what would be better does not.

    Raises ``ConfigError`` where an implementation was asked for by name that does not run a layer.
    """
    found: dict[str, dict[str, None]] = {}
    for layer, place in zip(programs.cfg.layers, programs.cache.layers, strict=True):
        mixer, pages = layer.mixer, programs.cache.planes[place.plane][0]
        heads = HeadLayout.of(mixer, programs.mesh.size)
        here = heads.kv_heads // programs.mesh.size
        cases: dict[str, tuple[str, object]] = {}
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
            else:
                cases["mla_attention, decode"] = (mla_attention.__name__, mla_attention.Case(*latents, 1))
        for name, (package, case) in cases.items():
            try:
                found.setdefault(name, {})[str(choose(package, case, programs.kernels))] = None
            except KernelError as error:
                raise ConfigError(str(error)) from None
    return {name: "; ".join(choices) for name, choices in found.items()}
