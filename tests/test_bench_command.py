"""``jaxserve bench``: what it measures adds up, and what makes no sense is refused in one line."""

import json

import pytest
from tiny import FIXTURES, LIMITS

from jaxserve.bench import _decode_rate, cut_layers
from jaxserve.cli import main
from jaxserve.config import ConfigError

CONFIG = str(FIXTURES / "llama3" / "config.json")


def test_a_config_without_weights_is_measured(programs_dir: str, capsys: pytest.CaptureFixture[str]) -> None:
    layers = json.loads((FIXTURES / "llama3" / "config.json").read_text())["num_hidden_layers"]
    limits = [
        word
        for name in ("dtype", "max_num_seqs", "max_num_batched_tokens", "page_size", "kv_cache_memory_bytes")
        for word in ("--" + name.replace("_", "-"), str(LIMITS[name]))
    ]
    line = ["bench", "--config", CONFIG, "--load-format", "random", "--layers", str(layers), *limits]
    line += ["--max-model-len", "256", "--prompt-len", "20", "--output-len", "5", "--batch", "1", "2", "--rounds", "1"]
    assert main([*line, "--no-load-progress", "--cache-dir", programs_dir, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert "WEIGHTS ARE RANDOM" in found["facts"]["weights"]
    assert found["facts"]["layers"] == layers
    assert found["facts"]["model"] == CONFIG
    assert [(job["batch"], job["prompt"], job["output"]) for job in found["jobs"]] == [(1, 20, 5), (2, 20, 5)]
    for job in found["jobs"]:
        assert min(job["first_token_ms"], job["prefill_tokens_per_s"], job["decode_tokens_per_s"]) > 0
        assert job["step_ms"] == pytest.approx(job["batch"] / job["decode_tokens_per_s"] * 1e3, rel=0.01)


def test_decode_is_what_comes_after_the_last_first_token() -> None:
    assert _decode_rate([[1.0, 2.0, 3.0], [2.0, 3.0, 4.0]]) == 3 / 2.0
    assert _decode_rate([[1.0]]) == 0


def test_layers_are_cut_as_they_stand() -> None:
    hf = {
        "num_hidden_layers": 4,
        "layer_types": ["a", "b", "a", "b"],
        "eos_token_id": [1, 2],
        "first_k_dense_replace": 3,
        "num_kv_shared_layers": 2,
        "per_layer_config": {"1": {"head_dim": 2}, "3": {"head_dim": 2}},
    }
    cut = cut_layers(hf, 3)
    assert cut == hf | {
        "num_hidden_layers": 3,
        "layer_types": ["a", "b", "a"],
        "num_kv_shared_layers": 1,
        "per_layer_config": {"1": {"head_dim": 2}},
    }
    assert cut_layers(hf, 1)["num_kv_shared_layers"] == 0
    assert cut_layers(hf, 4) == hf


@pytest.mark.parametrize(("hf", "layers"), [({}, 1), ({"num_hidden_layers": 2}, 3), ({"num_hidden_layers": 2}, 0)])
def test_layers_that_are_not_there(hf: dict, layers: int) -> None:
    with pytest.raises(ConfigError, match="layers must be from 1"):
        cut_layers(hf, layers)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["a", "--config", "b.json"], "not both a and b.json"),
        (["--batch", "0"], "--batch"),
        (["--prompt-len", "0"], "--prompt-len"),
        (["--layers", "2"], "--load-format random"),
        (["--config", "b.json"], "--config b.json has no weights: add --load-format random"),
        (["--batch", "1", "3", "--max-num-seqs", "1"], "--batch 3 cannot run at once with --max-num-seqs 1"),
        (
            ["--prompt-len", "9", "--max-model-len", "50"],
            "--prompt-len + --output-len is 73, more than --max-model-len",
        ),
        (
            ["--config", CONFIG, "--load-format", "random", "--prompt-len", "5000", "--no-load-progress"],
            "--prompt-len + --output-len 5064 exceeds the model's own limit of 256 positions",
        ),
        (["--config", CONFIG, "--layers", "99", "--load-format", "random"], "layers must be from 1"),
        (["--load-format", "random", "--sidecar", "auto"], "--sidecar does not go with"),
    ],
)
def test_what_makes_no_sense_is_one_line(arguments: list[str], named: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", *arguments]) == 2
    error = capsys.readouterr().err
    assert named in error
    assert error.count("\n") == 1
