"""Bad input through the Python door: an error that names the offender, and an engine that serves on."""

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tiny import FIXTURES, ROOM, idle, reference, roomy

import checkpoints
import jaxserve
from jaxserve.config import ConfigError
from jaxserve.params import WeightError
from jaxserve.request import RequestError

# -- requests -------------------------------------------------------------------------------------------------------

BAD_REQUESTS: dict[str, tuple[dict[str, Any], str, str]] = {
    # fields, the field at fault, words of the message
    "token beyond the vocabulary": ({"prompt": [1, 256]}, "prompt", "token id 256 .* holds 256"),
    "negative token": ({"prompt": [-1]}, "prompt", "token id -1"),
    "token that is a float": ({"prompt": [1, 2.5]}, "prompt", "2.5"),
    "token that is a bool": ({"prompt": [[1, True]]}, "prompt", "True"),
    "empty text": ({"prompt": ""}, "prompt", "empty"),
    "empty list": ({"prompt": [[]]}, "prompt", "empty"),
    "prompt as long as the context": ({"prompt": [7] * 256}, "prompt", "256 tokens, and the context holds 256"),
    "prompt and min_tokens beyond it": (
        {"prompt": [7] * 250, "min_tokens": 7, "max_tokens": 9},
        "prompt",
        "at least 7",
    ),
    "no completions": ({"n": 0}, "n", "at least 1|in \\[1"),
    "n a float": ({"n": 1.0}, "n", "1.0"),
    "negative max_tokens": ({"max_tokens": -1}, "max_tokens", "-1"),
    "max_tokens zero for nothing": ({"max_tokens": 0}, "max_tokens", "echo"),
    "max_tokens text": ({"max_tokens": "10"}, "max_tokens", "'10'"),
    "max_tokens a bool": ({"max_tokens": True}, "max_tokens", "True"),
    "min above max": ({"min_tokens": 5, "max_tokens": 4}, "min_tokens", "4"),
    "NaN temperature": ({"temperature": math.nan}, "temperature", "nan"),
    "infinite temperature": ({"temperature": math.inf}, "temperature", "inf"),
    "negative temperature": ({"temperature": -0.1}, "temperature", "-0.1"),
    "temperature text": ({"temperature": "hot"}, "temperature", "'hot'"),
    "huge integer": ({"temperature": 10**400}, "temperature", "finite|1000"),
    "top_p zero": ({"top_p": 0.0}, "top_p", "0.0"),
    "top_p NaN": ({"top_p": math.nan}, "top_p", "nan"),
    "top_k below -1": ({"top_k": -2}, "top_k", "-2"),
    "min_p above one": ({"min_p": 1.1}, "min_p", "1.1"),
    "seed too large": ({"seed": 2**63}, "seed", str(2**63)),
    "presence": ({"presence_penalty": 2.1}, "presence_penalty", "2.1"),
    "frequency": ({"frequency_penalty": None}, "frequency_penalty", "None"),
    "repetition zero": ({"repetition_penalty": 0}, "repetition_penalty", "0"),
    "bias beyond the vocabulary": ({"logit_bias": {256: 1.0}}, "logit_bias", "token id 256"),
    "bias of no token": ({"logit_bias": {"a": 1.0}}, "logit_bias", "'a'"),
    "bias too strong": ({"logit_bias": {5: 101}}, "logit_bias[5]", "101"),
    "bias NaN": ({"logit_bias": {5: math.nan}}, "logit_bias[5]", "nan"),
    "bias list": ({"logit_bias": [5]}, "logit_bias", "map"),
    "biases too many": ({"logit_bias": dict.fromkeys(range(513), 1.0)}, "logit_bias", "513"),
    "allowed beyond the vocabulary": ({"allowed_token_ids": [5, 999]}, "allowed_token_ids", "999"),
    "allowed none": ({"allowed_token_ids": []}, "allowed_token_ids", "empty"),
    "allowed text": ({"allowed_token_ids": "abc"}, "allowed_token_ids", "'abc'"),
    "stop id beyond the vocabulary": ({"stop_token_ids": [2**40]}, "stop_token_ids", str(2**40)),
    "stop id negative": ({"stop_token_ids": [-5]}, "stop_token_ids", "-5"),
    "stop empty": ({"stop": [""]}, "stop", "empty"),
    "stop number": ({"stop": 5}, "stop", "5"),
    "stops too many": ({"stop": ["x"] * 17}, "stop", "17"),
    "bad word empty": ({"bad_words": ["a", ""]}, "bad_words", "empty"),
    "bad word number": ({"bad_words": [1]}, "bad_words", "1"),
    "logprobs too many": ({"logprobs": 21}, "logprobs", "21"),
    "prompt_logprobs negative": ({"prompt_logprobs": -1}, "prompt_logprobs", "-1"),
    "echo number": ({"echo": 1}, "echo", "1"),
    "unknown option": ({"temprature": 1.0}, "temprature", "known: .*temperature"),
    "nothing allowed and unbanned": (
        {"allowed_token_ids": [97], "bad_words": ["a"]},
        "allowed_token_ids",
        "leaves no token",
    ),
    "nothing allowed but the end": (
        {"allowed_token_ids": [2], "min_tokens": 1},
        "allowed_token_ids",
        "leaves no token",
    ),
    "a bad word for every choice": (
        {"allowed_token_ids": [*b"ab"], "bad_words": ["ba", "bb"]},
        "allowed_token_ids",
        "leaves no token",
    ),
    "everything stops": ({"stop_token_ids": list(range(256)), "min_tokens": 1}, "stop_token_ids", "leaves no token"),
}


