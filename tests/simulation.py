"""The engine's loop over a simulated device, for tests of the scheduler: it asserts the invariants at every turn."""

from collections import deque
from dataclasses import dataclass, field

import numpy as np
from memory_stores import MemoryStores

from jaxserve.constraint import Constraint, Mask
from jaxserve.host_tier import HostTier
from jaxserve.pages import PagePool
from jaxserve.prefix_cache import PrefixCache, in_order
from jaxserve.request import SamplingParams
from jaxserve.residency import HotShape, Residency
from jaxserve.scheduler import Scheduler
from jaxserve.sequence import Sequence, Status, StepPlan

BLOCK = 4


def sequence(prompt: int, limit: int, *, arrival: int = 0, priority: int = 0, bad_words: bool = False) -> Sequence:
    params = SamplingParams(bad_words=["x"] if bad_words else ())
    ids = [word(arrival, i) for i in range(prompt)]
    return Sequence(f"r{arrival}", 0, ids, params, seed=0, limit=limit, priority=priority, arrival=arrival)


def word(topic: int, position: int) -> int:
    """What a text on ``topic`` says at a position: the simulated model's only output."""
    return topic * 1000 + position


@dataclass(frozen=True)
class Wish:
    """A request of the simulation, by turns of the loop."""

    prompt: int
    output: int
    turn: int = 0
    priority: int = 0
    abort_after: int | None = None
    stops_at: int | None = None
    bad_words: bool = False
    mask_turns: int | None = None
    """Turns that each mask of its grammar takes; None where it has no grammar."""
    topic: int | None = None
    """Requests on one topic have the same text, as far as it goes; None is a topic of its own."""


class NoMatcher:
    """The simulation lets masks come by itself."""

    def advance(self, token: int) -> Mask:
        raise AssertionError("nobody advances it")


MASK = Mask(np.zeros(1, np.uint32))


