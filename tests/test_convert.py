"""A converted folder serves the same tokens as its source, in the layout it was converted for."""

import json
from pathlib import Path

import pytest
from tiny import FIXTURES, LIMITS, reference, roomy

import checkpoints
import jaxserve
from jaxserve.config import ConfigError
from jaxserve.convert import convert


def greedy(llm: jaxserve.LLM, family: str) -> list[int]:
    prompt = reference(family)["input_ids"][0].tolist()
    return llm.generate([prompt], max_tokens=16, temperature=0.0, ignore_eos=True)[0].outputs[0].token_ids


@pytest.mark.parametrize("family", ["llama3", "smollm2", "qwen2"])
def test_a_converted_folder_serves_the_reference(family: str, tmp_path: Path, programs_dir: str) -> None:
    """Heads tied and untied, with biases and without."""
    convert(str(FIXTURES / family), tmp_path / "new")
    options = {**LIMITS, "cache_dir": programs_dir}
    with jaxserve.LLM(str(tmp_path / "new"), **options) as llm:
        assert greedy(llm, family) == reference(family)["greedy_ids"].tolist()
        assert llm.report()["model"]["format"] == "orbax"
        assert llm.report()["executables"]["discarded"] == []


def test_a_sharded_folder_serves_at_its_own_layout_and_refuses_others(tmp_path: Path, programs_dir: str) -> None:
    folder = tmp_path / "sharded"
    convert(str(FIXTURES / "qwen3"), folder, tensor_parallel=8)  # more devices than KV heads: they are replicated
    options = {**LIMITS, "cache_dir": programs_dir}
    with jaxserve.LLM(str(folder), tensor_parallel=8, **options) as llm:
        assert greedy(llm, "qwen3") == reference("qwen3")["greedy_ids"].tolist()
    with pytest.raises(ConfigError, match="tensor_parallel 1: this folder was converted for tensor_parallel 8"):
        jaxserve.LLM(str(folder), **options)


def test_layouts_that_agree_are_exchangeable(tmp_path: Path, programs_dir: str) -> None:
    """Two KV heads lie alike over one device and over two."""
    convert(str(FIXTURES / "qwen3"), tmp_path / "two", tensor_parallel=2)
    convert(str(FIXTURES / "qwen3"), tmp_path / "one")
    expected = reference("qwen3")["greedy_ids"].tolist()
    options = {**LIMITS, "cache_dir": programs_dir}
    for folder, devices in (("two", 2), ("two", 1), ("one", 2)):
        with jaxserve.LLM(str(tmp_path / folder), tensor_parallel=devices, **options) as llm:
            assert greedy(llm, "qwen3") == expected


def test_the_words_come_along(llm: jaxserve.LLM, speaking: Path, tmp_path: Path, programs_dir: str) -> None:
    """Tokenizer, chat template and end-of-sequence token; seeds mean the same."""
    convert(str(speaking), tmp_path / "new")
    params = jaxserve.SamplingParams(seed=3, max_tokens=40)
    with roomy(programs_dir, tmp_path / "new") as other:
        for ask in (
            lambda m: m.generate("Hello", params),
            lambda m: m.chat([{"role": "user", "content": "Hi"}], params),
        ):
            (ours,), (theirs,) = ask(other), ask(llm)
            assert ours.outputs == theirs.outputs
            assert ours.prompt == theirs.prompt
        assert other._built.eos_ids == llm._built.eos_ids


def test_a_dtype_is_kept(tmp_path: Path, programs_dir: str) -> None:
    convert(str(FIXTURES / "llama3"), tmp_path / "half", dtype="bfloat16")
    meta = checkpoints.read_meta(tmp_path / "half")
    assert meta["layout"] == {"tensor_parallel": 1, "dtype": "bfloat16"}
    options = {**LIMITS, "cache_dir": programs_dir, "dtype": "auto", "max_num_seqs": 1}
    with jaxserve.LLM(str(tmp_path / "half"), **options) as llm:
        assert llm.report()["run"]["dtype"] == "bfloat16"
        assert len(greedy(llm, "llama3")) == 16
    with pytest.raises(ConfigError, match="converted as bfloat16"):
        jaxserve.LLM(str(tmp_path / "half"), **{**options, "dtype": "float32"})


def test_what_cannot_be_converted_is_named(tmp_path: Path) -> None:
    with pytest.raises((checkpoints.CheckpointError, ConfigError), match="no-such-model"):
        convert("no-such-model", tmp_path / "a")
    convert(str(FIXTURES / "llama3"), tmp_path / "b")
    with pytest.raises(ConfigError, match="converted folder already"):
        convert(str(tmp_path / "b"), tmp_path / "c")
    with pytest.raises((checkpoints.CheckpointError, ConfigError), match="b"):
        convert(str(FIXTURES / "llama3"), tmp_path / "b")
    with pytest.raises(ConfigError, match="tensor_parallel is 9 but only 8"):
        convert(str(FIXTURES / "llama3"), tmp_path / "d", tensor_parallel=9)
    assert not (tmp_path / "a").exists()
    assert not (tmp_path / "c").exists()


def test_a_damaged_converted_folder_is_named(tmp_path: Path, programs_dir: str) -> None:
    folder = tmp_path / "new"
    convert(str(FIXTURES / "llama3"), folder)
    meta = next(path for path in folder.iterdir() if path.suffix == ".json" and "layout" in path.read_text())
    whole = json.loads(meta.read_text())
    options = {**LIMITS, "cache_dir": programs_dir}
    cases = {
        "{": meta.name,
        "{}": meta.name,
        json.dumps({**whole, "meta": {}}): "unknown architecture",
        json.dumps(
            {**whole, "meta": whole["meta"] | {"layout": {}}}
        ): f"{meta.name} does not say which tensor_parallel",
        json.dumps({**whole, "arrays": whole["arrays"] | {"extra": {"shape": [1], "dtype": "float32"}}}): "extra",
    }
    for harmed, words in cases.items():
        meta.write_text(harmed)
        with pytest.raises((checkpoints.CheckpointError, ConfigError), match=words):
            jaxserve.LLM(str(folder), **options)
