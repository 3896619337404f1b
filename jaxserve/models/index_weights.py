"""The weights of an indexer, whole on every device, and their names on disk."""

import numpy as np

from jaxserve.layer_spec import Latent
from jaxserve.params import Index, ParamSpec, Source, vector


def index_specs(hidden: int, mixer: Latent, prefix: str) -> dict[str, ParamSpec]:
    """Declare them, none where there is no indexer; names begin with ``prefix``: ``model.layers.0.self_attn.indexer.``.
    What gates the heads is kept in float32."""
    spec = mixer.indexer
    if spec is None:
        return {}
    assert mixer.q_rank is not None
    return {
        "index_q": _matrix(prefix + "wq_b.weight", (spec.heads, spec.dim, mixer.q_rank)),
        "index_k": _matrix(prefix + "wk.weight", (spec.dim, hidden)),
        "index_k_norm": vector(prefix + "k_norm.weight", spec.dim),
        "index_k_bias": vector(prefix + "k_norm.bias", spec.dim),
        "index_gates": _matrix(prefix + "weights_proj.weight", (spec.heads, hidden), "float32"),
    }


def _matrix(name: str, shape: tuple[int, ...], dtype: str | None = None) -> ParamSpec:
    disk = (int(np.prod(shape[:-1])), shape[-1])

    def fill(source: Source, index: Index) -> np.ndarray:
        return source.read(name).reshape(shape)[index]

    return ParamSpec(shape, (None,) * len(shape), {name: disk}, fill, dtype=dtype)
