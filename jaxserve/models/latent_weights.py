"""The weights of multi-head latent attention: what they are in memory, and their names on disk.

On disk the rows of ``kv_b_proj`` are, head by head, what makes its keys and what makes its values; in memory the two
are apart, ``k_up`` and ``v_up``, since decode uses one before attention and one after it. Latents are made on every
device, heads are divided among them.
"""

import math

import numpy as np

from jaxserve.layer_spec import Latent
from jaxserve.params import Index, ParamSpec, Source, vector
from jaxserve.sharding import HeadLayout, Parallel


def latent_specs(hidden: int, spec: Latent, parallel: Parallel, prefix: str) -> dict[str, ParamSpec]:
    """Declare them; names begin with ``prefix``: ``model.layers.0.self_attn.``."""
    layout = HeadLayout.of(spec, parallel.devices)
    heads = [head for group in layout.q_source for head in group]
    rope, made_from = spec.rope.dim, spec.q_rank or hidden
    q_name = prefix + ("q_proj.weight" if spec.q_rank is None else "q_b_proj.weight")
    up, joint = prefix + "kv_b_proj.weight", spec.nope + spec.value
    specs = {
        "q": _heads(q_name, heads, spec.heads, range(spec.nope + rope), spec.nope + rope, made_from),
        "kv_a": whole(prefix + "kv_a_proj_with_mqa.weight", (spec.rank + rope, hidden)),
        "kv_norm": vector(prefix + "kv_a_layernorm.weight", spec.rank),
        "k_up": _heads(up, heads, spec.heads, range(spec.nope), joint, spec.rank),
        "v_up": _heads(up, heads, spec.heads, range(spec.nope, joint), joint, spec.rank),
        "o": _output(prefix + "o_proj.weight", heads, spec, hidden),
    }
    if spec.q_rank is not None:
        specs["q_a"] = whole(prefix + "q_a_proj.weight", (spec.q_rank, hidden))
        specs["q_norm"] = vector(prefix + "q_a_layernorm.weight", spec.q_rank)
    if spec.bias:
        specs["kv_a_bias"] = vector(prefix + "kv_a_proj_with_mqa.bias", spec.rank + rope)
        specs["o_bias"] = vector(prefix + "o_proj.bias", hidden)
        if spec.q_rank is not None:
            specs["q_a_bias"] = vector(prefix + "q_a_proj.bias", spec.q_rank)
    return specs


def whole(name: str, shape: tuple[int, ...]) -> ParamSpec:
    """A tensor as it is on disk, on every device."""
    return ParamSpec(shape, (None,) * len(shape), {name: shape}, lambda source, index: source.read(name)[index])


def _heads(name: str, heads: list[int], count: int, part: range, stride: int, inputs: int) -> ParamSpec:
    """``[H, rows of part, inputs]``: of each of ``heads`` these rows of its ``stride`` on disk; zeros for head -1."""

    def fill(source: Source, index: Index) -> np.ndarray:
        wanted = heads[index[0]]
        rows = [np.arange(head * stride + part.start, head * stride + part.stop) for head in wanted if head >= 0]
        data = source.read(name, np.concatenate(rows) if rows else np.zeros(0, np.int64))
        out = np.zeros((len(wanted), len(part), inputs), data.dtype)
        out[[i for i, head in enumerate(wanted) if head >= 0]] = data.reshape(-1, len(part), inputs)
        return out[:, index[1], index[2]]

    shape = (len(heads), len(part), inputs)
    aligned = math.gcd(stride, part.start)
    return ParamSpec(shape, ("heads", None, None), {name: (count * stride, inputs)}, fill, aligned=aligned)


def _output(name: str, heads: list[int], spec: Latent, hidden: int) -> ParamSpec:
    """The output projection ``[E, H, D]``."""
    shape = (hidden, spec.heads * spec.value)

    def fill(source: Source, index: Index) -> np.ndarray:
        data = source.read(name).reshape(hidden, spec.heads, spec.value)
        data = np.concatenate([data, np.zeros_like(data[:, :1])], axis=1)  # head -1 is this last, zero one
        return data[index[0], np.array(heads[index[1]]), index[2]]

    full = (hidden, len(heads), spec.value)
    return ParamSpec(full, (None, "heads", None), {name: shape}, fill, inputs=2)