@pytest.mark.parametrize("name", BAD_REQUESTS)
def test_a_bad_request_is_named_and_hurts_nobody(llm: jaxserve.LLM, name: str) -> None:
    fields, param, words = BAD_REQUESTS[name]
    with pytest.raises(RequestError, match=words) as caught:
        llm.generate(
            **{"prompts" if k == "prompt" else k: v for k, v in fields.items()}
            | {"prompts": fields.get("prompt", "Hi")}
        )
    assert caught.value.param == param
    assert len(str(caught.value)) < 1200
    if "context" in words:
        assert caught.value.code == "context_length_exceeded"
    assert len(llm.generate("Hi", max_tokens=2, ignore_eos=True)[0].outputs[0].token_ids) == 2
    idle(llm)


def test_one_bad_prompt_refuses_the_batch_before_anything_runs(llm: jaxserve.LLM) -> None:
    with pytest.raises(RequestError, match="token id 300"):
        llm.generate([[1, 2], [300]], max_tokens=5)
    idle(llm)
    with pytest.raises(RequestError, match="2 sampling params for 1 prompts"):
        llm.generate(["Hi"], [jaxserve.SamplingParams()] * 2)
    with pytest.raises(RequestError, match="not both"):
        llm.generate("Hi", jaxserve.SamplingParams(), n=2)


@pytest.mark.parametrize("prompt", [None, 5, {"a": 1}, [None], b"bytes", [["a", 1]], object()], ids=repr)
def test_a_prompt_of_a_wrong_type_is_refused(llm: jaxserve.LLM, prompt: Any) -> None:
    with pytest.raises(RequestError, match="prompt"):
        llm.generate(prompt)
    with pytest.raises(RequestError, match="prompt"):
        llm.submit(prompt, jaxserve.SamplingParams(), on_delta=print)
    idle(llm)


@pytest.mark.parametrize("params", [None, {"n": 1}, ["Hi"], 5], ids=repr)
def test_parameters_of_a_wrong_type_are_refused(llm: jaxserve.LLM, params: Any) -> None:
    if params is not None:
        with pytest.raises(RequestError, match="params must be"):
            llm.generate("Hi", params)
    for priority in ("high", 1.5, None, True):
        with pytest.raises(RequestError, match="priority must be an integer") as caught:
            llm.submit("Hi", jaxserve.SamplingParams(), on_delta=print, priority=priority)
        assert caught.value.param == "priority"
    idle(llm)


def test_bad_words_that_leave_a_way_are_served(llm: jaxserve.LLM) -> None:
    fields = {"allowed_token_ids": [*b"ab"], "max_tokens": 30, "seed": 0}
    assert set(llm.generate("Hi", **fields, bad_words=["ab", "ba"])[0].outputs[0].text) in ({"a"}, {"b"})


def test_no_prompts_give_no_outputs(llm: jaxserve.LLM) -> None:
    assert llm.generate([]) == []


def test_a_model_without_a_tokenizer_says_so(programs_dir: str) -> None:
    with roomy(programs_dir, FIXTURES / "llama3") as mute:
        for fields, param in (({"prompts": "Hi"}, "prompt"), ({"prompts": [5], "stop": "x"}, "stop")):
            with pytest.raises(RequestError, match="tokenizer") as caught:
                mute.generate(**fields)
            assert caught.value.param == param
        with pytest.raises(RequestError, match="tokenizer"):
            mute.generate([5], bad_words=["x"])
        with pytest.raises(RequestError, match="tokenizer"):
            mute.chat([{"role": "user", "content": "Hi"}])
        (output,) = mute.generate([5], max_tokens=3, ignore_eos=True)
        assert (len(output.outputs[0].token_ids), output.outputs[0].text) == (3, "")


