"""The engine loop, in a thread that owns the device: schedule N + 1, launch N + 1, collect N.

Requests come in through a locked inbox and leave as ``Delta`` objects handed to their callback on this thread. A
failure that belongs to one sequence ends that request; a failure of the device ends the engine, and every request is
told.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, Protocol

from jaxserve.batch import Packer, StepBatch
from jaxserve.constraint import GRACE_SECONDS, Mask, MaskPool
from jaxserve.host_tier import Block, Spill
from jaxserve.metrics import TIERS, EngineMetrics
from jaxserve.output import LogprobRows, SequenceOutput
from jaxserve.request import Delta, EngineDeadError, FinishReason, QueueFullError, TokenLogprob
from jaxserve.scheduler import Scheduler
from jaxserve.sequence import Sequence, StepPlan

log = logging.getLogger(__name__)

SETTLE_SECONDS = 0.05
"""Between two looks at what an idle engine still moves."""
COPY_SECONDS = 0.005
"""The same where there is more to be moved."""
DAMAGED = "KV pages of this request in host memory are damaged: their checksum is wrong"
OnDelta = Callable[[Delta], None]


class StepRunner(Protocol):
    """What the loop needs of a device: ``runner.Runner``, or a null one that measures the host."""

    def launch(self, batch: StepBatch) -> Any: ...

    def collect(self, step: Any) -> Any: ...

    def spill(self, spill: Spill) -> None: ...


@dataclass(slots=True)
class Entry:
    """A request in the engine: its sequences' outputs, and where its deltas go."""

    request_id: str
    outputs: list[SequenceOutput]
    on_delta: OnDelta
    open: int
    """Sequences that have not ended."""
    admitted: bool = False


@dataclass(frozen=True, slots=True)
class Health:
    """Liveness by forward progress: an engine with work that makes no progress for long is not well."""

    alive: bool
    idle: bool
    seconds_since_progress: float
    running: int
    waiting: int


