"""Whole steps of small models for ``compile_sm90``: the programs that an engine of them has on a GPU, kernels and all.

The models are as narrow as kernels allow (V3.2's heads, latents and index are the real ones), with two layers, one of
them of experts where there are any; their weights are never made.
"""

import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jax.sharding import Mesh

from jaxserve import targets, warmup
from jaxserve.config import EngineConfig
from jaxserve.executables import Compiled, ExecutableStore, Program

LLAMA = {
    "model_type": "llama",
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 2,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 32000,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
}
V32 = {
    "model_type": "deepseek_v32",
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "moe_intermediate_size": 512,
    "num_hidden_layers": 2,
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 4,
    "topk_group": 2,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "q_lora_rank": 768,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "index_n_heads": 64,
    "index_head_dim": 128,
    "index_topk": 2048,
    "vocab_size": 32000,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-6,
}
ROWS, TOKENS = 64, 256
"""Sequences that decode in a step, and prompt tokens beside them in one that has some."""


@dataclass(frozen=True)
class Step:
    """A step of a model, given as its config.json: decode, or prompt tokens beside it as well."""

    name: str
    model: dict[str, Any]
    kv_cache_dtype: str = "auto"
    prompts: bool = False

    def programs(self, mesh: Mesh) -> list[Program]:
        """Embedding, layers and the heads that choose tokens, as the engine compiles them for the mesh's device."""
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "config.json").write_text(json.dumps(self.model))
            config = EngineConfig(
                model=folder,
                load_format="random",
                dtype="bfloat16",
                kv_cache_dtype=self.kv_cache_dtype,
                kv_cache_memory_bytes=1 << 30,
                max_model_len=4096,
                max_num_seqs=ROWS,
                max_num_batched_tokens=TOKENS,
                host_kv_gib=0.0,
                cache_dir=folder,
                kernels="mosaic",
            )
            store = Unmeasured(config.cache_path, mesh.devices.flat, ahead=True)
            made = warmup.plan(config, mesh, store, targets.find("h200"))
        bucket = made.buckets.step(ROWS, TOKENS // made.buckets.block if self.prompts else 0)
        layers = {segment.kind: segment for segment in made.segments(bucket)}.values()
        return [made.embed(bucket), *(made.layers(bucket, segment) for segment in layers), *made.heads(ROWS)]


class Unmeasured(ExecutableStore):
    """Compiles nothing, so that planning an engine does not compile its largest step to learn what memory it takes."""

    def build(self, program: Program) -> Compiled:
        return program.function


STEPS = (
    Step("step llama decode", LLAMA),
    Step("step llama prompts", LLAMA, prompts=True),
    Step("step deepseek_v32 decode fp8_ds_mla", V32, "fp8_ds_mla"),
    Step("step deepseek_v32 prompts fp8_ds_mla", V32, "fp8_ds_mla", prompts=True),
)
