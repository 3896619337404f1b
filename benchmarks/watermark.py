"""How well the mark is found: tokens needed beside what the model's own probabilities allow, decay under edits,
calibration on text without a mark, and what marking and detection cost."""

import argparse
import dataclasses
import math
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmarks import report
from benchmarks.stats import median
from jaxserve.watermark import Scheme, detect_many
from jaxserve.watermark.config import MAX_STREAMS
from jaxserve.watermark.evidence import as_ids, windows
from jaxserve.watermark.prf import KEY_BITS
from jaxserve.watermark.statistics import Likelihood, Statistic, Sum
from jaxserve.watermark.tails import Floats

HELP = "tokens needed to find the mark, its decay under edits, calibration, and what marking and detection cost"

KEY = 0x5EED_0F_A_BE9C43AA
TOPICS = (
    *("rivers", "the moon", "bread", "a lost dog", "bicycles", "winter", "the sea", "a small village", "volcanoes"),
    *("music", "chess", "a train journey", "bees", "old maps", "a lighthouse", "rain", "gardens", "football"),
)
FORMS = ("Write a story about {}.", "Explain {} to a child.", "Write a letter to a friend about {}.")
OPENINGS = ("The history of {} begins", "In this article we look at {}. ", "Ten facts about {}:\n1.")
PARTS = ("quality", "speed", "cost", "sequences")
SEQUENCES, STEPS = 32, 32
"""Of ``cost``: decoded side by side, and steps that are timed."""
FALSE_POSITIVES, FOUND = 1e-6, 0.95
REPLICATES = 16
SHUFFLES = 20_000
REPEAT = 4
"""Of ``sequences``: shuffles of the permutation test, and tokens of what counts as repeated."""


def prompts(count: int) -> list[Any]:
    """Questions and beginnings of texts, in turns."""
    asked: list[Any] = [[{"role": "user", "content": form.format(topic)}] for topic in TOPICS for form in FORMS]
    begun: list[Any] = [form.format(topic) for topic in TOPICS for form in OPENINGS]
    both = [one for pair in zip(asked, begun, strict=True) for one in pair]
    return [both[i * 7 % len(both)] for i in range(count)]


def generate(args: argparse.Namespace, mark: bool) -> list[tuple[np.ndarray, np.ndarray]]:
    """Token ids of each document, and the probabilities of what was chosen."""
    import jaxserve

    options: dict[str, Any] = {"watermark_config": f'{{"key": {KEY}}}'} if mark else {}
    with jaxserve.LLM(args.model, load_progress=False, max_model_len=args.length + 128, **options) as llm:
        found = llm.generate(
            prompts(args.documents),
            max_tokens=args.length,
            temperature=1.0,
            logprobs=0,
            seed=int(mark),
            ignore_eos=True,
        )
    outputs = [one.outputs[0] for one in found]
    return [(as_ids(one.token_ids), np.exp([entry.logprob for entry in one.logprobs or ()])) for one in outputs]


def evidence(ids: np.ndarray) -> Floats:
    return next(windows([ids], 4, dedup=True)).evidence(Scheme(key=KEY), 0)


def simulated(chances: np.ndarray, rng: np.random.Generator) -> Floats:
    """Evidence as the mark's law has it for tokens of these probabilities: u is Beta(1 / p, 1)."""
    return -np.log(-np.expm1(np.log(rng.random((len(chances), 1))) * np.minimum(chances, 1 - 1e-7)[:, None]))


def tokens_needed(documents: Sequence[Floats], measure: Statistic) -> int | None:
    """The shortest beginning of documents by which enough of them are found."""
    sums = [np.cumsum(measure.scores(one)) for one in documents]
    for n in range(4, max(map(len, sums)) + 1):
        reached = np.array([one[n - 1] for one in sums if len(one) >= n])
        if len(reached) < len(sums) / 2:
            return None
        logs = measure.log_tail(np.full(len(reached), n), reached)
        if (logs < math.log(FALSE_POSITIVES)).mean() >= FOUND:
            return n
    return None


def power(marked: Any, plain: Any) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    chances = np.concatenate([p for _, p in plain])
    found: dict[str, Any] = {"entropy": float(-np.log(chances).mean())}
    found["least"] = math.log(1 / FALSE_POSITIVES) / found["entropy"]
    own = [simulated(p, rng) for _ in range(REPLICATES) for _, p in plain]
    for measure in (Sum(), Likelihood()):
        needed = tokens_needed([evidence(ids) for ids, _ in marked], measure)
        bound = tokens_needed(own, measure)
        found[measure.name] = {
            "measured": needed,
            "bound": bound,
            "ratio": needed / bound if needed and bound else None,
        }
    return found


def edited(ids: np.ndarray, kind: str, share: float, vocab: int, rng: np.random.Generator) -> np.ndarray:
    hit = rng.random(len(ids)) < share
    return ids[~hit] if kind == "deleted" else np.where(hit, rng.integers(0, vocab, len(ids)), ids)