class Engine:
    """Runs the loop. ``submit`` and ``abort`` may be called from any thread; everything else happens on the loop's."""

    def __init__(
        self,
        scheduler: Scheduler,
        packer: Packer,
        runner: StepRunner,
        metrics: EngineMetrics,
        *,
        overlap: bool = True,
        max_queued: int = 4096,
    ):
        self.scheduler, self.packer, self.runner, self.metrics = scheduler, packer, runner, metrics
        self.depth = 1 if overlap else 0
        self.max_queued = max_queued
        self.error: BaseException | None = None
        self._entries: dict[str, Entry] = {}
        self._inbox: deque[Entry | str] = deque()
        self._wake = threading.Condition()
        self._closing = False
        self._queued = 0
        self._arrivals = 0
        self._progress = time.monotonic()
        self._flight: deque[tuple[StepPlan, Any, float]] = deque()
        """Steps, and when they were launched."""
        self._preemptions = 0
        self._transfers: deque[tuple[Block, float]] = deque()
        """Spills that have not been seen to end, and when they were launched."""
        self._writes = 0
        """Blocks that were waiting for the stores when they were last looked at."""
        self._masks = MaskPool(self._mask_ready)
        self._ready: deque[tuple[Any, Mask]] = deque()
        """Masks that have been computed and not taken in yet."""
        self._awaited: set[Sequence] = set()
        """Sequences whose mask is being computed."""
        self._soon: set[Any] = set()
        """Those of them that a step is held back for, until ``_grace``."""
        self._stalled = False
        """Nothing can run before a mask is ready."""
        self._grace = 0.0
        self.cache = scheduler.cache
        self._stores = self.cache.stores
        if self._stores is not None:
            self._stores.notify = self._notify
        self.thread = threading.Thread(target=self._run, name="jaxserve-engine", daemon=True)

    # -- any thread ---------------------------------------------------------------------------------------------------

    def start(self) -> None:
        self.thread.start()

    def submit(self, request_id: str, outputs: list[SequenceOutput], on_delta: OnDelta) -> None:
        """Queue a request. Raises ``QueueFullError`` or ``EngineDeadError``."""
        with self._wake:
            self._raise_if_dead()
            if self._queued + len(outputs) > self.max_queued:
                self.metrics.rejected()
                raise QueueFullError(f"{self._queued} sequences are waiting, the most allowed is {self.max_queued}")
            self._queued += len(outputs)
            self._arrivals += 1
            for output in outputs:
                output.seq.arrival = self._arrivals
            self._put(Entry(request_id, outputs, on_delta, len(outputs)))

    def abort(self, request_id: str) -> None:
        """End a request; an unknown or finished one is ignored."""
        with self._wake:
            self._put(request_id)

    def _put(self, item: Entry | str) -> None:
        """Hand an item to the loop, with ``_wake`` held. What an idle engine has not yet done, it is not late with."""
        if not self._entries and not self._inbox:
            self._progress = time.monotonic()
        self._inbox.append(item)
        self._wake.notify()

    def close(self) -> None:
        """Stop the loop; requests that are still open end with reason "abort"."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        if self.thread.is_alive():
            self.thread.join()

    def health(self) -> Health:
        idle = not self._entries and not self._inbox
        waited = 0.0 if idle else time.monotonic() - self._progress
        scheduler = self.scheduler
        alive = self.thread.is_alive() and self.error is None
        return Health(alive, idle, waited, len(scheduler.running), self._queued)

    def _raise_if_dead(self) -> None:
        if self.error is not None:
            raise EngineDeadError(f"the engine has stopped: {self.error!r}") from self.error
        if self._closing or not self.thread.is_alive():
            raise EngineDeadError("the engine is closed")

    def _notify(self) -> None:
        with self._wake:
            self._wake.notify()

    # -- the loop's thread --------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._receive():
                self._turn()
            while self._flight:  # a process that ends under a running step is aborted
                self.runner.collect(self._flight.popleft()[1])
        except BaseException as error:
            log.exception("the engine has failed")
            self.error = error
        finally:
            self._end_all()

    def _receive(self) -> bool:
        """Take what has come in; wait while there is nothing to do. False when it is time to stop."""
        with self._wake:
            while self._wait():
                pass
            items, ready = list(self._inbox), list(self._ready)
            self._inbox.clear()
            self._ready.clear()
            closing = self._closing
        for item in items:
            if isinstance(item, Entry):
                self._entries[item.request_id] = item
                for output in item.outputs:
                    self.scheduler.add(output.seq)
            elif item in self._entries:
                self._end_entry(self._entries[item], "abort")
        for seq, mask in ready:
            self._take_mask(seq, mask)
        self._take_records()
        return not closing

    def _take_records(self) -> None:
        """What has come from the stores goes to the host tier; whoever waited for it can be admitted."""
        if self._stores is None or not self._stores.has_arrived:
            return
        assert self.cache.tier is not None
        for arrival in self._stores.arrived():
            for keys, data, source in arrival.blocks:
                self.cache.tier.adopt(keys, data, source)
        self._stalled = False
        self._progress = time.monotonic()

    def _wait(self) -> bool:
        """Wait while there is nothing to do, with ``_wake`` held. False when there is, or may be."""
        if self._inbox or self._closing:
            return False
        if self._soon:
            left = self._grace - time.monotonic()
            if left > 0:
                self._wake.wait(left)
                return True
            self._soon.clear()
        if self._ready or self._flight or not (self.scheduler.idle or self._stalled):
            return False
        if self._stores is not None and self._stores.has_arrived:
            return False
        behind = bool(self.cache.backlog)
        if behind and not self._transfers and self._stores is not None and not self._stores.busy:
            return False
        if behind or self._transfers or self._writes:  # until the gauges are at rest too
            self._wake.wait(COPY_SECONDS if behind else SETTLE_SECONDS)
            self._note_transfers()
        else:
            self._wake.wait()
        return True

    def _turn(self) -> None:
        """One turn of the loop: launch the next step if there is one, and collect the oldest that is due."""
        plan = self.scheduler.schedule()
        if plan is not None:
            self._note_admissions(plan)
            self._flight.append((plan, self.runner.launch(self.packer.pack(plan)), time.monotonic()))
            self._launched(plan.spills)
        if self._flight and (plan is None or len(self._flight) > self.depth):
            self._collect(*self._flight.popleft())
        elif plan is None and not self.scheduler.idle:
            if not (self._awaited or (self._stores is not None and self._stores.reading)):
                raise RuntimeError("sequences wait but none can run: the scheduler is stuck")
            self._stalled = True
        if plan is None and not self._flight:
            self._copy()
        if self.scheduler.idle and not self._flight:
            self.scheduler.check()
            self._gauges(0)

    def _launched(self, spills: list[Spill]) -> None:
        """Spills have been launched: what outlives the process gets them as well as the host tier."""
        now = time.monotonic()
        for spill in spills:
            self._transfers.append((spill.block, now))
            if self._stores is not None:
                self._stores.save(spill.block, range(len(spill.block.keys)))

    def _copy(self) -> None:
        """No step runs: launch by itself what would have gone with the next one."""
        if not self.cache.spills:
            return
        spills = list(self.cache.spills)
        self.cache.spills.clear()
        for spill in spills:
            self.runner.spill(spill)
        self._launched(spills)

    def _note_admissions(self, plan: StepPlan) -> None:
        now = time.monotonic()
        for chunk in plan.chunks:
            seq = chunk.seq
            if chunk.first and seq.chain is not None:
                self._note_reuse(seq, chunk.start)
            if chunk.first and seq.preemptions == 0:
                self._queued -= 1
                seq.admitted_at = now
                entry = self._entries[seq.request_id]
                if not entry.admitted:
                    entry.admitted = True
                    self.metrics.admitted(now - seq.arrived_at, len(seq.prompt))

    def _note_reuse(self, seq: Sequence, known: int) -> None:
        """A sequence has been admitted with its first ``known`` tokens in the cache."""
        left, found = known, {}
        for tier, pages in seq.loaded.items():
            found[tier] = min(pages * self.scheduler.pool.page_size, left)
            left -= found[tier]
        if seq.preemptions == 0:
            self.metrics.prefix_lookup(len(seq.prompt), known)
            self.metrics.reused({"device": left, **found})
        elif known < len(seq) - 1:
            self.metrics.resumed("recompute")
        else:
            self.metrics.resumed(max(found, key=TIERS.index, default="device"))

    def _collect(self, plan: StepPlan, step: Any, launched: float) -> None:
        result = self.runner.collect(step)
        now = self._progress = time.monotonic()
        for restore in plan.restores:
            self.metrics.restored(restore.block.nbytes, now - launched)
        for rows, values in result.prompt:
            self._prompt_logprobs(rows, LogprobRows(*values))
        if (residency := self.scheduler.residency) is not None:
            hits, misses, lost = result.fetched.tolist()
            if lost:
                raise RuntimeError(f"{lost} chosen latents are neither on the device nor in a buffer")
            shape = residency.shape
            pages = len(plan.fetches) * residency.page_size * shape.planes * shape.row_bytes
            self.metrics.sparse_host(hits, misses, misses * shape.row_bytes, pages)
            if result.damaged is not None:
                self._end_damaged(plan, result.damaged)
        logprobs = LogprobRows(*result.logprobs) if result.logprobs is not None else None
        intervals: list[float | None] = []
        for i, (seq, token) in enumerate(zip(plan.sampled, result.tokens.tolist(), strict=True)):
            if seq.finished:
                continue  # it ended while this step was in flight
            intervals.append(None if seq.last_token_at is None else now - seq.last_token_at)
            if seq.first_token_at is None:
                seq.first_token_at = now
                self.metrics.first_token(now - seq.arrived_at)
            seq.last_token_at = now
            wanted = seq.params.logprobs
            self._accept(seq, token, logprobs.row(i, token, wanted) if logprobs and wanted is not None else None)
        self.metrics.tokens(intervals)
        self.scheduler.collected(plan)
        self._gauges(plan.tokens)

    def _end_damaged(self, plan: StepPlan, damaged: Any) -> None:
        """End the requests that have read from the host what is not what was written there, and forget their pages."""
        ended = [seq for seq, wrong in zip(plan.decodes, damaged.decodes.tolist(), strict=False) if wrong]
        row = 0
        for chunk in plan.chunks:
            last = row - (-chunk.count // self.packer.buckets.block)
            ended += [chunk.seq] if damaged.blocks[row:last].any() else []
            row = last
        pages = set(damaged.pages)
        if pages:
            ended += [seq for seq in self.scheduler.running if not pages.isdisjoint(seq.pages[0])]
        for seq in ended:
            if not seq.finished:
                self.scheduler.distrust(seq)
                self._end_entry(self._entries[seq.request_id], "error", DAMAGED)

    def _accept(self, seq: Sequence, token: int, logprob: TokenLogprob | None) -> None:
        entry = self._entries[seq.request_id]
        try:
            delta, reason, stop = entry.outputs[seq.index].accept(token, logprob)
        except Exception as error:
            log.exception("request %s: its text cannot be made", seq.request_id)
            self._end_entry(entry, "error", f"detokenization failed: {error}")
            return
        if reason is not None:
            self.scheduler.finish(seq, reason, stop)
            delta = self._ended(entry, seq, delta)
        elif seq.constraint is not None:
            self._advance(seq, token)
        self._deliver(entry, delta)

    def _advance(self, seq: Sequence, token: int) -> None:
        """Have the mask of the token after ``token`` computed."""
        assert seq.constraint is not None
        self._awaited.add(seq)
        if not seq.constraint.slow:
            with self._wake:
                self._soon.add(seq)
            self._grace = time.monotonic() + GRACE_SECONDS
        self._masks.advance(seq, seq.constraint, token)

    def _mask_ready(self, seq: Any, mask: Mask) -> None:
        """A thread of the pool has computed a mask."""
        with self._wake:
            self._ready.append((seq, mask))
            self._soon.discard(seq)
            self._wake.notify()

    def _take_mask(self, seq: Sequence, mask: Mask) -> None:
        """Let the sequence go on, or end it where its grammar is complete or its matcher has failed."""
        self._awaited.discard(seq)
        self._stalled = False
        if seq.finished or seq.constraint is None:
            return  # it ended while the mask was being computed
        entry = self._entries[seq.request_id]
        self._progress = time.monotonic()
        if mask.error is not None:
            self._end_entry(entry, "error", mask.error)
        elif mask.complete or len(seq) >= seq.limit:
            self._end(entry, seq, "stop" if mask.complete else "length")
        else:
            seq.constraint.mask = mask

    def _ended(self, entry: Entry, seq: Sequence, delta: Delta) -> Delta:
        entry.open -= 1
        now = time.monotonic()
        first = None if seq.first_token_at is None else seq.first_token_at - seq.arrived_at
        queued = None if seq.admitted_at is None else seq.admitted_at - seq.arrived_at
        self.metrics.finished(
            seq.finish_reason or "error",
            len(seq.prompt),
            len(seq.output),
            now - seq.arrived_at,
            queue_seconds=queued,
            first_token_seconds=first,
            preemptions=seq.preemptions,
        )
        if seq.watermark is not None and seq.finish_reason in ("stop", "length"):
            self.metrics.watermarked(seq.watermark.status)
        if entry.open == 0:
            self._entries.pop(entry.request_id, None)
            most = max(len(output.seq.output) for output in entry.outputs)
            self.metrics.request_finished(len(entry.outputs), seq.params.max_tokens, most)
            delta = replace(delta, request_done=True)
        return delta

    def _end_entry(self, entry: Entry, reason: FinishReason, error: str | None = None) -> None:
        """End all of a request's open sequences from outside."""
        for output in entry.outputs:
            seq = output.seq
            if seq.finished:
                continue
            if seq.slot < 0 and seq.preemptions == 0:
                self._queued -= 1
            self._end(entry, seq, reason, error)

    def _end(self, entry: Entry, seq: Sequence, reason: FinishReason, error: str | None = None) -> None:
        """End one sequence without a token."""
        self.scheduler.finish(seq, reason)
        self._deliver(entry, self._ended(entry, seq, entry.outputs[seq.index].end(reason, error)))

    def _deliver(self, entry: Entry, delta: Delta) -> None:
        try:
            entry.on_delta(delta)
        except Exception:
            log.exception("request %s: its callback failed; the request is aborted", entry.request_id)
            if entry.request_id in self._entries:
                entry.on_delta = lambda _: None
                self._end_entry(entry, "abort")

    def _prompt_logprobs(self, rows: Any, values: LogprobRows) -> None:
        seq, count = rows.seq, rows.seq.params.prompt_logprobs
        if seq.prompt_logprobs is None:
            seq.prompt_logprobs = [None] * len(seq.prompt)
        for i, token in enumerate(rows.targets[: rows.count].tolist()):
            seq.prompt_logprobs[rows.position + i] = values.row(i, token, count)

    def _gauges(self, tokens: int) -> None:
        scheduler = self.scheduler
        if scheduler.preemptions > self._preemptions:
            self.metrics.preempted(scheduler.preemptions - self._preemptions)
            self._preemptions = scheduler.preemptions
        self.metrics.step(tokens, len(scheduler.running), len(scheduler.waiting), scheduler.pool.usage)
        if (residency := scheduler.residency) is not None:
            self.metrics.residency(residency.usage, residency.host_backed, residency.moved_out, residency.moved_in)
        self._note_transfers()

    def _note_transfers(self) -> None:
        cache, tier = self.cache, self.cache.tier
        while self._transfers and self._transfers[0][0].ready:
            block, launched = self._transfers.popleft()
            self.metrics.spilled(block.nbytes, time.monotonic() - launched)
            if tier is not None:
                tier.seal(block)
        self.metrics.tiers(self.scheduler.pool.kept, len(self._transfers))
        if tier is not None:
            counts = tier.counts
            self.metrics.host_tier(tier.usage, counts.dropped, counts.refused, counts.damaged)
        if self._stores is not None:
            self._writes = self._stores.pending
            self.metrics.stores(self._writes, self._stores.wait_seconds, cache.backed_up, len(cache.backlog))
            for store in self._stores.stores:
                self.metrics.store(store.name, store.usage, store.record_bytes, store.counts)

    def _end_all(self) -> None:
        """The loop is over: collect nothing more, tell everybody."""
        self._masks.close()
        with self._wake:
            self._closing = True
            entries: Iterable[Entry] = [*self._entries.values(), *(e for e in self._inbox if isinstance(e, Entry))]
            self._inbox.clear()
        reason: FinishReason = "abort" if self.error is None else "error"
        message = None if self.error is None else f"the engine has stopped: {self.error!r}"
        for entry in entries:
            self._entries[entry.request_id] = entry
            self._end_entry(entry, reason, message)
