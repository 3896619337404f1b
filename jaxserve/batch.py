"""StepPlan -> StepBatch: the host arrays of one step, gathered from persistent per-slot buffers. Imports no jax."""

from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from jaxserve.buckets import Buckets, StepBucket, pad_to
from jaxserve.host_tier import Restore, Spill
from jaxserve.request import MAX_LOGIT_BIAS
from jaxserve.residency import NO_REGION, Residency
from jaxserve.sequence import Chunk, Sequence, StepPlan
from jaxserve.watermark.slots import MarkRow, MarkSlots

Mode = Literal["greedy", "random", "shaped", "marked", "marked shaped"]
"""The sampler's program: argmax; temperature and truncation; penalties and bans before that; the watermark in both."""

CHOICE_FIELDS = (
    ("slot", np.int32),
    ("position", np.int32),
    ("seed_low", np.uint32),
    ("seed_high", np.uint32),
    ("temperature", np.float32),
    ("top_k", np.int32),
    ("top_p", np.float32),
    ("min_p", np.float32),
    ("shaped", np.int32),
    ("presence", np.float32),
    ("frequency", np.float32),
    ("repetition", np.float32),
    ("hold_until", np.int32),
)
"""Columns of a packed sampling row, each 32 bits, in the order of ``sampler.Choice``."""

_COLUMN = {name: i for i, (name, _) in enumerate(CHOICE_FIELDS)}

COPIES = 8
"""Pages that one call copies."""
FETCHES = 16
"""Pages that one call brings from the host to frames."""

PROMPT_BIT = 1 << 15
"""In a slot's counts: the token stands in the prompt. The bits below count its appearances in the output."""


class SlotRow(NamedTuple):
    """One slot's state in the shapes of ``sampler.SlotState``, without the slot dimension."""

    counts: np.ndarray
    allowed: np.ndarray
    hold: np.ndarray
    bias_ids: np.ndarray
    bias: np.ndarray


@dataclass(frozen=True, slots=True)
class PromptRows:
    """A block of prompt tokens whose log-probabilities are wanted: step rows ``picks [Q]`` predict ``targets [Q]``."""

    seq: Sequence
    position: int
    """Of the first target."""
    picks: np.ndarray
    targets: np.ndarray
    count: int


@dataclass(frozen=True, slots=True)
class StepBatch:
    """What a step uploads. ``ints`` is laid out as ``split_ints`` reads it."""

    bucket: StepBucket
    ints: np.ndarray
    picks: np.ndarray
    """int32 ``[S]``: the step row each sampling row reads."""
    choice: np.ndarray
    """int32 ``[S, len(CHOICE_FIELDS)]``."""
    mode: Mode
    sampled: int
    logprobs: bool
    marks: np.ndarray | None
    """uint32 ``[S, ROW]``: what marks the rows, in a mode that marks."""
    slot_rows: list[tuple[int, SlotRow]]
    mark_rows: list[tuple[int, MarkRow]]
    mask_slots: np.ndarray
    """int32 ``[M]``: slots whose ``allowed`` is replaced, after ``slot_rows``; M is 0 or one of ``Buckets.masks``."""
    mask_words: np.ndarray
    """uint32 ``[M, ceil(V / 32)]``."""
    prompt_rows: list[PromptRows]
    spills: list[Spill]
    restores: list[Restore]
    copies: list[np.ndarray]
    """int32 ``[2, COPIES]`` each: pages to copy first, from and to. Padding copies page 0 to itself."""
    fetches: list[np.ndarray]
    """int32 ``[2, FETCHES]`` each: pages whose latents go from the host to frames, after all that. Padding: 0 to 0."""


def ints_size(bucket: StepBucket, tables: int, width: int) -> int:
    """Length of ``StepBatch.ints``: ``tables [tables, N, W]``, spans ``[2, N]``, regions ``[N]``, slots ``[R]``, prompt
    tokens ``[B*Q]``."""
    return bucket.rows * (tables * width + 3) + bucket.tokens


