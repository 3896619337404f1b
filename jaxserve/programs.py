"""The programs of an engine: every function the runner calls, with the abstract arguments it is compiled for.

A step runs ``embed``, then the layers, then ``pick`` (the rows that sample), ``logits`` and one of the samplers. Layers
with equal specs share one program of a few layers: one layer a program loads and compiles fastest and costs a CPU
nothing but in the smallest steps, where the calls show; on a GPU one program of all layers saves launches. Every form
runs the same functions.
"""

import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxserve import decoder, sampler
from jaxserve.batch import CHOICE_FIELDS, COPIES, ints_size, split_ints
from jaxserve.buckets import Buckets, StepBucket
from jaxserve.cache_spec import CacheSpec
from jaxserve.config import ModelConfig
from jaxserve.executables import Program
from jaxserve.host_tier import SIZES
from jaxserve.layer_spec import LayerSpec
from jaxserve.params import Abstract, Params, Specs, abstract
from jaxserve.request import MAX_LOGPROBS
from jaxserve.sharding import head_layout, sharding
from jaxserve.watermark import marking
from jaxserve.watermark.slots import ROW, MarkSpec


@dataclass(frozen=True)
class Segment:
    """Consecutive layers that one call of a ``layers`` program computes."""

    first: int
    specs: tuple[LayerSpec, ...]
    kind: int
    """Segments of equal kind have equal specs, and share a program."""

    @property
    def indices(self) -> range:
        return range(self.first, self.first + len(self.specs))


DECODE_LAYERS = 6
"""Layers a program on a CPU in steps without prompt tokens (measured: 8 rows take 36 ms a step instead of 45)."""


def cut_layers(cfg: ModelConfig, size: int) -> tuple[Segment, ...]:
    """Cut the layers into calls of at most ``size`` layers."""
    parts = [cfg.layers[i : i + size] for i in range(0, cfg.num_layers, size)]
    kinds = list(dict.fromkeys(parts))
    return tuple(Segment(i * size, part, kinds.index(part)) for i, part in enumerate(parts))