def decay(marked: Any, vocab: int) -> list[dict[str, Any]]:
    rng, rows = np.random.default_rng(1), []
    whole = sum((evidence(ids) - 1).sum() for ids, _ in marked)
    for kind, share in (("as it was", 0.0), *((kind, e) for kind in ("deleted", "replaced") for e in (0.1, 0.3))):
        documents = [edited(ids, kind, share, vocab, rng) for ids, _ in marked]
        row: dict[str, Any] = {"edit": f"{share:.0%} {kind}" if share else kind, "expected": (1 - share) ** 5}
        row["left"] = float(sum((evidence(ids) - 1).sum() for ids in documents) / whole)
        for name in ("sum", "likelihood", "both"):
            logs = np.array([o.log10_p_value for o in detect_many(documents, [Scheme(key=KEY)], statistic=name)])
            row[name] = float(np.median(logs))
            row[f"{name} found"] = float((logs < math.log10(FALSE_POSITIVES)).mean())
        rows.append(row)
    return rows


def calibration(plain: Any, count: int) -> list[dict[str, Any]]:
    """p-values of pieces of text without a mark, each under a key of its own; and of the same without deduplication."""
    rng, rows = np.random.default_rng(2), []
    ids = np.concatenate([one for one, _ in plain])
    for name, options in (("sum", {}), ("likelihood", {"statistic": "likelihood"}), ("no dedup", {"dedup": False})):
        values = []
        for _ in range(count):
            size = int(rng.integers(30, min(220, len(ids) - 1)))
            start = int(rng.integers(0, len(ids) - size))
            scheme = Scheme(key=int(rng.integers(1 << 63)))
            values.append(detect_many([ids[start : start + size]], [scheme], **options)[0].p_value)
        ordered = np.sort(values)
        row: dict[str, Any] = {"test": name, "documents": count}
        row["distance"] = float(np.abs(ordered - (np.arange(count) + 0.5) / count).max() * math.sqrt(count))
        row |= {f"below {level:g}": float((ordered < level).mean()) for level in (1e-2, 1e-3, 1e-4)}
        rows.append(row)
    return rows


def speed(count: int) -> list[dict[str, Any]]:
    rng, rows = np.random.default_rng(3), []
    documents = [rng.integers(0, 49152, 200) for _ in range(count)]
    for prf in KEY_BITS:
        for name in ("sum", "likelihood"):
            begun = time.perf_counter()
            detect_many(documents, [Scheme(key=KEY, prf=prf)], statistic=name)
            seconds = time.perf_counter() - begun
            rows.append({"prf": prf, "statistic": name, "seconds": seconds, "tokens_per_second": count * 200 / seconds})
    return rows


def cost(model: str, rounds: int) -> dict[str, Any]:
    """Decode throughput with the mark as a share of that without it, in one engine, by turns.

    ``wall`` and ``cpu`` (of the whole process): ``median`` and ``quickest`` of the rounds. CPU time tells more on a
    machine that is not quiet.
    """
    import jaxserve

    ids = np.random.default_rng(4).integers(100, 40_000, (SEQUENCES, 8)).tolist()
    taken: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
    with jaxserve.LLM(
        model,
        load_progress=False,
        max_model_len=256,
        max_num_seqs=SEQUENCES,
        max_num_batched_tokens=SEQUENCES,  # few programs to compile
        watermark_config=f'{{"key": {KEY}}}',
    ) as llm:

        def seconds(mark: bool, tokens: int) -> np.ndarray:
            cpu, wall = time.process_time(), time.perf_counter()
            llm.generate(
                ids, max_tokens=tokens, temperature=1.0, seed=1, ignore_eos=True, watermarking=mark, progress=False
            )
            return np.array([time.perf_counter() - wall, time.process_time() - cpu])

        for mark in taken:
            seconds(mark, 4)
        for number in range(rounds):
            for mark in (True, False) if number % 2 else (False, True):
                prompt = seconds(mark, 4)  # with a few steps, so that what is left is steps alone
                taken[mark].append(tuple(seconds(mark, 4 + STEPS) - prompt))
    found: dict[str, Any] = {"rounds": rounds, "sequences": SEQUENCES, "steps": STEPS}
    for column, clock in enumerate(("wall", "cpu")):
        on, off = ([one[column] for one in taken[mark]] for mark in (True, False))
        found[clock] = {"median": median(off) / median(on), "quickest": min(off) / min(on)}
        found[clock] |= {"seconds_on": on, "seconds_off": off}
    return found


