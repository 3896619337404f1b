"""Sparse decode with latents in host memory: how many sequences fit a device, and what reading from the host costs.

``capacity`` counts, with the engine's own sizing and scheduler over a device that answers at once. ``run`` generates
with a random model of DeepSeek V3.2's attention (fewer heads, dense layers) and compares answers and speed with the
latents on the device. On a CPU both are the same memory: there is a price to be seen, and nothing to be gained.
"""

import argparse
import json
import re
import tempfile
import time
from pathlib import Path
from typing import Any

from prometheus_client import generate_latest

import jaxserve
from benchmarks import report
from jaxserve import hot_size, models
from jaxserve.cache_spec import CacheSpec
from jaxserve.config import EngineConfig, ModelConfig
from jaxserve.declare import declare_cache
from jaxserve.pages import PagePool
from jaxserve.request import Delta, SamplingParams
from jaxserve.residency import Residency
from jaxserve.scheduler import Scheduler
from jaxserve.sequence import Sequence

HELP = "latents of sparse attention in host memory: sequences that fit, and what they cost"
PARTS = ("capacity", "run")
FIXTURES = Path(__file__).parent.parent / "tests" / "fixtures" / "models"
LATENTS = {
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "head_dim": 64,
    "qk_head_dim": 192,
    "index_head_dim": 128,
    "index_n_heads": 64,
    "index_topk": 2048,
    "max_position_embeddings": 131072,
}
"""What V3.2 and GLM-5 have in common, and sizes every record."""


def config(family: str, layers: int, **fields: Any) -> dict[str, Any]:
    """A config.json of ``family`` with true records in so many layers."""
    found = json.loads((FIXTURES / family / "config.json").read_text()) | LATENTS
    return found | {"num_hidden_layers": layers, "layer_types": None, "mlp_layer_types": None} | fields


CASES = {
    "one layer of V3.2": config("deepseek_v32", 1),
    "four layers of GLM-5, one chooses": config("glm_moe_dsa", 4, indexer_types=["full", "shared", "shared", "shared"]),
}


def at_once(scheduler: Scheduler, tokens: int) -> int:
    """The most sequences of ``tokens`` that decode together, nobody preempted: let in until there are no more."""
    for number in range(2000):
        prompt = [number] * (tokens - 64)
        scheduler.add(Sequence(f"{number}", 0, prompt, SamplingParams(), seed=0, limit=tokens, arrival=number))
    most = 0
    while True:
        plan = scheduler.schedule()
        if plan is None or scheduler.preemptions:
            return most
        for seq in plan.sampled:
            seq.output.append(0)
        scheduler.collected(plan)
        decoding = sum(not seq.prefilling for seq in scheduler.running)
        if decoding == len(scheduler.running) and decoding <= most:
            return most
        most = max(most, decoding)


def capacity(budget: int, tokens: int, buffer: int) -> list[list[Any]]:
    rows = []
    for name, hf in CASES.items():
        model = models.model_config(hf)
        asked = EngineConfig(model="x", sparse_host="always", hot_buffer_tokens=buffer, kv_cache_dtype="fp8_ds_mla")
        cache = declare_cache(model, asked, "bfloat16")
        found = [_without(cache, asked, budget, tokens), _with(model, cache, asked, budget, tokens)]
        rows.append([name, *found, found[1] / found[0]])
    return rows


LIMITS: dict[str, Any] = {"max_num_seqs": 2000, "prompt_tokens": 1 << 15, "block": 32}