# -- engines --------------------------------------------------------------------------------------------------------


BAD_OPTIONS: dict[str, tuple[dict[str, Any], str]] = {
    "unknown": ({"max_num_seq": 4}, "unknown engine option 'max_num_seq'; known: .*max_num_seqs"),
    "dtype": ({"dtype": "int8"}, "dtype must be one of .*'int8'"),
    "longer than the model": ({"max_model_len": 257}, "max_model_len 257 exceeds the model's own limit of 256"),
    "max_model_len tiny": ({"max_model_len": 1}, "max_model_len"),
    "kv too small for max_model_len": (
        {"max_model_len": 256, "kv_cache_memory_bytes": 100_000},
        "max_model_len 256 does not fit: the KV cache holds 120 tokens",
    ),
    "kv too small for anything": ({"kv_cache_memory_bytes": 100}, "raise kv_cache_memory_bytes"),
    "kv beyond the memory": ({"kv_cache_memory_bytes": 2**60}, "kv_cache_memory_bytes .* does not fit"),
    "more devices than there are": ({"tensor_parallel": 9}, "tensor_parallel is 9 but only 8"),
    "no devices": ({"tensor_parallel": 0}, "tensor_parallel"),
    "no slots": ({"max_num_seqs": 0}, "max_num_seqs"),
    "slots text": ({"max_num_seqs": "4"}, "max_num_seqs .*'4'"),
    "no page": ({"page_size": 0}, "page_size"),
    "no tokens": ({"max_num_batched_tokens": 0}, "max_num_batched_tokens"),
    "utilization": ({"device_memory_utilization": 1.5}, "device_memory_utilization .*1.5"),
    "utilization text": ({"device_memory_utilization": "0.5"}, "device_memory_utilization .*'0.5'"),
    "utilization NaN": ({"device_memory_utilization": math.nan}, "device_memory_utilization .*nan"),
    "overlap text": ({"overlap": "no"}, "overlap .*'no'"),
    "seed text": ({"seed": "x"}, "seed .*'x'"),
}


@pytest.mark.parametrize("name", BAD_OPTIONS)
def test_a_bad_engine_option_is_named(name: str, programs_dir: str) -> None:
    options, words = BAD_OPTIONS[name]
    with pytest.raises(ConfigError, match=words):
        roomy(programs_dir, FIXTURES / "llama3", **options)


def test_a_context_that_was_not_asked_for_is_lowered_and_reported(programs_dir: str) -> None:
    limits = {"max_num_seqs": 1, "max_num_batched_tokens": 32}
    with roomy(programs_dir, FIXTURES / "llama3", kv_cache_memory_bytes=100_000, **limits) as small:
        assert small.max_model_len == 120
        assert small.report()["limits"]["max_model_len_lowered_from"] == 256
        with pytest.raises(RequestError, match="context holds 120"):
            small.generate([7] * 120)


def test_generate_names_an_unknown_option_before_loading() -> None:
    with pytest.raises(RequestError, match="unknown option 'max_token'") as caught:
        jaxserve.generate("no-such-model", "Hi", max_token=5)
    assert caught.value.param == "max_token"


# -- checkpoints ------------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(FIXTURES / "llama3", tmp_path / "model"))


def change_config(folder: Path, **fields: Any) -> None:
    path = folder / "config.json"
    config = {**json.loads(path.read_text()), **fields}
    path.write_text(json.dumps({k: v for k, v in config.items() if v is not ...}))


def change_tensors(folder: Path, change: Callable[[dict[str, np.ndarray]], Any]) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


def corrupt(path: Path, start: int, data: bytes) -> None:
    raw = bytearray(path.read_bytes())
    raw[start : start + len(data)] = data
    path.write_bytes(raw)


UP = "model.layers.1.mlp.up_proj.weight"

