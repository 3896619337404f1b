"""Which tokens to compute next: continuous batching under a token budget. Policy only; imports no jax.

Every step, running sequences decode first; the prompt budget goes, priority by priority, to prompts already begun, then
to new ones in order of arrival. A new one is admitted when a slot is free and the pages of its whole prompt are; what
the prefix cache knows of it is not computed. One whose next page is just being computed by another waits for that.

Every group of layers has pages of its own. Those of a group with a window go back as soon as what is planned next looks
at them no more: the device runs steps in order, so whoever writes to them does so after the last step that reads them.

A sequence is preempted when another, before it in order, needs a page to go on and none is free, or when one of better
priority waits and does not fit beside it. It gives everything back, and goes on later with what the prefix cache still
has of it; the rest is computed again. Nobody is preempted for one who is later in order, so the first always
progresses. Of several the worst priority goes, and there whoever has been preempted least, then who has least to bring
back. Coming back takes the more free pages the more often one has had to go; and before one has to go for another's
priority again, it must have got on, twice as far each time.
"""

import bisect
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from typing import Literal

from jaxserve.host_tier import Block, Restore
from jaxserve.pages import PagePool
from jaxserve.prefix_cache import Hit, PrefixCache, in_order
from jaxserve.request import FinishReason
from jaxserve.residency import TAIL, Residency
from jaxserve.sequence import Chunk, Sequence, Status, StepPlan

CHEAP, DEAR = 2, 4
"""How fast the room grows that a sequence needs to come back, where its pages are still known, and where not."""
LOOK_AHEAD = 256
"""Waiting sequences that are looked at for one that can go, where those before wait for each other's prompts."""


