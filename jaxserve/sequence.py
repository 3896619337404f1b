"""A request inside the engine: one ``Sequence`` a completion, and where it stands. Imports no jax."""

import enum
import time
from dataclasses import dataclass, field

from jaxserve.constraint import Constraint
from jaxserve.host_tier import Restore, Spill
from jaxserve.prefix_cache import Chain
from jaxserve.request import FinishReason, SamplingParams, TokenLogprob, Watermark
from jaxserve.watermark.config import Mark


class Status(enum.Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Sequence:
    """One completion of one prompt.

    ``computed`` counts positions whose KV is in the cache or on its way there, ``in_flight`` the steps that touch it
    and are not collected yet, ``pending`` the tokens they will bring. It holds ``slot`` and ``pages`` while RUNNING,
    and afterwards until nothing is in flight.
    """

    request_id: str
    index: int
    prompt: list[int]
    params: SamplingParams
    seed: int
    limit: int
    """Most tokens, prompt and output."""
    bad_words: tuple[tuple[int, ...], ...] = ()
    """The token sequences that ``params.bad_words`` stand for."""
    constraint: Constraint | None = None
    """Where it stands in the language of ``params.structured_outputs``."""
    priority: int = 0
    mark: Mark | None = None
    """What marks it; None: nothing does."""
    watermark: Watermark | None = None
    """What is said of its mark; None where the engine has none."""
    chain: Chain | None = None
    """The keys of its pages; None where nothing of it is reused."""
    arrival: int = 0
    arrived_at: float = field(default_factory=time.monotonic)
    output: list[int] = field(default_factory=list)
    status: Status = Status.WAITING
    slot: int = -1
    pages: list[list[int]] = field(default_factory=list)
    """For each group of layers, in the order of the text; 0 where the page lies behind the group's window."""
    behind: list[int] = field(default_factory=list)
    """How many those are, all at the beginning."""
    room: int = 0
    """Tokens that all groups have pages for."""
    region: int = -1
    """Where its latents are the host's: the buffer it reads them through; -1 while the devices have them all."""
    region_is_new: bool = False
    """What is in the buffer is another's."""
    host_from: int = 0
    """How many of its pages, from the first, it does not need on the devices."""
    computed: int = 0
    prefill_end: int = 0
    """Prompt (and, after a preemption, output) tokens that are prefilled in chunks before decoding goes on."""
    cached: int = 0
    """Prompt tokens that were known when it was first admitted."""
    loaded: dict[str, int] = field(default_factory=dict)
    """Pages that did not come from the device when it was last admitted, by where they came from."""
    fetched: bool = False
    """It has asked for what the stores have of it, and not been admitted since."""
    reached: int = 0
    """The most tokens it had computed when it was preempted."""
    in_flight: int = 0
    pending: int = 0
    preemptions: int = 0
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    admitted_at: float | None = None
    first_token_at: float | None = None
    last_token_at: float | None = None
    prompt_logprobs: list[TokenLogprob | None] | None = None

    def __len__(self) -> int:
        """Tokens known: prompt and collected output."""
        return len(self.prompt) + len(self.output)

    @property
    def order(self) -> tuple[int, int, int]:
        """Lower goes first: priority, then arrival."""
        return (self.priority, self.arrival, self.index)

    @property
    def prefilling(self) -> bool:
        return self.computed < self.prefill_end

    @property
    def finished(self) -> bool:
        return self.status is Status.FINISHED

    @property
    def host_driven(self) -> bool:
        """True where the next token's bans depend on the last token, so that steps cannot run ahead of the host."""
        return bool(self.params.bad_words) or self.constraint is not None

    @property
    def awaits_mask(self) -> bool:
        """True while the mask of its next token is being computed: it can choose no token."""
        return self.constraint is not None and self.constraint.mask is None

    @property
    def text(self) -> list[int]:
        """All tokens known. Not to be changed."""
        return self.prompt + self.output if self.output else self.prompt

    def tokens(self, start: int, stop: int) -> list[int]:
        """Known tokens at positions ``[start, stop)``."""
        edge = len(self.prompt)
        if stop <= edge:
            return self.prompt[start:stop]
        if start >= edge:
            return self.output[start - edge : stop - edge]
        return self.prompt[start:] + self.output[: stop - edge]


@dataclass(frozen=True, slots=True)
class Chunk:
    """Prompt tokens ``[start, start + count)`` of a sequence to compute in a step; ``final`` chunks sample a token."""

    seq: Sequence
    start: int
    count: int
    final: bool
    first: bool
    """The sequence has been admitted with it."""


@dataclass(frozen=True, slots=True)
class StepPlan:
    """The host's decision for one step: sequences that decode one token, and chunks of prompts.

    Before all else, pages are spilled to the host, others restored from there, and others copied: (from, to) each.
    """

    decodes: list[Sequence]
    chunks: list[Chunk]
    spills: list[Spill] = field(default_factory=list)
    restores: list[Restore] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)
    fetches: list[tuple[int, int]] = field(default_factory=list)
    """Pages and the frames on the devices that get their latents from the host, after all that (see ``residency``)."""

    @property
    def sampled(self) -> list[Sequence]:
        """Sequences that get a token from this step, in the order of the sampling rows."""
        return self.decodes + [chunk.seq for chunk in self.chunks if chunk.final]

    @property
    def tokens(self) -> int:
        return len(self.decodes) + sum(chunk.count for chunk in self.chunks)

    @property
    def sequences(self) -> list[Sequence]:
        return self.decodes + [chunk.seq for chunk in self.chunks]
