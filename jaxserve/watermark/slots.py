"""The host's side of marking: what a step uploads for its marked rows, and what a slot remembers when it is taken anew.

Contexts that have been used are remembered per slot in a table of buckets of WAYS entries, each a tag of 32 bits and
the stamp of its last use; the newest WAYS of a bucket stay. Stamps only grow while a slot lives, so that what its
former owners left is older than all that counts, and nothing has to be wiped. Imports no jax.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from jaxserve.sequence import Sequence
from jaxserve.watermark import prf as prfs
from jaxserve.watermark.config import WatermarkConfig

WAYS = 8
LAST_STAMP = 1 << 31
"""A slot whose stamps have come this far starts again with an empty table."""
FIELDS = ("marked", "generated", "stamp", "oldest", "alpha")
ROW = len(FIELDS) + 2 * prfs.WORDS
"""Columns of a packed row: FIELDS, then the prepared keys A and B."""


@dataclass(frozen=True)
class MarkSpec:
    """What the programs that mark depend on. No key is part of it."""

    prf: str
    width: int
    dual: bool
    history: int
    """Contexts that are remembered; 0: none."""
    after_prompt: bool
    """Contexts that reach before the generation are not marked, and those of the prompt count as used."""

    @classmethod
    def of(cls, config: WatermarkConfig, max_model_len: int) -> "MarkSpec":
        most = config.deduplicate_contexts_max_history or max_model_len
        history = 0 if config.deduplicate_contexts == "none" else min(most, max_model_len)
        after_prompt = config.deduplicate_contexts == "all"
        return cls(config.prf, config.context_width, config.dual, history, after_prompt)

    @property
    def buckets(self) -> int:
        """A power of two, two contexts a bucket when the history is full: one in 4,000 buckets then overflows."""
        return 1 << max(0, (self.history - 1) // 2).bit_length()


class MarkRow(NamedTuple):
    """One slot's state in the shapes of ``marking.MarkState``, without the slot dimension."""

    context: np.ndarray
    table: np.ndarray


class MarkSlots:
    """Keeps the marked rows of every slot; ``slots`` counts the dump in."""

    def __init__(self, spec: MarkSpec, slots: int, alpha: float | None = None):
        self.spec = spec
        self.rows = np.zeros((slots, ROW), np.uint32)
        self.rows[:, FIELDS.index("alpha")] = np.float32(alpha or 0).view(np.uint32)
        self.prompt = np.zeros(slots, np.int64)
        self.base = np.ones(slots, np.int64)
        self.next = np.ones(slots, np.int64)
        """The first stamp that has not been given to anyone."""

    def admit(self, seq: Sequence) -> MarkRow | None:
        """A sequence has taken its slot. Returns what must be uploaded: nothing, for most."""
        slot, mark = seq.slot, seq.mark
        self.rows[slot, 0] = mark is not None
        if mark is None:
            return None
        self.rows[slot, len(FIELDS) :] = mark.words.ravel()
        self.prompt[slot] = len(seq.prompt)
        wiped = self.next[slot] > LAST_STAMP
        self.base[slot] = self.next[slot] = 1 if wiped else self.next[slot]
        if seq.output or self.spec.after_prompt or wiped:
            return MarkRow(self._context(seq), self._table(seq, int(self.base[slot])))
        return None

    def pack(self, slots: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """uint32 ``[S, ROW]`` for tokens at these positions of the slots' sequences."""
        out = self.rows[slots]
        stamp = self.base[slots] + positions
        out[:, 1] = np.clip(positions - self.prompt[slots], 0, self.spec.width)
        out[:, 2] = stamp
        out[:, 3] = np.maximum(self.base[slots], stamp - self.spec.history)
        np.maximum.at(self.next, slots, stamp + 1)
        return out

    def _context(self, seq: Sequence) -> np.ndarray:
        width = self.spec.width
        return prfs.as_context(([-1] * width + seq.output)[-width:])

    def _table(self, seq: Sequence, base: int) -> np.ndarray:
        """What the device would remember of the sequence had it run without a break: uint32 ``[buckets, 2 * WAYS]``."""
        spec, mark = self.spec, seq.mark
        assert mark is not None
        table = np.zeros((spec.buckets, WAYS, 2), np.uint32)
        contexts, positions = used_contexts(seq, spec)
        contexts, positions = contexts[-spec.history :], positions[-spec.history :]
        if spec.history and len(contexts):
            keys = np.broadcast_to(mark.words[0][:, None], (prfs.WORDS, len(contexts)))
            bucket, tag = prfs.context_tag(spec.prf, prfs.context_words(spec.prf, keys, contexts.T))
            bucket = bucket % np.uint32(spec.buckets)
            # The last use of each context, newest first within its bucket: its place there is its rank.
            order = np.lexsort((-positions, bucket))
            pairs = bucket[order].astype(np.uint64) << np.uint64(32) | tag[order]
            _, first = np.unique(pairs, return_index=True)
            order = order[np.sort(first)]
            buckets = bucket[order]
            rank = np.arange(len(order)) - np.searchsorted(buckets, buckets)
            kept = order[rank < WAYS]
            table[bucket[kept], rank[rank < WAYS]] = np.stack([tag[kept], base + positions[kept]], axis=-1)
        return table.reshape(spec.buckets, 2 * WAYS)


def used_contexts(seq: Sequence, spec: MarkSpec) -> tuple[np.ndarray, np.ndarray]:
    """Contexts ``[N, W]`` that count as used before the sequence's next token, and the positions of their uses."""
    width, prompt = spec.width, len(seq.prompt)
    parts = []
    if spec.after_prompt and prompt >= width:
        windows = np.lib.stride_tricks.sliding_window_view(prfs.as_context(seq.prompt), width)
        parts.append((windows, np.arange(width, prompt + 1)))
    if seq.output:
        text = prfs.as_context([-1] * width + seq.output[:-1])
        windows = np.lib.stride_tricks.sliding_window_view(text, width)
        parts.append((windows, prompt + np.arange(len(seq.output))))
    if not parts:
        return np.zeros((0, width), np.uint32), np.zeros(0, np.int64)
    return np.concatenate([c for c, _ in parts]), np.concatenate([p for _, p in parts])
