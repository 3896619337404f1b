"""The engine's numbers for Prometheus: plain counts while the engine runs, turned into metric families when scraped.

The names follow the vLLM project's (``vllm:num_requests_running`` is ``jaxserve:num_requests_running`` here), so that
dashboards carry over. The engine thread calls these methods at every step, so an observation is a bisect and two
additions under one lock, and nothing in here can raise into the caller: a failure is logged once and counted in
``metrics_errors_total``.
"""

import functools
import logging
import math
import threading
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from jaxserve.record_store import StoreCounts

log = logging.getLogger(__name__)

FIRST_TOKEN_SECONDS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0),
    *(2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
TOKEN_SECONDS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
REQUEST_SECONDS = (
    *(0.01, 0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
LENGTHS = tuple(float(m * 10**e) for e in range(6) for m in (1, 2, 5))
STEP_TOKENS = tuple(float(2**e) for e in (0, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14))
COUNTS = (1.0, 2.0, 5.0, 10.0, 20.0)
TIMES = (0.0, 1.0, 2.0, 3.0, 4.0, 8.0, 16.0, 32.0)

LABELS = ("model_name", "engine")
TIERS = ("device", "host", "sidecar", "disk")
LOSSES = ("evicted", "refused", "damaged")
ENGINE = "0"
"""The number of the engine, which the peer's dashboards ask for; a process has one."""


class _Histogram:
    """Counts per bucket (the last one is +Inf), and the sum of everything observed."""

    def __init__(self, name: str, text: str, bounds: Sequence[float]):
        self.name, self.text, self.bounds = name, text, bounds
        self.labels = [floatToGoString(bound) for bound in (*bounds, math.inf)]
        self.counts = [0] * len(self.labels)
        self.total = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Count ``value`` (a bound belongs to its bucket). Negative values, from a clock gone wrong, count as 0."""
        value = max(0.0, value)
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times

    def family(self, prefix: str, model: str) -> Metric:
        family = HistogramMetricFamily(prefix + self.name, self.text, labels=LABELS)
        running, buckets = 0, []
        for label, count in zip(self.labels, self.counts, strict=True):
            running += count
            buckets.append((label, float(running)))
        family.add_metric((model, ENGINE), buckets, self.total)
        return family


class _Counter:
    """A number that only grows, one for each value of ``label`` where it has a label."""

    def __init__(self, name: str, text: str, label: str | None = None, known: Sequence[str] = ()):
        self.name, self.text, self.label = name, text, label
        self.values: dict[str, float] = dict.fromkeys(known if label else [""], 0.0)

    def add(self, amount: float, label: str = "") -> None:
        if amount > 0:
            self.values[label] = self.values.get(label, 0.0) + amount

    def family(self, prefix: str, model: str) -> Metric:
        labels = (*LABELS, self.label) if self.label else LABELS
        family = CounterMetricFamily(prefix + self.name, self.text, labels=labels)
        for label, value in self.values.items():
            family.add_metric((model, ENGINE, label) if self.label else (model, ENGINE), value)
        return family


class _Gauge:
    def __init__(self, name: str, text: str):
        self.name, self.text, self.value = name, text, 0.0

    def family(self, prefix: str, model: str) -> Metric:
        family = GaugeMetricFamily(prefix + self.name, self.text, labels=LABELS)
        family.add_metric((model, ENGINE), self.value)
        return family


class _Table:
    """Counts or gauges with labels of their own, as somebody else keeps them."""

    def __init__(self, kind: type[CounterMetricFamily | GaugeMetricFamily], name: str, text: str, *labels: str):
        self.kind, self.name, self.text, self.labels = kind, name, text, labels
        self.rows: dict[tuple[str, ...], float] = {}

    def family(self, prefix: str, model: str) -> Metric:
        family = self.kind(prefix + self.name, self.text, labels=(*LABELS, *self.labels))
        for labels, value in self.rows.items():
            family.add_metric((model, ENGINE, *labels), value)
        return family


class _Info:
    """Facts as labels of a gauge that is 1; nothing while there are none."""

    def __init__(self, name: str, text: str):
        self.name, self.text, self.facts = name, text, dict[str, str]()

    def family(self, prefix: str, model: str) -> Metric:
        family = GaugeMetricFamily(prefix + self.name, self.text, labels=(*LABELS, *self.facts))
        if self.facts:
            family.add_metric((model, ENGINE, *self.facts.values()), 1)
        return family


def _guarded[**P](method: Callable[P, None]) -> Callable[P, None]:
    """Hold the lock, and let no error out."""

    @functools.wraps(method)
    def call(*args: P.args, **kwargs: P.kwargs) -> None:
        self: EngineMetrics = args[0]  # type: ignore[assignment]
        try:
            with self._lock:
                method(*args, **kwargs)
        except Exception:
            self._errors.values[""] += 1
            if self._errors.values[""] == 1:
                log.exception("metrics: %s failed; further failures are only counted", method.__name__)

    return call


class EngineMetrics(Collector):
    """All metrics of one engine, in a registry of their own.

    ``registry`` (a new one where None) is what ``/metrics`` prints. ``model_name`` labels every sample. ``prefix``
    (and a colon) stands before every name; ``watermark`` says whether there are those of the watermark. Every method
    may be called from any thread and never raises.
    """

    def __init__(
        self,
        registry: CollectorRegistry | None = None,
        *,
        model_name: str = "",
        prefix: str = "jaxserve",
        watermark: bool = False,
        sparse_host: bool = False,
    ):
        self.registry = CollectorRegistry() if registry is None else registry
        self._model_name, self._prefix, self._lock = model_name, prefix + ":", threading.Lock()
        counter, gauge, histogram = _Counter, _Gauge, _Histogram

        self._running = gauge("num_requests_running", "Sequences that hold a slot.")
        self._waiting = gauge("num_requests_waiting", "Requests in the waiting queue.")
        self._usage = gauge("kv_cache_usage_perc", "Share of the KV pages in use; 1 is all of them.")

        self._cache_config = _Info("cache_config_info", "What the KV cache is like.")

        self._preemptions = counter("num_preemptions", "Times a running sequence lost its slot and pages.")
        self._prompt_tokens = counter("prompt_tokens", "Prompt tokens of admitted requests.")
        self._generation_tokens = counter("generation_tokens", "Generated tokens.")
        self._steps = counter("engine_steps", "Steps the engine has run.")
        reasons = ("stop", "length", "abort", "error")
        self._success = counter("request_success", "Finished requests.", "finished_reason", reasons)
        refusals = ("queue_full", "too_long", "too_large", "draining", "deadline")
        self._rejections = counter("admission_rejections", "Requests refused or given up.", "reason", refusals)
        self._prefix_queries = counter("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.")
        self._prefix_hits = counter("prefix_cache_hits", "Prompt tokens found in the prefix cache.")
        self._cached = counter(
            "prompt_tokens_cached_by_source", "Prompt tokens that were not computed.", "source", TIERS
        )
        self._resumes = counter(
            "preemption_resumes",
            "Preempted sequences that went on: with all they had in one tier or several, or computing it again.",
            "kind",
            (*TIERS, "recompute"),
        )
        self._host_usage = gauge("host_kv_usage_perc", "Share of the host's KV memory in use; 1 is all of it.")
        self._kept = gauge("prefix_cache_pages", "KV pages that nobody holds and whose content is kept.")
        self._pending = gauge("kv_offload_pending_transfers", "Transfers to the host that have not come to an end.")
        ways = ("device_to_host", "host_to_device")
        self._moved = counter("kv_offload_total_bytes", "Bytes of KV pages moved.", "transfer_type", ways)
        self._moving = counter(
            "kv_offload_total_time",
            "Seconds from the launch of a transfer to its end; of one from the host, to the end of its step.",
            "transfer_type",
            ways,
        )
        self._dropped = counter(
            "host_kv_dropped_pages",
            "Pages whose content the host lost: for want of memory, or its checksum was wrong.",
            "reason",
            LOSSES,
        )
        self._store_usage = _Table(
            GaugeMetricFamily, "kv_store_usage_perc", "Share of a store's room in use; 1 is all of it.", "store"
        )
        self._store_bytes = _Table(
            CounterMetricFamily, "kv_store_bytes", "Bytes of KV pages read and written.", "store", "way"
        )
        self._store_seconds = _Table(CounterMetricFamily, "kv_store_seconds", "Seconds that took.", "store", "way")
        self._store_dropped = _Table(
            CounterMetricFamily, "kv_store_dropped_pages", "Pages that a store lost.", "store", "reason"
        )
        self._store_pending = gauge("kv_store_pending_writes", "Blocks of KV pages that wait to be written.")
        self._store_waits = counter("kv_store_wait_seconds", "Seconds that requests waited for KV pages from a store.")
        self._backups = counter("kv_backup_pages", "Pages copied to the stores while they were on the device.")
        self._backlog = gauge("kv_backup_pending_pages", "Pages on the device that are still to be copied.")
        outcomes = ("loaded", "compiled", "discarded", "evicted", "not_stored")
        self._executables = counter("executables", "Programs by what became of them.", "outcome", outcomes)
        self._missed = counter("executables_missed", "Programs that were compiled, by why none was stored.", "reason")
        self._tally: Any = None
        marks = ("watermarked", "skipped", "not_watermarked")
        if watermark:
            self._watermark = counter("watermark_requests", "Finished requests by what was marked.", "status", marks)
        if sparse_host:
            self._rows = counter(
                "sparse_host_rows",
                "Latents that sequences reading from the host chose, by whether the device had them.",
                "found",
                ("hit", "miss"),
            )
            self._fetched = counter(
                "sparse_host_to_device_bytes",
                "Bytes of latents brought from the host: single rows in a step, pages before it.",
                "kind",
                ("rows", "pages"),
            )
            self._frames = gauge("sparse_host_frames_usage_perc", "Share of the frames in use; 1 is all of them.")
            self._backed = gauge("sparse_host_backed_sequences", "Sequences that read from the host.")
            self._sides = counter(
                "sparse_host_moves", "Times a sequence began to read from the host, and stopped.", "way", ("out", "in")
            )
        self._compilations = counter(
            "compilations_after_ready", "Executables traced or compiled after ready; ought to be 0."
        )
        self._sidecar_lost = counter(
            "sidecar_lost", "Times the sidecar that holds the weights has died under this engine."
        )
        self._errors = counter("metrics_errors", "Calls into the metrics that failed.")

        self._first_token = histogram("time_to_first_token_seconds", "Arrival to first token.", FIRST_TOKEN_SECONDS)
        self._interval = histogram(
            "inter_token_latency_seconds", "Time between two tokens of a sequence.", TOKEN_SECONDS
        )
        self._per_token = histogram(
            "request_time_per_output_token_seconds",
            "Mean time per token after the first, per request.",
            TOKEN_SECONDS,
        )
        self._latency = histogram("e2e_request_latency_seconds", "Arrival to last token.", REQUEST_SECONDS)
        self._queue = histogram("request_queue_time_seconds", "Time in the waiting queue.", REQUEST_SECONDS)
        self._prefill = histogram("request_prefill_time_seconds", "Admission to first token.", REQUEST_SECONDS)
        self._decode = histogram("request_decode_time_seconds", "First to last token.", REQUEST_SECONDS)
        self._inference = histogram("request_inference_time_seconds", "Admission to last token.", REQUEST_SECONDS)
        self._params_n = histogram("request_params_n", "Completions a request asked for.", COUNTS)
        self._params_max = histogram("request_params_max_tokens", "max_tokens of a request, where given.", LENGTHS)
        self._most_tokens = histogram(
            "request_max_num_generation_tokens", "Tokens of a request's longest completion.", LENGTHS
        )
        self._request_prompt = histogram("request_prompt_tokens", "Prompt tokens of a finished request.", LENGTHS)
        self._request_tokens = histogram(
            "request_generation_tokens", "Tokens generated for a finished request.", LENGTHS
        )
        self._request_preemptions = histogram(
            "request_num_preemptions", "Times a finished request was preempted.", TIMES
        )
        self._step_tokens = histogram("iteration_tokens_total", "Tokens in one engine step.", STEP_TOKENS)

        kinds = (counter, gauge, histogram, _Table, _Info)
        self._all = [item for item in vars(self).values() if isinstance(item, kinds)]
        self.registry.register(self)
        ProcessCollector(registry=self.registry)

    def collect(self) -> Iterator[Metric]:
        """The families, as the registry asks for them."""
        with self._lock:
            if (tally := self._tally) is not None:
                counts = {"loaded": tally.loaded, "compiled": tally.compiled, "discarded": len(tally.discarded)}
                self._executables.values |= counts
                self._executables.values |= {"evicted": tally.evicted, "not_stored": tally.not_stored.total()}
                self._missed.values |= tally.kinds
            families = [item.family(self._prefix, self._model_name) for item in self._all]
        yield from families

    @_guarded
    def step(self, tokens: int, running: int, waiting: int, page_usage: float) -> None:
        """One engine step of ``tokens`` tokens (0 where only the gauges changed); ``page_usage`` is in [0, 1]."""
        self._running.value, self._waiting.value, self._usage.value = running, waiting, page_usage
        if tokens > 0:
            self._steps.add(1)
            self._step_tokens.observe(tokens)

    @_guarded
    def admitted(self, queue_seconds: float, prompt_tokens: int = 0) -> None:
        """A request left the waiting queue for the first time (not when it resumes after preemption)."""
        self._queue.observe(queue_seconds)
        self._prompt_tokens.add(prompt_tokens)

    @_guarded
    def first_token(self, seconds: float) -> None:
        """A request's first token came ``seconds`` after its arrival. The token itself is counted by ``tokens``."""
        self._first_token.observe(seconds)

    @_guarded
    def tokens(self, intervals: Sequence[float | None]) -> None:
        """A token was generated for each of these: seconds after the one before it in its sequence, None for a first
        token.
        """
        self._generation_tokens.add(len(intervals))
        for interval in intervals:
            if interval is not None:
                self._interval.observe(interval)

    @_guarded
    def finished(
        self,
        reason: str,
        prompt_tokens: int,
        generated_tokens: int,
        seconds: float,
        *,
        queue_seconds: float | None = None,
        first_token_seconds: float | None = None,
        preemptions: int = 0,
    ) -> None:
        """A sequence ended, ``seconds`` after its arrival; it was admitted and got its first token (None: never) so
        long after its arrival.
        """
        self._success.add(1, reason)
        self._request_prompt.observe(prompt_tokens)
        self._request_tokens.observe(generated_tokens)
        self._latency.observe(seconds)
        self._request_preemptions.observe(preemptions)
        if queue_seconds is not None:
            self._inference.observe(seconds - queue_seconds)
            if first_token_seconds is not None:
                self._prefill.observe(first_token_seconds - queue_seconds)
        if first_token_seconds is not None:
            self._decode.observe(seconds - first_token_seconds)
        if first_token_seconds is not None and generated_tokens > 1:
            self._per_token.observe((seconds - first_token_seconds) / (generated_tokens - 1))

    @_guarded
    def request_finished(self, n: int, max_tokens: int | None, most_tokens: int) -> None:
        """All ``n`` sequences of a request have ended; the longest has ``most_tokens`` generated tokens."""
        self._params_n.observe(n)
        self._most_tokens.observe(most_tokens)
        if max_tokens is not None:
            self._params_max.observe(max_tokens)

    @_guarded
    def prefix_lookup(self, queries: int, hits: int) -> None:
        """A prompt of ``queries`` tokens was looked up in the prefix cache, which had the first ``hits`` of them."""
        self._prefix_queries.add(queries)
        self._prefix_hits.add(hits)

    @_guarded
    def reused(self, known: dict[str, int]) -> None:
        """Tokens of a sequence's text that were known when it was admitted, by the tier they were in."""
        for tier, tokens in known.items():
            self._cached.add(tokens, tier)

    @_guarded
    def resumed(self, kind: str) -> None:
        """A preempted sequence has been admitted again: one of TIERS, or ``recompute``."""
        self._resumes.add(1, kind)

    @_guarded
    def tiers(self, kept: int, pending: int) -> None:
        """Pages on the device that nobody holds, and transfers on their way."""
        self._kept.value, self._pending.value = kept, pending

    @_guarded
    def host_tier(self, usage: float, evicted: int, refused: int, damaged: int) -> None:
        """How full the host tier is, and the pages it has lost from the start."""
        self._host_usage.value = usage
        self._dropped.values |= dict(zip(LOSSES, (evicted, refused, damaged), strict=True))

    @_guarded
    def sparse_host(self, hits: int, misses: int, row_bytes: int, page_bytes: int) -> None:
        """A step has read so many rows through the buffers of sequences, and brought so many bytes there and to
        frames."""
        self._rows.add(hits, "hit")
        self._rows.add(misses, "miss")
        self._fetched.add(row_bytes, "rows")
        self._fetched.add(page_bytes, "pages")

    @_guarded
    def residency(self, frames: float, backed: int, moved_out: int, moved_in: int) -> None:
        """The share of frames in use, sequences that read from the host, and moves from the start."""
        self._frames.value, self._backed.value = frames, backed
        self._sides.values |= {"out": moved_out, "in": moved_in}

    @_guarded
    def store(self, name: str, usage: float, record_bytes: int, counts: StoreCounts) -> None:
        """The same of a store."""
        self._store_usage.rows[name,] = usage
        self._store_bytes.rows |= {
            (name, "read"): counts.read * record_bytes,
            (name, "write"): counts.written * record_bytes,
        }
        self._store_seconds.rows |= {(name, "read"): counts.read_seconds, (name, "write"): counts.write_seconds}
        lost = (counts.evicted, counts.refused, counts.damaged)
        self._store_dropped.rows |= {(name, why): pages for why, pages in zip(LOSSES, lost, strict=True)}

    @_guarded
    def stores(self, pending: int, wait_seconds: float, backups: int, backlog: int) -> None:
        """Blocks that wait to be written; from the start, seconds requests waited, and pages copied; and those to be
        copied."""
        self._store_pending.value, self._backlog.value = pending, backlog
        self._store_waits.values[""], self._backups.values[""] = wait_seconds, backups

    @_guarded
    def spilled(self, nbytes: int, seconds: float) -> None:
        """A transfer to the host has ended, ``seconds`` after its launch."""
        self._moved.add(nbytes, "device_to_host")
        self._moving.add(seconds, "device_to_host")

    @_guarded
    def restored(self, nbytes: int, seconds: float) -> None:
        """A transfer from the host has ended, with the step that was launched with it ``seconds`` before."""
        self._moved.add(nbytes, "host_to_device")
        self._moving.add(seconds, "host_to_device")

    @_guarded
    def cache_config(self, **facts: object) -> None:
        """What the KV cache is like, for ``cache_config_info``."""
        self._cache_config.facts = {name: str(value) for name, value in facts.items()}

    @_guarded
    def watermarked(self, status: str) -> None:
        """A sequence has ended by itself; what was done about its watermark."""
        self._watermark.add(1, status)

    @_guarded
    def preempted(self, n: int = 1) -> None:
        """``n`` running sequences were preempted."""
        self._preemptions.add(n)

    @_guarded
    def rejected(self, reason: str = "queue_full") -> None:
        """A request was refused before it was queued, or (``deadline``) ended because it took too long."""
        self._rejections.add(1, reason)

    def follow_executables(self, tally: Any) -> None:
        """Read the ``executables.Tally`` whenever metrics are asked for: it goes on after ready."""
        self._tally = tally

    @_guarded
    def compiled_after_ready(self, n: int = 1) -> None:
        """``n`` executables were traced or compiled after the engine said it was ready."""
        self._compilations.add(n)

    @_guarded
    def sidecar_gone(self) -> None:
        """The sidecar that the engine was attached to has died."""
        self._sidecar_lost.add(1)
