"""The sampler against numpy: what shapes the logits, exactly who is kept, the law of the draws, log-probabilities."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.random import threefry_2x32

from jaxserve import sampler
from jaxserve.batch import CHOICE_FIELDS, PROMPT_BIT, pack_bits
from jaxserve.request import MAX_LOGIT_BIAS
from jaxserve.sampler import Choice, SlotState

VOCAB = 50

sample, kept, shape_logits = jax.jit(sampler.sample), jax.jit(sampler.kept), jax.jit(sampler.shape_logits)
gumbel = jax.jit(sampler.gumbel, static_argnums=1)


def choices(rows: int, **columns) -> Choice:
    """Rows that do nothing but what is given: temperature 1, seeds 0, 1, 2, ..., slots 0, 1, 2, ..."""
    neutral = {"temperature": 1, "top_p": 1, "repetition": 1, "slot": np.arange(rows), "seed_low": np.arange(rows)}
    values = dict.fromkeys(Choice._fields, 0) | neutral | columns
    assert set(values) == set(Choice._fields)
    return Choice(*(np.broadcast_to(np.asarray(values[name]), rows).astype(kind) for name, kind in CHOICE_FIELDS))


def test_packed_rows_unpack_to_their_own_types() -> None:
    choice = choices(3, seed_low=[1, 2**32 - 1, 7], temperature=[0.5, 0, 2], position=[1, 2, 3], frequency=-0.5)
    packed = np.stack([np.asarray(column).view(np.int32) for column in choice], axis=1)
    for name, ours, theirs in zip(Choice._fields, sampler.unpack(jnp.asarray(packed)), choice, strict=True):
        assert ours.dtype == theirs.dtype, name
        assert (np.asarray(ours) == theirs).all(), name


# -- penalties and bans -----------------------------------------------------------------------------------------------


def random_slots(rng: np.random.Generator, slots: int) -> tuple[SlotState, dict[str, np.ndarray]]:
    """Slot states as the packer makes them, and the same as plain arrays."""
    plain = {
        "output": rng.poisson(0.5, (slots, VOCAB)),
        "prompt": rng.random((slots, VOCAB)) < 0.3,
        "allowed": rng.random((slots, VOCAB)) < 0.8,
        "hold": rng.random((slots, VOCAB)) < 0.1,
        "bias": np.where(rng.random((slots, VOCAB)) < 0.2, rng.uniform(-5, 5, (slots, VOCAB)), 0).astype(np.float32),
    }
    ids = np.full((slots, MAX_LOGIT_BIAS), VOCAB, np.int32)
    bias = np.zeros((slots, MAX_LOGIT_BIAS), np.float32)
    for slot in range(slots):
        (named,) = np.nonzero(plain["bias"][slot])
        ids[slot, : len(named)], bias[slot, : len(named)] = named, plain["bias"][slot, named]
    counts = (plain["output"] + PROMPT_BIT * plain["prompt"]).astype(np.uint16)
    bits = [np.stack([pack_bits(row) for row in plain[name]]) for name in ("allowed", "hold")]
    return SlotState(counts, *bits, ids, bias), plain


def shaped_by_definition(logits: np.ndarray, choice: Choice, plain: dict[str, np.ndarray]) -> np.ndarray:
    """One token at a time, as the documentation says it."""
    out = logits.copy()
    for row in range(len(logits)):
        if not choice.shaped[row]:
            continue
        slot = choice.slot[row]
        for v in range(logits.shape[1]):
            value, seen = float(logits[row, v]), int(plain["output"][slot, v])
            if seen or plain["prompt"][slot, v]:
                repetition = float(choice.repetition[row])
                value = value / repetition if value > 0 else value * repetition
            value -= float(choice.presence[row]) * (seen > 0) + float(choice.frequency[row]) * seen
            value += float(plain["bias"][slot, v])
            held = choice.position[row] < choice.hold_until[row] and plain["hold"][slot, v]
            out[row, v] = value if plain["allowed"][slot, v] and not held else -np.inf
    return out


def test_logits_are_shaped_by_definition() -> None:
    """Repetition over prompt and output, presence and frequency over the output, then bias, then bans."""
    rng = np.random.default_rng(0)
    rows, slots = 40, 9
    state, plain = random_slots(rng, slots)
    logits = rng.normal(0, 3, (rows, VOCAB)).astype(np.float32)
    choice = choices(
        rows,
        slot=rng.integers(0, slots, rows),
        shaped=rng.random(rows) < 0.8,
        presence=rng.uniform(-2, 2, rows),
        frequency=rng.uniform(-2, 2, rows),
        repetition=rng.uniform(0.5, 2, rows),
        position=rng.integers(0, 3, rows),
        hold_until=rng.integers(0, 3, rows),
    )
    ours = np.asarray(shape_logits(logits, choice, state))
    expected = shaped_by_definition(logits, choice, plain)
    assert np.array_equal(np.isinf(ours), np.isinf(expected))
    np.testing.assert_allclose(ours, expected, atol=1e-5)
    assert 0 < np.isinf(ours).sum() < ours.size / 2


def test_counting_touches_the_slots_of_shaped_rows_alone() -> None:
    state, plain = random_slots(np.random.default_rng(1), 5)
    choice = choices(3, slot=[2, 0, 4], shaped=[1, 0, 1])
    after = np.asarray(jax.jit(sampler.count)(state, choice, np.array([7, 8, 9])).counts).astype(int)
    before = state.counts.astype(int)
    before[2, 7] += 1
    before[4, 9] += 1
    dump = len(before) - 1
    assert np.array_equal(after[:dump], before[:dump])
    assert plain["prompt"][2, 7] == (after[2, 7] >= PROMPT_BIT), "the prompt's mark stays"


def test_setting_a_slot_leaves_the_others() -> None:
    state, _ = random_slots(np.random.default_rng(2), 5)
    other, _ = random_slots(np.random.default_rng(3), 1)
    after = jax.jit(sampler.set_slot)(state, np.int32(3), SlotState(*(array[0] for array in other)))
    for ours, old, new in zip(after, state, other, strict=True):
        assert np.array_equal(np.asarray(ours)[3], new[0])
        assert np.array_equal(np.delete(np.asarray(ours), 3, 0), np.delete(old, 3, 0))


# -- which tokens are kept --------------------------------------------------------------------------------------------


def kept_by_sorting(weight: np.ndarray, k: int, p: float, m: float) -> tuple[np.ndarray, float]:
    """Kept tokens of one row, and how near top-p was to another answer (relative)."""
    best = np.sort(weight)[::-1].astype(np.float64)
    keep, margin = np.ones(len(weight), bool), np.inf
    if 0 < k < len(weight):
        keep &= weight >= best[k - 1]
    if p < 1:
        mass = np.cumsum(best[best >= best[k - 1]] if 0 < k < len(weight) else best)
        need = p * mass[-1]
        last = min(int(np.searchsorted(mass, need)), len(mass) - 1)
        margin = float(np.abs(mass - need).min() / mass[-1])
        keep &= weight >= best[last]
    return keep & (weight >= np.float32(m)), margin


def test_kept_sets_are_those_of_a_sort() -> None:
    """Thousands of random rows with ties, cliffs and flats, under every combination of top-k, top-p and min-p."""
    rng = np.random.default_rng(4)
    rows, close = 1024, 0
    for scale in (0.01, 1.0, 4.0, 30.0):
        logits = rng.normal(0, scale, (rows, VOCAB)).astype(np.float32)
        logits[::3] = np.round(logits[::3])  # ties
        logits[::5, ::2] = -np.inf  # bans
        scaled = logits - logits.max(-1, keepdims=True)
        k = rng.choice([0, 1, 2, 3, 10, VOCAB - 1, VOCAB], rows)
        p = rng.choice([1e-6, 0.1, 0.5, 0.9, 0.999, 1.0], rows).astype(np.float32)
        m = rng.choice([0.0, 0.02, 0.5, 1.0], rows).astype(np.float32)
        ours = np.asarray(kept(scaled, choices(rows, top_k=k, top_p=p, min_p=m)))
        weight = np.asarray(jnp.exp(scaled))
        for row in range(rows):
            expected, margin = kept_by_sorting(weight[row], k[row], float(p[row]), m[row])
            if margin < 1e-6:
                close += 1  # the sums' rounding decides
            else:
                assert np.array_equal(ours[row], expected), (scale, k[row], p[row], m[row])
            assert ours[row, np.argmax(logits[row])], "the likeliest is always kept"
    assert close < rows


KEPT = {
    "nothing asked": ({}, 6),
    "one": ({"top_k": 1}, 1),
    "k as large as the vocabulary": ({"top_k": 6}, 6),
    "k beyond it": ({"top_k": 100}, 6),
    "ties with the k-th are kept": ({"top_k": 2}, 3),
    "p one": ({"top_p": 1.0}, 6),
    "p that the first reaches": ({"top_p": 0.35}, 1),
    "p just beyond the first": ({"top_p": 0.45}, 3),
    "p tiny": ({"top_p": 1e-30}, 1),
    "k first, and then p of what is left": ({"top_k": 3, "top_p": 0.45}, 1),
    "min-p of half the best": ({"min_p": 0.49}, 3),
    "min-p one": ({"min_p": 1.0}, 1),
}


@pytest.mark.parametrize("name", KEPT)
def test_kept_at_the_edges(name: str) -> None:
    columns, count = KEPT[name]
    share = np.array([[0.4, 0.2, 0.2, 0.1, 0.06, 0.04]], np.float32)
    scaled = np.log(share / share.max())
    mask = np.asarray(kept(scaled, choices(1, **columns)))[0]
    assert mask.tolist() == [i < count for i in range(6)]


def test_neighbouring_floats_are_told_apart() -> None:
    scaled = np.log1p(-np.array([[0, 1, 2, 3]]) * 2.0**-24).astype(np.float32)
    keys = np.asarray(jnp.exp(scaled)).view(np.int32)[0]
    assert (np.diff(keys) == -1).all()
    for k in (1, 2, 3):
        assert np.asarray(kept(scaled, choices(1, top_k=k)))[0].sum() == k


# -- the draw ---------------------------------------------------------------------------------------------------------


def test_greedy_takes_the_lowest_id_among_equals() -> None:
    logits = np.zeros((3, VOCAB), np.float32)
    logits[1, [7, 9]] = 1
    logits[2, 5:] = -np.inf
    assert np.asarray(sampler.greedy(logits)).tolist() == [0, 7, 0]
    assert np.asarray(sample(logits, choices(3, temperature=0))).tolist() == [0, 7, 0]


@pytest.mark.parametrize("temperature", [1e-45, 1e-38, 1.2e-38, 1e-37, 1e-30, 1e-6])
def test_a_very_low_temperature_is_as_good_as_greedy(temperature: float) -> None:
    logits = np.random.default_rng(5).normal(0, 30, (16, VOCAB)).astype(np.float32)
    tokens = np.asarray(sample(logits, choices(16, temperature=temperature)))
    assert tokens.tolist() == logits.argmax(1).tolist()


def numpy_threefry(key: tuple[int, int], counter: tuple[int, int]) -> tuple[int, int]:
    """Threefry-2x32-20 from the paper, in Python's integers."""
    mask = 2**32 - 1
    keys = (*key, key[0] ^ key[1] ^ 0x1BD11BDA)
    x, y = (counter[0] + keys[0]) & mask, (counter[1] + keys[1]) & mask
    for turn in range(20):
        by = (13, 15, 26, 6, 17, 29, 16, 24)[turn % 8]
        x = (x + y) & mask
        y = ((y << by | y >> (32 - by)) & mask) ^ x
        if turn % 4 == 3:
            step = turn // 4 + 1
            x, y = (x + keys[step % 3]) & mask, (y + keys[(step + 1) % 3] + step) & mask
    return x, y


