"""What a compressed KV cache costs in accuracy: the same prompts with it and with the model's own dtype.

Greedy answers are compared token by token. Then every prompt with its answer is fed to both engines, and their logits
are compared at every position, so that one different token does not make all others incomparable.
"""

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

import jaxserve

HELP = "greedy agreement and logit errors of a compressed KV cache"

TOPICS = (
    "the capital of France",
    "how a river forms",
    "why the sky is blue",
    "a poem about winter",
    "the causes of the French Revolution",
    "how to bake bread",
    "the rules of chess",
    "what a prime number is",
    "a letter to a landlord",
    "how vaccines work",
    "the life of a bee",
    "a short story about a lighthouse",
    "how a bill becomes law",
    "the planets of the solar system",
    "a recipe for soup",
    "why leaves turn red",
    "how to learn a language",
    "what inflation is",
    "a list of three mountains",
    "the water cycle",
    "a function that reverses a list",
    "how a bicycle stays upright",
    "the history of paper",
    "advice for a first job",
    "what gravity is",
    "a dialogue between two cats",
    "how to plant a tree",
    "the meaning of irony",
    "a summary of Hamlet",
    "how computers store numbers",
    "what causes tides",
    "a plan for a week of exercise",
)
"""32 subjects of a chat turn each."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--kv-cache-dtype", default="fp8")
    parser.add_argument("--prompts", type=int, default=len(TOPICS))
    parser.add_argument("--tokens", type=int, default=64, help="of each answer")
    parser.add_argument("--ids", type=int, default=64, help="random tokens a prompt has, of a model with no tokenizer")
    parser.add_argument("--max-model-len", type=int, default=512)
    parser.add_argument("--max-num-seqs", type=int, default=8)


@dataclass
class Found:
    """What one engine gave."""

    prompts: list[list[int]]
    answers: list[list[int]]
    logits: list[np.ndarray]
    """Of every position of each text, float32 ``[tokens, V]``."""
    bytes: int
    """That a token takes in the cache."""


def run(args: argparse.Namespace) -> None:
    plain = _measure(args, "auto", None)
    packed = _measure(args, args.kv_cache_dtype, _texts(plain))
    same = [_agreed(a, b) for a, b in zip(plain.answers, packed.answers, strict=True)]
    errors = [_errors(a, b) for a, b in zip(plain.logits, packed.logits, strict=True)]
    mean, worst, first, divergence = (np.concatenate(column) for column in zip(*errors, strict=True))
    print(
        f"{args.model}, {args.dtype}: {len(same)} prompts, {args.tokens} tokens each, {len(mean)} positions of logits"
    )
    print(f"bytes a token: {plain.bytes} with auto, {packed.bytes} with {args.kv_cache_dtype}")
    print(f"answers equal to the last token: {sum(n == args.tokens for n in same)} of {len(same)}")
    print(f"tokens before the first difference: mean {np.mean(same):.1f}, median {np.median(same):.0f}")
    print(f"same most probable token, given the same text: {np.mean(first):.2%}")
    print(f"logit error: mean {np.mean(mean):.4f}, largest {np.max(worst):.3f}")
    print(
        f"divergence of the distributions (KL): mean {np.mean(divergence):.2e} nats, largest {np.max(divergence):.2e}"
    )


def _texts(found: Found) -> list[list[int]]:
    return [prompt + answer for prompt, answer in zip(found.prompts, found.answers, strict=True)]


def _measure(args: argparse.Namespace, kv: str, texts: list[list[int]] | None) -> Found:
    """Answer the prompts, and compute the logits of ``texts``, or of the prompts with their answers."""
    limits = {"max_num_seqs": args.max_num_seqs, "max_num_batched_tokens": 128, "max_model_len": args.max_model_len}
    with jaxserve.LLM(args.model, dtype=args.dtype, kv_cache_dtype=kv, prefix_caching=False, **limits) as llm:
        outputs = llm.generate(_prompts(args, llm), max_tokens=args.tokens, temperature=0.0, ignore_eos=True)
        answers = [output.outputs[0].token_ids for output in outputs]
        found = Found(
            [list(o.prompt_token_ids) for o in outputs], answers, [], llm.report()["kv cache"]["bytes_per_token"]
        )
        for text in texts or _texts(found):
            with _logits(llm) as rows:
                llm.generate([text], max_tokens=1, temperature=0.0, prompt_logprobs=0)
            blocks = [block for block in rows if len(block) > 1]  # the last place is sampled from, a row by itself
            found.logits.append(np.concatenate(blocks)[: len(text) - 1])
    return found


def _prompts(args: argparse.Namespace, llm: jaxserve.LLM) -> list[Any]:
    """A chat turn of each topic; of a model without a tokenizer, as many random tokens as ``--ids`` says."""
    if llm.tokenizer is not None:
        return [[{"role": "user", "content": f"Write about {topic}."}] for topic in TOPICS[: args.prompts]]
    rng = np.random.default_rng(0)
    return [rng.integers(0, llm.vocab_size, args.ids).tolist() for _ in range(args.prompts)]


@contextmanager
def _logits(llm: jaxserve.LLM) -> Iterator[list[np.ndarray]]:
    """The rows of logits that the engine computes meanwhile."""
    compiled = llm._built.runner.compiled
    compiled.finish()
    heads = {name: program for name, program in compiled.items() if name.startswith("logits ")}
    rows: list[np.ndarray] = []

    def watched(program: Any) -> Any:
        def call(*args: Any) -> Any:
            out = program(*args)
            rows.append(np.asarray(out))
            return out

        return call

    compiled.update({name: watched(program) for name, program in heads.items()})
    try:
        yield rows
    finally:
        compiled.update(heads)


def _agreed(a: list[int], b: list[int]) -> int:
    """Tokens before the first difference."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), len(a))


def _errors(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, ...]:
    """For each position: mean and largest error of the logits, whether the first choice is the same, and KL(a, b)."""
    error = np.abs(a - b)
    log_a, log_b = (x - np.logaddexp.reduce(x, axis=1, keepdims=True) for x in (a, b))
    divergence = (np.exp(log_a) * (log_a - log_b)).sum(1)
    return error.mean(1), error.max(1), a.argmax(1) == b.argmax(1), divergence
