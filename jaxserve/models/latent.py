"""Reading multi-head latent attention, in the fields that DeepSeek V2 and its kin share."""

import dataclasses
import math
from typing import Any

from jaxserve.layer_spec import Latent
from jaxserve.models.family import need, read_rope
from jaxserve.rope import RopeConfig


def latent(hf: dict[str, Any], **differs: Any) -> Latent:
    """The config's attention; ``differs`` are traits that these fields do not tell (see ``Latent``).

    Raises ``ConfigError`` naming a field that is missing or not supported.
    """
    nope, turning = int(need(hf, "qk_nope_head_dim")), int(need(hf, "qk_rope_head_dim"))
    rope = dataclasses.replace(read_rope(hf, turning), dim=turning)
    traits: dict[str, Any] = {"pairs": bool(hf.get("rope_interleave", True)), **differs}
    return Latent(
        heads=int(need(hf, "num_attention_heads")),
        rank=int(need(hf, "kv_lora_rank")),
        nope=nope,
        value=int(need(hf, "v_head_dim")),
        rope=rope,
        scale=(nope + turning) ** -0.5 * _mscale(hf, rope) ** 2,
        q_rank=None if hf.get("q_lora_rank") is None else int(hf["q_lora_rank"]),
        bias=bool(hf.get("attention_bias")),
        **traits,
    )


def _mscale(hf: dict[str, Any], rope: RopeConfig) -> float:
    """What a stretched rope multiplies queries and keys by: not in cos and sin, as others have it."""
    params = hf.get("rope_parameters") or hf.get("rope_scaling") or {}
    weight = float(params.get("mscale_all_dim") or 0.0)
    return 0.1 * weight * math.log(rope.factor) + 1.0 if rope.factor > 1 else 1.0