def split_ints(ints, bucket: StepBucket, tables: int, width: int):
    """Views (tables, spans, regions, slots, tokens) of ``ints``; works on numpy and on traced arrays alike."""
    rows = bucket.rows
    a, b, c = rows * tables * width, rows * (tables * width + 2), rows * (tables * width + 3)
    d = c + bucket.decodes
    return ints[:a].reshape(tables, rows, width), ints[a:b].reshape(2, rows), ints[b:c], ints[c:d], ints[d:]


class Packer:
    """Keeps page tables and sampling rows of every slot, and gathers a step's rows from them.

    ``width`` is the pages of the longest sequence, ``groups`` how many tables it has; slot ``max_num_seqs`` is the dump
    that padding rows write to. ``stop_ids`` are the model's end-of-sequence tokens. ``marks`` is there where the engine
    marks, ``residency`` where latents are the host's: then the last table has the frames of the first one's pages.
    """

    def __init__(
        self,
        buckets: Buckets,
        *,
        width: int,
        max_num_seqs: int,
        vocab_size: int,
        groups: int = 1,
        stop_ids: tuple[int, ...] = (),
        marks: MarkSlots | None = None,
        residency: Residency | None = None,
    ):
        self.buckets = buckets
        self.groups = groups
        self.width = width
        self.dump = max_num_seqs
        self.vocab_size = vocab_size
        self.stop_ids = stop_ids
        self.marks = marks
        self.residency = residency
        self.tables = np.zeros((groups, max_num_seqs + 1, width), np.int32)
        self.choice = np.zeros((max_num_seqs + 1, len(CHOICE_FIELDS)), np.int32)
        self.choice[:, _COLUMN["slot"]] = np.arange(max_num_seqs + 1)
        self.owner: list[tuple[Sequence, int] | None] = [None] * (max_num_seqs + 1)
        """Who the buffers were filled for: a sequence and its admission."""
        self.written = [[0] * groups for _ in range(max_num_seqs + 1)]
        """Pages of the owner that the tables have."""
        self.room = [0] * (max_num_seqs + 1)
        """The owner's ``room`` when they were written: it grows with the pages."""
        self.rows: list[SlotRow | None] = [None] * (max_num_seqs + 1)
        """What was uploaded for each slot's owner, where it shapes its logits."""

    def pack(self, plan: StepPlan) -> StepBatch:
        decodes, chunks = plan.decodes, plan.chunks
        block = self.buckets.block
        bucket = self.buckets.step(len(decodes), sum(-(-c.count // block) for c in chunks))
        slot_rows, mark_rows = self._refresh(plan)
        count = self.groups + (self.residency is not None)
        ints = np.zeros(ints_size(bucket, count, self.width), np.int32)
        every, spans, regions, slots, tokens = split_ints(ints, bucket, count, self.width)
        tables = every[: self.groups]
        regions[:] = NO_REGION
        slots[:] = self.dump
        picks = np.zeros(self.buckets.sample_rows(bucket), np.int32)
        rows = np.full(len(picks), self.dump)
        positions = np.zeros(len(picks), np.int32)
        sampled = len(decodes)
        if decodes:
            mine = np.fromiter((s.slot for s in decodes), np.int32, sampled)
            computed = np.fromiter((s.computed for s in decodes), np.int32, sampled)
            tables[:, :sampled] = self.tables[:, mine]
            spans[0, :sampled] = computed - 1
            spans[1, :sampled] = 1
            slots[:sampled] = mine
            picks[:sampled] = np.arange(sampled)
            rows[:sampled] = mine
            positions[:sampled] = computed
            if self.residency is not None:
                regions[:sampled] = [_region(seq) for seq in decodes]
        prompt_rows: list[PromptRows] = []
        row = 0
        for chunk in chunks:
            seq, blocks = chunk.seq, -(-chunk.count // block)
            where = slice(bucket.decodes + row, bucket.decodes + row + blocks)
            tables[:, where] = self.tables[:, seq.slot, None]
            starts = np.arange(blocks, dtype=np.int32) * block
            spans[0, where] = chunk.start + starts
            spans[1, where] = np.minimum(chunk.count - starts, block)
            regions[where] = _region(seq)
            tokens[row * block : row * block + chunk.count] = seq.tokens(chunk.start, chunk.start + chunk.count)
            first = bucket.decodes + row * block
            if chunk.final:
                picks[sampled] = first + chunk.count - 1
                rows[sampled] = seq.slot
                positions[sampled] = chunk.start + chunk.count
                sampled += 1
            if seq.params.prompt_logprobs is not None:
                prompt_rows += self._prompt_rows(chunk, first)
            row += blocks
        if self.residency is not None:
            every[-1] = self.residency.frame[tables[0]]
        choice = self.choice[rows]
        choice[:, _COLUMN["position"]] = positions
        live = choice[:sampled]
        mode: Mode = "greedy"
        if live[:, _COLUMN["shaped"]].any():
            mode = "shaped"
        elif live[:, _COLUMN["temperature"]].any():
            mode = "random"
        marks = None
        if self.marks is not None and any(seq.mark is not None for seq in plan.sampled):
            mode = "marked shaped" if mode == "shaped" else "marked"
            marks = self.marks.pack(rows, positions)
        wants = any(s.params.logprobs is not None for s in plan.sampled)
        return StepBatch(
            bucket,
            ints,
            picks,
            choice,
            mode,
            sampled,
            wants,
            marks,
            slot_rows,
            mark_rows,
            *self._masks(plan.sampled),
            prompt_rows,
            plan.spills,
            plan.restores,
            pack_pairs(plan.copies, COPIES),
            pack_pairs(plan.fetches, FETCHES),
        )

    def _refresh(self, plan: StepPlan) -> tuple[list[tuple[int, SlotRow]], list[tuple[int, MarkRow]]]:
        """Bring the buffers of the plan's slots up to date; returns the slot states to upload."""
        rows, marks = [], []
        for seq in plan.sequences:
            slot = seq.slot
            new = self.owner[slot] != (seq, seq.preemptions)
            if new:
                self.owner[slot], self.room[slot] = (seq, seq.preemptions), 0
                self.written[slot] = [0] * self.groups
                self._fill_choice(seq)
                row = self._slot_row(seq) if seq.params.shapes_logits else None
                self.rows[slot] = row
                if row is not None:
                    rows.append((slot, row))
                if self.marks is not None and (mark := self.marks.admit(seq)) is not None:
                    marks.append((slot, mark))
            if self.room[slot] != seq.room:
                self.room[slot] = seq.room
                self._write_tables(seq)
        return rows, marks

    def _write_tables(self, seq: Sequence) -> None:
        """A page for every page of the text, and 0 for those behind a window."""
        written = self.written[seq.slot]
        for group, (pages, behind) in enumerate(zip(seq.pages, seq.behind, strict=True)):
            table, done = self.tables[group, seq.slot], max(written[group], behind)
            table[:behind] = 0
            table[done : len(pages)] = pages[done:]
            written[group] = len(pages)

    def _masks(self, sampled: list[Sequence]) -> tuple[np.ndarray, np.ndarray]:
        """Slots and words of the masks that this step's tokens depend on: those of host-driven sequences."""
        driven = [seq for seq in sampled if seq.host_driven]
        count = pad_to(len(driven), self.buckets.masks) if driven else 0
        slots = np.full(count, self.dump, np.int32)
        words = np.zeros((count, -(-self.vocab_size // 32)), np.uint32)
        for i, seq in enumerate(driven):
            slots[i] = seq.slot
            mask = self._mask(seq)
            words[i, : len(mask)] = mask
        return slots, words

    def _mask(self, seq: Sequence) -> np.ndarray:
        """Packed words of the tokens that may come next. Bans give way where nothing else could be chosen."""
        row = self.rows[seq.slot]
        assert row is not None
        if seq.constraint is not None:
            assert seq.constraint.mask is not None, "a sequence was planned that has no mask yet"
            words = seq.constraint.mask.words
            if len(seq.output) >= seq.params.min_tokens:
                return words
            kept = words & ~row.hold[: len(words)]
        else:
            words, kept = row.allowed, row.allowed.copy()
            for token in banned_tokens(seq):
                kept[token // 32] &= ~np.uint32(1 << token % 32)
        return kept if kept.any() else words

    def _fill_choice(self, seq: Sequence) -> None:
        params, row = seq.params, self.choice[seq.slot]
        greedy = params.greedy
        values = {
            "seed_low": seq.seed & 0xFFFFFFFF,
            "seed_high": (seq.seed >> 32) & 0xFFFFFFFF,
            "temperature": 0.0 if greedy else params.temperature,
            "top_k": min(max(params.top_k, 0), self.vocab_size),
            "top_p": params.top_p,
            "min_p": params.min_p,
            "shaped": int(params.shapes_logits),
            "presence": params.presence_penalty,
            "frequency": params.frequency_penalty,
            "repetition": params.repetition_penalty,
            # A grammar's mask has it already, and gives way to nothing.
            "hold_until": 0 if seq.constraint is not None else len(seq.prompt) + params.min_tokens,
        }
        for name, kind in CHOICE_FIELDS:
            if name in values:
                row[_COLUMN[name]] = np.array(values[name], kind).view(np.int32)

    def _slot_row(self, seq: Sequence) -> SlotRow:
        params, vocab = seq.params, self.vocab_size
        counts = np.zeros(vocab, np.uint16)
        np.add.at(counts, np.asarray(seq.output, np.int64), 1)
        counts[np.asarray(seq.prompt, np.int64)] |= PROMPT_BIT
        allowed = np.ones(vocab, bool)
        if params.allowed_token_ids is not None:
            allowed[:] = False
            allowed[list(params.allowed_token_ids)] = True
        hold = np.zeros(vocab, bool)
        hold[[*params.stop_token_ids, *(() if params.ignore_eos else self.stop_ids)]] = True
        ids = np.full(MAX_LOGIT_BIAS, vocab, np.int32)
        bias = np.zeros(MAX_LOGIT_BIAS, np.float32)
        for i, (token, value) in enumerate((params.logit_bias or {}).items()):
            ids[i], bias[i] = token, value
        return SlotRow(counts, pack_bits(allowed), pack_bits(hold), ids, bias)

    def _prompt_rows(self, chunk: Chunk, first: int) -> list[PromptRows]:
        """Blocks of the chunk that predict prompt tokens (the last prompt token predicts none)."""
        seq, size, out = chunk.seq, self.buckets.block, []
        end = min(chunk.start + chunk.count, len(seq.prompt) - 1)
        for start in range(chunk.start, end, size):
            count = min(size, end - start)
            picks = np.minimum(first + start - chunk.start + np.arange(size), first + end - chunk.start - 1)
            targets = np.zeros(size, np.int32)
            targets[:count] = seq.prompt[start + 1 : start + 1 + count]
            out.append(PromptRows(seq, start + 1, picks.astype(np.int32), targets, count))
        return out


def _region(seq: Sequence) -> int:
    """As the step is told: see ``pallas_kernels.resolver``. From then on what is in it is the sequence's."""
    new, seq.region_is_new = seq.region_is_new, False
    return ~seq.region - 1 if new else seq.region


def pack_pairs(pairs: list[tuple[int, int]], size: int) -> list[np.ndarray]:
    """Pairs of pages as blocks of ``size``."""
    blocks = []
    for start in range(0, len(pairs), size):
        block = np.zeros((2, size), np.int32)
        some = pairs[start : start + size]
        block[:, : len(some)] = np.array(some, np.int32).T
        blocks.append(block)
    return blocks


def pack_bits(mask: np.ndarray) -> np.ndarray:
    """Bool ``[V]`` to uint32 words, bit v % 32 of word v // 32."""
    padded = np.pad(mask, (0, -len(mask) % 32))
    return np.packbits(padded, bitorder="little").view(np.uint32)


def banned_tokens(seq: Sequence) -> list[int]:
    """Tokens that would complete a bad word after the sequence's last tokens."""
    banned = []
    for word in seq.bad_words:
        prefix = word[:-1]
        if not prefix or tuple(seq.output[-len(prefix) :]) == prefix:
            banned.append(word[-1])
    return banned
