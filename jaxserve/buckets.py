"""Every static shape the engine may run. Imports no jax.

A step is a ``StepBucket``: decode rows and blocks of prompt tokens. Rows that sample are counted by a ladder of their
own, since the head and the sampler do not care where a row came from.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, order=True)
class StepBucket:
    """``decodes`` rows of one token and ``blocks`` blocks of ``block`` prompt tokens."""

    decodes: int
    blocks: int
    block: int

    @property
    def rows(self) -> int:
        """N: rows with a page table."""
        return self.decodes + self.blocks

    @property
    def tokens(self) -> int:
        """T: tokens in the step."""
        return self.decodes + self.blocks * self.block

    def __str__(self) -> str:
        return f"{self.decodes}+{self.blocks}x{self.block}"


def ladder(top: int, factor: int = 2, start: int = 1) -> tuple[int, ...]:
    """``start``, then powers of ``factor`` above it, up to and including ``top``."""
    steps = [start]
    while steps[-1] < top:
        steps.append(min(steps[-1] * factor, top))
    return tuple(steps)


def pad_to(size: int, steps: Sequence[int]) -> int:
    """The smallest step that holds ``size``. Raises ValueError where none does."""
    for step in steps:
        if size <= step:
            return step
    raise ValueError(f"{size} exceeds the largest bucket {steps[-1]}")


@dataclass(frozen=True)
class Buckets:
    """The shapes of one engine, all of them compiled before it is ready."""

    decodes: tuple[int, ...]
    """Rows of a step without prompt tokens."""
    mixed: tuple[int, ...]
    """Decode rows of a step with prompt tokens: coarser, since the prompt dominates the step."""
    blocks: tuple[int, ...]
    block: int
    samples: tuple[int, ...]
    masks: tuple[int, ...]
    """Slots whose masks are replaced before a step."""

    @classmethod
    def make(cls, max_num_seqs: int, max_num_batched_tokens: int, block: int = 32) -> "Buckets":
        most_blocks = max(1, max_num_batched_tokens // block)
        decodes = ladder(max_num_seqs)
        mixed = (0, *(m for m in ladder(max_num_seqs, 4, min(4, max_num_seqs))))
        return cls(decodes, mixed, ladder(most_blocks, 4), block, ladder(max_num_seqs), ladder(max_num_seqs, 4))

    @property
    def max_prompt_tokens(self) -> int:
        return self.blocks[-1] * self.block

    def step(self, decodes: int, blocks: int) -> StepBucket:
        """The smallest bucket that holds this many decode rows and prompt blocks."""
        if blocks == 0:
            return StepBucket(pad_to(decodes, self.decodes), 0, self.block)
        return StepBucket(pad_to(decodes, self.mixed), pad_to(blocks, self.blocks), self.block)

    def steps(self) -> list[StepBucket]:
        """Every step shape."""
        decode = [StepBucket(d, 0, self.block) for d in self.decodes]
        return decode + [StepBucket(d, b, self.block) for b in self.blocks for d in self.mixed]

    def sample_rows(self, bucket: StepBucket) -> int:
        """Rows the head computes after a step: enough for every decode row and a last token in every block."""
        return pad_to(min(bucket.rows, self.samples[-1]), self.samples)
