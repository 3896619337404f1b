"""Sparse decode with latents in host memory: how many sequences fit a device, and what reading from the host costs.

``capacity`` counts, with the engine's own sizing and scheduler over a device that answers at once. ``model`` computes
tokens a second of V3.2 on eight GPUs from assumed rates, over shares of hits and two buses. ``copies`` replays assumed
patterns of choices: hits, and times beside a gather on the host. ``run`` generates with a random model of DeepSeek
V3.2's attention (fewer heads, dense layers) and compares answers and speed with the latents on the device. On a CPU
both are the same memory: there is a price to be seen, and nothing to be gained.
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
from benchmarks import hisparse_copies, hisparse_model, report
from benchmarks.hisparse_model import Bus, Deployment
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
PARTS = ("capacity", "model", "copies", "run")
LENGTHS = (32768, 131072)
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
            if mode not in args.modes:
                continue
            options: dict[str, Any] = {"sparse_host": mode, "hot_buffer_tokens": buffer, "load_progress": False}
            options |= {"load_format": "random", "dtype": "bfloat16", "kv_cache_dtype": "fp8_ds_mla"}
            options |= {"max_model_len": args.context + 256, "max_num_seqs": args.sequences}
            if mode == "auto":  # frames for one sequence, and for a part of another
                options |= {"kv_cache_memory_bytes": int(2.2 * args.context * args.layers * 656)}
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


def modelled(args: argparse.Namespace) -> dict[str, Any]:
    """Tables of ``hisparse_model``."""
    buses = [Bus(name, rate * 1e9, args.row_share) for name, rate in hisparse_model.BUSES.items()]
    layouts = {"tensor": Deployment(ways=8), "data": Deployment(ways=1)}
    fitting = [
        [f"{layout}, {tokens}, {buffer or 'plain'}", *_fitting(at, tokens, buffer, buses)]
        for layout, at in layouts.items()
        for tokens in LENGTHS
        for buffer in (None, 2048, 4096)
    ]
    columns = ["", "sequences a GPU", "GB of the host", "tokens/s", "ms a step"]
    columns += [f"{bus.name}{end}" for bus in buses for end in ("", ", ahead")]
    caption = "Tokens/s and ms: with every chosen row on the device. Buses: the share of hits from which it pays."
    report.show("V3.2 on eight GPUs: how attention is shared, tokens, buffer", columns, fitting, caption)
    figures: dict[str, Any] = {"fitting": fitting}
    shapes = [(bus, tokens) for tokens in LENGTHS for bus in buses]
    for layout, at in layouts.items():
        rows: list[list[Any]] = [["plain", *(_plain(at, tokens) for _, tokens in shapes)]]
        for hits in (0.0, 0.5, 0.7, 0.8, 0.9, 0.95, 0.99, 1.0):
            rows.append([f"{hits:.0%} hits", *(_hosted(at, tokens, bus, hits) for bus, tokens in shapes)])
        rows.append(["host gathers", *(_gathered(at, tokens, bus) for bus, tokens in shapes)])
        caption = "Host gathers: for nothing, and all rows cross, at the rate of large copies; buffers of 2048."
        columns = ["", *(f"{tokens}, {bus.name}" for bus, tokens in shapes)]
        report.show(f"Tokens/s of eight GPUs, attention {layout}-parallel, buffers of 4096", columns, rows, caption)
        figures[layout] = rows
    return figures


def _fitting(at: Deployment, tokens: int, buffer: int | None, buses: list[Bus]) -> list[Any]:
    batch = hisparse_model.fits(at, tokens, buffer)
    seconds = hisparse_model.step(at, batch, tokens, bus=buses[0] if buffer else None).seconds
    found = [hisparse_model.throughput(at, batch, seconds), 1e3 * seconds]
    if buffer is None:
        return [batch, None, *found, *[None] * 2 * len(buses)]
    host = hisparse_model.pool_bytes(at, batch, tokens) / 1e9
    ends = [hisparse_model.break_even(at, tokens, buffer, bus, ahead=ahead) for bus in buses for ahead in (False, True)]
    return [batch, host, *found, *ends]


def _plain(at: Deployment, tokens: int) -> float:
    batch = hisparse_model.fits(at, tokens, None)
    return hisparse_model.throughput(at, batch, hisparse_model.step(at, batch, tokens).seconds)


def _hosted(at: Deployment, tokens: int, bus: Bus, hits: float) -> float:
    batch = hisparse_model.fits(at, tokens, 4096)
    return hisparse_model.throughput(at, batch, hisparse_model.step(at, batch, tokens, bus=bus, hits=hits).seconds)


def _gathered(at: Deployment, tokens: int, bus: Bus) -> float:
    batch = hisparse_model.fits(at, tokens, 2048)
    return hisparse_model.throughput(at, batch, hisparse_model.host_gather(at, batch, tokens, bus))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("parts", nargs="*", default=PARTS, metavar="PART", help=" ".join(PARTS))
    parser.add_argument("--budget-gib", type=float, default=4.0, help="of the device, for what the layers keep")
    parser.add_argument("--length", type=int, default=32768, help="tokens of each sequence that is counted")
    parser.add_argument("--row-share", type=float, default=0.7, help="of a bus's rate that single rows reach (model)")
    parser.add_argument("--steps", type=int, default=192, help="of a replay (copies)")
    parser.add_argument("--context", type=int, default=16640, help="tokens of the longest prompt that is run")
    parser.add_argument("--modes", nargs="+", default=["off", "auto", "always"], help="that are run")
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
    if not 0 < args.row_share <= 1:
        raise SystemExit(f"--row-share must be above 0 and at most 1, got {args.row_share:g}")
    if "copies" in args.parts and (args.length < 4096 or args.steps < 4 or args.sequences < 1):
        raise SystemExit("copies need --length 4096, --steps 4 and --sequences 1 at least")
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
    if "model" in args.parts:
        figures["model"] = modelled(args)
    if "copies" in args.parts:
        rows = figures["copies"] = hisparse_copies.table(args.length, args.sequences, args.steps)
        columns = ["others come", "stays", "buffer", "hits", "resolver ms", "copies ms", "gather on the host ms"]
        report.show(f"{args.sequences} sequences of {args.length} tokens, one layer", columns, rows)
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
