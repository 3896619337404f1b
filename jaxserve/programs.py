"""The programs of an engine: every function the runner calls, with the abstract arguments it is compiled for.

A step runs ``embed``, then the layers, then ``pick`` (the rows that sample), ``logits`` and one of the samplers. Layers
with equal specs share one program of a few layers: one layer a program loads and compiles fastest and costs a CPU
nothing but in the smallest steps, where the calls show; on a GPU one program of all layers saves launches. Every form
runs the same functions.
"""

import dataclasses
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxserve import decoder, hot, sampler, transfers, untouched
from jaxserve.batch import CHOICE_FIELDS, COPIES, FETCHES, ints_size, split_ints
from jaxserve.buckets import Buckets, StepBucket
from jaxserve.cache_spec import CacheSpec, LayerCache, Pages
from jaxserve.config import ModelConfig
from jaxserve.context import Context, Hidden, Setting, context, hidden
from jaxserve.executables import Program
from jaxserve.host_tier import SIZES
from jaxserve.hot import HotPlane
from jaxserve.layer_spec import LayerSpec
from jaxserve.params import Abstract, Params, Specs, abstract
from jaxserve.request import MAX_LOGPROBS
from jaxserve.residency import HotShape
from jaxserve.sharding import sharding
from jaxserve.watermark import marking
from jaxserve.watermark.slots import ROW, MarkSpec
from pallas_kernels.dispatch import Kernels
from pallas_kernels.resolver import Hot


@dataclass(frozen=True)
class Segment:
    """Consecutive layers that one call of a ``layers`` program computes."""

    first: int
    specs: tuple[LayerSpec, ...]
    planes: tuple[int, ...]
    """The planes of the cache that they use."""
    places: tuple[LayerCache, ...]
    """Of each layer, its plane as a number in ``planes``, and its group."""
    kind: int
    """Segments of equal kind have equal specs, caches and places, and share a program."""

    @property
    def indices(self) -> range:
        return range(self.first, self.first + len(self.specs))


DECODE_LAYERS = 6
"""Layers a program on a CPU in steps without prompt tokens (measured: 8 rows take 36 ms a step instead of 45)."""


