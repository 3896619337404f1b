"""What a grammar costs: host microseconds a token, and the rate of requests with one beside others without."""

import argparse
import json
import queue
import time
from typing import Any

import numpy as np

import checkpoints
from benchmarks import report
from benchmarks.stats import summary
from jaxserve.grammar import Grammars
from jaxserve.request import Delta, SamplingParams, StructuredOutputs
from jaxserve.tokenizer import Tokenizer

HELP = "host microseconds a mask, and the step rate of requests beside ones with a grammar"

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "email": {"type": "string", "format": "email"},
        "tags": {"type": "array", "items": {"type": "string"}, "maxItems": 8},
        "kind": {"enum": ["person", "company", "other"]},
        "address": {
            "type": "object",
            "properties": {"street": {"type": "string"}, "zip": {"type": "string", "pattern": "^[0-9]{5}$"}},
            "required": ["street", "zip"],
            "additionalProperties": False,
        },
    },
    "required": ["name", "age", "tags", "kind", "address"],
    "additionalProperties": False,
}
ANSWER = {
    "name": "Ada Lovelace",
    "age": 36,
    "email": "ada@example.org",
    "tags": ["mathematics", "engines", "a somewhat longer tag that goes on for a while"],
    "kind": "person",
    "address": {"street": "12 St James's Square", "zip": "10115"},
}
ENDLESS = StructuredOutputs(json={"type": "array", "items": {"type": "string", "maxLength": 60}, "minItems": 1000})
"""No answer of the benchmark's length is whole, so that all requests run for as long."""


def masks(tokenizer: Tokenizer, vocab_size: int, rounds: int) -> dict[str, list[float]]:
    """Seconds of compiling, and of every token of ``ANSWER`` (taken in, next mask computed), over ``rounds``."""
    grammars = Grammars(tokenizer, vocab_size, frozenset(tokenizer.eos_token_ids))
    wish = StructuredOutputs(json=SCHEMA)
    start = time.perf_counter()
    grammars.compile(StructuredOutputs(choice=["a"]))
    first = time.perf_counter()
    grammar = grammars.compile(wish)
    found = {"vocabulary": [first - start], "compile": [time.perf_counter() - first], "token": []}
    tokens = tokenizer.encode(json.dumps(ANSWER), add_special_tokens=False)
    for _ in range(rounds):
        place = grammar.start()
        for token in tokens:
            start = time.perf_counter()
            mask = place.matcher.advance(token)
            found["token"].append(time.perf_counter() - start)
            if mask.error is not None:
                raise RuntimeError(mask.error)
    return found


def rate(llm: Any, plain: int, bound: int, output_len: int, seed: int) -> tuple[float, float]:
    """Tokens a second of one request without a grammar, and of one with, while ``plain`` and ``bound`` run together."""
    rng = np.random.default_rng(seed)
    base = SamplingParams(temperature=0.8, max_tokens=output_len, ignore_eos=True)
    times: dict[str, list[float]] = {"plain": [], "bound": []}
    done: queue.SimpleQueue[str] = queue.SimpleQueue()

    def follow(kind: str) -> Any:
        stamps: list[float] = []

        def on_delta(delta: Delta) -> None:
            stamps.append(time.perf_counter())
            if delta.request_done:
                times[kind].append((len(stamps) - 1) / (stamps[-1] - stamps[0]))
                done.put(kind)

        return on_delta

    for i in range(plain + bound):
        prompt = rng.integers(100, llm.vocab_size, 32).tolist()
        kind = "plain" if i < plain else "bound"
        params = base.replace(seed=i, structured_outputs=ENDLESS if kind == "bound" else None)
        llm.submit(prompt, params, on_delta=follow(kind))
    for _ in range(plain + bound):
        done.get()
    return tuple(float(np.median(times[kind])) if times[kind] else 0.0 for kind in ("plain", "bound"))  # type: ignore[return-value]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--output-len", type=int, default=64)
    parser.add_argument("--no-engine", action="store_true", help="measure the masks alone")
    parser.add_argument("--json", metavar="FILE")


def run(args: argparse.Namespace) -> None:
    where = report.environment()
    report.warn_if_busy()
    with checkpoints.open_checkpoint(checkpoints.resolve_model(args.model)) as ckpt:
        tokenizer = Tokenizer.from_checkpoint(ckpt)
    found = masks(tokenizer, tokenizer.vocab_size, args.rounds)
    figures = {name: summary(seconds, 1e6) for name, seconds in found.items()}
    rows = [[name, *(one.get(key) for key in ("mean", "p50", "p90", "p99"))] for name, one in figures.items()]
    report.show(f"Host microseconds, {tokenizer.vocab_size} tokens", ["of", "mean", "p50", "p90", "p99"], rows)
    rates: list[dict[str, Any]] = []
    if not args.no_engine:
        import jaxserve

        with jaxserve.LLM(args.model, load_progress=False) as llm:
            rate(llm, 8, 8, 8, 0)
            for turn in range(3):
                for plain, bound in ((16, 0), (8, 8), (0, 16)):
                    each = rate(llm, plain, bound, args.output_len, turn)
                    rates.append({"plain": plain, "bound": bound, "plain_rate": each[0], "bound_rate": each[1]})
        table = []
        for plain, bound in ((16, 0), (8, 8), (0, 16)):
            own = [r for r in rates if (r["plain"], r["bound"]) == (plain, bound)]
            medians = [float(np.median([r[key] for r in own])) for key in ("plain_rate", "bound_rate")]
            table.append([f"{plain} + {bound}", *medians])
        report.show("Tokens a second of one request", ["without + with a grammar", "without", "with"], table)
    report.save_json(args.json, {"benchmark": "grammar", "environment": where, "us": figures, "rates": rates})
