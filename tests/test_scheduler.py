"""The scheduler and the page pool over a simulated device: nothing lost, nobody starved, nothing read unwritten."""

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from simulation import Wish, World, make, sequence, word

from jaxserve.pages import PagePool

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
    windows=st.sampled_from([(None,), (None, 5), (6,), (None, 2, 9)]),
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
    assert len(scheduler.running[0].pages[0]) == 4
    assert [s.arrival for s in scheduler.waiting] == [1]


def test_admission_leaves_a_page_for_those_who_run() -> None:
    scheduler = make(pages=5, blocks=8)
    scheduler.add(sequence(7, 20, arrival=0))
    scheduler.add(sequence(11, 20, arrival=1))
    scheduler.schedule()
    assert scheduler.pool.free == scheduler.pool.pages_for(12)
    assert [s.arrival for s in scheduler.waiting] == [1], "the first would have to preempt it at its next page"


def test_admission_leaves_a_page_a_group_for_those_who_run() -> None:
    """The first holds four pages, two a group, and the second needs as many: one page to spare is not enough."""
    for pages, admitted in ((9, 1), (10, 2)):
        scheduler = make(pages, blocks=8, windows=(None, 5))
        scheduler.add(sequence(7, 20, arrival=0))
        scheduler.add(sequence(4, 20, arrival=1))
        scheduler.schedule()
        assert len(scheduler.running) == admitted


def twins(count: int, prompt: int, limit: int) -> list[Wish]:
    return [Wish(prompt, limit - prompt, topic=0) for _ in range(count)]


@pytest.mark.parametrize("prompt", [3, 5, 8, 9])
def test_a_prompt_that_many_ask_at_once_is_computed_once(prompt: int) -> None:
    """The others wait for its pages, copy the one that is not full, and compute the last token."""
    world = World(pages=40, page_size=4, slots=5, blocks=8, depth=1)
    seqs = world.run(twins(5, prompt, prompt + 6))
    assert [seq.cached for seq in seqs] == [0] + [prompt - 1] * 4
    assert world.prompt_tokens == prompt + 4


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