@dataclass(frozen=True)
class ProgramSet:
    """Everything the programs of one engine are made from."""

    cfg: ModelConfig
    mesh: Mesh
    buckets: Buckets
    cache: CacheSpec
    specs: Specs
    dtype: str
    num_pages: int
    page_size: int
    width: int
    """Pages of the longest sequence."""
    max_num_seqs: int
    host_tier: bool
    """Whether pages go to host memory and come back."""
    mark: MarkSpec | None
    """How tokens are marked, where they are."""
    layers_per_program: int | None
    """0 means all; None one where there are prompt tokens, DECODE_LAYERS elsewhere."""

    def segments(self, bucket: StepBucket) -> tuple[Segment, ...]:
        """The calls that a step of this shape makes."""
        size = self.layers_per_program
        if size is None:
            size = 1 if bucket.blocks else DECODE_LAYERS
        return cut_layers(self.cfg, size or self.cfg.num_layers)

    def array(self, shape: tuple[int, ...], dtype: Any, axes: tuple[str | None, ...] = ()) -> Abstract:
        return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype), sharding=sharding(self.mesh, axes))

    @cached_property
    def params(self) -> Params:
        """Abstract parameters."""
        return abstract(self.specs, self.dtype, self.mesh)

    @property
    def kv(self) -> Abstract:
        """Abstract pages of one layer."""
        shape = self.cache.pages_shape(self.num_pages, self.page_size)
        return self.array(shape, self.cache.dtype, self.cache.pages_axes)

    @property
    def last_token(self) -> Abstract:
        return self.array((self.max_num_seqs + 1,), jnp.int32)

    @property
    def vocab(self) -> int:
        """Physical vocabulary: padded to the devices."""
        return self.specs["embed"].shape[0]

    @property
    def slot_state(self) -> sampler.SlotState:
        shapes = sampler.slot_state_shapes(self.max_num_seqs + 1, self.vocab)
        return jax.tree.map(lambda s: self.array(s.shape, s.dtype), shapes)

    @property
    def mark_state(self) -> marking.MarkState | None:
        if self.mark is None:
            return None
        shapes = marking.state_shapes(self.mark, self.max_num_seqs + 1)
        return jax.tree.map(lambda s: self.array(s.shape, s.dtype), shapes)

    @property
    def head_params(self) -> Params:
        """The parameters the head reads."""
        tree = self.params
        return {name: tree[name] for name in ("norm", "head" if "head" in tree else "embed")}

    def hidden(self, rows: int) -> Abstract:
        return self.array((rows, self.cfg.hidden_size), jnp.float32)

    def context(self, bucket: StepBucket) -> decoder.Context:
        half = self.cfg.layers[0].mixer.rope.dim // 2
        ropes = len(decoder.ropes(self.cfg))
        return decoder.Context(
            self.array((ropes, 2, bucket.tokens, half), jnp.float32),
            self.array((3, bucket.tokens), jnp.int32),
            self.array((bucket.rows, self.width), jnp.int32),
            self.array((2, bucket.rows), jnp.int32),
        )

    def zeros(self) -> Program:
        """Makes the state of an engine that has run nothing: (last tokens, slots, pages by layer, marks)."""
        kv = [self.kv] * self.cfg.num_layers
        shapes = (self.last_token, self.slot_state, kv, self.mark_state)

        def zeros():
            return jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)

        return self._program("zeros", zeros, (), (), shapes, about=f"{shapes}")

    def programs(self) -> Iterator[Program]:
        """All of them; names are what the runner looks them up by."""
        for bucket in self.buckets.steps():
            yield self.embed(bucket)
            for segment in {s.kind: s for s in self.segments(bucket)}.values():
                yield self.layers(bucket, segment)
            for rows in sorted({self.buckets.sample_rows(bucket), *([self.buckets.block] if bucket.blocks else [])}):
                yield self.pick(bucket, rows)
        for rows in sorted({*self.buckets.samples, self.buckets.block}):
            yield from self.heads(rows)
        row = jax.tree.map(lambda s: self.array(s.shape[1:], s.dtype), self.slot_state)
        state = self.slot_state
        kv = [self.kv] * self.cfg.num_layers
        yield self._program("copy", decoder.copy_pages, (kv, self.array((2, COPIES), jnp.int32)), (0,), kv)
        if self.host_tier:
            for records in SIZES:
                yield from self.transfers(records)
        yield self._program("set_slot", sampler.set_slot, (state, self.array((), jnp.int32), row), (0,), state)
        if (marks := self.mark_state) is not None:
            memory = jax.tree.map(lambda s: self.array(s.shape[1:], s.dtype), marks)
            where = self.array((), jnp.int32)
            yield self._program("set_mark", marking.set_slot, (marks, where, memory), (0,), marks)
        for rows in self.buckets.masks:
            words = self.array((rows, state.allowed.shape[1]), jnp.uint32)
            args = (state.allowed, self.array((rows,), jnp.int32), words)
            yield self._program(f"masks {rows}", sampler.set_masks, args, (0,), state.allowed)

    def first_needed(self) -> set[str]:
        """Names of the programs that the first short request runs."""
        decode, prompt = self.buckets.step(1, 0), self.buckets.step(0, 1)
        names = {f"{kind} 1" for kind in ("logits", "greedy", "random")}
        for bucket in (decode, prompt):
            names |= {f"embed {bucket}", f"pick {bucket} 1"}
            names |= {f"layers {bucket} {segment.kind}" for segment in self.segments(bucket)}
        return names

    @property
    def record_shape(self) -> tuple[int, ...]:
        """A page of all layers on the host, the same for any number of devices: ``[L, 2, K, ...]``."""
        _, parts, _, *head = self.kv.shape
        return (self.cfg.num_layers, parts, self.cfg.num_kv_heads, *head)

    @property
    def record_bytes(self) -> int:
        return math.prod(self.record_shape) * jnp.dtype(self.cache.dtype).itemsize

    @property
    def _kv_source(self) -> tuple[tuple[int, ...], bool]:
        """Which of the model's KV heads each of ours is, and whether they are the same."""
        layout = head_layout(self.cfg.num_heads, self.cfg.num_kv_heads, self.mesh.size).kv_source
        return layout, layout == tuple(range(self.cfg.num_kv_heads))

    def block(self, records: int) -> Abstract:
        """Records in pinned host memory, ``[N, L, 2, K, ...]``."""
        axes = (None, None, None, "kv_heads" if self._kv_source[1] else None)
        host = sharding(self.mesh, axes).with_memory_kind("pinned_host")
        return jax.ShapeDtypeStruct((records, *self.record_shape), jnp.dtype(self.cache.dtype), sharding=host)

    def transfers(self, records: int) -> Iterator[Program]:
        """``spill N``: pages to a block of N records in host memory; ``restore N``: back."""
        layout, plain = self._kv_source
        out = None if plain else jnp.array([layout.index(head) for head in range(self.cfg.num_kv_heads)])
        back = None if plain else jnp.array([max(head, 0) for head in layout])
        kv = [self.kv] * self.cfg.num_layers
        block = self.block(records)
        pages = self.array((records,), jnp.int32)

        def spill(kv: list, pages: jax.Array) -> jax.Array:
            return decoder.spill_pages(kv, pages, out)

        def restore(kv: list, block: jax.Array, pages: jax.Array) -> list:
            return decoder.restore_pages(kv, block, pages, back)

        yield self._program(f"spill {records}", spill, (kv, pages), (), block)
        yield self._program(f"restore {records}", restore, (kv, block, pages), (0,), kv)

    def embed(self, bucket: StepBucket) -> Program:
        def embed(table: jax.Array, last_token: jax.Array, ints: jax.Array) -> tuple[jax.Array, decoder.Context]:
            tables, spans, slots, tokens = split_ints(ints, bucket, self.width)
            ctx = decoder.context(self.cfg, bucket, self.page_size, tables, spans)
            return decoder.embed(self.cfg, table, jnp.concatenate([last_token[slots], tokens])), ctx

        ints = self.array((ints_size(bucket, self.width),), jnp.int32)
        out = (self.hidden(bucket.tokens), self.context(bucket))
        return self._program(f"embed {bucket}", embed, (self.params["embed"], self.last_token, ints), (), out)

    def layers(self, bucket: StepBucket, segment: Segment) -> Program:
        specs = segment.specs

        def layers(weights: list, kvs: list, x: jax.Array, ctx: decoder.Context) -> tuple[list, jax.Array]:
            out = []
            for spec, weight, kv in zip(specs, weights, kvs, strict=True):
                x, kv = decoder.layer(self.cfg, spec, bucket, self.mesh, weight, kv, x, ctx)
                out.append(kv)
            return out, x

        weights = [self.params["layers"][i] for i in segment.indices]
        kvs = [self.kv for _ in specs]
        args = (weights, kvs, self.hidden(bucket.tokens), self.context(bucket))
        name = f"layers {bucket} {segment.kind}"
        return self._program(name, layers, args, (1,), (kvs, args[2]), about=str(specs))

    def pick(self, bucket: StepBucket, rows: int) -> Program:
        args = (self.hidden(bucket.tokens), self.array((rows,), jnp.int32))
        return self._program(f"pick {bucket} {rows}", lambda x, picks: x[picks], args, (), self.hidden(rows))

    def heads(self, rows: int) -> Iterator[Program]:
        """Logits of ``rows`` hidden rows, and every way to use them."""
        logits = self.array((rows, self.vocab), jnp.float32)
        tokens = self.array((rows,), jnp.int32)
        choice = self.array((rows, len(CHOICE_FIELDS)), jnp.int32)
        last, state = self.last_token, self.slot_state

        def head(weights: Params, x: jax.Array) -> jax.Array:
            return decoder.head(self.cfg, weights, x)

        def store(last_token: jax.Array, packed: jax.Array, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
            return last_token.at[packed[:, 0]].set(tokens), tokens

        def greedy(logits: jax.Array, last_token: jax.Array, packed: jax.Array):
            return store(last_token, packed, sampler.greedy(logits))

        def random(logits: jax.Array, last_token: jax.Array, packed: jax.Array):
            return store(last_token, packed, sampler.sample(logits, sampler.unpack(packed)))

        def shaped(logits: jax.Array, last_token: jax.Array, packed: jax.Array, state: sampler.SlotState):
            choice = sampler.unpack(packed)
            tokens = sampler.sample(sampler.shape_logits(logits, choice, state), choice)
            return *store(last_token, packed, tokens), sampler.count(state, choice, tokens)

        def logprobs(logits: jax.Array, tokens: jax.Array) -> sampler.Logprobs[jax.Array]:
            return sampler.logprobs(logits, tokens, min(MAX_LOGPROBS, self.cfg.vocab_size))

        yield self._program(f"logits {rows}", head, (self.head_params, self.hidden(rows)), (), logits)
        yield self._program(f"greedy {rows}", greedy, (logits, last, choice), (1,), (last, tokens))
        yield self._program(f"random {rows}", random, (logits, last, choice), (1,), (last, tokens))
        args = (logits, last, choice, state)
        yield self._program(f"shaped {rows}", shaped, args, (1, 3), (last, tokens, state))
        yield self._program(f"logprobs {rows}", logprobs, (logits, tokens), (), sharding(self.mesh))
        if self.mark is not None:
            yield from self.marked_heads(rows, self.mark)

    def marked_heads(self, rows: int, spec: MarkSpec) -> Iterator[Program]:
        """The samplers that mark."""
        logits, tokens = self.array((rows, self.vocab), jnp.float32), self.array((rows,), jnp.int32)
        choice, packed = self.array((rows, len(CHOICE_FIELDS)), jnp.int32), self.array((rows, ROW), jnp.uint32)
        last, slots, state = self.last_token, self.slot_state, self.mark_state

        def marked(logits: jax.Array, last_token: jax.Array, packed: jax.Array, marks: jax.Array, state: Any):
            choice = sampler.unpack(packed)
            tokens, state = marking.sample(spec, logits, choice, marking.unpack(marks), state)
            return last_token.at[choice.slot].set(tokens), tokens, state

        def shaped(logits: jax.Array, last: jax.Array, packed: jax.Array, slots: Any, marks: jax.Array, state: Any):
            choice = sampler.unpack(packed)
            last, tokens, state = marked(sampler.shape_logits(logits, choice, slots), last, packed, marks, state)
            return last, tokens, sampler.count(slots, choice, tokens), state

        args = (logits, last, choice, packed, state)
        yield self._program(f"marked {rows}", marked, args, (1, 4), (last, tokens, state), about=f"{spec}")
        wide = (logits, last, choice, slots, packed, state)
        out = (last, tokens, slots, state)
        yield self._program(f"marked shaped {rows}", shaped, wide, (1, 3, 5), out, about=f"{spec}")

    def _program(
        self, name: str, function: Any, args: tuple[Any, ...], donate: tuple[int, ...], out: Any, about: str = ""
    ) -> Program:
        shardings = jax.tree.map(lambda leaf: getattr(leaf, "sharding", leaf), out)
        model, statics = self._described
        return Program(name, function, args, donate, shardings, f"{statics} {about}", model)

    @cached_property
    def _described(self) -> tuple[str, str]:
        """What the programs belong to, for people; and what they are specialized to beside their arguments."""
        cfg = str(self.cfg)
        known = hashlib.sha256(cfg.encode()).hexdigest()[:8]
        model = f"{self.cfg.model_type} {self.cfg.num_layers}x{self.cfg.hidden_size} {self.dtype} {known}"
        return model, f"{cfg} {self.page_size} {self.width} {MAX_LOGPROBS}"
