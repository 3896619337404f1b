"""gpt-oss: windows on every second layer, attention sinks, biases everywhere, experts with clamped gates.

On disk all experts of a layer are one tensor: in 16 or 32 bits ``[X, in, out]``, in MXFP4 ``[X, out, in]``. In both the
gate's and the up projection's channels alternate.
"""

from typing import Any

import numpy as np

from jaxserve.config import ModelConfig
from jaxserve.layer_spec import Activation, Moe, Router
from jaxserve.models.expert_weights import Place, down_spec, gate_up_spec, padded_spec, router_specs
from jaxserve.models.family import WINDOWED, Family, decoder_config, need, windows
from jaxserve.params import ParamSpec, Source
from jaxserve.quantization import MxArray

GROUP = 32
"""Channels that share a scale in MXFP4."""


def _gpt_oss(hf: dict[str, Any]) -> ModelConfig:
    need(hf, "layer_types")
    need(hf, "sliding_window")
    bias = bool(hf.get("attention_bias", True))
    top_k = int(hf.get("num_experts_per_tok") or need(hf, "experts_per_token"))
    moe = Moe(
        experts=int(need(hf, "num_local_experts")),
        width=int(need(hf, "intermediate_size")),
        router=Router("chosen_softmax", top_k, bias=True),
        activation=Activation(
            "swish_up_one", limit=float(hf.get("swiglu_limit", 7.0)), alpha=float(hf.get("swiglu_alpha", 1.702))
        ),
        bias=True,
        mxfp4=(hf.get("quantization_config") or {}).get("quant_method") == "mxfp4",
    )
    return decoder_config(
        hf,
        ffn=lambda layer: moe,
        window=windows(hf),
        qkv_bias=bias,
        o_bias=bias,
        sinks=True,
    )


def _experts(at: Place) -> dict[str, Any]:
    block, experts, width, hidden = at.prefix + "mlp.", at.spec.experts, at.spec.width, at.hidden
    specs: dict[str, Any] = dict(router_specs(at, block + "router"))
    both, down = block + "experts.gate_up_proj", block + "experts.down_proj"

    def gate_up_bias(source: Source, wanted: range, channels: range) -> np.ndarray:
        return _apart(source.read(both + "_bias", _slice(wanted)), axis=1)[:, :, _slice(channels)]

    def down_bias(source: Source, wanted: range, channels: range) -> np.ndarray:
        return source.read(down + "_bias", _slice(wanted))

    on_disk = {both + "_bias": (experts, 2 * width)}
    specs["gate_up_bias"] = padded_spec(at, "gate_up_bias", (at.experts, 2, at.width), 2, on_disk, gate_up_bias)
    on_disk = {down + "_bias": (experts, hidden)}
    specs["down_bias"] = padded_spec(at, "down_bias", (at.experts, hidden), None, on_disk, down_bias)
    return specs | (_packed(at, both, down) if at.spec.mxfp4 else _plain(at, both, down))


def _plain(at: Place, both: str, down: str) -> dict[str, ParamSpec]:
    experts, width, hidden = at.spec.experts, at.spec.width, at.hidden

    def read_gate_up(source: Source, wanted: range, channels: range) -> np.ndarray:
        data = source.read(both, _slice(wanted)).swapaxes(1, 2)
        return _apart(data, axis=1)[:, :, _slice(channels)]

    def read_down(source: Source, wanted: range, channels: range) -> np.ndarray:
        return source.read(down, _slice(wanted))[:, _slice(channels)].swapaxes(1, 2)

    return {
        "gate_up": gate_up_spec(at, {both: (experts, hidden, 2 * width)}, read_gate_up),
        "down": down_spec(at, {down: (experts, width, hidden)}, read_down),
    }


def _packed(at: Place, both: str, down: str) -> dict[str, MxArray]:
    """The experts as they are on disk: two numbers a byte, and a scale for every 32. ``unit`` is how many channels of
    the last axis one byte stands for."""
    experts, width, hidden = at.spec.experts, at.spec.width, at.hidden

    def gate_up_part(name: str, tail: tuple[int, ...], unit: int) -> ParamSpec:
        def read(source: Source, wanted: range, channels: range) -> np.ndarray:
            data = source.read(name, _slice(wanted)).reshape(len(wanted), 2 * width, -1)
            return _apart(data, axis=1)[:, :, _slice(channels)]

        shape, on_disk = (at.experts, 2, at.width, hidden // unit), (experts, 2 * width, hidden // GROUP, *tail)
        return padded_spec(at, "gate_up", shape, 2, {name: on_disk}, read, dtype="uint8")

    def down_part(name: str, tail: tuple[int, ...], unit: int) -> ParamSpec:
        def read(source: Source, wanted: range, channels: range) -> np.ndarray:
            data = source.read(name, _slice(wanted)).reshape(len(wanted), hidden, -1)
            return data[:, :, channels.start // unit : channels.stop // unit]

        shape, on_disk = (at.experts, hidden, at.width // unit), (experts, hidden, width // GROUP, *tail)
        return padded_spec(at, "down", shape, 2, {name: on_disk}, read, dtype="uint8", unit=unit)

    parts = (("_blocks", (GROUP // 2,), 2), ("_scales", (), GROUP))
    return {
        "gate_up": MxArray(*(gate_up_part(both + end, tail, unit) for end, tail, unit in parts)),
        "down": MxArray(*(down_part(down + end, tail, unit) for end, tail, unit in parts)),
    }


def _slice(part: range) -> slice:
    return slice(part.start, part.stop)


def _apart(data: np.ndarray, axis: int) -> np.ndarray:
    """Channels that alternate between gate and up, as ``[..., 2, channels, ...]``."""
    shape = (*data.shape[:axis], data.shape[axis] // 2, 2, *data.shape[axis + 1 :])
    return data.reshape(shape).swapaxes(axis, axis + 1)


FAMILIES = {"gpt_oss": Family(_gpt_oss, _experts, layer_types=WINDOWED)}