def cut_layers(cfg: ModelConfig, cache: CacheSpec, size: int) -> tuple[Segment, ...]:
    """Cut the layers into calls of at most ``size`` layers."""
    parts, kinds = [], []
    for first in range(0, cfg.num_layers, size):
        specs, layers = cfg.layers[first : first + size], cache.layers[first : first + size]
        planes = tuple(dict.fromkeys(layer.plane for layer in layers))
        places = tuple(LayerCache(planes.index(layer.plane), layer.group) for layer in layers)
        kind = (specs, places, tuple(cache.planes[plane] for plane in planes))
        kinds += [] if kind in kinds else [kind]
        parts.append(Segment(first, specs, planes, places, kinds.index(kind)))
    return tuple(parts)


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
    kernels: Kernels
    """Which implementations of the kernels."""
    layers_per_program: int | None
    """0 means all; None one where there are prompt tokens, DECODE_LAYERS elsewhere."""
    hot: HotShape | None = None
    """What the devices hold of latents whose home is the host; None: the devices are their home."""

    def segments(self, bucket: StepBucket) -> tuple[Segment, ...]:
        """The calls that a step of this shape makes."""
        size = self.layers_per_program
        if size is None:
            size = 1 if bucket.blocks else DECODE_LAYERS
        return cut_layers(self.cfg, self.cache, size or self.cfg.num_layers)

    def array(self, shape: tuple[int, ...], dtype: Any, axes: tuple[str | None, ...] = ()) -> Abstract:
        return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype), sharding=sharding(self.mesh, axes))

    @cached_property
    def params(self) -> Params:
        """Abstract parameters."""
        return abstract(self.specs, self.dtype, self.mesh)

    def pages(self, kind: Pages) -> Abstract:
        """Abstract pages of one array of a plane."""
        return self.array((self.num_pages, *kind.page(self.page_size)), kind.dtype, (None, *kind.axes))

    @cached_property
    def kv(self) -> list[tuple[Any, ...]]:
        """Abstract pages of all planes, and what the devices hold of them where latents are the host's."""
        return [(*map(self.pages, plane), *self._hot_plane(plane)) for plane in self.cache.planes]

    def _hot_plane(self, plane: tuple[Pages, ...]) -> tuple[HotPlane, ...]:
        if self.hot is None:
            return ()
        latents, shape, size = plane[0], self.hot, self.page_size
        near = self.array((shape.frames + shape.regions * shape.rows // size, *latents.page(size)), latents.dtype)
        held = self.array((shape.regions, shape.rows), jnp.int32)
        sums = self.array((self.num_pages * size,), jnp.uint32) if shape.checked else None
        return (HotPlane(near, Hot(held, held) if len(plane) > 1 else None, sums),)

    @property
    def groups(self) -> int:
        """Groups of layers, each with pages of its own."""
        return len(self.cache.windows)

    @property
    def tables(self) -> int:
        """Tables of a row: its pages in each group, and their frames where it may read from the host."""
        return self.groups + (self.hot is not None)

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

    def context(self, bucket: StepBucket) -> Context:
        tokens = self.array((bucket.tokens,), jnp.int32)
        return Context(
            tuple(self.array((2, bucket.tokens, rope.dim // 2), jnp.float32) for rope in self.cfg.ropes),
            self.array((self.tables, bucket.tokens), jnp.int32),
            self.array((bucket.tokens,), jnp.int32),
            self.array((self.tables, bucket.rows, self.width), jnp.int32),
            self.array((2, bucket.rows), jnp.int32),
            tokens=tokens if self.cfg.embeds_per_layer else None,
            embedded=self.hidden(bucket.tokens) if self.cfg.embeds_per_layer else None,
            regions=None if self.hot is None else self.array((bucket.rows,), jnp.int32),
        )

    def between(self, bucket: StepBucket) -> Hidden:
        """What passes from layer to layer."""
        x = self.hidden(bucket.tokens)
        if self.cfg.handed_on is None and self.hot is None:
            return Hidden(x)
        shapes = jax.eval_shape(partial(hidden, self.setting(bucket)), x)
        return jax.tree.map(lambda leaf: self.array(leaf.shape, leaf.dtype), shapes)

    def zeros(self) -> Program:
        """Makes the state of an engine that has run nothing: (last tokens, slots, pages by plane, marks)."""
        shapes = (self.last_token, self.slot_state, self.kv, self.mark_state)

        def zeros():
            return untouched.zeros(shapes)

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
        pairs = self.array((2, COPIES), jnp.int32)

        def copy(kv: transfers.KV, pairs: jax.Array) -> transfers.KV:
            return self._sealed(transfers.copy_pages(self.cache, kv, pairs), pairs[1])

        yield self._program("copy", copy, (self.kv, pairs), (0,), self.kv)
        if self.hot is not None:
            pairs = self.array((2, FETCHES), jnp.int32)
            out = (self.kv, self.array((FETCHES,), bool) if self.hot.checked else None)
            yield self._program("fetch", hot.fill_frames, (self.kv, pairs), (0,), out)
        if self.host_tier:
            for records in SIZES:
                yield from self.transfers(records)
        slot, program = self.array((), jnp.int32), partial(self._program, any_model=True)
        yield program("set_slot", sampler.set_slot, (state, slot, row), (0,), state)
        if (marks := self.mark_state) is not None:
            memory = jax.tree.map(lambda s: self.array(s.shape[1:], s.dtype), marks)
            yield program("set_mark", marking.set_slot, (marks, slot, memory), (0,), marks)
        for rows in self.buckets.masks:
            words = self.array((rows, state.allowed.shape[1]), jnp.uint32)
            args = (state.allowed, self.array((rows,), jnp.int32), words)
            yield program(f"masks {rows}", sampler.set_masks, args, (0,), state.allowed)

    def _sealed(self, kv: transfers.KV, pages: jax.Array) -> transfers.KV:
        """``kv``, whose ``pages`` have been written to."""
        return kv if self.hot is None else hot.seal(kv, pages)

    def first_needed(self) -> set[str]:
        """Names of the programs that the first short request runs."""
        decode, prompt = self.buckets.step(1, 0), self.buckets.step(0, 1)
        names = {f"{kind} 1" for kind in ("logits", "greedy", "random")}
        for bucket in (decode, prompt):
            names |= {f"embed {bucket}", f"pick {bucket} 1"}
            names |= {f"layers {bucket} {segment.kind}" for segment in self.segments(bucket)}
        return names

    @property
    def record_shapes(self) -> list[tuple[int, ...]]:
        """A page of all planes on the host, the same for any number of devices (see ``transfers``)."""
        arrays = list(self.cache.arrays)
        return [(arrays.count(kind), *kind.record(self.page_size)) for kind in self.cache.kinds]

    @property
    def record_bytes(self) -> int:
        return sum(leaf.size * leaf.dtype.itemsize for leaf in self.block(1))

    def block(self, records: int) -> tuple[Abstract, ...]:
        """Records in host memory: pinned, but for a CPU that works on them where they are (see ``transfers``)."""

        def part(kind: Pages, shape: tuple[int, ...]) -> Abstract:
            host = sharding(self.mesh, (None, None, *kind.axes) if kind.plain else ())
            if not self.spills_in_turn:
                host = host.with_memory_kind("pinned_host")
            return jax.ShapeDtypeStruct((records, *shape), jnp.dtype(kind.dtype), sharding=host)

        return tuple(part(kind, shape) for kind, shape in zip(self.cache.kinds, self.record_shapes, strict=True))

    @property
    def spills_in_turn(self) -> bool:
        """Whether spills write to a block that is given to them, page after page (see ``transfers``)."""
        one_cpu = self.mesh.size == 1 and self.mesh.devices.flat[0].platform == "cpu"
        return one_cpu and all(kind.plain for kind in self.cache.kinds)

    def transfers(self, records: int) -> Iterator[Program]:
        """``spill N``: pages to a block of N records in host memory; ``restore N``: back. ``blank N``: a block."""
        kv, block = self.kv, self.block(records)
        pages = self.array((records,), jnp.int32)
        if self.spills_in_turn:
            yield from self._transfers_in_turn(records, kv, block, pages)
            return

        def spill(kv: transfers.KV, pages: jax.Array) -> transfers.Block:
            return transfers.spill_pages(self.cache, self.page_size, kv, pages)

        def restore(kv: transfers.KV, block: transfers.Block, pages: jax.Array) -> transfers.KV:
            return self._sealed(transfers.restore_pages(self.cache, kv, block, pages), pages)

        yield self._program(f"spill {records}", spill, (kv, pages), (), block)
        yield self._program(f"restore {records}", restore, (kv, block, pages), (0,), kv)

    def _transfers_in_turn(self, records: int, kv: Any, block: Any, pages: Abstract) -> Iterator[Program]:
        def blank() -> transfers.Block:
            return untouched.zeros(block)

        def spill(block: transfers.Block, kv: transfers.KV, pages: jax.Array) -> transfers.Block:
            return transfers.spill_in_turn(self.cache, block, kv, pages)

        def restore(kv: transfers.KV, block: transfers.Block, pages: jax.Array) -> transfers.KV:
            return self._sealed(transfers.restore_in_turn(self.cache, kv, block, pages), pages)

        yield self._program(f"blank {records}", blank, (), (), block, about=f"{block}")
        yield self._program(f"spill {records}", spill, (block, kv, pages), (0,), block)
        yield self._program(f"restore {records}", restore, (kv, block, pages), (0,), kv)

    def setting(self, bucket: StepBucket) -> Setting:
        return Setting(self.cfg, bucket, self.mesh, self.kernels, self.hot)

    def embed(self, bucket: StepBucket) -> Program:
        at = self.setting(bucket)

        def embed(table: jax.Array, last_token: jax.Array, ints: jax.Array) -> tuple[Hidden, Context]:
            tables, spans, regions, slots, tokens = split_ints(ints, bucket, self.tables, self.width)
            ctx = context(self.cfg, bucket, self.page_size, tables, spans)
            if self.hot is not None:
                ctx = ctx._replace(regions=regions)
            tokens = jnp.concatenate([last_token[slots], tokens])
            embedded = decoder.embed(self.cfg, table, tokens)
            if self.cfg.embeds_per_layer:
                ctx = ctx._replace(tokens=tokens, embedded=embedded)
            return hidden(at, embedded), ctx

        ints = self.array((ints_size(bucket, self.tables, self.width),), jnp.int32)
        out = (self.between(bucket), self.context(bucket))
        return self._program(f"embed {bucket}", embed, (self.params["embed"], self.last_token, ints), (), out)

    def layers(self, bucket: StepBucket, segment: Segment) -> Program:
        specs, places = segment.specs, segment.places
        at = self.setting(bucket)

        def layers(weights: list, kv: transfers.KV, hidden: Hidden, ctx: Context) -> tuple[transfers.KV, Hidden]:
            kv = list(kv)
            for spec, place, weight in zip(specs, places, weights, strict=True):
                pages = kv[place.plane]
                kv[place.plane], hidden = decoder.layer(at, spec, place.group, weight, pages, hidden, ctx)
            return kv, hidden

        weights = [self.params["layers"][i] for i in segment.indices]
        kv = [self.kv[plane] for plane in segment.planes]
        args = (weights, kv, self.between(bucket), self.context(bucket))
        name = f"layers {bucket} {segment.kind}"
        made = self._program(name, layers, args, (1,), (kv, args[2]), about=f"{specs} {places}")
        return dataclasses.replace(made, interpreted=self.kernels.interpreted)

    def pick(self, bucket: StepBucket, rows: int) -> Program:
        args = (self.hidden(bucket.tokens), self.array((rows,), jnp.int32))
        out = self.hidden(rows)
        return self._program(f"pick {bucket} {rows}", lambda x, picks: x[picks], args, (), out, any_model=True)

    def heads(self, rows: int) -> Iterator[Program]:
        """Logits of ``rows`` hidden rows, and every way to use them."""
        logits = self.array((rows, self.vocab), jnp.float32)
        tokens = self.array((rows,), jnp.int32)
        choice = self.array((rows, len(CHOICE_FIELDS)), jnp.int32)
        last, state, most = self.last_token, self.slot_state, min(MAX_LOGPROBS, self.cfg.vocab_size)
        program = partial(self._program, any_model=True)

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
            return sampler.logprobs(logits, tokens, most)

        yield self._program(f"logits {rows}", head, (self.head_params, self.hidden(rows)), (), logits)
        yield program(f"greedy {rows}", greedy, (logits, last, choice), (1,), (last, tokens))
        yield program(f"random {rows}", random, (logits, last, choice), (1,), (last, tokens))
        args = (logits, last, choice, state)
        yield program(f"shaped {rows}", shaped, args, (1, 3), (last, tokens, state))
        yield program(f"logprobs {rows}", logprobs, (logits, tokens), (), sharding(self.mesh), f"{most}")
        if self.mark is not None:
            yield from self.marked_heads(rows, self.mark)

    def marked_heads(self, rows: int, spec: MarkSpec) -> Iterator[Program]:
        """The samplers that mark."""
        logits, tokens = self.array((rows, self.vocab), jnp.float32), self.array((rows,), jnp.int32)
        choice, packed = self.array((rows, len(CHOICE_FIELDS)), jnp.int32), self.array((rows, ROW), jnp.uint32)
        last, slots, state = self.last_token, self.slot_state, self.mark_state
        program = partial(self._program, any_model=True)

        def marked(logits: jax.Array, last_token: jax.Array, packed: jax.Array, marks: jax.Array, state: Any):
            choice = sampler.unpack(packed)
            tokens, state = marking.sample(spec, logits, choice, marking.unpack(marks), state)
            return last_token.at[choice.slot].set(tokens), tokens, state

        def shaped(logits: jax.Array, last: jax.Array, packed: jax.Array, slots: Any, marks: jax.Array, state: Any):
            choice = sampler.unpack(packed)
            last, tokens, state = marked(sampler.shape_logits(logits, choice, slots), last, packed, marks, state)
            return last, tokens, sampler.count(slots, choice, tokens), state

        args = (logits, last, choice, packed, state)
        yield program(f"marked {rows}", marked, args, (1, 4), (last, tokens, state), about=f"{spec}")
        wide = (logits, last, choice, slots, packed, state)
        out = (last, tokens, slots, state)
        yield program(f"marked shaped {rows}", shaped, wide, (1, 3, 5), out, about=f"{spec}")

    def _program(
        self,
        name: str,
        function: Any,
        args: tuple[Any, ...],
        donate: tuple[int, ...],
        out: Any,
        about: str = "",
        *,
        any_model: bool = False,
    ) -> Program:
        """``about``: what it is specialized to beside its arguments and this engine. ``any_model``: to nothing of the
        engine, so that it serves other models too whose arguments are like these."""
        shardings = jax.tree.map(lambda leaf: getattr(leaf, "sharding", leaf), out)
        model, statics = ("any model", "") if any_model else self._described
        return Program(name, function, args, donate, shardings, f"{statics} {about}", model)

    @cached_property
    def _described(self) -> tuple[str, str]:
        """What the programs belong to, for people; and what they are specialized to beside their arguments."""
        known = hashlib.sha256(str(self.cfg).encode()).hexdigest()
        model = f"{self.cfg.model_type} {self.cfg.num_layers}x{self.cfg.hidden_size} {self.dtype} {known[:8]}"
        hot = self.hot and dataclasses.replace(self.hot, always=False, chunk=0)  # the host's policy alone
        return model, f"{known} {self.kernels} {hot} {self.page_size} {self.width}"
