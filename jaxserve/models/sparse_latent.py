"""DeepSeek V3.2 and GLM-5: V3's decoder, whose latent attention looks only at what an indexer chooses. In GLM-5 layers
may go by the choice of one before them."""

from typing import Any

from jaxserve.config import ConfigError, ModelConfig
from jaxserve.layer_spec import Indexer, Latent
from jaxserve.models.deepseek_moe import deepseek_ffn
from jaxserve.models.family import Family, decoder_config, need
from jaxserve.models.latent import latent


def _deepseek_v32(hf: dict[str, Any]) -> ModelConfig:
    attention = _choosing(hf, pairs=False)
    return decoder_config(hf, ffn=deepseek_ffn(hf), mixer=lambda layer: attention, predictors=_predictors(hf))


def _glm_moe_dsa(hf: dict[str, Any]) -> ModelConfig:
    chooses = _chooses(hf) + [True] * _predictors(hf)
    own, taken = _choosing(hf, pairs=True), latent(hf, takes_choice=True)

    def mixer(layer: int) -> Latent:
        return own if chooses[layer] else taken

    return decoder_config(hf, ffn=deepseek_ffn(hf), mixer=mixer, predictors=_predictors(hf))


def _predictors(hf: dict[str, Any]) -> int:
    return int(hf.get("num_nextn_predict_layers") or 0)


def _choosing(hf: dict[str, Any], *, pairs: bool) -> Latent:
    """Attention with an indexer. Raises ``ConfigError``."""
    need(hf, "q_lora_rank")  # the indexer's queries are made from it
    heads, dim, top_k = (int(need(hf, name)) for name in ("index_n_heads", "index_head_dim", "index_topk"))
    if dim < int(need(hf, "qk_rope_head_dim")):
        raise ConfigError(f"index_head_dim {dim} is less than qk_rope_head_dim {hf['qk_rope_head_dim']}")
    pairs = bool(hf.get("indexer_rope_interleave", pairs))
    return latent(hf, indexer=Indexer(heads, dim, top_k, pairs))


def _chooses(hf: dict[str, Any]) -> list[bool]:
    """Whether each layer has an indexer: told layer by layer, or as a period. Raises ``ConfigError``."""
    layers = int(need(hf, "num_hidden_layers"))
    if (kinds := hf.get("indexer_types")) is not None:
        name, own, taken = "indexer_types", "full", "shared"
    elif (kinds := hf.get("index_topk_pattern")) is not None:
        name, own, taken = "index_topk_pattern", "F", "S"
    else:
        period, skip = int(hf.get("index_topk_freq") or 1), hf.get("index_skip_topk_offset")
        first = 2 if skip is None else int(skip)
        found = [max(layer - first + 1, 0) % period == 0 for layer in range(layers)]
        if not found[0]:
            raise ConfigError(
                f"index_topk_freq {period} and index_skip_topk_offset {first}: the first layer would go by the choice "
                "of one before it, and there is none"
            )
        return found
    if len(kinds) < layers:
        raise ConfigError(f"{name} has {len(kinds)} entries for {layers} layers")
    kinds = list(kinds)[:layers]
    if unknown := [kind for kind in kinds if kind not in (own, taken)]:
        raise ConfigError(f"{name}: {unknown[0]!r} is neither {own!r} nor {taken!r}")
    if kinds[0] != own:
        raise ConfigError(f"{name}: the first layer is {taken!r}, and there is none before it")
    return [kind == own for kind in kinds]


SPARSE = ("indexed_attention", "deepseek_sparse_attention")

FAMILIES = {
    "deepseek_v32": Family(_deepseek_v32, layer_types=SPARSE),
    "glm_moe_dsa": Family(_glm_moe_dsa, layer_types=SPARSE),
}
