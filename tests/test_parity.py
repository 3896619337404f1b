"""The numbers are right: reference checkpoints and real weights, through the paged, chunked, batched engine."""

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from tiny import FAMILIES, idle, reference, tiny

import jaxserve

REAL = json.loads((Path(__file__).parent / "fixtures" / "smollm2_reference.json").read_text())

SHARDED = [
    ("llama3", 2),
    ("qwen3", 8),
    ("qwen3_fp8_block", 2),
    ("qwen3_moe", 8),
    ("gpt_oss_mxfp4", 2),
    ("gemma4_dense", 8),
    ("deepseek_v3", 2),
    ("deepseek_v32", 8),
    ("glm_moe_dsa", 4),
]
"""Kinds of heads, experts, records and latents, on a number of devices each."""


class Spy:
    """Keeps the logits of everything the engine computes, by wrapping its compiled heads."""

    def __init__(self, llm: jaxserve.LLM):
        self.rows: list[np.ndarray] = []
        compiled = llm._built.engine.runner.compiled
        compiled.finish()
        for name in [n for n in compiled if n.startswith("logits ")]:
            compiled[name] = self._wrap(compiled[name])

    def _wrap(self, program):
        def run(*args):
            out = program(*args)
            self.rows.append(np.asarray(out))
            return out

        return run


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Each family on one device, and one of each kind on several; with ``--whole`` all on 1, 2, 4 and 8."""
    if metafunc.definition.originalname == "test_reference_numbers":
        if metafunc.config.getoption("--whole"):
            cases = [(family, count) for family in FAMILIES for count in (1, 2, 4, 8)]
        else:
            cases = [(family, 1) for family in FAMILIES] + SHARDED
        metafunc.parametrize(("family", "tensor_parallel"), cases)


def test_reference_numbers(family: str, tensor_parallel: int, programs_dir: str) -> None:
    """Greedy ids equal and every logit within 1e-3, on one device and sharded (8: more devices than heads)."""
    ref = reference(family)
    prompt = ref["input_ids"][0].tolist()
    with tiny(programs_dir, family, tensor_parallel=tensor_parallel) as llm:
        others = [prompt[:7], prompt[3:40]]  # company in the batch
        spy = Spy(llm)
        outputs = llm.generate([prompt, *others], max_tokens=16, temperature=0.0, ignore_eos=True)
        assert outputs[0].outputs[0].token_ids == ref["greedy_ids"].tolist()
        vocab = ref["logits"].shape[1]
        seen = np.concatenate([rows[:, :vocab] for rows in spy.rows])
        for wanted in ref["step_logits"]:
            assert np.abs(seen - wanted).max(axis=1).min() < 1e-3
        spy.rows.clear()
        llm.generate([prompt], max_tokens=1, temperature=0.0, prompt_logprobs=0)
        seen = np.concatenate([rows[:, :vocab] for rows in spy.rows])
        for wanted in ref["logits"]:
            assert np.abs(seen - wanted).max(axis=1).min() < 1e-3
        idle(llm)


@pytest.fixture(scope="module")
def smollm2(programs_dir: str) -> Iterator[jaxserve.LLM]:
    options = {"max_num_seqs": 8, "max_num_batched_tokens": 128, "max_model_len": 1024, "load_progress": False}
    with jaxserve.LLM("smollm2-135m", dtype="float32", cache_dir=programs_dir, forbid_compile=True, **options) as llm:
        yield llm


def test_real_weights_agree_with_transformers(smollm2: jaxserve.LLM) -> None:
    """At least 19 of 20 prompts give the same 64 greedy tokens, and the chosen log-probabilities are within 2e-3."""
    cases = REAL["cases"]
    params = jaxserve.SamplingParams(max_tokens=64, temperature=0.0, ignore_eos=True, logprobs=5)
    outputs = smollm2.generate([case["prompt_token_ids"] for case in cases], params)
    same = 0
    for case, output in zip(cases, outputs, strict=True):
        ours = output.outputs[0]
        agree = next((i for i, (a, b) in enumerate(zip(ours.token_ids, case["token_ids"], strict=True)) if a != b), 64)
        same += agree == 64
        for position in range(agree):
            expected = dict(map(tuple, case["top_logprobs"][position]))
            got = ours.logprobs[position]
            assert got.logprob == pytest.approx(expected[got.token_id], abs=2e-3), (case["id"], position)
            assert got.rank == 1
            assert {t for t, _ in got.top} & set(expected)
    assert same >= 19


def test_text_of_a_real_answer(smollm2: jaxserve.LLM) -> None:
    case = REAL["cases"][0]
    (output,) = smollm2.generate(case["prompt"], max_tokens=64, temperature=0.0)
    assert output.prompt_token_ids == case["prompt_token_ids"]
    assert output.outputs[0].finish_reason == "stop"
    assert case["output_text"].startswith(output.outputs[0].text)
    assert output.outputs[0].token_ids == case["token_ids"][: case["eos_at"] + 1]


def test_chat_uses_the_models_template(smollm2: jaxserve.LLM) -> None:
    case = next(c for c in REAL["cases"] if c["kind"] == "chat")
    (output,) = smollm2.chat(case["messages"], max_tokens=8, temperature=0.0, ignore_eos=True)
    assert output.prompt_token_ids == case["prompt_token_ids"]
    assert output.outputs[0].token_ids == case["token_ids"][:8]