class Scheduler:
    """Owns the waiting and the running sequences, the slots and the pages.

    ``prompt_tokens`` is the budget of prompt tokens a step, a multiple of ``block``: a chunk occupies whole blocks.
    Of a sequence without a ``chain`` nothing is reused. ``cache`` is over the same pool; by default it has no tiers.
    ``residency`` is there where latents are the host's.
    """

    def __init__(
        self,
        pool: PagePool,
        *,
        max_num_seqs: int,
        prompt_tokens: int,
        block: int,
        cache: PrefixCache | None = None,
        residency: Residency | None = None,
    ):
        self.pool = pool
        self.cache = cache or PrefixCache(pool)
        self.residency = residency
        self.max_num_seqs = max_num_seqs
        self.groups = len(pool.windows)
        self.blocks = prompt_tokens // block
        self.block = block
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.leaving: list[Sequence] = []
        """Finished or preempted while a step in flight still writes to their pages."""
        self.free_slots = list(range(max_num_seqs - 1, -1, -1))
        self.preemptions = 0
        self._coming: dict[bytes, Sequence] = {}
        """Keys of pages that a running sequence is about to compute."""

    @property
    def idle(self) -> bool:
        return not (self.waiting or self.running or self.leaving)

    def add(self, seq: Sequence) -> None:
        bisect.insort(self.waiting, seq, key=lambda s: s.order)

    def schedule(self) -> StepPlan | None:
        """The next step, or None where nothing can run before a step in flight is collected."""
        self.cache.back_up()
        if self.residency is not None:
            self.residency.settle(self.running)
        self._make_way()
        before = self.preemptions
        plan = StepPlan(self._run_on(), [])
        self._prompts(plan, admit=self.preemptions == before)
        self._enter(plan)
        for seq in plan.decodes:
            seq.computed += 1
        for seq in plan.sequences:
            seq.in_flight += 1
        for seq in plan.sampled:
            seq.pending += 1
        if not plan.sequences:
            return None
        plan.spills.extend(self.cache.spills)
        self.cache.spills.clear()
        if self.residency is not None:
            plan.fetches.extend(self.residency.take_fetched())
        return plan

    def _make_way(self) -> None:
        """Preempt running sequences where one of better priority waits, and does not fit beside them."""
        for seq in islice(self.waiting, LOOK_AHEAD):
            if not self.running or seq.priority >= self.running[-1].priority:
                return
            if seq.awaits_mask or (hit := self._match(seq)) is None:
                continue
            for victim in self._in_the_way(seq, hit):
                self._preempt(victim)
            self.cache.let_go(hit.pinned)
            return

    def _in_the_way(self, seq: Sequence, hit: Hit) -> list[Sequence]:
        """Whom of worse priority to preempt so that ``seq`` can be admitted; none where that would not be enough.

        One who has been preempted before must have got on since, twice as far each time, to have to go again.
        """
        better = [other for other in self.running if other.priority <= seq.priority]
        if sum(self._blocks_left(other) for other in better) >= self.blocks:
            return []  # it could not begin in this step
        worse = sorted((other for other in self.running if other.priority > seq.priority), key=_loss, reverse=True)
        may_go = [other for other in worse if other.computed >= other.reached + _earned(other)]
        chosen: list[Sequence] = []
        while True:
            room = self.pool.free + self._given_back([*self.leaving, *chosen])
            slots = len(self.free_slots) + len(self.leaving) + len(chosen)
            # Those who stay get a page each, so that they do not preempt each other at once.
            stay = (len(worse) - len(chosen)) * self.groups
            if slots and room >= self._need(seq, hit) + self._reserve(seq, hit) + stay:
                return chosen
            if not may_go:
                return []
            chosen.append(may_go.pop())

    def _given_back(self, seqs: list[Sequence]) -> int:
        """Pages that become free when all of them go."""
        pages = Counter(page for seq in seqs for page in in_order(seq.pages))
        return sum(self.pool.holders(page) == count for page, count in pages.items())

    def _need(self, seq: Sequence, hit: Hit) -> int:
        """Pages it takes to admit ``seq``: for all that is known of it, and one token."""
        return sum(self._shares(seq, hit)) - len(hit.held)

    def _shares(self, seq: Sequence, hit: Hit) -> list[int]:
        """The same by group, those of the hit among them: behind a window no more than computing ever takes."""
        end = min(len(seq) + 1, seq.limit)
        return self.pool.windows.most(hit.tokens, end, self.blocks * self.block)

    def _reserve(self, seq: Sequence, hit: Hit) -> int:
        """Pages to leave free for those that ``seq`` cannot preempt, so that it does not have to go at once.

        More of them the more often it has been preempted, and the more it costs to bring it back.
        """
        beside = sum(other.priority <= seq.priority for other in self.running)
        cheap = len(seq) - hit.tokens <= self.pool.page_size
        return self.groups * beside * (CHEAP if cheap else DEAR) ** min(seq.preemptions, 8)

    def _run_on(self) -> list[Sequence]:
        """Who decodes; they, and the prompts that have begun, get the pages they need for it."""
        chosen, left = [], self.blocks
        for seq in list(self.running):
            if seq.status is not Status.RUNNING:
                continue
            if seq.prefilling:
                count = min(seq.prefill_end - seq.computed, left * self.block)
                left -= -(-count // self.block)
                if seq.computed + count > seq.room:
                    self._grow(seq, seq.computed, seq.computed + count)
                continue
            planned = len(seq) + seq.pending
            if planned >= seq.limit or (seq.pending and seq.host_driven) or seq.awaits_mask:
                continue  # it ends when collected, or waits for its own last token, or for what may follow that
            if planned <= seq.room or self._grow(seq, seq.computed, planned):
                chosen.append(seq)
        return chosen

    def _grow(self, seq: Sequence, start: int, end: int) -> bool:
        """Give ``seq`` pages for the tokens ``[start, end)``, preempting later ones if need be; those that none of
        them looks at go back. False: it must wait a step."""
        self._shift(seq, start)
        pages = self.pool.pages_for(end)
        needs = [max(0, pages - len(table)) for table in seq.pages]
        need = sum(needs)
        while (fresh := self._take(need)) is None:
            if self.leaving and sum(len(in_order(s.pages)) for s in self.leaving) + self.pool.free >= need:
                return False  # enough comes back when the step in flight is collected
            victim = self._victim(seq)
            self._preempt(victim)
            if victim is seq:
                return False
        for table, count in zip(seq.pages, needs, strict=True):
            table += fresh[:count]
            del fresh[:count]
        seq.room = min(map(len, seq.pages)) * self.pool.page_size
        if self.residency is not None:
            self.residency.grow(seq, need)
        return True

    def _take(self, need: int) -> list[int] | None:
        """Pages that the devices have room for, or None."""
        if self.residency is not None and not self.residency.make_room(need, self.running):
            return None
        return self.pool.take(need)

    def _shift(self, seq: Sequence, position: int) -> None:
        """Give back the pages that no token from ``position`` on looks at."""
        for group, table in enumerate(seq.pages):
            behind, first = seq.behind[group], self.pool.windows.first(group, position)
            if behind < first:
                self.cache.let_go(table[behind:first])
                table[behind:first] = [0] * (first - behind)
                seq.behind[group] = first

    def _victim(self, needy: Sequence) -> Sequence:
        """Who gives way: one after ``needy`` in order, or ``needy`` itself where there is none."""
        return min(self.running[self.running.index(needy) + 1 :] or [needy], key=_loss)

    def _preempt(self, seq: Sequence) -> None:
        self.running.remove(seq)
        self.preemptions += 1
        seq.preemptions += 1
        seq.reached = max(seq.reached, seq.computed)
        seq.status = Status.WAITING
        if seq.in_flight:
            self.leaving.append(seq)  # joins the waiting when its token has come
        else:
            self._release(seq)
            self.add(seq)

    def _prompts(self, plan: StepPlan, *, admit: bool) -> None:
        """Fill the budget with prompts that have begun, then with those of new sequences, priority by priority."""
        begun = [seq for seq in self.running if seq.prefilling]
        new = list(islice(self.waiting, LOOK_AHEAD)) if admit and self.free_slots else []
        left = self.blocks
        for seq in sorted(begun + new, key=lambda s: (s.priority, s.status is Status.WAITING)):
            if not left:
                break
            if seq.status is Status.RUNNING:
                left -= self._chunk(seq, left, plan.chunks)
            elif admit and self.free_slots and not seq.awaits_mask and (hit := self._match(seq)) is not None:
                admit = self._admit(seq, hit, plan)  # nobody overtakes one there is no room for
                if admit:
                    left -= self._chunk(seq, left, plan.chunks, first=True)
        for page, _ in plan.copies:
            self.cache.let_go([page])

    def _blocks_left(self, seq: Sequence) -> int:
        """Blocks of prompt tokens that are still to be computed."""
        return -(-max(0, seq.prefill_end - seq.computed) // self.block)

    def _chunk(self, seq: Sequence, blocks: int, chunks: list[Chunk], *, first: bool = False) -> int:
        """Plan the next chunk of ``seq`` in at most ``blocks`` blocks, as far as it has pages; returns how many it
        takes."""
        count = min(seq.prefill_end, seq.room, seq.computed + blocks * self.block) - seq.computed
        if self.residency is not None and seq.region >= 0:
            count = min(count, self.residency.shape.chunk)
        if count <= 0:
            return 0
        if self.residency is not None:
            self.residency.computing.add(seq)
        start, seq.computed = seq.computed, seq.computed + count
        chunks.append(Chunk(seq, start, count, final=not seq.prefilling, first=first))
        return -(-count // self.block)

    def _admit(self, seq: Sequence, hit: Hit, plan: StepPlan) -> bool:
        """Let ``seq`` in if there are pages for it."""
        reserve = self._reserve(seq, hit)
        if self._need(seq, hit) + reserve > self.pool.free and not (self.running or self.leaving):
            hit, reserve = self._without_copies(seq, hit), 0
        need = self._need(seq, hit)
        place = self._place(hit, need) if need + reserve <= self.pool.free else None
        if place is None:
            self.cache.let_go(hit.pinned)
            return False
        pages = self.pool.take(need) or []
        self.waiting.remove(seq)
        if not seq.preemptions:
            seq.cached = hit.tokens
        seq.loaded, seq.fetched = _sources(hit), False
        self._fill(seq, hit, pages, plan)
        if self.residency is not None:
            self.residency.enter(seq, hit, host_backed=place == "host")
        seq.slot = self.free_slots.pop()
        seq.status, seq.computed, seq.prefill_end = Status.RUNNING, hit.tokens, len(seq)
        bisect.insort(self.running, seq, key=lambda s: s.order)
        for key in self._keys(seq, hit.tokens // self.pool.page_size):
            self._coming.setdefault(key, seq)
        return True

    def _place(self, hit: Hit, need: int) -> Literal["device", "host"] | None:
        """Where a sequence with so many pages beside those of its hit can begin; None: nowhere yet."""
        if self.residency is None:
            return "device"
        if need + len(hit.held) <= self.residency.usable:
            return "device" if self.residency.make_room(need, self.running, hit.held) else None
        return "host" if self.residency.make_room(TAIL, self.running) and self.residency.has_region else None

    def _fill(self, seq: Sequence, hit: Hit, fresh: list[int], plan: StepPlan) -> None:
        """Give ``seq`` the pages of its hit, and ``fresh`` ones, which the plan fills if it can."""
        fresh = fresh[::-1]
        seq.pages, seq.behind = [], []
        for group, (known, share) in enumerate(zip(hit.pages, self._shares(seq, hit), strict=True)):
            behind = self.pool.windows.first(group, hit.tokens)
            more = behind + share - len(known)
            seq.pages.append([*known[:behind], *(page or fresh.pop() for page in known[behind:])])
            seq.pages[group] += [fresh.pop() for _ in range(more)]
            seq.behind.append(behind)
        seq.room = min(map(len, seq.pages)) * self.pool.page_size
        restores: dict[Block, Restore] = {}
        for load in hit.loads:
            block = load.block
            if block not in restores:
                restores[block] = Restore(block, [0] * len(block.keys))
            restores[block].pages[load.record] = seq.pages[load.group][load.number]
        plan.restores.extend(restores.values())
        for block in restores:
            block.source = "host"  # the next time
        if self.cache.tier is not None:
            self.cache.tier.counts.restored += len(hit.loads)
        for group, page in hit.copies:
            plan.copies.append((page, seq.pages[group][hit.tokens // self.pool.page_size]))

    def _without_copies(self, seq: Sequence, hit: Hit) -> Hit:
        """The whole pages of a hit: pages to copy would be in the way of one that needs all there are."""
        if not hit.copies or seq.chain is None:
            return hit
        self.cache.let_go(hit.pinned)
        return self.cache.match(seq.chain, seq.text, hit.tokens, tails=False)

    def _match(self, seq: Sequence) -> Hit | None:
        """What is known of ``seq``, its last token apart; None where what comes next is just being computed or read."""
        if seq.chain is None:
            return Hit(0, [[] for _ in range(self.groups)])
        text = seq.text
        whole = seq.params.prompt_logprobs is not None  # all of it has to be computed
        hit = self.cache.match(seq.chain, text, 0 if whole else len(text) - 1)
        if not whole and next(self._keys(seq, hit.tokens // self.pool.page_size), None) in self._coming:
            self.cache.let_go(hit.pinned)
            return None
        if hit.beyond and self._reading(seq, hit.beyond):
            self.cache.let_go(hit.pinned)
            return None
        return hit

    def _reading(self, seq: Sequence, keys: list[bytes]) -> bool:
        """Whether ``seq`` has to wait for records on their way from a store. It asks for some once an admission."""
        stores, tier = self.cache.stores, self.cache.tier
        if stores is None or tier is None:
            return False
        if not seq.fetched:
            missing = [key for key in keys if key not in stores.reading]
            if stores.reading and len(stores.reading) + len(missing) > tier.capacity // 2:
                return True  # what comes must not drive out what has just come
            seq.fetched = True
            if missing:
                stores.fetch(missing)
        return any(key in stores.reading for key in keys)

    def _keys(self, seq: Sequence, page: int) -> Iterator[bytes]:
        """Keys of the pages of ``seq`` from number ``page`` on, the last one as far as it is filled."""
        if seq.chain is not None:
            yield from self.cache.keys(seq.chain, seq.text, page)

    def _enter(self, plan: StepPlan) -> None:
        """The step's prompt tokens are known from the next plan on."""
        for chunk in plan.chunks:
            seq = chunk.seq
            if seq.chain is None:
                continue
            self.cache.enter(seq.chain, seq.text, seq.pages, seq.computed, tail=chunk.final)
            if chunk.final:
                self._computed(seq)

    def _enter_output(self, seq: Sequence) -> None:
        """A running sequence's output is known too, a page at a time."""
        if seq.chain is None or seq.status is not Status.RUNNING or seq.prefilling:
            return
        computed = min(seq.computed, len(seq))
        if computed // self.pool.page_size > seq.chain.entered:
            self.cache.enter(seq.chain, seq.text, seq.pages, computed, tail=False)

    def _computed(self, seq: Sequence) -> None:
        """Nobody waits for ``seq`` any more."""
        for key in [key for key, by in self._coming.items() if by is seq]:
            del self._coming[key]

    def collected(self, plan: StepPlan) -> None:
        """A step has come back and its tokens have been dealt with: what was held for it goes back."""
        for seq in plan.sampled:
            seq.pending -= 1
            self._enter_output(seq)
        for seq in plan.sequences:
            seq.in_flight -= 1
            if not seq.in_flight and seq in self.leaving:
                self._release(seq)
                self.leaving.remove(seq)
                if seq.status is Status.WAITING:
                    self.add(seq)

    def finish(self, seq: Sequence, reason: FinishReason, stop_reason: int | str | None = None) -> None:
        """End ``seq`` in whatever state; its pages and slot go back now, or when no step in flight touches them."""
        if seq.finished:
            return
        if seq.status is Status.RUNNING:
            if seq.in_flight:
                self.leaving.append(seq)
            else:
                self._release(seq)
            self.running.remove(seq)
        elif seq in self.waiting:
            self.waiting.remove(seq)
        seq.status, seq.finish_reason, seq.stop_reason = Status.FINISHED, reason, stop_reason

    def distrust(self, seq: Sequence) -> None:
        """Nothing that ``seq`` has computed is to be reused."""
        for page in in_order(seq.pages):
            self.cache.forget(page)
        self._computed(seq)
        seq.chain = None

    def _release(self, seq: Sequence) -> None:
        if self.residency is not None:
            self.residency.leave(seq)
        if seq.chain is not None:
            self._computed(seq)
            returns = seq.status is Status.WAITING
            self.cache.leave(seq.chain, seq.text, seq.pages, min(seq.computed, len(seq)), returns=returns)
        else:
            self.pool.give(in_order(seq.pages))
        self.free_slots.append(seq.slot)
        seq.pages, seq.behind, seq.room = [], [], 0
        seq.slot, seq.computed, seq.prefill_end = -1, 0, 0

    def check(self) -> None:
        """Raise AssertionError unless every page and slot is either free or held by exactly one sequence."""
        holders = self.running + self.leaving
        self.pool.check(page for seq in holders for page in in_order(seq.pages))
        self.cache.check()
        if self.residency is not None:
            self.residency.check(holders)
        slots = sorted([*self.free_slots, *(seq.slot for seq in holders)])
        if slots != list(range(self.max_num_seqs)):
            raise AssertionError(f"slots {slots} are not 0 .. {self.max_num_seqs - 1}")


def _sources(hit: Hit) -> Counter[str]:
    """Pages of the text by where they came from: what some group has loaded has come from there."""
    return Counter({load.number: load.block.source for load in hit.loads}.values())


def _loss(seq: Sequence) -> tuple[int, ...]:
    """Lower is preempted first: the worst priority, who has been preempted least, who has least to bring back."""
    return (-seq.priority, seq.preemptions, seq.computed, -seq.arrival, -seq.index)


def _earned(seq: Sequence) -> int:
    """Tokens it has to get on by, beyond what it had reached, before it may be preempted for another's priority."""
    return 8 * 2**seq.preemptions if seq.preemptions else 0
