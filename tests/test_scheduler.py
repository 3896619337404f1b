"""The scheduler and the page pool over a simulated device: nothing lost, nobody starved, nothing read unwritten."""

from collections import deque
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from memory_stores import MemoryStores

from jaxserve.constraint import Constraint, Mask
from jaxserve.host_tier import HostTier
from jaxserve.pages import PagePool
from jaxserve.prefix_cache import PrefixCache
from jaxserve.request import SamplingParams
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
    kv: dict[tuple[int, int], tuple[int, int]] = field(default_factory=dict)
    """(page, offset) -> (position, token)."""
    last_token: dict[int, int] = field(default_factory=dict)
    flight: deque = field(default_factory=deque)
    covered: dict[tuple[int, int], int] = field(default_factory=dict)
    """(arrival, preemptions) -> prompt tokens planned so far."""
    awaited: dict[int, int] = field(default_factory=dict)
    """Arrival of a sequence -> turns until its mask is there."""

    prompt_tokens: int = 0

    def __post_init__(self) -> None:
        pool = PagePool(self.pages + 1, self.page_size)
        self.tier = HostTier(self.records, 1)
        stores = [("sidecar", {}), ("disk", {})] if self.near else [("disk", {})]
        self.store = MemoryStores(self.disk, *stores, near=self.near) if self.disk and self.records else None
        self.cache = PrefixCache(pool, "", self.tier if self.records else None, self.store) if self.reuse else None
        self.waited = 0
        limits = {"max_num_seqs": self.slots, "prompt_tokens": self.blocks * BLOCK, "block": BLOCK}
        self.scheduler = Scheduler(pool, **limits, cache=self.cache)

    def run(self, wishes: list[Wish]) -> list[Sequence]:
        longest = self.pages * self.page_size
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
            self.flight.append((plan, self.launch(plan), [(s, list(s.pages), s.slot) for s in plan.sequences]))
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
        first = scheduler.running[0] if scheduler.running else None
        waiting, preemptions = list(scheduler.waiting), scheduler.preemptions
        supply = scheduler.pool.free + sum(len(s.pages) for s in scheduler.leaving)
        demand = sum(
            max(0, scheduler.pool.pages_for(len(s) + s.pending) - len(s.pages))
            for s in scheduler.running
            if not s.prefilling and len(s) + s.pending < s.limit and not (s.host_driven and s.pending)
            if not s.awaits_mask
        )
        plan = scheduler.schedule()
        if scheduler.preemptions > preemptions:
            assert demand > supply, "preempted though the pages would have sufficed"
            assert first.status is Status.RUNNING, "the first in order was preempted"
        admitted = [s for s in waiting if s.status is Status.RUNNING]
        left = [s for s in scheduler.waiting if s in waiting]
        # Others may wait for a page that is just being computed, or for their mask.
        left = [s for s in left if s.chain is None and not s.awaits_mask]
        assert not admitted or not left or max(s.order for s in admitted) < min(s.order for s in left)
        if plan is not None:
            self.check_plan(plan)
        self.check()
        return plan

    def check_plan(self, plan: StepPlan) -> None:
        seqs = plan.sequences
        assert len({id(s) for s in seqs}) == len(seqs) <= self.slots
        assert all(s.status is Status.RUNNING for s in seqs)
        assert sum(-(-c.count // BLOCK) for c in plan.chunks) <= self.blocks
        for seq in seqs:
            assert seq.computed <= len(seq.pages) * self.page_size
            # A prompt that is all its limit allows still samples one token, which nobody keeps.
            assert len(seq) + seq.pending <= max(seq.limit, len(seq.prompt) + 1)
        for seq in plan.decodes:
            assert not seq.host_driven or seq.pending == 1
        for seq in plan.sampled:
            assert not seq.awaits_mask, "a token is to be chosen without the mask it depends on"
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
        for seq in plan.decodes:
            self.write(seq, seq.computed - 1, self.last_token[seq.slot])
        for chunk in plan.chunks:
            end = chunk.start + chunk.count
            for position, token in enumerate(chunk.seq.tokens(chunk.start, end), chunk.start):
                self.write(chunk.seq, position, token)
        for seq in plan.sampled:
            for position in range(seq.computed):
                page, offset = seq.pages[position // self.page_size], position % self.page_size
                assert self.kv[page, offset] == (position, word(self.topic(seq), position))
            token = word(self.topic(seq), seq.computed)
            self.last_token[seq.slot] = token
            tokens.append(token)
        return tokens

    def write(self, seq: Sequence, position: int, token: int) -> None:
        page = seq.pages[position // self.page_size]
        assert page > 0
        assert self.scheduler.pool.holders(page) == 1, "a page that others read is written"
        self.kv[page, position % self.page_size] = (position, token)

    def page(self, page: int) -> dict[int, tuple[int, int]]:
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
                assert seq.pages[: len(pages)] == pages, "pages went back while a step in flight touches them"


def topic_of(arrival: int, wish: Wish) -> int:
    return 100 + arrival if wish.topic is None else wish.topic


wishes = st.lists(
    st.builds(
        Wish,
        prompt=st.integers(1, 30),
        output=st.integers(0, 20),
        turn=st.integers(0, 20),
        priority=st.integers(-1, 1),
        abort_after=st.none() | st.none() | st.integers(0, 30),
        stops_at=st.none() | st.integers(1, 10),
        bad_words=st.booleans(),
        mask_turns=st.none() | st.integers(0, 6),
        topic=st.none() | st.integers(0, 2),
    ),
    min_size=1,
    max_size=12,
)
worlds = st.builds(
    World,
    pages=st.integers(3, 24),
    page_size=st.integers(1, 5),
    slots=st.integers(1, 5),
    blocks=st.integers(1, 4),
    depth=st.integers(0, 1),
    reuse=st.booleans(),
    records=st.sampled_from([0, 1, 5, 40]),
    disk=st.sampled_from([0, 3, 100]),
    near=st.booleans(),
    disk_turns=st.integers(0, 6),
)


@settings(max_examples=500, deadline=None, derandomize=True)
@given(worlds, wishes)
@example(World(4, 2, 4, 2, 1), [Wish(2, 12)] * 6)
def test_everybody_finishes_with_the_right_tokens(world: World, wishes: list[Wish]) -> None:
    """Any mix of arrivals, aborts and ends, in too little memory: the invariants hold and every token is right."""
    for seq, wish in zip(world.run(wishes), wishes, strict=True):
        assert seq.finished
        assert seq.output == [word(world.topic(seq), len(seq.prompt) + i) for i in range(len(seq.output))]
        if seq.finish_reason == "length":
            assert len(seq) == seq.limit
        elif seq.finish_reason == "stop":
            assert len(seq.output) == wish.stops_at
        else:
            assert wish.abort_after is not None


@pytest.mark.parametrize("depth", [0, 1])
def test_too_little_memory_preempts_and_the_first_never_is(depth: int) -> None:
    world = World(pages=8, page_size=2, slots=4, blocks=2, depth=depth)
    seqs = world.run([Wish(2, 12)] * 4)
    assert world.scheduler.preemptions > 0
    assert seqs[0].preemptions == 0
    assert sum(s.preemptions for s in seqs) == world.scheduler.preemptions


@pytest.mark.parametrize("depth", [0, 1])
def test_a_slow_mask_holds_nobody_else_up(depth: int) -> None:
    alone = World(pages=40, page_size=4, slots=3, blocks=2, depth=depth)
    company = World(pages=40, page_size=4, slots=3, blocks=2, depth=depth)
    quick = [Wish(5, 10), Wish(9, 10)]
    done = {}
    for name, world, wishes in (("alone", alone, quick), ("company", company, [*quick, Wish(3, 10, mask_turns=50)])):
        turn, turns = world.turn, []
        world.turn = lambda turn=turn, turns=turns: turns.append(1) or turn()
        finish = world.scheduler.finish
        ends = done[name] = []

        def note(seq, *rest, finish=finish, turns=turns, ends=ends):
            ends.append((seq.arrival, len(turns)))
            finish(seq, *rest)

        world.scheduler.finish = note
        world.run(wishes)
    assert done["company"][:2] == done["alone"]


def test_a_preempted_sequence_waits_for_its_mask() -> None:
    scheduler = make(blocks=2)
    seq = sequence(10, 30)
    seq.constraint = Constraint(NoMatcher(), MASK)
    scheduler.add(seq)
    for _ in range(2):
        plan = scheduler.schedule()
        scheduler.collected(plan)
    seq.output.append(7)
    seq.constraint.mask = None
    scheduler._preempt(seq)
    assert scheduler.schedule() is None
    assert scheduler.schedule() is None
    seq.constraint.mask = MASK
    plan = scheduler.schedule()
    assert [(c.start, c.count, c.final) for c in plan.chunks] == [(0, 8, False)]


@pytest.mark.parametrize("depth", [0, 1])
def test_enough_memory_never_preempts(depth: int) -> None:
    world = World(pages=28, page_size=2, slots=4, blocks=2, depth=depth)
    world.run([Wish(2, 12)] * 8)
    assert world.scheduler.preemptions == 0


def test_overlap_changes_no_schedule_of_tokens() -> None:
    """With room, a step a token at either depth: the device is never asked for a token twice."""
    for depth in (0, 1):
        world = World(pages=40, page_size=4, slots=2, blocks=8, depth=depth)
        plans = []
        schedule = world.scheduler.schedule
        world.scheduler.schedule = lambda schedule=schedule, plans=plans: plans.append(schedule()) or plans[-1]
        world.run([Wish(5, 10), Wish(9, 10)])
        assert sum(plan.tokens for plan in plans if plan) == 5 + 9 + 9 + 9


def test_pages_on_the_disk_are_waited_for_while_others_run() -> None:
    """A text has been driven out to the disk; who asks for it again computes the last page, once the rest is there."""
    world = World(pages=8, page_size=2, slots=2, blocks=8, depth=1, records=8, disk=100, disk_turns=5)
    others = [Wish(12, 2, turn=10 * i) for i in range(1, 5)]
    seqs = world.run([Wish(12, 2, topic=0), *others, Wish(12, 2, topic=0, turn=60), Wish(2, 2, turn=60)])
    again, other = seqs[-2:]
    assert again.cached == 10, "whole pages"
    assert again.loaded["disk"] > 0
    admitted = [arrival for arrival, _ in world.covered]
    assert admitted.index(other.arrival) < admitted.index(again.arrival)


def make(pages: int = 32, slots: int = 2, blocks: int = 2) -> Scheduler:
    return Scheduler(PagePool(pages + 1, 4), max_num_seqs=slots, prompt_tokens=blocks * BLOCK, block=BLOCK)


def test_admission_waits_for_a_slot() -> None:
    scheduler = make(slots=2, blocks=4)
    for arrival in range(3):
        scheduler.add(sequence(4, 8, arrival=arrival))
    plan = scheduler.schedule()
    assert [chunk.seq.arrival for chunk in plan.chunks] == [0, 1]
    assert len(scheduler.waiting) == 1


def test_admission_waits_for_the_pages_of_the_whole_prompt() -> None:
    scheduler = make(pages=6, blocks=1)
    scheduler.add(sequence(12, 20, arrival=0))
    scheduler.add(sequence(12, 20, arrival=1))
    scheduler.schedule()
    assert len(scheduler.running[0].pages) == 4
    assert [s.arrival for s in scheduler.waiting] == [1]


def test_admission_leaves_a_page_for_those_who_run() -> None:
    scheduler = make(pages=5, blocks=8)
    scheduler.add(sequence(7, 20, arrival=0))
    scheduler.add(sequence(11, 20, arrival=1))
    scheduler.schedule()
    assert scheduler.pool.free == scheduler.pool.pages_for(12)
    assert [s.arrival for s in scheduler.waiting] == [1], "the first would have to preempt it at its next page"


def twins(count: int, prompt: int, limit: int) -> list[Wish]:
    return [Wish(prompt, limit - prompt, topic=0) for _ in range(count)]


@pytest.mark.parametrize("prompt", [3, 5, 8, 9])
def test_a_prompt_that_many_ask_at_once_is_computed_once(prompt: int) -> None:
    """The others wait for its pages, copy the one that is not full, and compute the last token."""
    world = World(pages=40, page_size=4, slots=5, blocks=8, depth=1)
    seqs = world.run(twins(5, prompt, prompt + 6))
    assert [seq.cached for seq in seqs] == [0] + [prompt - 1] * 4
    assert world.prompt_tokens == prompt + 4


@pytest.mark.parametrize("depth", [0, 1])
def test_who_is_preempted_goes_on_where_he_was(depth: int) -> None:
    """With room on the host nothing is computed twice, however little the device holds."""
    wishes = [Wish(6, 30) for _ in range(6)]
    worlds = [World(12, 4, 6, 8, depth, records=records) for records in (200, 0)]
    for world in worlds:
        world.run(wishes)
        assert world.scheduler.preemptions > 0
    spilled, recomputed = (world.prompt_tokens - 6 * 6 for world in worlds)
    assert spilled == worlds[0].scheduler.preemptions, "its last token, each time"
    assert recomputed > 2 * spilled


@pytest.mark.parametrize("records", [0, 300])
def test_nobody_is_preempted_again_and_again(records: int) -> None:
    """Twelve texts of 200 tokens, each of a third of the memory: coming back takes more room every time."""
    world = World(150, 4, 12, 8, 1, records=records)
    seqs = world.run([Wish(10, 190) for _ in range(12)])
    counts = sorted(seq.preemptions for seq in seqs)
    assert world.scheduler.preemptions > 0
    assert counts[-1] <= 4
    assert counts[len(counts) * 3 // 4] <= 2


def test_the_lowest_priority_gives_way() -> None:
    world = World(20, 4, 4, 8, 1)
    seqs = world.run([Wish(4, 60, priority=1), Wish(4, 60, priority=0), Wish(4, 60, priority=0), Wish(4, 20)])
    assert seqs[0].preemptions > 0
    assert seqs[1].preemptions == 0


def test_who_comes_again_finds_what_was_said() -> None:
    world = World(pages=40, page_size=4, slots=1, blocks=8, depth=1)
    seqs = world.run([Wish(6, 8, topic=0), Wish(14, 3, topic=0), Wish(14, 3, topic=1)])
    assert [seq.cached for seq in seqs] == [0, 13, 0]


def test_prompts_are_cut_to_the_budget_and_decodes_go_on_beside_them() -> None:
    scheduler = make(blocks=2)
    one = sequence(3, 20, arrival=0)
    scheduler.add(one)
    plan = scheduler.schedule()
    one.output.append(7)
    scheduler.collected(plan)
    scheduler.add(sequence(19, 30, arrival=1))
    chunks = []
    for _ in range(3):
        plan = scheduler.schedule()
        assert plan.decodes == [one]
        chunks += [(c.start, c.count, c.final) for c in plan.chunks]
        one.output.append(7)
        scheduler.collected(plan)
    assert chunks == [(0, 8, False), (8, 8, False), (16, 3, True)]


def test_lower_priority_numbers_go_first_and_equals_in_order_of_arrival() -> None:
    scheduler = make(slots=1)
    for arrival, priority in enumerate((0, 1, -1, 0)):
        scheduler.add(sequence(2, 3, arrival=arrival, priority=priority))
    order = []
    while plan := scheduler.schedule():
        (chunk,) = plan.chunks
        order.append(chunk.seq.arrival)
        scheduler.finish(chunk.seq, "length")
        scheduler.collected(plan)
    assert order == [2, 0, 3, 1]


def test_a_finished_sequence_is_held_until_its_step_is_collected() -> None:
    scheduler = make()
    seq = sequence(4, 8)
    scheduler.add(seq)
    plan = scheduler.schedule()
    scheduler.finish(seq, "abort")
    assert scheduler.pool.free < scheduler.pool.usable
    assert not scheduler.idle
    scheduler.finish(seq, "length")
    assert seq.finish_reason == "abort"
    scheduler.collected(plan)
    assert scheduler.pool.free == scheduler.pool.usable
    assert scheduler.idle
    scheduler.check()


def test_the_check_sees_a_lost_and_a_doubled_page_and_slot() -> None:
    for harm in (
        lambda s: s.pool.take(1),
        lambda s: s.pool.give([1]),
        lambda s: s.free_slots.pop(),
        lambda s: s.free_slots.append(0),
    ):
        scheduler = make()
        scheduler.check()
        harm(scheduler)
        with pytest.raises(AssertionError):
            scheduler.check()


def test_the_pool_gives_all_or_nothing_and_never_the_dump_page() -> None:
    pool = PagePool(5, 8)
    assert pool.take(5) is None
    assert pool.free == pool.usable == 4
    taken = pool.take(4)
    assert sorted(taken) == [1, 2, 3, 4]
    assert pool.usage == 1
    pool.check(taken)
    assert [pool.pages_for(n) for n in (0, 1, 8, 9)] == [0, 1, 1, 2]
    with pytest.raises(ValueError, match="at least 2 pages"):
        PagePool(1, 8)
