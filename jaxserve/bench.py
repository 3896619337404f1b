"""A small benchmark of one engine: first token, prompt tokens a second, decoded tokens a second, by batch size."""

import queue
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from jaxserve.config import ConfigError
from jaxserve.llm import LLM
from jaxserve.request import Delta, EngineDeadError, SamplingParams


@dataclass(frozen=True)
class Job:
    """``batch`` requests at once, of ``prompt`` random tokens in and ``output`` tokens out."""

    batch: int
    prompt: int
    output: int


@dataclass(frozen=True)
class Result:
    """Medians over the rounds of a job."""

    job: Job
    first_token_ms: float
    """From submitting all requests to the first token of the median one."""
    prefill_tokens_per_s: float
    """Prompt tokens over the time until all requests, of one token each, are done."""
    decode_tokens_per_s: float
    """From when all requests have their first token until the last one ends."""
    step_ms: float
    """Between two tokens of a sequence, in that time."""


def cut_layers(hf: Mapping[str, Any], layers: int) -> dict[str, Any]:
    """The config of a model that has only the first ``layers`` layers of this one, each as it is there.

    Raises ``ConfigError`` where there are not so many.
    """
    have = hf.get("num_hidden_layers")
    if type(have) is not int or not 1 <= layers <= have:
        raise ConfigError(f"layers must be from 1 to the model's {have}, got {layers}")
    cut = {
        name: value[:layers] if isinstance(value, list) and len(value) == have else value for name, value in hf.items()
    }
    cut["num_hidden_layers"] = layers
    if isinstance(named := hf.get("per_layer_config"), dict):  # Gemma 4
        cut["per_layer_config"] = {n: differs for n, differs in named.items() if not n.isdecimal() or int(n) < layers}
    if type(shared := hf.get("num_kv_shared_layers")) is int and shared:  # the last of them all
        cut["num_kv_shared_layers"] = max(0, layers - (have - shared))
    return cut


def measure(
    llm: LLM,
    jobs: list[Job],
    rounds: int,
    seed: int = 0,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Iterator[Result]:
    """Run the jobs one after another; prompts are fresh in every round, and a short round of each goes before."""
    draw = random.Random(seed)
    total, done = len(jobs) * (2 * rounds + 1), 0

    def timed(job: Job, output: int) -> list[list[float]]:
        nonlocal done
        prompts = [[draw.randrange(llm.vocab_size) for _ in range(job.prompt)] for _ in range(job.batch)]
        times = _run(llm, prompts, output)
        done += 1
        progress(done, total)
        return times

    for job in jobs:
        timed(job, min(2, job.output))
        prompt = [max(times[-1] for times in timed(job, 1)) for _ in range(rounds)]
        whole = [timed(job, job.output) for _ in range(rounds)]
        decode = [_decode_rate(times) for times in whole]
        rate = statistics.median(decode)
        yield Result(
            job,
            first_token_ms=statistics.median(statistics.median(t[0] for t in times) for times in whole) * 1e3,
            prefill_tokens_per_s=job.batch * job.prompt / statistics.median(prompt),
            decode_tokens_per_s=rate,
            step_ms=job.batch / rate * 1e3 if rate else 0.0,
        )


def _decode_rate(times: list[list[float]]) -> float:
    """Tokens a second after every sequence has its first; 0 where there are none. ``times`` of each one's tokens."""
    begun, ended = max(each[0] for each in times), max(each[-1] for each in times)
    after = sum(moment > begun for each in times for moment in each)
    return after / (ended - begun) if ended > begun else 0.0


def _run(llm: LLM, prompts: list[list[int]], output: int) -> list[list[float]]:
    """Seconds from the first submission to each token of each request."""
    ended: queue.SimpleQueue[str | None] = queue.SimpleQueue()
    times: list[list[float]] = [[] for _ in prompts]
    params = SamplingParams(max_tokens=output, temperature=0.0, ignore_eos=True)
    begun = time.perf_counter()

    def listener(number: int) -> Callable[[Delta], None]:
        def on_delta(delta: Delta) -> None:
            times[number] += [time.perf_counter() - begun] * len(delta.token_ids)
            if delta.request_done:
                ended.put(delta.error)

        return on_delta

    for number, prompt in enumerate(prompts):
        llm.submit(prompt, params, on_delta=listener(number))
    for _ in prompts:
        if (error := ended.get()) is not None:
            raise EngineDeadError(error)
    return times


def describe(llm: LLM) -> dict[str, Any]:
    """What was measured, from the start-up report."""
    report = llm.report()
    model, run, kv = report["model"], report["run"], report["kv cache"]
    facts = {
        "model": model["name"],
        "weights": model.get("weights", "of the checkpoint"),
        "family": model["family"],
        "layers": llm.model_config.num_layers,
        "parameters": model["parameters"],
        "dtype": run["dtype"],
        "quantization": run["quantization"],
        "weight_bytes": run["weight_bytes"],
        "kv_dtype": kv["dtype"],
        "kv_bytes_per_token": kv["bytes_per_token"],
        "kv_bytes": kv["total_bytes"],
        "tokens_that_fit": kv["tokens_that_fit"],
        "devices": run["devices"],
        "mesh": run["mesh"],
        "start_s": report["phases"].get("process start to ready"),
        "weights_s": report["phases"].get("weights (beside)"),
        "programs_s": report["phases"].get("programs (beside)"),
        "programs_compiled": report["executables"]["compiled"],
        "programs_loaded": report["executables"]["loaded"],
    }
    return {name: value for name, value in facts.items() if value is not None}