def ours_threefry(key: tuple[int, int], counter: tuple[int, int]) -> int:
    return int(sampler.threefry(*(jnp.uint32(word) for word in (*key, *counter))))


ONES = 0xFFFFFFFF
KNOWN = [  # Random123's known answers
    ((0, 0), (0, 0), (0x6B200159, 0x99BA4EFE)),
    ((ONES, ONES), (ONES, ONES), (0x1CB996FC, 0xBB002BE7)),
    ((0x13198A2E, 0x03707344), (0x243F6A88, 0x85A308D3), (0xC4923A9C, 0x483DF7A0)),
]


@pytest.mark.parametrize(("key", "counter", "answer"), KNOWN)
def test_threefry_gives_the_known_answers(key, counter, answer) -> None:
    assert numpy_threefry(key, counter) == answer
    assert ours_threefry(key, counter) == answer[0]


def test_threefry_is_jaxs() -> None:
    rng = np.random.default_rng(6)
    for _ in range(5):
        key = rng.integers(0, 2**32, 2, np.uint32)
        high, low = rng.integers(0, 2**32, (2, 64), np.uint32)
        theirs = np.asarray(threefry_2x32(jnp.asarray(key), jnp.concatenate([high, low])))[:64]
        assert np.array_equal(np.asarray(sampler.threefry(key[0], key[1], high, low)), theirs)


