"""The weights of a mixture of experts: what they are in memory, and the usual names of their tensors on disk.

In memory all experts of a layer are two arrays, ``gate_up [X, 2, F, E]`` and ``down [X, E, F]``. The number of experts
is padded to the groups of devices that share them out, the width to the devices of a group.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxserve.layer_spec import Moe
from jaxserve.moe import AXES
from jaxserve.params import Index, ParamSpec, Source, columns, rows
from jaxserve.sharding import Parallel, pad_to_multiple


@dataclass(frozen=True)
class Place:
    """Where a mixture stands: what its weights' shapes follow from."""

    spec: Moe
    hidden: int  # E
    parallel: Parallel
    prefix: str
    """What the names of the layer's tensors begin with: ``model.layers.0.``."""
    tensors: Collection[str]
    """Names on disk."""

    @property
    def experts(self) -> int:
        """X, padded."""
        return pad_to_multiple(self.spec.experts, self.parallel.expert_groups)

    @property
    def width(self) -> int:
        """F of an expert, padded; MXFP4 is cut between groups of 32."""
        return pad_to_multiple(self.spec.width, self.parallel.group * (32 if self.spec.mxfp4 else 1))


ExpertWeights = Callable[[Place], dict[str, Any]]
"""Declares the parameters of a mixture: the names of ``moe.AXES``, a ``ParamSpec`` or a tree of them each."""

Read = Callable[[Source, range, range], np.ndarray]
"""Reads ``gate_up [x, 2, f, E]`` or ``down [x, E, f]`` of real experts x and real channels f of their width."""


def per_expert(
    block: str = "mlp.",
    router: str = "gate",
    correction: str = "gate.e_score_correction_bias",
    expert: str = "experts.{}.",
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
    shared: str = "shared_experts.",
) -> ExpertWeights:
    """Experts with three tensors each: ``model.layers.0.mlp.experts.5.gate_proj.weight``. ``names``: gate, up, down."""

    def declare(at: Place) -> dict[str, ParamSpec]:
        prefix, width = at.prefix + block, at.spec.width
        gates, ups, downs = (
            [f"{prefix}{expert.format(i)}{name}.weight" for i in range(at.spec.experts)] for name in names
        )

        def gate_up(source: Source, wanted: range, channels: range) -> np.ndarray:
            part = slice(channels.start, channels.stop)
            return np.stack([np.stack([source.read(gates[i], part), source.read(ups[i], part)]) for i in wanted])

        def down(source: Source, wanted: range, channels: range) -> np.ndarray:
            return np.stack([source.read(downs[i])[:, channels.start : channels.stop] for i in wanted])

        specs = router_specs(at, prefix + router, prefix + correction)
        specs["gate_up"] = gate_up_spec(at, dict.fromkeys((*gates, *ups), (width, at.hidden)), gate_up)
        specs["down"] = down_spec(at, dict.fromkeys(downs, (at.hidden, width)), down)
        return specs | shared_specs(at, prefix + shared)

    return declare


def router_specs(at: Place, router: str, correction: str = "") -> dict[str, ParamSpec]:
    """The router's parameters, kept in float32. ``correction`` is the name of the bias for choosing."""
    experts = at.spec.experts
    specs = {"router": _whole(router + ".weight", (experts, at.hidden))}
    if at.spec.router.bias:
        specs["router_bias"] = _whole(router + ".bias", (experts,))
    if at.spec.router.correction:
        specs["correction"] = _whole(correction, (experts,))
    return specs


def _whole(name: str, shape: tuple[int, ...]) -> ParamSpec:
    """A replicated float32 tensor read as it is."""
    axes = (None,) * len(shape)
    return ParamSpec(shape, axes, {name: shape}, lambda source, i: source.read(name)[i], dtype="float32")


def gate_up_spec(at: Place, pieces: Mapping[str, tuple[int, ...]], read: Read) -> ParamSpec:
    return padded_spec(at, "gate_up", (at.experts, 2, at.width, at.hidden), 2, pieces, read)


def down_spec(at: Place, pieces: Mapping[str, tuple[int, ...]], read: Read) -> ParamSpec:
    return padded_spec(at, "down", (at.experts, at.hidden, at.width), 2, pieces, read)


def padded_spec(
    at: Place,
    name: str,
    shape: tuple[int, ...],
    width_axis: int | None,
    pieces: Mapping[str, tuple[int, ...]],
    read: Read,
    dtype: str | None = None,
    unit: int = 1,
) -> ParamSpec:
    """A parameter whose first axis are experts and whose ``width_axis`` is their width, in steps of ``unit`` channels.

    ``read`` gives what is real of a part; the rest is 0.
    """

    def fill(source: Source, index: Index) -> np.ndarray:
        part = tuple(each.stop - each.start for each in index)
        wanted = range(index[0].start, min(index[0].stop, at.spec.experts))
        channels = range(at.spec.width)
        if width_axis is not None:
            across = index[width_axis]
            channels = range(across.start * unit, min(across.stop * unit, at.spec.width))
        if not wanted or not channels:
            return np.zeros(part, np.float32)
        data = read(source, wanted, channels)
        missing = [(0, size - have) for size, have in zip(part, data.shape, strict=True)]
        return np.pad(data, missing) if data.shape != part else data

    return ParamSpec(shape, AXES[name], pieces, fill, dtype=dtype)


def shared_specs(at: Place, prefix: str, names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")):
    """The shared experts as one network, none where the mixture has none."""
    if at.spec.shared is None:
        return {}
    width = at.spec.shared.width
    padded = pad_to_multiple(width, at.parallel.devices)
    gate, up, down = (f"{prefix}{name}.weight" for name in names)
    specs = {
        "shared_gate": rows(gate, (width, at.hidden), padded, "ff"),
        "shared_up": rows(up, (width, at.hidden), padded, "ff"),
        "shared_down": columns(down, (at.hidden, width), padded, "ff"),
    }
    if at.spec.gated:
        specs["shared_weight"] = _whole(prefix.removesuffix(".") + "_gate.weight", (1, at.hidden))
    return specs
