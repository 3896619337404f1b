"""Which tokens to compute next: continuous batching under a token budget. Policy only; imports no jax.

Every step, running sequences decode first; what is left of the prompt budget goes to prompts already begun, then to new
ones, in order of (priority, arrival). A new one is admitted when a slot is free and the pages of its whole prompt are.
When a running sequence needs a page and none is free, the one last in order is preempted: it gives everything back and
is computed again later, its tokens kept. The first in order is never preempted, so something always progresses.
"""

import bisect

from jaxserve.pages import PagePool
from jaxserve.request import FinishReason
from jaxserve.sequence import Chunk, Sequence, Status, StepPlan


class Scheduler:
    """Owns the waiting and the running sequences, the slots and the pages.

    ``prompt_tokens`` is the budget of prompt tokens a step, a multiple of ``block``: a chunk occupies whole blocks.
    """

    def __init__(self, pool: PagePool, *, max_num_seqs: int, prompt_tokens: int, block: int):
        self.pool = pool
        self.max_num_seqs = max_num_seqs
        self.blocks = prompt_tokens // block
        self.block = block
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.leaving: list[Sequence] = []
        """Finished or preempted while a step in flight still writes to their pages."""
        self.free_slots = list(range(max_num_seqs - 1, -1, -1))
        self.preemptions = 0

    @property
    def idle(self) -> bool:
        return not (self.waiting or self.running or self.leaving)

    def add(self, seq: Sequence) -> None:
        bisect.insort(self.waiting, seq, key=lambda s: s.order)

    def schedule(self) -> StepPlan | None:
        """The next step, or None where nothing can run before a step in flight is collected."""
        before = self.preemptions
        decodes = self._decodes()
        chunks = self._continue_prompts()
        if self.preemptions == before:
            self._admit(chunks)
        plan = StepPlan(decodes, chunks)
        for seq in plan.decodes:
            seq.computed += 1
        for seq in plan.sequences:
            seq.in_flight += 1
        for seq in plan.sampled:
            seq.pending += 1
        return plan if decodes or chunks else None

    def _decodes(self) -> list[Sequence]:
        chosen = []
        for seq in list(self.running):
            if seq.status is not Status.RUNNING or seq.prefilling:
                continue
            planned = len(seq) + seq.pending
            if planned >= seq.limit or (seq.pending and seq.host_driven) or seq.awaits_mask:
                continue  # it ends when collected, or waits for its own last token, or for what may follow that
            if self._grow(seq, planned):
                chosen.append(seq)
        return chosen

    def _grow(self, seq: Sequence, tokens: int) -> bool:
        """Give ``seq`` pages for ``tokens`` tokens, preempting later ones if need be. False: it must wait a step."""
        need = self.pool.pages_for(tokens) - len(seq.pages)
        if need <= 0:
            return True
        while (pages := self.pool.take(need)) is None:
            if sum(len(s.pages) for s in self.leaving) + self.pool.free >= need:
                return False  # enough comes back when the step in flight is collected
            victim = self.running[-1]
            self._preempt(victim)
            if victim is seq:
                return False
        seq.pages += pages
        return True

    def _preempt(self, seq: Sequence) -> None:
        self.running.remove(seq)
        self.preemptions += 1
        seq.preemptions += 1
        seq.status = Status.WAITING
        if seq.in_flight:
            self.leaving.append(seq)  # joins the waiting when its token has come
        else:
            self._release(seq)
            self.add(seq)

    def _continue_prompts(self) -> list[Chunk]:
        chunks: list[Chunk] = []
        left = self.blocks
        for seq in self.running:
            if seq.prefilling and left:
                left -= self._chunk(seq, left, chunks)
        return chunks

    def _chunk(self, seq: Sequence, blocks: int, chunks: list[Chunk]) -> int:
        """Plan the next chunk of ``seq`` in at most ``blocks`` blocks; returns how many it takes.

        The last chunk chooses a token, so it waits where the sequence's mask is not there yet.
        """
        left = seq.prefill_end - seq.computed
        count = min(left, blocks * self.block)
        if count == left and seq.awaits_mask:
            return 0
        start, seq.computed = seq.computed, seq.computed + count
        chunks.append(Chunk(seq, start, count, final=not seq.prefilling))
        return -(-count // self.block)

    def _admit(self, chunks: list[Chunk]) -> None:
        left = self.blocks - sum(-(-chunk.count // self.block) for chunk in chunks)
        while self.waiting and left and self.free_slots:
            seq = self.waiting[0]
            reserve = len(self.running)  # a page for each to go on with, so that admission does not preempt at once
            need = self.pool.pages_for(min(len(seq) + 1, seq.limit))
            if need + (reserve if self.running else 0) > self.pool.free and (self.running or self.leaving):
                return
            pages = self.pool.take(need)
            if pages is None:
                return
            self.waiting.pop(0)
            seq.pages, seq.slot = pages, self.free_slots.pop()
            seq.status, seq.computed, seq.prefill_end = Status.RUNNING, 0, len(seq)
            bisect.insort(self.running, seq, key=lambda s: s.order)
            left -= self._chunk(seq, left, chunks)

    def collected(self, plan: StepPlan) -> None:
        """A step has come back and its tokens have been dealt with: what was held for it goes back."""
        for seq in plan.sampled:
            seq.pending -= 1
        for seq in plan.sequences:
            seq.in_flight -= 1
            if not seq.in_flight and seq in self.leaving:
                self.leaving.remove(seq)
                self._release(seq)
                if seq.status is Status.WAITING:
                    self.add(seq)

    def finish(self, seq: Sequence, reason: FinishReason, stop_reason: int | str | None = None) -> None:
        """End ``seq`` in whatever state; its pages and slot go back now, or when no step in flight touches them."""
        if seq.finished:
            return
        if seq.status is Status.RUNNING:
            self.running.remove(seq)
            if seq.in_flight:
                self.leaving.append(seq)
            else:
                self._release(seq)
        elif seq in self.waiting:
            self.waiting.remove(seq)
        seq.status, seq.finish_reason, seq.stop_reason = Status.FINISHED, reason, stop_reason

    def _release(self, seq: Sequence) -> None:
        self.pool.give(seq.pages)
        self.free_slots.append(seq.slot)
        seq.pages, seq.slot, seq.computed, seq.prefill_end = [], -1, 0, 0

    def check(self) -> None:
        """Raise AssertionError unless every page and slot is either free or held by exactly one sequence."""
        holders = self.running + self.leaving
        self.pool.check(page for seq in holders for page in seq.pages)
        slots = sorted([*self.free_slots, *(seq.slot for seq in holders)])
        if slots != list(range(self.max_num_seqs)):
            raise AssertionError(f"slots {slots} are not 0 .. {self.max_num_seqs - 1}")
