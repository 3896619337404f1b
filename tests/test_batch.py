"""StepPlan -> StepBatch against the plainest packing: rows say what their sequence needs, padding harms none."""

import random
from collections.abc import Iterator

import numpy as np
import pytest

from jaxserve.batch import (
    CHOICE_FIELDS,
    PROMPT_BIT,
    Packer,
    StepBatch,
    banned_tokens,
    ints_size,
    pack_bits,
    split_ints,
)
from jaxserve.buckets import Buckets
from jaxserve.constraint import Constraint, Mask
from jaxserve.pages import PagePool
from jaxserve.request import MAX_LOGIT_BIAS, SamplingParams, StructuredOutputs
from jaxserve.scheduler import Scheduler
from jaxserve.sequence import Sequence, StepPlan

VOCAB, SLOTS, PAGE, BLOCK, LONGEST, EOS = 77, 5, 4, 8, 60, 3
WIDTH = LONGEST // PAGE


def packer(groups: int = 1) -> Packer:
    made = Buckets.make(SLOTS, 3 * BLOCK, BLOCK)
    return Packer(made, width=WIDTH, max_num_seqs=SLOTS, vocab_size=VOCAB, groups=groups, stop_ids=(EOS,))


def column(batch: StepBatch, name: str) -> np.ndarray:
    index = [n for n, _ in CHOICE_FIELDS].index(name)
    return np.ascontiguousarray(batch.choice[:, index]).view(CHOICE_FIELDS[index][1])


def random_params(rng: random.Random) -> SamplingParams:
    options = {
        "temperature": rng.choice([0.0, 0.7, 1.3]),
        "top_k": rng.choice([-1, 0, 1, 5, 1000]),
        "top_p": rng.choice([0.5, 1.0]),
        "min_p": rng.choice([0.0, 0.1]),
        "max_tokens": 20,
    }
    extras = {
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "repetition_penalty": 1.5,
        "logit_bias": {5: 2.0, 9: -1.0},
        "allowed_token_ids": [1, EOS, 40],
        "min_tokens": 2,
        "stop_token_ids": [11],
        "ignore_eos": True,
        "logprobs": 2,
        "prompt_logprobs": 1,
        "bad_words": ["x"],
    }
    chosen = {k: extras[k] for k in rng.sample(sorted(extras), rng.randrange(4))}
    if not chosen.keys() & {"allowed_token_ids", "bad_words"} and rng.random() < 0.3:
        chosen["structured_outputs"] = StructuredOutputs(json_object=True)
    return SamplingParams(**options, **chosen)


class NoMatcher:
    """The tests put masks in themselves."""

    def advance(self, token: int) -> Mask:
        raise AssertionError("nobody advances it")


def random_mask(rng: random.Random) -> Mask:
    """Some of the tokens; now and then only those that ``min_tokens`` holds back."""
    few = [EOS, 11] if rng.random() < 0.2 else rng.sample(range(VOCAB), 9)
    return Mask(pack_bits(np.isin(np.arange(VOCAB), few)))


