"""Makes a fixture from the ``transformers`` package, which the project itself does not need:
``python tests/transformers_fixture.py glm4_moe_lite`` writes ``fixtures/models/glm4_moe_lite``.

Weights are random: matrices of variance 1 / fan-in, norms around 1, biases around 0; latents are so small that the eps
of their norms counts. The first seed is taken whose greedy choices are clear and spread over enough tokens, so that
rounding changes none.
"""

import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).parent / "fixtures" / "models"

CONFIGS: dict[str, dict[str, Any]] = {
    # Queries straight from the hidden row, experts of one group, two shared, a stretched rope with a weight of its own.
    "deepseek_v2_lite": {
        "model_type": "deepseek_v2",
        "architectures": ["DeepseekV2ForCausalLM"],
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 48,
        "moe_intermediate_size": 16,
        "num_hidden_layers": 2,
        "first_k_dense_replace": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "n_shared_experts": 2,
        "n_routed_experts": 6,
        "num_experts_per_tok": 2,
        "routed_scaling_factor": 1.0,
        "topk_method": "greedy",
        "n_group": 3,
        "topk_group": 1,
        "norm_topk_prob": False,
        "kv_lora_rank": 24,
        "q_lora_rank": None,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 12,
        "max_position_embeddings": 160,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 40.0,
            "original_max_position_embeddings": 16,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 0.707,
            "mscale_all_dim": 0.707,
        },
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    },
    # Latents, heads that are no power of two, values of another size than keys, another eps than the latents' norms.
    "glm4_moe_lite": {
        "architectures": ["Glm4MoeLiteForCausalLM"],
        "vocab_size": 256,
        "hidden_size": 64,
        "intermediate_size": 128,
        "moe_intermediate_size": 32,
        "num_hidden_layers": 3,
        "num_attention_heads": 5,
        "num_key_value_heads": 5,
        "n_shared_experts": 1,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "routed_scaling_factor": 1.8,
        "kv_lora_rank": 32,
        "q_lora_rank": 48,
        "qk_nope_head_dim": 24,
        "qk_rope_head_dim": 8,
        "v_head_dim": 20,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        "attention_bias": True,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    },
    # A shared expert behind a gate, biases on q, k and v, a dense layer among sparse ones.
    "qwen2_moe": {
        "architectures": ["Qwen2MoeForCausalLM"],
        "vocab_size": 256,
        "hidden_size": 64,
        "intermediate_size": 96,
        "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 40,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "norm_topk_prob": False,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [1],
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    },
    # Experts beside a dense network, values that are keys, full layers with other heads, none of them borrowed.
    "gemma4_moe": {
        "model_type": "gemma4_text",
        "architectures": ["Gemma4ForCausalLM"],
        "vocab_size": 256,
        "hidden_size": 64,
        "intermediate_size": 48,
        "moe_intermediate_size": 24,
        "num_experts": 8,
        "top_k_experts": 2,
        "enable_moe_block": True,
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "global_head_dim": 32,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
        "hidden_size_per_layer_input": 0,
        "sliding_window": 16,
        "final_logit_softcapping": 30.0,
        "max_position_embeddings": 256,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    },
}
PROMPT, MORE, MARGIN, DISTINCT = 48, 16, 0.02, 5


def randomize(model: Any, seed: int) -> None:
    import torch

    generator = torch.Generator().manual_seed(seed)
    state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for name, tensor in sorted(state.items()):
        if "rotary" in name or name.endswith("embed_scale"):
            continue
        noise = torch.randn(tensor.shape, generator=generator)
        if tensor.ndim > 1:
            tensor.data.copy_(noise * tensor.shape[-1] ** -0.5)
        elif "bias" in name:
            tensor.data.copy_(noise * 0.1)
        else:
            tensor.data.copy_(1 + 0.2 * noise)
        if "q_a_proj" in name or "kv_a_proj" in name:
            tensor.data[: tensor.shape[0] if "q_a_proj" in name else model.config.kv_lora_rank] *= 0.005


def numbers(model: Any, prompt: np.ndarray) -> dict[str, np.ndarray]:
    """What the tests compare with: logits of the prompt, then of 16 greedy tokens, cached."""
    import torch

    ids = torch.tensor(prompt)[None]
    with torch.no_grad():
        out = model(ids, use_cache=True)
        steps = [out.logits[0, -1]]
        for _ in range(MORE - 1):
            out = model(steps[-1].argmax()[None, None], past_key_values=out.past_key_values, use_cache=True)
            steps.append(out.logits[0, -1])
        whole = model(ids).logits[0]
    stacked = torch.stack(steps)
    return {
        "input_ids": prompt[None].astype(np.int32),
        "logits": whole.numpy(),
        "greedy_ids": stacked.argmax(-1).numpy().astype(np.int32),
        "step_logits": stacked.numpy(),
    }


def write(family: str) -> None:
    import torch
    import transformers

    torch.set_num_threads(1)
    cfg = transformers.AutoConfig.for_model(**{"model_type": family, **CONFIGS[family]})
    model = transformers.AutoModelForCausalLM.from_config(cfg, attn_implementation="eager").float().eval()
    for seed in range(100):
        randomize(model, seed)
        found = numbers(model, np.random.default_rng(seed).integers(3, cfg.vocab_size, PROMPT))
        best = np.sort(found["step_logits"])
        margin = float((best[:, -1] - best[:, -2]).min())
        if margin > MARGIN and len(set(found["greedy_ids"].tolist())) >= DISTINCT:
            break
    else:
        raise SystemExit("no seed is clear enough")
    folder = HERE / family
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        model.save_pretrained(scratch)
        for name in ("config.json", "model.safetensors"):
            shutil.copyfile(Path(scratch) / name, folder / name)
    np.savez_compressed(folder / "reference.npz", **found)
    versions = {"transformers": transformers.__version__, "torch": torch.__version__}
    meta = {"seed": seed, "greedy_margin_min": margin, **versions, "made_by": "tests/transformers_fixture.py"}
    (folder / "meta.json").write_text(json.dumps(meta, indent=1) + "\n")


if __name__ == "__main__":
    write(sys.argv[1])
