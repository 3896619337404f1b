"""Who has to go when there is too little room, who comes back when, and what priority is worth."""

import pytest
from simulation import MASK, NoMatcher, Wish, World, make, sequence

from jaxserve.constraint import Constraint


@pytest.mark.parametrize("depth", [0, 1])
def test_too_little_memory_preempts_and_the_first_never_is(depth: int) -> None:
    world = World(pages=8, page_size=2, slots=4, blocks=2, depth=depth)
    seqs = world.run([Wish(2, 12)] * 4)
    assert world.scheduler.preemptions > 0
    assert seqs[0].preemptions == 0
    assert sum(s.preemptions for s in seqs) == world.scheduler.preemptions


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


BATCH = [Wish(6, 60, priority=5)] * 3
"""Jobs that fill 30 pages of 4 tokens, with the room for each other's next page."""


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("records", [0, 200])
def test_a_better_priority_gets_in_at_once(records: int, depth: int) -> None:
    """Neither slots nor pages that worse ones hold keep it waiting; they go on afterwards with what they had."""
    for slots, pages in ((3, 200), (8, 24)):
        world = World(pages, 4, slots, 8, depth, records=records)
        seqs = world.run([*BATCH, Wish(30, 4, turn=20), Wish(20, 4, turn=20)])
        assert world.began[3] <= 20 + depth
        assert world.scheduler.preemptions > 0
        assert seqs[3].preemptions == seqs[4].preemptions == 0
        if records:
            assert world.prompt_tokens == sum(len(s.prompt) + s.preemptions for s in seqs), "only its last token"


def test_an_equal_priority_waits_for_its_turn() -> None:
    world = World(200, 4, 3, 8, 1)
    world.run([*BATCH, Wish(30, 4, turn=20, priority=5)])
    assert world.scheduler.preemptions == 0
    assert world.began[3] > 50


def test_nobody_has_to_go_where_that_would_not_be_enough() -> None:
    """The room that is missing belongs to one of the same priority."""
    world = World(20, 4, 8, 8, 1, reuse=False)
    seqs = world.run([Wish(40, 20), Wish(4, 8, priority=5), Wish(60, 4, turn=4)])
    assert [seq.preemptions for seq in seqs] == [0, 0, 0]
    assert world.began[2] > 20


def test_only_as_many_go_as_have_to() -> None:
    world = World(40, 4, 8, 8, 1, records=100)
    seqs = world.run([*[Wish(6, 30, priority=5)] * 4, Wish(12, 4, turn=12)])
    assert sum(seq.preemptions for seq in seqs) <= 1


@pytest.mark.parametrize("records", [0, 300])
@pytest.mark.parametrize("pause", [3, 8, 30])
def test_a_stream_of_better_ones_does_not_preempt_one_again_and_again(records: int, pause: int) -> None:
    """It has to get on by 16, 32, 64 ... tokens between: over 200 tokens four times, and once before the first."""
    world = World(30, 4, 4, 8, 1, records=records)
    stream = [Wish(40, 4, turn=5 + pause * number) for number in range(40)]
    seqs = world.run([*[Wish(8, 100, priority=5)] * 2, *stream])
    assert 0 < max(seq.preemptions for seq in seqs[:2]) <= 5
    assert all(seq.preemptions == 0 for seq in seqs[2:])


def test_a_better_prompt_does_not_wait_for_those_that_have_begun() -> None:
    world = World(200, 4, 4, 1, 1)
    world.run([Wish(100, 4, priority=5), Wish(8, 4, turn=3)])
    assert world.began[1] == 4
    assert world.began[0] >= 26


def test_nobody_has_to_go_for_one_that_could_not_begin_yet() -> None:
    """Prompts of better or equal priority take the whole budget for a while."""
    world = World(24, 4, 8, 1, 1)
    seqs = world.run([Wish(6, 20, priority=5), Wish(40, 2, turn=5), Wish(40, 2, turn=6)])
    gone = world.preempted[seqs[0].arrival]
    assert gone[0] >= world.began[1] - 1


def test_those_who_stay_keep_a_page_a_group() -> None:
    """Two hold four pages each, and a better one needs two: it gets in beside both where each can have two more."""
    for pages, stay in ((13, 1), (14, 2)):
        scheduler = make(pages, slots=3, blocks=8, windows=(None, 5))
        for arrival in range(2):
            scheduler.add(sequence(7, 20, arrival=arrival, priority=1))
        scheduler.collected(scheduler.schedule())
        assert scheduler.pool.free == pages - 8
        scheduler.add(sequence(3, 20, arrival=2))
        scheduler.schedule()
        assert [seq.arrival for seq in scheduler.running] == [2, *range(stay)]


def test_who_has_least_to_bring_back_goes_first() -> None:
    scheduler = make(pages=20, slots=3, blocks=16)
    for arrival, prompt in enumerate((20, 6, 12)):
        scheduler.add(sequence(prompt, prompt + 9, arrival=arrival, priority=5))
    scheduler.collected(scheduler.schedule())
    urgent = sequence(4, 8, arrival=3)
    scheduler.add(urgent)
    scheduler.schedule()
    assert [seq.arrival for seq in scheduler.running] == [3, 0, 2]
    scheduler.running[1].preemptions = scheduler.running[2].preemptions = 1
    scheduler.running[1].preemptions = 2
    assert scheduler._victim(urgent).arrival == 2, "who has had to go least often"