def _without(cache: CacheSpec, asked: EngineConfig, budget: int, tokens: int) -> int:
    pool = PagePool(budget // (cache.token_bytes * asked.page_size), asked.page_size)
    return at_once(Scheduler(pool, **LIMITS), tokens)


def _with(model: ModelConfig, cache: CacheSpec, asked: EngineConfig, budget: int, tokens: int) -> int:
    sizes = {"budget": budget, "pool": 1 << 60, "longest": tokens, "max_num_seqs": LIMITS["max_num_seqs"]}
    hot, pages = hot_size.hot_shape(asked, model, cache, **sizes, block=LIMITS["block"])
    pool = PagePool(pages, asked.page_size)
    return at_once(Scheduler(pool, **LIMITS, residency=Residency(hot, pages, asked.page_size)), tokens)


def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Answers, tokens a second while decoding, and what came from the host, for each mode."""
    hf = config(
        "deepseek_v32",
        args.layers,
        hidden_size=args.hidden,
        num_attention_heads=args.heads,
        num_key_value_heads=args.heads,
        first_k_dense_replace=args.layers,
        intermediate_size=2 * args.hidden,
        q_lora_rank=args.hidden // 2,
    )
    found: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(hf))
        for mode, buffer in (("off", None), ("auto", None), ("always", 2048), ("always", 4096)):
            options: dict[str, Any] = {"sparse_host": mode, "hot_buffer_tokens": buffer, "load_progress": False}
            options |= {"load_format": "random", "dtype": "bfloat16", "kv_cache_dtype": "fp8_ds_mla"}
            options |= {"max_model_len": args.context + 256, "max_num_seqs": args.sequences}
            with jaxserve.LLM(folder, **options) as llm:
                found.append({"mode": mode, "buffer": buffer} | _generate(llm, args))
    return found


def _generate(llm: jaxserve.LLM, args: argparse.Namespace) -> dict[str, Any]:
    prompts = [[(7 * i + i * i // (3 + n)) % 250 for i in range(args.context - 97 * n)] for n in range(args.sequences)]
    params = SamplingParams(temperature=0.0, max_tokens=args.tokens, ignore_eos=True)
    answers: dict[str, list[int]] = {}
    stamps: list[float] = []
    """Of the tokens behind everybody's first."""
    left = {"open": len(prompts)}

    def on_delta(delta: Delta) -> None:
        answers.setdefault(delta.request_id, []).extend(delta.token_ids)
        if len(answers) == len(prompts):
            stamps.append(time.perf_counter())
        left["open"] -= delta.request_done

    begun = time.perf_counter()
    names = [llm.submit(prompt, params, on_delta=on_delta) for prompt in prompts]
    while left["open"]:
        time.sleep(0.01)
    rows = dict(re.findall(r'sparse_host_rows_total{.*found="(\w+)".*} (\S+)', generate_latest(llm.metrics).decode()))
    hits, misses = float(rows.get("hit", 0)), float(rows.get("miss", 0))
    return {
        "answers": [answers[name] for name in names],
        "prompt_seconds": stamps[0] - begun,
        "tokens_per_second": (len(stamps) - 1) / (stamps[-1] - stamps[0]),
        "miss_rate": misses / (hits + misses) if hits + misses else None,
    }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("parts", nargs="*", default=PARTS, metavar="PART", help=" ".join(PARTS))
    parser.add_argument("--budget-gib", type=float, default=4.0, help="of the device, for what the layers keep")
    parser.add_argument("--length", type=int, default=32768, help="tokens of each sequence that is counted")
    parser.add_argument("--context", type=int, default=16640, help="tokens of the longest prompt that is run")
    parser.add_argument("--sequences", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=64, help="of each answer")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--json", metavar="FILE")


def run(args: argparse.Namespace) -> None:
    for part in args.parts:
        if part not in PARTS:
            raise SystemExit(f"unknown part {part!r}; known: {', '.join(PARTS)}")
    where = report.environment()
    report.warn_if_busy()
    figures: dict[str, Any] = {}
    if "capacity" in args.parts:
        budget = int(args.budget_gib * 2**30)
        rows = figures["capacity"] = [
            [f"{name}, buffers of {buffer}", *found]
            for buffer in (2048, 4096)
            for name, *found in capacity(budget, args.length, buffer)
        ]
        columns = ["", "without", "with", "ratio"]
        report.show(f"Sequences of {args.length} tokens in {args.budget_gib:g} GiB (asked: 8)", columns, rows)
    if "run" in args.parts:
        found = figures["run"] = [row for _ in range(args.rounds) for row in measure(args)]
        same = all(row["answers"] == found[0]["answers"] for row in found)
        rows = [
            [row["mode"], row["buffer"], row["prompt_seconds"], row["tokens_per_second"], row["miss_rate"]]
            for row in found
        ]
        columns = ["latents on the host", "buffer", "seconds to the last first token", "tokens/s", "misses"]
        report.show(f"{args.sequences} sequences of {args.context} tokens", columns, rows)
        print("the same answers in all modes" if same else "ANSWERS DIFFER")
        figures["same"] = same
    report.save_json(args.json, {"benchmark": "hisparse", "environment": where, **figures})
