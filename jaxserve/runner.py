"""The device's side of a step: owns weights and ``DeviceState``, launches a ``StepBatch``, collects a ``StepResult``.

``launch`` returns as soon as the step is queued on the device; ``collect`` waits for its small packed result.
Everything that runs was compiled before ready, so no call here can trace or compile.
"""

import time
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from jaxserve.batch import PromptRows, StepBatch
from jaxserve.block_pool import BlockPool
from jaxserve.buckets import StepBucket
from jaxserve.executables import Compiled, Programs
from jaxserve.host_tier import Spill
from jaxserve.params import Params
from jaxserve.programs import ProgramSet
from jaxserve.sampler import Logprobs

SETTLE_SECONDS = 0.1
"""Given to XLA's threads when an engine closes."""


@jax.tree_util.register_dataclass
@dataclass
class DeviceState:
    """What stays on the devices between steps. Every program that changes a part of it takes it donated."""

    last_token: jax.Array
    """int32 ``[slots + 1]``: the token each slot feeds to its next decode step."""
    slots: Any
    """``sampler.SlotState``."""
    kv: list[tuple[jax.Array, ...]]
    """The pages of every plane."""
    mark: Any = None
    """``marking.MarkState`` where the engine marks."""


@dataclass(frozen=True, slots=True)
class Damaged:
    """What has come from the host with a wrong checksum: for which decode rows and blocks, bool; and which pages."""

    decodes: np.ndarray
    blocks: np.ndarray
    pages: list[int]


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step brought, on the host. ``tokens [sampled]``; log-probabilities where some row wanted them."""

    tokens: np.ndarray
    logprobs: Logprobs[np.ndarray] | None
    prompt: list[tuple[PromptRows, Logprobs[np.ndarray]]]
    fetched: np.ndarray | None = None
    """int32 ``[3]``, where latents are the host's: ``context.Fetch.counts`` of all layers."""
    damaged: Damaged | None = None
    """Where checksums of what comes from there are compared."""


@dataclass(frozen=True, slots=True)
class InFlight:
    """A launched step: device arrays on their way to the host."""

    batch: StepBatch
    tokens: jax.Array | None
    logprobs: Logprobs[jax.Array] | None
    prompt: list[tuple[PromptRows, Logprobs[jax.Array]]]
    fetched: jax.Array | None
    damaged: tuple[jax.Array, list[tuple[np.ndarray, jax.Array]]] | None
    """Rows of the step, and pages that were fetched before it."""