def steps(
    seed: int, depth: int, pages: int = 40, windows: tuple[int | None, ...] = (None,)
) -> Iterator[tuple[StepPlan, StepBatch, list[Sequence]]]:
    """Random work through a real scheduler: (plan, batch, sequences admitted by it), before each step is collected."""
    rng = random.Random(seed)
    pack = packer(len(windows))
    scheduler = Scheduler(
        PagePool(pages, PAGE, windows), max_num_seqs=SLOTS, prompt_tokens=pack.buckets.max_prompt_tokens, block=BLOCK
    )
    flight: list[StepPlan] = []
    for arrival in range(14):
        prompt = [rng.randrange(VOCAB) for _ in range(rng.choice([1, 5, 8, 9, 30]))]
        params = random_params(rng)
        bad = ((20,), (21, 22)) if params.bad_words else ()
        limit = min(LONGEST, len(prompt) + rng.randrange(1, 50))
        seed = rng.randrange(-(2**63), 2**63) & (2**64 - 1)
        seq = Sequence(f"r{arrival}", 0, prompt, params, seed, limit, bad, arrival=arrival)
        if params.structured_outputs is not None:
            seq.constraint = Constraint(NoMatcher(), random_mask(rng))
        scheduler.add(seq)
    seen: dict[int, tuple[Sequence, int]] = {}
    while not scheduler.idle or flight:
        plan = scheduler.schedule()
        if plan is not None:
            fresh = [s for s in plan.sequences if seen.get(s.slot) != (s, s.preemptions)]
            seen.update({s.slot: (s, s.preemptions) for s in plan.sequences})
            yield plan, pack.pack(plan), fresh
            flight.append(plan)
        if flight and (plan is None or len(flight) > depth):
            done = flight.pop(0)
            for seq in done.sampled:
                if not seq.finished:
                    seq.output.append(rng.choice([20, 21, 22, rng.randrange(VOCAB)]))
                    if seq.constraint is not None:
                        seq.constraint.mask = random_mask(rng)
                    if len(seq) >= seq.limit:
                        scheduler.finish(seq, "length")
            scheduler.collected(done)


CASES = pytest.mark.parametrize(
    ("seed", "depth", "pages"), [(0, 0, 80), (1, 1, 80), *((seed, seed % 2, 16 + seed) for seed in range(2, 14))]
)