def test_noise_is_a_function_of_seed_position_and_token_alone() -> None:
    rows = 5
    choice = choices(rows, seed_low=[1, 1, 1, 2, 1], seed_high=[0, 0, 3, 0, 0], position=[4, 5, 4, 4, 4])
    noise = np.asarray(gumbel(choice, VOCAB))
    assert np.array_equal(noise[0], noise[4])
    for i in range(4):
        for j in range(i):
            assert (noise[i] != noise[j]).mean() > 0.9, "another seed or position is another draw"
    assert np.array_equal(np.asarray(gumbel(choice, VOCAB + 14))[:, :VOCAB], noise), (
        "padding the vocabulary changes nothing"
    )
    uniform = [((numpy_threefry((1, 0), (4, v))[0] >> 9) + 0.5) / 2**23 for v in range(VOCAB)]
    np.testing.assert_allclose(noise[0], -np.log(-np.log(uniform)), atol=1e-4)


def test_noise_is_finite_at_both_ends_of_the_uniform_numbers() -> None:
    """Counters whose first 24 bits are all ones, and all zeros: a token of infinite noise would always or never win."""
    most, least = 3184748, 3695797
    assert numpy_threefry((0, 0), (0, most))[0] >> 8 == 0xFFFFFF
    assert numpy_threefry((0, 0), (1, least))[0] >> 8 == 0
    noise = np.asarray(gumbel(choices(2, seed_low=0, position=[0, 1]), least + 1))
    assert 15 < noise[0, most] < 18
    assert noise[0, most] == noise[0].max()
    assert -3 < noise[1, least] < -2.5