class Runner:
    """Runs steps of one engine. ``compiled`` are the programs of ``programs`` by name."""

    def __init__(self, programs: ProgramSet, compiled: Programs, weights: Params, state: DeviceState):
        self.programs = programs
        self.compiled = compiled
        self.weights = weights
        self.head = {name: weights[name] for name in programs.head_params}
        self.calls: dict[StepBucket, list[tuple[Compiled, list[Params], tuple[int, ...]]]] = {}
        self.state = state
        self.pool: BlockPool | None = None
        """Where spills have to be given their blocks."""
        if programs.spills_in_turn:
            self.pool = BlockPool(lambda records: compiled[f"blank {records}"]())

    def _calls(self, bucket: StepBucket) -> list[tuple[Compiled, list[Params], tuple[int, ...]]]:
        """The layer calls of a step: program, weights, and which planes."""
        calls = []
        for segment in self.programs.segments(bucket):
            weights = [self.weights["layers"][i] for i in segment.indices]
            calls.append((self.compiled[f"layers {bucket} {segment.kind}"], weights, segment.planes))
        return calls

    def launch(self, batch: StepBatch) -> InFlight:
        """Queue a step. Its rows' ``last_token`` and KV are on the device for the next launch at once."""
        run, state, bucket = self.compiled, self.state, batch.bucket
        for slot, row in batch.slot_rows:
            state.slots = run["set_slot"](state.slots, np.int32(slot), type(state.slots)(*row))
        for slot, mark in batch.mark_rows:
            state.mark = run["set_mark"](state.mark, np.int32(slot), type(state.mark)(*mark))
        if len(batch.mask_slots):
            masks = run[f"masks {len(batch.mask_slots)}"]
            allowed = masks(state.slots.allowed, batch.mask_slots, batch.mask_words)
            state.slots = state.slots._replace(allowed=allowed)
        fetches = self._move(batch)
        hidden, ctx = run[f"embed {bucket}"](self.weights["embed"], state.last_token, batch.ints)
        if bucket not in self.calls:
            self.calls[bucket] = self._calls(bucket)
        for call, weights, planes in self.calls[bucket]:
            kept, hidden = call(weights, [state.kv[plane] for plane in planes], hidden, ctx)
            for plane, pages in zip(planes, kept, strict=True):
                state.kv[plane] = pages
        x = hidden.x
        tokens = logprobs = None
        if batch.sampled:
            tokens, logprobs = self._sample(batch, x)
        if hidden.fetched is not None:
            hidden.fetched.copy_to_host_async()
        prompt = [(rows, self._prompt(batch, x, rows)) for rows in batch.prompt_rows]
        damaged = None if hidden.damaged is None else (hidden.damaged, fetches)
        return InFlight(batch, tokens, logprobs, prompt, hidden.fetched, damaged)

    def _move(self, batch: StepBatch) -> list[tuple[np.ndarray, jax.Array]]:
        """Pages to the host, from the host, from one to another, and to frames, in this order. Returns the last ones,
        and which of them are damaged, where that is looked for."""
        run, state = self.compiled, self.state
        for spill in batch.spills:
            self.spill(spill)
        for restore in batch.restores:
            pages = np.array(restore.pages, np.int32)
            state.kv = run[f"restore {len(pages)}"](state.kv, restore.block.data, pages)
        for pairs in batch.copies:
            state.kv = run["copy"](state.kv, pairs)
        found = []
        for pairs in batch.fetches:
            state.kv, damaged = run["fetch"](state.kv, pairs)
            if damaged is not None:
                found.append((pairs[0], damaged))
        return found

    def spill(self, spill: Spill) -> None:
        """Start copying pages to the host."""
        count = len(spill.pages)
        program, args = self.compiled[f"spill {count}"], (self.state.kv, np.array(spill.pages, np.int32))
        if self.pool is None:
            spill.block.data = program(*args)
        else:
            spill.block.data = program(self.pool.take(count), *args)
            self.pool.watch(spill.block)

    def place(self, records: np.ndarray) -> tuple[jax.Array, ...]:
        """The data of a block: records as bytes, uint8 ``[N, record_bytes]``, in the host memory that restores read."""
        placed, start = [], 0
        for part in self.programs.block(len(records)):
            size = part.size * part.dtype.itemsize // len(records)
            data = np.ascontiguousarray(records[:, start : start + size])
            placed.append(jax.device_put(data.view(part.dtype).reshape(part.shape), part.sharding))
            start += size
        return tuple(placed)

    def _sample(self, batch: StepBatch, x: jax.Array) -> tuple[jax.Array, Logprobs[jax.Array] | None]:
        run, state, rows = self.compiled, self.state, len(batch.picks)
        logits = run[f"logits {rows}"](self.head, run[f"pick {batch.bucket} {rows}"](x, batch.picks))
        program, args = run[f"{batch.mode} {rows}"], (logits, state.last_token, batch.choice)
        if batch.mode == "shaped":
            state.last_token, tokens, state.slots = program(*args, state.slots)
        elif batch.mode == "marked":
            state.last_token, tokens, state.mark = program(*args, batch.marks, state.mark)
        elif batch.mode == "marked shaped":
            state.last_token, tokens, state.slots, state.mark = program(*args, state.slots, batch.marks, state.mark)
        else:
            state.last_token, tokens = program(*args)
        tokens.copy_to_host_async()
        if not batch.logprobs:
            return tokens, None
        return tokens, _to_host(run[f"logprobs {rows}"](logits, tokens))

    def _prompt(self, batch: StepBatch, x: jax.Array, rows: PromptRows) -> Logprobs[jax.Array]:
        run, count = self.compiled, len(rows.picks)
        logits = run[f"logits {count}"](self.head, run[f"pick {batch.bucket} {count}"](x, rows.picks))
        return _to_host(run[f"logprobs {count}"](logits, rows.targets))

    def collect(self, step: InFlight) -> StepResult:
        """Wait for a step and bring its result to the host."""
        tokens = np.zeros(0, np.int32) if step.tokens is None else np.asarray(step.tokens)[: step.batch.sampled]
        logprobs = None if step.logprobs is None else _numpy(step.logprobs)
        fetched = None if step.fetched is None else np.asarray(step.fetched)
        prompt = [(rows, _numpy(values)) for rows, values in step.prompt]
        damaged = None
        if step.damaged is not None:
            rows, decodes = np.asarray(step.damaged[0]), step.batch.bucket.decodes
            pages = [page for pages, wrong in step.damaged[1] for page in pages[np.asarray(wrong)].tolist()]
            damaged = Damaged(rows[:decodes], rows[decodes:], pages)
        return StepResult(tokens, logprobs, prompt, fetched, damaged)

    def wait(self) -> None:
        """Wait until nothing runs on the devices, nor on the threads behind them.

        XLA's threads let go of our host buffers a moment after a result is ready. One that comes for the interpreter's
        lock while the process ends takes the process down with it (1 in 24 ends without the pause, 0 in 72 with it).
        """
        jax.block_until_ready(self.state)
        time.sleep(SETTLE_SECONDS)


def _to_host(values: Logprobs[jax.Array]) -> Logprobs[jax.Array]:
    for array in values:
        array.copy_to_host_async()
    return values


def _numpy(values: Logprobs[jax.Array]) -> Logprobs[np.ndarray]:
    return Logprobs(*(np.asarray(array) for array in values))
