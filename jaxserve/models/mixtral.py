"""Mixtral: every layer a mixture; the weights of the chosen experts are a softmax over them alone."""

from typing import Any

from jaxserve.config import ModelConfig
from jaxserve.layer_spec import Moe, Router
from jaxserve.models.expert_weights import per_expert
from jaxserve.models.family import WINDOWED, Family, activation, decoder_config, need, windows


def _mixtral(hf: dict[str, Any]) -> ModelConfig:
    router = Router("softmax", int(need(hf, "num_experts_per_tok")), renormalize=True)
    moe = Moe(int(need(hf, "num_local_experts")), int(need(hf, "intermediate_size")), router, activation(hf))
    return decoder_config(hf, ffn=lambda layer: moe, window=windows(hf))


FAMILIES = {
    "mixtral": Family(_mixtral, per_expert("block_sparse_moe.", names=("w1", "w3", "w2")), layer_types=WINDOWED)
}