def sequences(model: str, count: int, limit: int) -> list[dict[str, Any]]:
    """Whether whole answers differ with the mark and without: their lengths, and how much of them repeats.

    A mark that keeps the law of every token may still not keep that of texts (loops, fewer ends): contexts that come
    again are why. Different prompts, answers that end by themselves, and a key each: under one key all answers begin
    with the same noise, and are alike. ``p`` by a permutation test of the means.
    """
    import jaxserve

    watermark = f'{{"key": {KEY}, "streams": {MAX_STREAMS}}}'
    seeds = [jaxserve.SamplingParams(max_tokens=limit, temperature=1.0, seed=seed) for seed in range(count)]
    taken: dict[bool, list[Any]] = {}
    with jaxserve.LLM(
        model, load_progress=False, max_model_len=limit + 128, max_num_seqs=SEQUENCES, watermark_config=watermark
    ) as llm:
        for mark in (True, False):
            params = [dataclasses.replace(one, watermarking=mark) for one in seeds]
            taken[mark] = llm.generate(prompts(count), params, progress=False)
    ids = {mark: [as_ids(one.outputs[0].token_ids) for one in found] for mark, found in taken.items()}
    rng, rows = np.random.default_rng(6), []
    for name, measure in (("tokens", len), ("share that repeats", repeated)):
        on, off = (np.array([float(measure(text)) for text in ids[mark]]) for mark in (True, False))
        rows.append({"of a text": name, "on": on.mean(), "off": off.mean(), "p": permutation(on, off, rng)})
    return rows


def repeated(ids: np.ndarray) -> float:
    """Share of a text's runs of ``REPEAT`` tokens that were there before."""
    runs = [tuple(run) for run in np.lib.stride_tricks.sliding_window_view(ids, REPEAT)] if len(ids) >= REPEAT else []
    return 1 - len(set(runs)) / len(runs) if runs else 0.0


def permutation(a: np.ndarray, b: np.ndarray, rng: np.random.Generator) -> float:
    """How often the means of two groups drawn anew from both differ at least as much as these."""
    both, seen = np.concatenate([a, b]), abs(a.mean() - b.mean())
    parts = rng.permuted(np.tile(both, (SHUFFLES, 1)), axis=1)
    drawn = np.abs(parts[:, : len(a)].mean(1) - parts[:, len(a) :].mean(1))
    return float((np.sum(drawn >= seen - 1e-12) + 1) / (SHUFFLES + 1))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--documents", type=int, default=256)
    parser.add_argument("--length", type=int, default=200)
    parser.add_argument("--calibration", type=int, default=20_000, metavar="DOCUMENTS")
    parser.add_argument("--speed", type=int, default=20_000, metavar="DOCUMENTS")
    parser.add_argument("--part", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--cost-rounds", type=int, default=15)
    parser.add_argument("--json", metavar="FILE")


def run(args: argparse.Namespace) -> None:
    where = report.environment()
    found: dict[str, Any] = {}
    if "quality" in args.part:
        found |= _quality(args)
    if "speed" in args.part:
        found["speed"] = speed(args.speed)
        heads = ["prf", "statistic", "seconds", "tokens_per_second"]
        rows = [[row[head] for head in heads] for row in found["speed"]]
        report.show(f"{args.speed} documents of 200 tokens", heads, rows)
    if "cost" in args.part:
        report.warn_if_busy()
        found["cost"] = made = cost(args.model, args.cost_rounds)
        rows = [[clock, *(made[clock][head] for head in ("median", "quickest"))] for clock in ("wall", "cpu")]
        title = f"Decode throughput with the mark / without, batch {SEQUENCES}, {args.cost_rounds} rounds"
        report.show(title, ["time", "of medians", "of the quickest"], rows)
    if "sequences" in args.part:
        count = min(args.documents, 2 * len(TOPICS) * len(FORMS))
        found["sequences"] = sequences(args.model, count, args.length)
        heads = ["of a text", "on", "off", "p"]
        title = f"{count} answers with the mark and without; p: of a difference as large by chance"
        report.show(title, heads, [[row[head] for head in heads] for row in found["sequences"]])
    report.save_json(args.json, {"benchmark": "watermark", "environment": where} | found)


def _quality(args: argparse.Namespace) -> dict[str, Any]:
    marked, plain = generate(args, mark=True), generate(args, mark=False)
    vocab = int(max(ids.max() for ids, _ in (*marked, *plain))) + 1
    needed, edits = power(marked, plain), decay(marked, vocab)
    rows = [[name, *(needed[name][key] for key in ("measured", "bound", "ratio"))] for name in ("sum", "likelihood")]
    title = f"Tokens for p < {FALSE_POSITIVES:g} in {FOUND:.0%} of documents; {needed['entropy']:.2f} nats a token"
    report.show(title, ["statistic", "measured", "by the model's own probabilities", "ratio"], rows)
    heads = ["edit", "left", "expected", "sum", "sum found", "likelihood", "likelihood found", "both", "both found"]
    report.show(
        f"Evidence left; median log10 p, and share found at {FALSE_POSITIVES:g}",
        heads,
        [[row[head] for head in heads] for row in edits],
    )
    calibrated = calibration(plain, args.calibration)
    heads = ["test", "documents", "distance", "below 0.01", "below 0.001", "below 0.0001"]
    report.show(
        "Without a mark (distance: Kolmogorov's, 1.36 in one of twenty)",
        heads,
        [[row[h] for h in heads] for row in calibrated],
    )
    return {"power": needed, "decay": edits, "calibration": calibrated}