BAD_MODELS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "unknown architecture": (
        lambda f: change_config(f, model_type="mamba9", architectures=["Mamba9ForCausalLM"]),
        "unknown architecture .*Mamba9ForCausalLM.*known: .*llama",
    ),
    "no architecture": (lambda f: change_config(f, model_type=...), "unknown architecture"),
    "rope type": (
        lambda f: change_config(f, rope_parameters={"rope_type": "dynamic", "factor": 2.0}),
        "rope type 'dynamic' is not implemented",
    ),
    "rope parameter": (
        lambda f: change_config(f, rope_parameters={"rope_type": "llama3", "factor": 2.0}),
        "'original_max_position_embeddings'|'low_freq_factor'",
    ),
    "missing field": (lambda f: change_config(f, hidden_size=...), "hidden_size"),
    "activation": (lambda f: change_config(f, hidden_act="gelu"), "hidden_act 'gelu'"),
    "head counts": (lambda f: change_config(f, num_key_value_heads=3), "num_key_value_heads"),
    "quantized": (lambda f: change_config(f, quantization_config={"quant_method": "awq"}), "awq"),
    "missing tensor": (lambda f: change_tensors(f, lambda t: t.pop(UP)), f"missing tensor {UP}"),
    "unexpected tensor": (
        lambda f: change_tensors(f, lambda t: t.update({"model.extra": np.zeros(3, np.float32)})),
        "unexpected tensor model.extra",
    ),
    "misshapen tensor": (
        lambda f: change_tensors(f, lambda t: t.update({UP: t[UP].T.copy()})),
        rf"tensor {UP} has shape \[64, 128\], expected \[128, 64\]",
    ),
    "a layer too many": (lambda f: change_config(f, num_hidden_layers=2), "unexpected tensor model.layers.2"),
    "a layer too few": (lambda f: change_config(f, num_hidden_layers=4), "missing tensor model.layers.3.*more"),
    "untied without a head": (
        lambda f: change_tensors(f, lambda t: t.pop("lm_head.weight")),
        "missing tensor lm_head.weight",
    ),
    "no config": (lambda f: (f / "config.json").unlink(), "config.json"),
    "config no json": (lambda f: (f / "config.json").write_text("{"), "config.json"),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), "safetensors"),
    "header length": (lambda f: corrupt(f / "model.safetensors", 0, b"\xff" * 8), "model.safetensors"),
    "header no json": (lambda f: corrupt(f / "model.safetensors", 8, b"!!!!"), "model.safetensors"),
    "truncated": (
        lambda f: (f / "model.safetensors").write_bytes((f / "model.safetensors").read_bytes()[:-100]),
        "model.safetensors",
    ),
    "empty": (lambda f: (f / "model.safetensors").write_bytes(b""), "model.safetensors"),
}


@pytest.mark.parametrize("name", BAD_MODELS)
def test_a_bad_checkpoint_is_named(name: str, folder: Path, programs_dir: str) -> None:
    harm, words = BAD_MODELS[name]
    harm(folder)
    with pytest.raises((checkpoints.CheckpointError, ConfigError, WeightError), match=words) as caught:
        roomy(programs_dir, folder)
    assert len(str(caught.value)) < 2000


@pytest.mark.parametrize("model", ["/no/such/folder", "no-such-model", "/etc/passwd", ""])
def test_an_unknown_model_is_named(model: str, programs_dir: str) -> None:
    with pytest.raises((checkpoints.CheckpointError, ConfigError), match=model or "model"):
        jaxserve.LLM(model, **{**ROOM, "cache_dir": programs_dir})


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("head", ["own", "copy"])
def test_a_head_that_is_there_is_used(tied: bool, head: str, folder: Path, programs_dir: str) -> None:
    """Whatever the flag says; without one the embedding serves where it says so (smollm2's fixture: test_parity)."""
    ref = reference("llama3")
    prompt = ref["input_ids"][0].tolist()
    change_config(folder, tie_word_embeddings=tied)
    if head == "copy":
        change_tensors(folder, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].copy()}))
    with roomy(programs_dir, folder, max_num_seqs=1, max_num_batched_tokens=32) as made:
        found = made.generate([prompt], max_tokens=16, temperature=0.0, ignore_eos=True)[0].outputs[0].token_ids
    assert (found == ref["greedy_ids"].tolist()) == (head == "own")


def test_a_tied_model_without_a_head_uses_its_embedding(folder: Path, programs_dir: str, tmp_path: Path) -> None:
    prompt = reference("llama3")["input_ids"][0].tolist()
    copy = Path(shutil.copytree(folder, tmp_path / "copy"))
    change_tensors(copy, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].copy()}))
    change_config(folder, tie_word_embeddings=True)
    change_tensors(folder, lambda t: t.pop("lm_head.weight"))
    found = []
    for model in (folder, copy):
        with roomy(programs_dir, model, max_num_seqs=1, max_num_batched_tokens=32) as made:
            found += [made.generate([prompt], max_tokens=16, temperature=0.0, ignore_eos=True)[0].outputs[0].token_ids]
    assert found[0] == found[1]


def test_an_engine_lives_after_another_has_failed_to(llm: jaxserve.LLM, folder: Path, programs_dir: str) -> None:
    change_tensors(folder, lambda t: t.pop(UP))
    with pytest.raises(WeightError):
        roomy(programs_dir, folder)
    assert len(llm.generate("Hi", max_tokens=2, ignore_eos=True)[0].outputs[0].token_ids) == 2
    idle(llm)
