"""Host milliseconds a decode step: the engine's whole loop over a device that answers at once.

Scheduling, packing, detokenization, deltas and metrics are real; only ``launch`` and ``collect`` do nothing. What the
host spends on dispatching programs to a device is not in this figure.
"""

import argparse
import random
import threading
import time
from typing import NamedTuple

import numpy as np

import checkpoints
from benchmarks import report
from benchmarks.stats import summary
from jaxserve.batch import Packer, StepBatch
from jaxserve.buckets import Buckets
from jaxserve.engine import Engine
from jaxserve.host_tier import Spill
from jaxserve.metrics import EngineMetrics
from jaxserve.output import SequenceOutput
from jaxserve.pages import PagePool
from jaxserve.request import Delta, SamplingParams
from jaxserve.scheduler import Scheduler
from jaxserve.sequence import Sequence
from jaxserve.tokenizer import Tokenizer

HELP = "host milliseconds a decode step, with a device that answers at once"


class NullResult(NamedTuple):
    """What ``runner.StepResult`` holds, with random tokens."""

    tokens: np.ndarray
    logprobs: None = None
    prompt: tuple[()] = ()


class NullRunner:
    """Answers every step at once with random tokens; notes how far apart full decode steps are launched."""

    def __init__(self, vocab_size: int, full: int, seed: int):
        self.tokens = np.random.default_rng(seed).integers(0, vocab_size, 1 << 16, dtype=np.int32)
        self.full = full
        self.count = 0
        self.steps: list[float] = []
        """Seconds between successive launches of steps with ``full`` decodes and no prompt."""
        self._last: float | None = None

    def launch(self, batch: StepBatch) -> StepBatch:
        now = time.perf_counter()
        whole = batch.bucket.blocks == 0 and batch.sampled == self.full
        if whole and self._last is not None:
            self.steps.append(now - self._last)
        self._last = now if whole else None
        return batch

    def collect(self, step: StepBatch) -> NullResult:
        start = self.count % (len(self.tokens) - step.sampled)
        self.count += step.sampled
        return NullResult(self.tokens[start : start + step.sampled])

    def spill(self, spill: Spill) -> None:
        """Nothing is kept."""


def measure(
    tokenizer: Tokenizer | None,
    vocab_size: int,
    *,
    seqs: int,
    input_len: int,
    output_len: int,
    params: SamplingParams,
    seed: int = 0,
) -> list[float]:
    """Seconds of every step in which all ``seqs`` sequences decode. Without a tokenizer no text is made."""
    page_size, longest = 32, input_len + output_len
    width = -(-longest // page_size)
    buckets = Buckets.make(seqs, 512)
    runner = NullRunner(vocab_size, seqs, seed)
    engine = Engine(
        Scheduler(
            PagePool(seqs * width + 1, page_size),
            max_num_seqs=seqs,
            prompt_tokens=buckets.max_prompt_tokens,
            block=buckets.block,
        ),
        Packer(buckets, width=width, max_num_seqs=seqs, vocab_size=vocab_size),
        runner,
        EngineMetrics(model_name="null"),
    )
    rng = random.Random(seed)
    left = threading.Semaphore(0)

    def on_delta(delta: Delta) -> None:
        if delta.request_done:
            left.release()

    engine.start()
    try:
        for number in range(seqs):
            prompt = [rng.randrange(vocab_size) for _ in range(input_len)]
            seq = Sequence(str(number), 0, prompt, params, seed=number, limit=longest)
            engine.submit(str(number), [SequenceOutput(seq, tokenizer, frozenset())], on_delta)
        for _ in range(seqs):
            left.acquire()
    finally:
        engine.close()
    if engine.error is not None:
        raise RuntimeError("the engine failed") from engine.error
    return runner.steps


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="smollm2-135m", help="whose tokenizer to use")
    parser.add_argument("--seqs", nargs="+", type=int, default=[1, 8, 32, 64, 256])
    parser.add_argument("--input-len", type=int, default=128)
    parser.add_argument("--output-len", type=int, default=512)
    parser.add_argument("--json", metavar="FILE")


def run(args: argparse.Namespace) -> None:
    where = report.environment()
    report.warn_if_busy()
    with checkpoints.open_checkpoint(checkpoints.resolve_model(args.model)) as ckpt:
        tokenizer = Tokenizer.from_checkpoint(ckpt)
    lengths = {"input_len": args.input_len, "output_len": args.output_len}
    kinds = {"greedy": SamplingParams(temperature=0.0), "sampled": SamplingParams(top_p=0.9, stop=["\x00never"])}
    rows, runs = [], []
    for seqs in args.seqs:
        for kind, base in kinds.items():
            params = base.replace(max_tokens=args.output_len, ignore_eos=True)
            figures = summary(measure(tokenizer, tokenizer.vocab_size, seqs=seqs, params=params, **lengths), 1e3)
            rows.append([f"{seqs} {kind}", *(figures.get(name) for name in ("mean", "p50", "p90", "p99"))])
            runs.append({"seqs": seqs, "kind": kind, "ms": figures})
    report.show("Host milliseconds a decode step", ["sequences", "mean", "p50", "p90", "p99"], rows)
    report.save_json(args.json, {"benchmark": "host", "environment": where, "runs": runs})
