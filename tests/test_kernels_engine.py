"""The engine with the kernels for Hopper, interpreted: the tokens of the engine with the references."""

import json
from pathlib import Path
from typing import Any

import pytest
from hopper import MOSAIC
from tiny import FIXTURES, LIMITS, idle, reference

import jaxserve
from jaxserve.request import TokenLogprob

SMALL: dict[str, Any] = {**LIMITS, "dtype": "bfloat16", "page_size": 16, "max_model_len": 64, "forbid_compile": False}

NEAR = 0.06
"""Of log-probabilities: the rounding of 16-bit activations."""


def answer(model: Path, kernels: str, cache: str, **options: Any) -> list[TokenLogprob]:
    prompt = reference("deepseek_v32")["input_ids"][0].tolist()[:14]
    with jaxserve.LLM(str(model), **{**SMALL, **options}, cache_dir=cache, kernels=kernels) as llm:
        assert all(choice.startswith(kernels) for choice in llm.report()["kernels"].values()), llm.report()["kernels"]
        (output,) = llm.generate([prompt], max_tokens=4, temperature=0.0, ignore_eos=True, logprobs=2)
        idle(llm)
    return output.outputs[0].logprobs


def assert_same(model: Path, cache: str, **options: Any) -> None:
    """The same greedy tokens, up to one that is as good as another; their log-probabilities are near."""
    got, want = (answer(model, kernels, cache, **options) for kernels in ("mosaic", "reference"))
    for number, (ours, theirs) in enumerate(zip(got, want, strict=True)):
        assert abs(ours.logprob - theirs.logprob) < NEAR, number
        if ours.token_id != theirs.token_id:
            assert number > 0
            assert theirs.top[0][1] - theirs.top[1][1] < NEAR, "another token, though it was no tie"
            return


def latents(folder: Path, family: str) -> Path:
    """A config of latents that the kernels take: its weights are random."""
    config = json.loads((FIXTURES / family / "config.json").read_text())
    config |= {
        "kv_lora_rank": 128 if MOSAIC.interpreted else 512,
        "qk_rope_head_dim": 64,
        "index_head_dim": 128,
        "num_hidden_layers": 2,
    }
    config |= {name: config[name][:2] for name in ("layer_types", "mlp_layer_types") if name in config}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_heads(programs_dir: str) -> None:
    assert_same(FIXTURES / "llama3", programs_dir)


def test_latents_and_chosen_ones(tmp_path: Path, programs_dir: str) -> None:
    model = latents(tmp_path, "deepseek_v32")
    assert_same(model, programs_dir, load_format="random", kv_cache_dtype="fp8_ds_mla", page_size=32)


def refused(cache: str, match: str, **options: Any) -> None:
    with pytest.raises(jaxserve.ConfigError, match=match):
        jaxserve.LLM(str(FIXTURES / "llama3"), **{**SMALL, **options}, cache_dir=cache, kernels="mosaic")


def test_what_no_kernel_runs_is_refused(programs_dir: str) -> None:
    refused(programs_dir, "kernels mosaic has no paged_attention.*float32", dtype="float32")


@pytest.mark.skipif(not MOSAIC.interpreted, reason="kernels are not interpreted")
def test_several_devices_are_refused_where_kernels_are_interpreted(programs_dir: str) -> None:
    """Their kernels would wait for each other inside the interpreter, or fail there."""
    refused(programs_dir, "kernels mosaic is interpreted.*tensor_parallel is 2", tensor_parallel=2)