@CASES
def test_every_row_points_at_its_own_pages_and_tokens(seed: int, depth: int, pages: int) -> None:
    count = 0
    for plan, batch, _ in steps(seed, depth, pages):
        count += 1
        tables, spans, _, slots, tokens = split_ints(batch.ints, batch.bucket, 1, WIDTH)
        assert batch.ints.dtype == np.int32
        assert len(batch.ints) == ints_size(batch.bucket, 1, WIDTH)
        decodes, rows = batch.bucket.decodes, batch.bucket.rows
        expected: list[tuple[Sequence, int, int] | None] = [(s, s.computed - 1, 1) for s in plan.decodes]
        expected += [None] * (decodes - len(plan.decodes))
        for chunk in plan.chunks:
            for start in range(chunk.start, chunk.start + chunk.count, BLOCK):
                expected.append((chunk.seq, start, min(BLOCK, chunk.start + chunk.count - start)))
        expected += [None] * (rows - len(expected))
        for row, want in enumerate(expected):
            if want is None:
                assert spans[1, row] == 0, "a padding row has no token"
                assert row >= decodes or slots[row] == SLOTS, "a padding row reads the dump slot"
                continue
            seq, start, length = want
            used = seq.pages[0][: -(-(start + length) // PAGE)]
            assert tables[0, row, : len(used)].tolist() == used
            assert spans[:, row].tolist() == [start, length]
            if row < decodes:
                assert slots[row] == seq.slot
            else:
                at = (row - decodes) * BLOCK
                assert tokens[at : at + length].tolist() == seq.tokens(start, start + length)
    assert count > 10


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("windows", [(None, 6), (9,), (None, 2, 13)])
def test_every_group_has_a_table_and_none_has_pages_behind_its_window(windows, depth: int) -> None:
    behind = 0
    for seed in range(4):
        for plan, batch, _ in steps(seed, depth, 24 * len(windows), windows):
            tables = split_ints(batch.ints, batch.bucket, len(windows), WIDTH)[0]
            rows = list(enumerate(plan.decodes))
            row = batch.bucket.decodes
            for chunk in plan.chunks:
                rows.append((row, chunk.seq))
                row += -(-chunk.count // BLOCK)
            for row, seq in rows:
                for group, pages in enumerate(seq.pages):
                    used = -(-seq.computed // PAGE)
                    assert tables[group, row, :used].tolist() == pages[:used]
                    assert tables[group, row, : seq.behind[group]].max(initial=0) == 0
                    behind += seq.behind[group]
    assert behind > 100


@CASES
def test_sampling_rows_carry_their_sequences_parameters(seed: int, depth: int, pages: int) -> None:
    modes = set()
    for plan, batch, _ in steps(seed, depth, pages):
        block_of, row = {}, batch.bucket.decodes
        for chunk in plan.chunks:
            block_of[chunk.seq.arrival] = row + chunk.count - 1
            row += -(-chunk.count // BLOCK) * BLOCK
        assert batch.sampled == len(plan.sampled) <= len(batch.picks) == len(batch.choice)
        assert batch.logprobs == any(s.params.logprobs is not None for s in plan.sampled)
        for i, seq in enumerate(plan.sampled):
            params = seq.params
            assert batch.picks[i] == (i if i < len(plan.decodes) else block_of[seq.arrival])
            wanted = {
                "slot": seq.slot,
                "position": seq.computed,
                "seed_low": seq.seed % 2**32,
                "seed_high": seq.seed >> 32,
                "temperature": np.float32(0 if params.greedy else params.temperature),
                "top_k": min(max(params.top_k, 0), VOCAB),
                "top_p": np.float32(params.top_p),
                "min_p": np.float32(params.min_p),
                "shaped": params.shapes_logits,
                "presence": np.float32(params.presence_penalty),
                "frequency": np.float32(params.frequency_penalty),
                "repetition": np.float32(params.repetition_penalty),
                "hold_until": 0 if seq.constraint else len(seq.prompt) + params.min_tokens,
            }
            assert {name: column(batch, name)[i] for name in wanted} == wanted
        assert (column(batch, "slot")[batch.sampled :] == SLOTS).all(), "padding rows store their token in the dump"
        assert (column(batch, "temperature")[batch.sampled :] == 0).all()
        assert (column(batch, "shaped")[batch.sampled :] == 0).all()
        shaped = any(s.params.shapes_logits for s in plan.sampled)
        random_ = any(not s.params.greedy for s in plan.sampled)
        assert batch.mode == ("shaped" if shaped else "random" if random_ else "greedy")
        modes.add(batch.mode)
    assert "shaped" in modes


@CASES
def test_slot_states_go_up_once_an_admission(seed: int, depth: int, pages: int) -> None:
    words = np.arange(VOCAB)
    for plan, batch, fresh in steps(seed, depth, pages):
        sent = dict(batch.slot_rows)
        shaping = [s for s in plan.sequences if s.params.shapes_logits]
        assert set(sent) == {s.slot for s in shaping if s in fresh}
        for seq in shaping:
            if seq.slot not in sent:
                continue
            row, params = sent[seq.slot], seq.params
            known = seq.output
            expected = np.array([known.count(v) + PROMPT_BIT * (v in seq.prompt) for v in range(VOCAB)])
            assert (row.counts == expected).all()
            allowed = np.isin(words, params.allowed_token_ids) if params.allowed_token_ids else np.ones(VOCAB, bool)
            assert (row.allowed == pack_bits(allowed)).all()
            hold = set(params.stop_token_ids) | (set() if params.ignore_eos else {EOS})
            assert (row.hold == pack_bits(np.isin(words, list(hold)))).all()
            bias = {int(i): float(b) for i, b in zip(row.bias_ids, row.bias, strict=True) if i != VOCAB}
            assert bias == (params.logit_bias or {})
            assert len(row.bias) == MAX_LOGIT_BIAS


@CASES
def test_masks_go_up_with_every_token_that_depends_on_the_last(seed: int, depth: int, pages: int) -> None:
    kinds = set()
    for plan, batch, _ in steps(seed, depth, pages):
        driven = [s for s in plan.sampled if s.params.bad_words or s.constraint]
        assert batch.mask_slots[: len(driven)].tolist() == [s.slot for s in driven]
        assert (batch.mask_slots[len(driven) :] == SLOTS).all(), "padding rows write to the dump"
        assert len(batch.mask_slots) == len(batch.mask_words)
        assert len(batch.mask_slots) in (0, *packer().buckets.masks)
        assert bool(driven) == bool(len(batch.mask_slots)), "steps without such rows upload nothing"
        for seq, words in zip(driven, batch.mask_words, strict=False):
            found = {v for v in range(VOCAB) if words[v // 32] >> np.uint32(v % 32) & np.uint32(1)}
            params = seq.params
            if seq.constraint is not None:
                mask = seq.constraint.mask.words
                base = {v for v in range(VOCAB) if mask[v // 32] >> np.uint32(v % 32) & np.uint32(1)}
                held = {*params.stop_token_ids, *(() if params.ignore_eos else (EOS,))}
                banned = held if len(seq.output) < params.min_tokens else set()
            else:
                base = set(params.allowed_token_ids or range(VOCAB))
                banned = {20} | ({22} if seq.output and seq.output[-1] == 21 else set())
            assert found == (base - banned or base)
            kinds.add((seq.constraint is not None, base - banned == set()))
    assert kinds


def test_the_tight_cases_preempt_those_who_shape_their_logits() -> None:
    """Or the cases above would not try that a slot is filled anew for the same sequence."""
    again = {s.arrival for plan, _, _ in steps(2, 0, 18) for s in plan.sequences if s.preemptions}
    shaping = {s.arrival for plan, _, _ in steps(2, 0, 18) for s in plan.sequences if s.params.shapes_logits}
    assert again & shaping


def test_prompt_rows_predict_every_prompt_token_but_the_first_once() -> None:
    """Across chunks, by the hidden row of the token before it."""
    found: dict[int, list[tuple[int, int]]] = {}
    prompts = {}
    for seed in range(6):
        for plan, batch, _ in steps(seed, 1):
            row, first = batch.bucket.decodes, {}
            for chunk in plan.chunks:
                first[chunk.seq.arrival] = (row, chunk)
                row += -(-chunk.count // BLOCK) * BLOCK
            for rows in batch.prompt_rows:
                key = seed * 100 + rows.seq.arrival
                prompts[key] = rows.seq
                assert len(rows.picks) == len(rows.targets) == BLOCK
                assert rows.picks.max() < batch.bucket.tokens
                begin, chunk = first[rows.seq.arrival]
                for i in range(rows.count):
                    assert rows.picks[i] == begin + rows.position + i - 1 - chunk.start
                    found.setdefault(key, []).append((rows.position + i, int(rows.targets[i])))
    assert len(found) > 3
    for key, seq in prompts.items():
        if seq.preemptions == 0:
            assert found[key] == list(enumerate(seq.prompt))[1:]


def test_prompt_rows_are_only_for_those_who_ask() -> None:
    for _, batch, _ in steps(7, 0):
        assert all(rows.seq.params.prompt_logprobs is not None for rows in batch.prompt_rows)


def test_bits_are_packed_little_end_first() -> None:
    for size in (1, 31, 32, 33, 77):
        mask = np.random.default_rng(size).random(size) < 0.5
        words = pack_bits(mask)
        assert words.dtype == np.uint32
        assert [bool(words[v // 32] >> np.uint32(v % 32) & np.uint32(1)) for v in range(size)] == mask.tolist()


def test_bad_words_ban_the_token_that_would_complete_them() -> None:
    words = ((5,), (7, 8), (7, 9, 10))

    def banned(*output: int) -> set[int]:
        seq = Sequence("r", 0, [7, 9], SamplingParams(bad_words=["x"]), 0, 30, words, output=list(output))
        return set(banned_tokens(seq))

    assert banned() == {5}, "the prompt is the user's own"
    assert banned(7) == {5, 8}
    assert banned(9) == {5}
    assert banned(7, 9) == {5, 10}
    assert banned(7, 9, 1) == {5}
