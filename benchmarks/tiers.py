"""The memory tiers beside their floors: transfers, working sets larger than the device, a shared prompt, a long stress.

All contenders of a table run in one process and take turns, so that a busy machine slows all of them alike.
"""

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

import jaxserve
from benchmarks import report
from benchmarks.stats import median
from benchmarks.tier_stress import stress
from benchmarks.tier_workloads import burst, converse, interactive, shared
from jaxserve.host_tier import Block, Spill

HELP = "KV pages in host memory: bandwidth, working sets beyond the device, shared prompts, stress"
PARTS = ("transfers", "conversations", "burst", "interactive", "shared", "stress")
TINY = str(Path(__file__).parent.parent / "tests" / "fixtures" / "models" / "llama3")


def seconds(call: Callable[[], Any]) -> float:
    begun = time.perf_counter()
    jax.block_until_ready(call())
    return time.perf_counter() - begun


def transfers(llm: jaxserve.LLM, rounds: int) -> dict[str, dict[str, float]]:
    """GB/s of each transfer program and of its floors, in alternation. The engine must be idle and new."""
    runner = llm._built.runner
    records, programs = 16, llm._built.programs
    nbytes = records * programs.record_bytes
    restore = runner.compiled[f"restore {records}"]
    rng = np.random.default_rng(0)
    regions = 8
    source, target = np.ones((regions, nbytes), np.uint8), np.ones((regions, nbytes), np.uint8)
    blocks: list[Any] = [None] * regions
    pieces = len(list(programs.cache.arrays))
    rows = np.ones((pieces, programs.num_pages, programs.record_bytes // pieces), np.uint8)
    targets = target.reshape(regions, records, pieces, -1)

    def by_rows(here: int, pages: np.ndarray) -> None:
        for piece in range(pieces):
            for record, page in enumerate(pages):
                targets[here, record, piece] = rows[piece, page]

    def step(number: int) -> None:
        here = number % regions
        pages = rng.permutation(np.arange(1, programs.num_pages, dtype=np.int32))[:records]
        samples["memcpy"].append(seconds(lambda: np.copyto(target[here], source[here])))
        samples["memcpy, the same pieces"].append(seconds(lambda: by_rows(here, pages)))

        def out() -> Any:
            blocks[here] = Block([b""] * records)
            runner.spill(Spill(blocks[here], pages.tolist()))
            return blocks[here].data

        def back() -> Any:
            runner.state.kv = restore(runner.state.kv, blocks[here].data, pages)
            return runner.state.kv

        samples["spill"].append(seconds(out))
        samples["restore"].append(seconds(back))
        if link is not None:
            host = link.sharding.with_memory_kind("pinned_host")
            there = jax.block_until_ready(jax.device_put(link, host))
            samples["link to host"].append(seconds(lambda: jax.device_put(link, host)))
            samples["link from host"].append(seconds(lambda: jax.device_put(there, link.sharding)))

    samples: dict[str, list[float]] = {"memcpy": [], "memcpy, the same pieces": [], "spill": [], "restore": []}
    device = programs.mesh.devices.flat[0]
    link: Any = None if device.platform == "cpu" else jax.device_put(source[0], device)
    if link is not None:
        samples |= {"link to host": [], "link from host": []}
    for number in range(rounds + regions):
        step(number)
    rate = nbytes / 1e9
    return {
        name: {"median": rate / median(times[regions:]), "best": rate / min(times[regions:])}
        for name, times in samples.items()
    }


def engine(args: argparse.Namespace, tokens: int, host_gib: float, **options: Any) -> jaxserve.LLM:
    """An engine whose device holds ``tokens`` tokens."""
    model = args.model
    with_probe = {"load_progress": False, "page_size": 32, "dtype": "bfloat16", **options}
    bytes_per_token = args.bytes_per_token
    pages = -(-tokens // 32) + 1
    room = {"kv_cache_memory_bytes": pages * 32 * bytes_per_token, "max_model_len": min(tokens, args.max_model_len)}
    return jaxserve.LLM(model, host_kv_gib=host_gib, **room, **with_probe)


def preemptions(llm: jaxserve.LLM) -> int:
    return llm._built.engine.scheduler.preemptions


def working_set(args: argparse.Namespace, part: str) -> list[dict[str, Any]]:
    """Total seconds with the host tier and without, each round in both."""
    sizes = (args.users, args.length)
    chats = {"jobs": args.jobs, "job": (1000, args.answer), "users": args.chats, "history": 400, "turns": args.turns}
    tokens = args.users * args.length
    if part == "interactive":
        tokens = args.jobs * (1000 + args.answer) + args.chats * (400 + 36 * args.turns)
    limits = {"max_num_seqs": args.users, "max_num_batched_tokens": 256}

    def measure(llm: jaxserve.LLM, number: int) -> tuple[float, list[float]]:
        if part == "interactive":
            return interactive(llm, number, **chats, pause=args.pause)
        run = converse(llm, number, *sizes, args.turns) if part == "conversations" else burst(llm, number, *sizes)
        return run, []

    with engine(args, tokens // 4, 1.0, **limits) as tier, engine(args, tokens // 4, 0.0, **limits) as bare:
        rounds = []
        for number in range(args.rounds):
            row: dict[str, Any] = {"part": part}
            for name, llm in (("tier", tier), ("recompute", bare)):
                before = preemptions(llm)
                run, firsts = measure(llm, number)
                row |= {name: run, f"{name} preemptions": preemptions(llm) - before}
                if firsts:
                    row[f"{name} first token"] = median(firsts)
            rounds.append(row)
    return rounds


def show_working_set(part: str, rounds: list[dict[str, Any]]) -> None:
    names = ("tier", "recompute")
    columns = ["round", "with the tier, s", "recompute, s", "ratio", "preemptions", "without"]
    firsts = "tier first token" in rounds[0]
    if firsts:
        columns += ["first token, median", "without"]
    rows = []
    for number, row in enumerate(rounds):
        cells = [number, row["tier"], row["recompute"], row["tier"] / row["recompute"]]
        cells += [row[f"{name} preemptions"] for name in names]
        rows.append(cells + ([row[f"{name} first token"] for name in names] if firsts else []))
    report.show(f"A working set of four devices: {part} (asked: 0.6)", columns, rows)


def show_shared(tokens: int, found: dict[str, list[float]]) -> None:
    """Each kind beside the same number of users with nothing to share."""
    rows = []
    for name, times in found.items():
        miss = median(found["different, all at once" if name.endswith("at once") else "new"])
        spread = [sorted(times)[len(times) * part // 10] for part in (1, 5, 9)]
        rows.append([name, len(times), *spread, median(times) / miss])
    columns = ["", "requests", "p10", "median", "p90", "median, of a miss"]
    report.show(f"Seconds to the first token behind {tokens} tokens (asked: 0.15 for what is known)", columns, rows)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("parts", nargs="*", default=PARTS, metavar="PART", help=" ".join(PARTS))
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--bytes-per-token", type=int, default=23040, help="of KV, for the model")
    parser.add_argument("--max-model-len", type=int, default=2304)
    parser.add_argument("--rounds", type=int, default=3, help="of each pair of engines")
    parser.add_argument("--users", type=int, default=16, help="who share a device that holds a quarter of their texts")
    parser.add_argument("--length", type=int, default=512, help="tokens of each of those texts")
    parser.add_argument("--turns", type=int, default=4, help="times a conversation comes back")
    parser.add_argument("--jobs", type=int, default=6, help="of 1,000 tokens that run while users chat")
    parser.add_argument("--answer", type=int, default=200, help="tokens of a job's answer")
    parser.add_argument("--chats", type=int, default=4, help="users who chat meanwhile, with histories of 400 tokens")
    parser.add_argument("--pause", type=float, default=0.5, help="seconds until such a user comes back")
    parser.add_argument("--system", type=int, default=2000, help="tokens of the shared prompt")
    parser.add_argument("--system-users", type=int, default=64)
    parser.add_argument("--stress-model", default=TINY, help="a tiny model of at least 250 tokens")
    parser.add_argument("--stress-rounds", type=int, default=1000)
    parser.add_argument("--json", metavar="FILE")


def run(args: argparse.Namespace) -> None:
    for part in args.parts:
        if part not in PARTS:
            raise SystemExit(f"unknown part {part!r}; known: {', '.join(PARTS)}")
    where = report.environment()
    report.warn_if_busy()
    figures: dict[str, Any] = {}
    if "transfers" in args.parts:
        with engine(args, 8192, 1.0, max_num_seqs=1, max_num_batched_tokens=32) as llm:
            rates = figures["transfers"] = transfers(llm, 40 * args.rounds)
        floor = rates["memcpy"]
        rows = [
            [n, r["median"], r["best"], r["median"] / floor["median"], r["best"] / floor["best"]]
            for n, r in rates.items()
        ]
        columns = ["", "GB/s, median", "best", "of memcpy, median", "best"]
        report.show("Sixteen pages at a time (asked: half of memcpy)", columns, rows)
    for part in ("conversations", "burst", "interactive"):
        if part in args.parts:
            rounds = figures[part] = working_set(args, part)
            show_working_set(part, rounds)
    if "shared" in args.parts:
        tokens, users = 8192, args.system_users
        with engine(args, tokens, 0.0, max_num_seqs=users, max_num_batched_tokens=512) as llm:
            found = figures["shared"] = shared(llm, 0, args.system, users, args.rounds)
        show_shared(args.system, found)
    if "stress" in args.parts:
        figures["stress"] = found = stress(args.stress_model, args.stress_rounds, report.CONSOLE.print)
        report.show("Nothing wrong, nothing left", ["", ""], [[name, str(value)] for name, value in found.items()])
    report.save_json(args.json, {"benchmark": "tiers", "environment": where, **figures})
