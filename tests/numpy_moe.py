"""A plain reading of Qwen3-MoE and Mixtral in numpy, one sequence, no cache: the truth behind a fixture of ours.

``python tests/numpy_moe.py`` writes ``fixtures/models/mixtral``. ``test_moe`` holds ``forward`` to the numbers that
another implementation gave for qwen3_moe.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).parent / "fixtures" / "models"
Tensors = dict[str, np.ndarray]


def norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def forward(hf: dict[str, Any], tensors: Tensors, ids: np.ndarray) -> np.ndarray:
    """Logits ``[T, V]`` of token ids ``[T]``, in float64."""
    t = {name: value.astype(np.float64) for name, value in tensors.items()}
    x = t["model.embed_tokens.weight"][ids]
    for layer in range(hf["num_hidden_layers"]):
        p, eps = f"model.layers.{layer}.", hf["rms_norm_eps"]
        x = x + attention(hf, t, p + "self_attn.", norm(x, t[p + "input_layernorm.weight"], eps))
        x = x + moe(hf, t, p, norm(x, t[p + "post_attention_layernorm.weight"], eps))
    return norm(x, t["model.norm.weight"], hf["rms_norm_eps"]) @ t["lm_head.weight"].T


def attention(hf: dict[str, Any], t: Tensors, p: str, x: np.ndarray) -> np.ndarray:
    heads, kv_heads, dim = hf["num_attention_heads"], hf["num_key_value_heads"], hf["head_dim"]
    q, k, v = ((x @ t[f"{p}{n}_proj.weight"].T).reshape(len(x), -1, dim) for n in "qkv")
    if p + "q_norm.weight" in t:
        q, k = (norm(a, t[f"{p}{n}_norm.weight"], hf["rms_norm_eps"]) for n, a in (("q", q), ("k", k)))
    angle = np.arange(len(x))[:, None] * hf["rope_parameters"]["rope_theta"] ** (-np.arange(0, dim, 2) / dim)
    cos, sin = np.cos(angle)[:, None], np.sin(angle)[:, None]

    def rotate(a: np.ndarray) -> np.ndarray:
        low, high = a[..., : dim // 2], a[..., dim // 2 :]
        return np.concatenate([low * cos - high * sin, high * cos + low * sin], -1)

    q, k = rotate(q), rotate(k)
    out = np.empty_like(q)
    for head in range(heads):
        group = head // (heads // kv_heads)
        for i in range(len(x)):
            first = max(0, i + 1 - (hf.get("sliding_window") or len(x)))
            weights = softmax(k[first : i + 1, group] @ q[i, head] * dim**-0.5)
            out[i, head] = weights @ v[first : i + 1, group]
    return out.reshape(len(x), -1) @ t[p + "o_proj.weight"].T


def moe(hf: dict[str, Any], t: Tensors, p: str, x: np.ndarray) -> np.ndarray:
    mixtral = hf["model_type"] == "mixtral"
    p += "block_sparse_moe." if mixtral else "mlp."
    gate, up, down = ("w1", "w3", "w2") if mixtral else ("gate_proj", "up_proj", "down_proj")
    out = np.zeros_like(x)
    scores = softmax(x @ t[p + "gate.weight"].T)
    for i, row in enumerate(x):
        best = np.argsort(-scores[i], kind="stable")[: hf["num_experts_per_tok"]]
        weights = scores[i, best] / scores[i, best].sum()
        for expert, weight in zip(best, weights, strict=True):
            e = f"{p}experts.{expert}."
            inner = t[f"{e}{gate}.weight"] @ row
            inner = inner / (1 + np.exp(-inner)) * (t[f"{e}{up}.weight"] @ row)
            out[i] += weight * (t[f"{e}{down}.weight"] @ inner)
    return out


MIXTRAL = {
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "dtype": "float32",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    "sliding_window": 16,
    "tie_word_embeddings": False,
}


def random_mixtral(seed: int) -> Tensors:
    rng = np.random.default_rng(seed)
    hf, hidden, width = MIXTRAL, MIXTRAL["hidden_size"], MIXTRAL["intermediate_size"]
    shapes: dict[str, tuple[int, ...]] = {"model.norm.weight": (hidden,)}
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        shapes[name] = (hf["vocab_size"], hidden)
    for layer in range(hf["num_hidden_layers"]):
        p = f"model.layers.{layer}."
        shapes[p + "input_layernorm.weight"] = shapes[p + "post_attention_layernorm.weight"] = (hidden,)
        for name, rows in (("q", 64), ("k", 32), ("v", 32), ("o", 64)):
            shapes[f"{p}self_attn.{name}_proj.weight"] = (rows, hidden)
        shapes[p + "block_sparse_moe.gate.weight"] = (hf["num_local_experts"], hidden)
        for expert in range(hf["num_local_experts"]):
            e = f"{p}block_sparse_moe.experts.{expert}."
            shapes |= {e + "w1.weight": (width, hidden), e + "w3.weight": (width, hidden)}
            shapes[e + "w2.weight"] = (hidden, width)
    tensors = {}
    for name, shape in shapes.items():
        values = rng.standard_normal(shape) * shape[-1] ** -0.5
        tensors[name] = (values if len(shape) > 1 else rng.uniform(0.8, 1.2, shape)).astype(np.float32)
    return tensors


def greedy(tensors: Tensors, prompt: np.ndarray) -> tuple[np.ndarray, np.ndarray, float]:
    """16 more tokens, the logits each was chosen from, and how close any choice was."""
    ids, steps = list(prompt), []
    for _ in range(16):
        steps.append(forward(MIXTRAL, tensors, np.array(ids))[-1])
        ids.append(int(steps[-1].argmax()))
    best = np.sort(np.array(steps))
    return np.array(ids[len(prompt) :]), np.array(steps), float((best[:, -1] - best[:, -2]).min())


def write_mixtral() -> None:
    from safetensors.numpy import save_file

    for seed in range(50):
        tensors = random_mixtral(seed)
        prompt = np.random.default_rng(seed).integers(3, 256, 48)
        ids, steps, margin = greedy(tensors, prompt)
        if margin > 0.02 and len(set(ids)) >= 5:
            break
    folder = HERE / "mixtral"
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(MIXTRAL, indent=2) + "\n")
    about = {"seed": seed, "greedy_margin_min": margin, "reference": "tests/numpy_moe.py, float64"}
    (folder / "meta.json").write_text(json.dumps(about, indent=1) + "\n")
    save_file(tensors, folder / "model.safetensors")
    logits = forward(MIXTRAL, tensors, prompt).astype(np.float32)
    steps = steps.astype(np.float32)
    np.savez(folder / "reference.npz", input_ids=prompt[None], logits=logits, greedy_ids=ids, step_logits=steps)
    print(f"mixtral: seed {seed}, margin {margin:.3f}, tokens {ids.tolist()}")


if __name__ == "__main__":
    write_mixtral()