def test_a_rows_token_does_not_depend_on_its_company() -> None:
    rng = np.random.default_rng(7)
    rows = 24
    logits = rng.normal(0, 2, (rows, VOCAB)).astype(np.float32)
    columns = {
        "temperature": rng.choice([0, 0.7, 1.5], rows),
        "top_k": rng.choice([0, 5], rows),
        "top_p": rng.choice([0.8, 1.0], rows),
        "min_p": rng.choice([0, 0.05], rows),
        "position": rng.integers(0, 1000, rows),
        "seed_high": rng.integers(0, 2**32, rows),
    }
    choice = choices(rows, **columns)
    together = np.asarray(sample(logits, choice))
    order = rng.permutation(rows)
    shuffled = np.asarray(sample(logits[order], Choice(*(c[order] for c in choice))))
    assert np.array_equal(shuffled, together[order])
    alone = [int(sample(logits[i : i + 1], Choice(*(c[i : i + 1] for c in choice)))[0]) for i in range(rows)]
    assert alone == together.tolist()


def chi_square(counts: np.ndarray, expected: np.ndarray) -> float:
    return float(((counts - expected) ** 2 / expected).sum())


@pytest.mark.parametrize("by", ["seed_low", "seed_high", "position"])
def test_draws_follow_the_softmax(by: str) -> None:
    """20,000 draws at temperature 1.5 over seeds, or over positions of one seed."""
    rows, logits = 20_000, np.array([2.0, 1.0, 0.5, 0.0, -0.5, -1.0, -2.0, 1.5], np.float32)
    columns = {"seed_low": 12345, "temperature": 1.5} | {by: np.arange(rows)}
    tokens = np.asarray(sample(np.broadcast_to(logits, (rows, 8)), choices(rows, **columns)))
    weight = np.exp(logits / 1.5)
    expected = rows * weight / weight.sum()
    assert chi_square(np.bincount(tokens, minlength=8), expected) < 30  # 7 degrees: once in ten thousand
    pairs = np.bincount(tokens[:-1] * 8 + tokens[1:], minlength=64)
    expected_pairs = np.outer(expected, expected).ravel() / rows
    assert chi_square(pairs, expected_pairs) < 120, "neighbours are independent"  # 63 degrees


def test_truncated_draws_follow_the_softmax_of_what_is_kept() -> None:
    rows, share = 20_000, np.array([0.4, 0.3, 0.2, 0.06, 0.04])
    logits = np.broadcast_to(np.log(share).astype(np.float32), (rows, 5))
    tokens = np.asarray(sample(logits, choices(rows, top_p=0.85)))
    assert tokens.max() == 2
    assert chi_square(np.bincount(tokens), rows * share[:3] / share[:3].sum()) < 23  # 2 degrees


# -- log-probabilities ------------------------------------------------------------------------------------------------


def test_log_probabilities_are_those_of_the_raw_logits() -> None:
    rng = np.random.default_rng(8)
    logits = rng.normal(0, 4, (12, VOCAB)).astype(np.float32)
    logits[3, 20:] = -np.inf  # a padded vocabulary
    tokens = rng.integers(0, 20, 12).astype(np.int32)
    ours = jax.jit(sampler.logprobs, static_argnums=2)(logits, tokens, 5)
    wide = logits.astype(np.float64)
    log_softmax = wide - np.log(np.exp(wide).sum(1, keepdims=True))
    for i, token in enumerate(tokens):
        best = np.argsort(-log_softmax[i], kind="stable")
        assert ours.chosen[i] == pytest.approx(log_softmax[i, token], abs=1e-5)
        assert ours.rank[i] == best.tolist().index(token) + 1
        assert ours.top_ids[i].tolist() == best[:5].tolist()
        np.testing.assert_allclose(ours.top[i], log_softmax[i, best[:5]], atol=1e-5)
