"""Every shape a step can take is one of the few that were compiled."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.buckets import Buckets, StepBucket, ladder, pad_to

buckets = st.builds(Buckets.make, st.integers(1, 300), st.integers(1, 9000), st.sampled_from([8, 16, 32]))


@given(st.integers(1, 1000), st.integers(2, 5), st.integers(1, 1000))
def test_a_ladder_climbs_to_its_top(top: int, factor: int, start: int) -> None:
    steps = ladder(top, factor, min(start, top))
    assert steps[0] == min(start, top)
    assert steps[-1] == top
    assert all(a < b <= a * factor for a, b in itertools.pairwise(steps))


@given(st.integers(1, 500), st.integers(1, 600))
def test_padding_takes_the_smallest_step_that_holds_it(top: int, size: int) -> None:
    steps = ladder(top)
    if size > top:
        with pytest.raises(ValueError, match=f"{size} exceeds the largest bucket {top}"):
            pad_to(size, steps)
    else:
        assert pad_to(size, steps) == min(step for step in steps if step >= size)


@given(buckets, st.data())
def test_every_step_lands_in_a_compiled_bucket_that_holds_it(made: Buckets, data: st.DataObject) -> None:
    decodes = data.draw(st.integers(0, made.decodes[-1]))
    blocks = data.draw(st.integers(0 if decodes else 1, made.blocks[-1]))
    bucket = made.step(decodes, blocks)
    assert bucket in made.steps()
    assert bucket.decodes >= decodes
    assert bucket.blocks >= blocks
    assert (bucket.blocks == 0) == (blocks == 0), "a step without prompts pays for none"
    rows = made.sample_rows(bucket)
    assert rows in made.samples
    assert rows >= min(decodes + blocks, made.decodes[-1]), "a sampling row for every sequence that may end its prompt"


@given(buckets)
def test_the_steps_are_few_and_different(made: Buckets) -> None:
    steps = made.steps()
    assert len(set(steps)) == len(steps) < 120
    assert made.max_prompt_tokens == max(s.blocks for s in steps) * made.block
    assert len({str(step) for step in steps}) == len(steps), "programs are looked up by name"


@given(st.integers(1, 300), st.integers(32, 9000))
def test_the_budget_is_kept_to_whole_blocks(seqs: int, tokens: int) -> None:
    made = Buckets.make(seqs, tokens)
    assert tokens - made.block < made.max_prompt_tokens <= tokens
    assert made.decodes[-1] == made.mixed[-1] == seqs


def test_a_bucket_counts_its_rows_and_tokens() -> None:
    bucket = StepBucket(3, 2, 32)
    assert (bucket.rows, bucket.tokens, str(bucket)) == (5, 67, "3+2x32")