@dataclass
class World:
    """The engine's loop over a device of dictionaries, asserting the invariants at every turn."""

    pages: int
    page_size: int
    slots: int
    blocks: int
    depth: int
    reuse: bool = True
    records: int = 0
    """Pages that the host tier holds."""
    disk: int = 0
    """Pages that the last store holds, where there is a host tier."""
    near: bool = False
    """Whether there is a faster one before it."""
    disk_turns: int = 0
    """Turns that a read takes."""
    windows: tuple[int | None, ...] = (None,)
    """Of the groups of layers."""
    hot: HotShape | None = None
    """What the devices hold, where all pages are the host's."""
    frames: dict[tuple[int, int], tuple[int, int, int]] = field(default_factory=dict)
    """(frame, offset) -> what ``kv`` has for its page."""
    kv: dict[tuple[int, int], tuple[int, int, int]] = field(default_factory=dict)
    """(page, offset) -> (group, position, token)."""
    last_token: dict[int, int] = field(default_factory=dict)
    flight: deque = field(default_factory=deque)
    covered: dict[tuple[int, int], int] = field(default_factory=dict)
    """(arrival, preemptions) -> prompt tokens planned so far."""
    awaited: dict[int, int] = field(default_factory=dict)
    """Arrival of a sequence -> turns until its mask is there."""

    prompt_tokens: int = 0
    now: int = 0
    """The turn."""
    began: dict[int, int] = field(default_factory=dict)
    """Arrival of a sequence -> the turn in which its first token was planned."""
    preempted: dict[int, list[int]] = field(default_factory=dict)
    """Arrival of a sequence -> the turns in which it was preempted."""

    def __post_init__(self) -> None:
        pool = PagePool(self.pages + 1, self.page_size, self.windows)
        self.most = [0] * len(self.windows)
        """Pages that a sequence has held at once, by group."""
        self.tier = HostTier(self.records, 1)
        stores = [("sidecar", {}), ("disk", {})] if self.near else [("disk", {})]
        self.store = MemoryStores(self.disk, *stores, near=self.near) if self.disk and self.records else None
        self.cache = PrefixCache(pool, "", self.tier if self.records else None, self.store) if self.reuse else None
        self.waited = 0
        limits = {"max_num_seqs": self.slots, "prompt_tokens": self.blocks * BLOCK, "block": BLOCK}
        self.residency = None if self.hot is None else Residency(self.hot, self.pages + 1, self.page_size)
        self.scheduler = Scheduler(pool, **limits, cache=self.cache, residency=self.residency)

    def run(self, wishes: list[Wish]) -> list[Sequence]:
        everything = self.pages * self.page_size
        longest = self.scheduler.pool.windows.longest(self.pages, self.blocks * BLOCK, everything)
        assert longest > 0, "not even one token fits"
        seqs = []
        for arrival, wish in enumerate(wishes):
            prompt = min(wish.prompt, longest)
            limit = min(prompt + wish.output, longest)
            seq = sequence(prompt, limit, arrival=arrival, priority=wish.priority, bad_words=wish.bad_words)
            seq.prompt = [word(topic_of(arrival, wish), i) for i in range(prompt)]
            seq.chain = self.cache.chain(seq.prompt) if self.cache else None
            if wish.mask_turns is not None:
                seq.constraint = Constraint(NoMatcher(), MASK)
            seqs.append(seq)
        self.wishes, self.seqs = wishes, seqs
        turns = sum(4 * len(s.prompt) + 4 * (s.limit - len(s.prompt)) for s in seqs) * 4 + 100
        turns += sum((wish.mask_turns or 0) * (wish.output + 1) for wish in wishes)
        for turn in range(turns):
            self.now = turn
            for seq, wish in zip(seqs, wishes, strict=True):
                if wish.turn == turn:
                    self.scheduler.add(seq)
                if wish.abort_after is not None and wish.turn + wish.abort_after == turn:
                    self.scheduler.finish(seq, "abort")
            self.turn()
            if self.scheduler.idle and not self.flight and turn >= max(w.turn for w in wishes):
                break
        else:
            raise AssertionError(f"not done after {turns} turns: {[(s.arrival, s.status, len(s)) for s in seqs]}")
        assert self.scheduler.pool.free == self.scheduler.pool.usable
        assert sorted(self.scheduler.free_slots) == list(range(self.slots))
        return seqs

    def turn(self) -> None:
        self.masks_come()
        plan = self.schedule()
        if plan is not None:
            self.flight.append((plan, self.launch(plan), [(s, tables_of(s), s.slot) for s in plan.sequences]))
        if self.flight and (plan is None or len(self.flight) > self.depth):
            plan, tokens, _ = self.flight.popleft()
            self.collect(plan, tokens)
        elif plan is None and not self.scheduler.idle:
            reading = self.store is not None and self.store.reading
            assert self.awaited or reading, "sequences wait but none can run"
        self.read()
        self.check()

    def read(self) -> None:
        """What the disk's thread does, and the engine with what it brings."""
        if self.store is None or not self.store.reading:
            return
        self.waited += 1
        if self.waited > self.disk_turns:
            self.waited = 0
            for arrival in self.store.arrived():
                for keys, data, source in arrival.blocks:
                    self.tier.adopt(keys, data, source)

    def masks_come(self) -> None:
        """As the engine does it: a sequence at its limit ends when its mask is there."""
        for arrival, turns in list(self.awaited.items()):
            self.awaited[arrival] = turns - 1
            if turns > 0:
                continue
            del self.awaited[arrival]
            seq = self.seqs[arrival]
            if not seq.finished:
                seq.constraint.mask = MASK
                if len(seq) >= seq.limit:
                    self.scheduler.finish(seq, "length")

    def schedule(self) -> StepPlan | None:
        """Plan a step; what is preempted and who is admitted must be as promised."""
        scheduler = self.scheduler
        running, waiting, preemptions = list(scheduler.running), list(scheduler.waiting), scheduler.preemptions
        first = running[0] if running else None
        best = min((s.priority for s in waiting), default=None)
        supply = scheduler.pool.free + sum(len(in_order(s.pages)) for s in scheduler.leaving)
        demand = sum(
            max(0, scheduler.pool.pages_for(end) - len(table))
            for s in scheduler.running
            if (end := self.end_of_step(s)) is not None
            for table in s.pages
        )
        plan = scheduler.schedule()
        if scheduler.preemptions > preemptions:
            gone = [s for s in running if s not in scheduler.running]
            for seq in gone:
                self.preempted.setdefault(seq.arrival, []).append(self.now)
            yielded = best is not None and all(s.priority > best for s in gone)
            enough = demand <= supply and self.residency is None
            assert yielded or not enough, "preempted though the pages would have sufficed"
            assert first.status is Status.RUNNING or best < first.priority, "the first in order was preempted"
        admitted = [s for s in waiting if s.status is Status.RUNNING]
        left = [s for s in scheduler.waiting if s in waiting]
        # Others may wait for a page that is just being computed, or for their mask.
        left = [s for s in left if s.chain is None and not s.awaits_mask]
        assert not admitted or not left or max(s.order for s in admitted) < min(s.order for s in left)
        if plan is not None:
            self.check_plan(plan)
        self.check()
        return plan

    def end_of_step(self, seq: Sequence) -> int | None:
        """How far a running sequence may get in the next step; None where it does not take part."""
        if seq.prefilling:
            return min(seq.prefill_end, seq.computed + self.blocks * BLOCK)
        if len(seq) + seq.pending >= seq.limit or (seq.host_driven and seq.pending) or seq.awaits_mask:
            return None
        return len(seq) + seq.pending

    def check_plan(self, plan: StepPlan) -> None:
        seqs = plan.sequences
        assert len({id(s) for s in seqs}) == len(seqs) <= self.slots
        assert all(s.status is Status.RUNNING for s in seqs)
        assert sum(-(-c.count // BLOCK) for c in plan.chunks) <= self.blocks
        for seq in seqs:
            for group, table in enumerate(seq.pages):
                assert seq.computed <= len(table) * self.page_size
                self.most[group] = max(self.most[group], sum(page > 0 for page in table))
            # A prompt that is all its limit allows still samples one token, which nobody keeps.
            assert len(seq) + seq.pending <= max(seq.limit, len(seq.prompt) + 1)
        for seq in plan.decodes:
            assert not seq.host_driven or seq.pending == 1
        for seq in plan.sampled:
            assert not seq.awaits_mask, "a token is to be chosen without the mask it depends on"
            self.began.setdefault(seq.arrival, self.now)
        self.prompt_tokens += sum(chunk.count for chunk in plan.chunks)
        for chunk in plan.chunks:
            key = (chunk.seq.arrival, chunk.seq.preemptions)
            assert chunk.count > 0
            if chunk.first:
                assert chunk.start < len(chunk.seq)
                assert chunk.start == 0 or self.reuse
                assert key not in self.covered
            else:
                assert chunk.start == self.covered[key], "a chunk does not begin where the last one ended"
            self.covered[key] = chunk.start + chunk.count
            assert chunk.final == (self.covered[key] == len(chunk.seq))

    def launch(self, plan: StepPlan) -> list[int]:
        """Run the step as the device would: write the step's tokens, then read everything before them."""
        tokens = []
        for spill in plan.spills:
            assert spill.block.data is None
            spill.block.data = [self.page(page) for page in spill.pages]
            if self.store is not None:
                self.store.save(spill.block, range(len(spill.pages)))
        for restore in plan.restores:
            for page, record in zip(restore.pages, restore.block.data, strict=True):
                self.kv |= {(page, offset): content for offset, content in record.items() if page}
        before = dict(self.kv)
        for source, target in plan.copies:
            for offset in range(self.page_size):
                if (source, offset) in before:
                    self.kv[target, offset] = before[source, offset]
        for page, frame in plan.fetches:
            assert self.residency.frame[page] == frame
            for offset in range(self.page_size):
                self.frames.pop((frame, offset), None)
            self.frames |= {(frame, offset): content for offset, content in self.page(page).items()}
        for seq in plan.decodes:
            self.write(seq, seq.computed - 1, self.last_token[seq.slot])
        for chunk in plan.chunks:
            fits = chunk.seq.region < 0 or chunk.count <= self.hot.chunk
            assert fits, "a sequence computes more prompt tokens at once than its buffer can serve"
            end = chunk.start + chunk.count
            for position, token in enumerate(chunk.seq.tokens(chunk.start, end), chunk.start):
                self.write(chunk.seq, position, token)
        starts = [(seq, seq.computed - 1) for seq in plan.decodes] + [(c.seq, c.start) for c in plan.chunks]
        for seq, start in starts:
            self.read_all(seq, start)
        for seq in plan.sampled:
            token = word(self.topic(seq), seq.computed)
            self.last_token[seq.slot] = token
            tokens.append(token)
        return tokens

    def read_all(self, seq: Sequence, start: int) -> None:
        """What attention reads for the tokens from ``start`` on: in each group all that its window shows them."""
        for group, table in enumerate(seq.pages):
            window = self.windows[group]
            for position in range(0 if window is None else max(0, start - window + 1), seq.computed):
                page, offset = table[position // self.page_size], position % self.page_size
                assert self.kv[page, offset] == (group, position, word(self.topic(seq), position))
                if self.residency is not None:
                    frame = self.residency.frame[page]
                    assert frame >= 0 or seq.region >= 0, "a sequence without a region reads from the host"
                    assert frame < 0 or self.frames[frame, offset] == self.kv[page, offset], "a frame is stale"

    def write(self, seq: Sequence, position: int, token: int) -> None:
        for group, table in enumerate(seq.pages):
            page = table[position // self.page_size]
            assert page > 0
            assert self.scheduler.pool.holders(page) == 1, "a page that others read is written"
            self.kv[page, position % self.page_size] = (group, position, token)
            if self.residency is not None and (frame := self.residency.frame[page]) >= 0:
                self.frames[frame, position % self.page_size] = (group, position, token)

    def page(self, page: int) -> dict[int, tuple[int, int, int]]:
        return {offset: self.kv[page, offset] for offset in range(self.page_size) if (page, offset) in self.kv}

    def topic(self, seq: Sequence) -> int:
        return topic_of(seq.arrival, self.wishes[seq.arrival])

    def collect(self, plan: StepPlan, tokens: list[int]) -> None:
        for seq, token in zip(plan.sampled, tokens, strict=True):
            if seq.finished:
                continue
            if seq.limit > len(seq.prompt):
                seq.output.append(token)
            if len(seq.output) == self.wishes[seq.arrival].stops_at:
                self.scheduler.finish(seq, "stop")
            elif seq.constraint is not None and len(seq) > len(seq.prompt):
                seq.constraint.mask = None
                self.awaited[seq.arrival] = self.wishes[seq.arrival].mask_turns
            elif len(seq) >= seq.limit:
                self.scheduler.finish(seq, "length")
        self.scheduler.collected(plan)

    def check(self) -> None:
        self.scheduler.check()
        self.tier.check()
        running = [s.order for s in self.scheduler.running]
        assert running == sorted(running)
        for _, _, held in self.flight:
            for seq, pages, slot in held:
                assert seq.slot == slot, "a slot went back while a step in flight uses it"
                for window, now, then in zip(self.windows, seq.pages, pages, strict=True):
                    assert len(now) >= len(then)
                    same = all(a == b or (window is not None and not a) for a, b in zip(now, then, strict=False))
                    assert same, "pages went back while a step in flight touches them"


def tables_of(seq: Sequence) -> list[list[int]]:
    return [list(table) for table in seq.pages]


def topic_of(arrival: int, wish: Wish) -> int:
    return 100 + arrival if wish.topic is None else wish.topic


def make(pages: int = 32, slots: int = 2, blocks: int = 2, windows: tuple[int | None, ...] = (None,)) -> Scheduler:
    return Scheduler(PagePool(pages + 1, 4, windows), max_num_seqs=slots, prompt_tokens=blocks * BLOCK, block=BLOCK)
