"""Marking against its definition: whose noise chooses, what counts as used, the law over keys, unmarked neighbours."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_sampler import chi_square, choices

from jaxserve import sampler
from jaxserve.request import SamplingParams
from jaxserve.sequence import Sequence
from jaxserve.watermark import marking, prf, slots
from jaxserve.watermark.config import Mark
from jaxserve.watermark.prf import CHACHA, PHILOX
from jaxserve.watermark.slots import MarkSlots, MarkSpec

VOCAB = 50
WIDTH = 4


def spec(name: str = CHACHA, **fields: Any) -> MarkSpec:
    neutral = {"prf": name, "width": WIDTH, "dual": False, "history": 64, "after_prompt": False}
    return MarkSpec(**neutral | fields)


def prepared(name: str, *keys: int) -> np.ndarray:
    """uint32 ``[2, WORDS]``."""
    return np.stack([prf.prepared(name, key, WIDTH) for key in (keys * 2)[:2]])


def empty(of: MarkSpec, count: int) -> marking.MarkState:
    return jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), marking.state_shapes(of, count))


def packed(of: MarkSpec, keys: np.ndarray, **columns: Any) -> np.ndarray:
    """Rows of MarkSlots.pack: marked, with nothing generated, unless columns say otherwise. ``keys [S, 2, WORDS]``."""
    rows = np.zeros((len(keys), slots.ROW), np.uint32)
    for name, value in ({"marked": 1, "stamp": 1000, "oldest": 1} | columns).items():
        column = rows[:, slots.FIELDS.index(name)]
        column[:] = np.asarray(value, np.float32).view(np.uint32) if name == "alpha" else value
    rows[:, len(slots.FIELDS) :] = keys.reshape(len(keys), -1)
    return rows


@functools.partial(jax.jit, static_argnums=0)
def sample(of, logits, choice, rows, state):
    return marking.sample(of, logits, choice, marking.unpack(rows), state)


def many_keys(name: str, count: int, seed: int, *, dual: bool = False) -> np.ndarray:
    """Prepared keys of ``count`` rows ``[S, 2, WORDS]``, as good as drawn: preparing 20,000 takes its time."""
    keys = np.random.default_rng(seed).integers(0, 2**32, (count, 2, prf.WORDS), np.uint32)
    if name == PHILOX:
        keys[:, :, 2:] = 0
    if not dual:
        keys[:, 1] = keys[:, 0]
    return keys


# -- the law ----------------------------------------------------------------------------------------------------------

LAWS: dict[str, dict[str, float]] = {
    "plain": {},
    "cold": {"temperature": 0.6},
    "hot": {"temperature": 1.7},
    "top-k": {"temperature": 0.9, "top_k": 5},
    "top-p": {"temperature": 1.2, "top_p": 0.8},
    "min-p": {"temperature": 1.3, "min_p": 0.1},
    "all": {"temperature": 1.1, "top_k": 9, "top_p": 0.9, "min_p": 0.03},
}


def filtered_law(logits: np.ndarray, columns: dict[str, float]) -> np.ndarray:
    """What tokens are drawn with: numpy's own sort and sums."""
    p = np.exp(logits.astype(np.float64) / columns.get("temperature", 1))
    floor = columns.get("min_p", 0) * p.max()
    order = np.argsort(-p)
    keep = np.zeros(len(p), bool)
    keep[order[: int(columns.get("top_k", 0)) or len(p)]] = True
    mass = np.cumsum(np.where(keep, p, 0)[order])
    keep[order[np.searchsorted(mass, columns.get("top_p", 1) * mass[-1]) + 1 :]] = False
    p = np.where(keep & (p >= floor), p, 0)
    return p / p.sum()


@pytest.mark.parametrize("name", [PHILOX, CHACHA])
@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("kind", ["single", "dual", "used before"])
def test_over_keys_tokens_follow_the_filtered_law(name: str, law: str, kind: str) -> None:
    """20,000 draws of one distribution: under as many keys, or by ordinary noise where the context is used."""
    count = 20_000
    logits = np.random.default_rng(3).normal(0, 1.5, 22).astype(np.float32)
    of = spec(name, dual=kind == "dual", history=0, after_prompt=kind == "used before")
    keys = many_keys(name, 1 if kind == "used before" else count, 4, dual=kind == "dual")
    rows = packed(of, np.broadcast_to(keys, (count, 2, prf.WORDS)), alpha=0.3)
    choice = choices(count, slot=0, position=7, **LAWS[law])
    tokens, _ = sample(of, np.broadcast_to(logits, (count, 22)), choice, rows, empty(of, 2))
    expected = count * filtered_law(logits, LAWS[law])
    counts = np.bincount(np.asarray(tokens), minlength=22)
    kept = expected > 0
    assert counts[~kept].sum() == 0
    degrees = kept.sum() - 1
    assert chi_square(counts[kept], expected[kept]) < degrees + 4.5 * (2 * degrees) ** 0.5 + 8


# -- whose noise chooses ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [PHILOX, CHACHA])
@pytest.mark.parametrize("vocab", [VOCAB, 51, 1000])
def test_the_token_is_the_one_the_reference_chooses(name: str, vocab: int) -> None:
    """argmax of logit - log(-log u) in float64, over contexts of every fill, but for ties within rounding."""
    rng = np.random.default_rng(5)
    count, close = 300, 0
    of = spec(name)
    secrets = rng.integers(0, 2**63, count).tolist()
    keys = np.stack([prepared(name, key) for key in secrets])
    generated = rng.integers(0, WIDTH + 1, count)
    contexts = rng.integers(0, vocab, (count, WIDTH))
    logits = rng.normal(0, 2, (count, vocab)).astype(np.float32)
    temperature = rng.choice([0.5, 1.0, 1.5], count).astype(np.float32)
    state = empty(of, count + 1)._replace(context=jnp.asarray(np.vstack([contexts, contexts[:1]]), jnp.uint32))
    choice = choices(count, temperature=temperature)
    tokens, after = sample(of, logits, choice, packed(of, keys, generated=generated), state)
    for i in range(count):
        context = np.where(np.arange(WIDTH, 0, -1) > generated[i], -1, contexts[i])
        noise = -np.log(-np.log(prf.all_uniforms(name, secrets[i], context, vocab)))
        noisy = (logits[i].astype(np.float64) - logits[i].max()) / temperature[i] + noise
        best, second = np.sort(noisy)[[-1, -2]]
        if best - second < 1e-4:
            close += 1
        else:
            assert tokens[i] == np.argmax(noisy), i
        assert np.asarray(after.context)[i].tolist() == [*context[1:].astype(np.uint32).tolist(), tokens[i]]
    assert close < count / 50


@pytest.mark.parametrize("name", [PHILOX, CHACHA])
def test_unmarked_and_greedy_rows_are_as_if_nobody_marked(name: str) -> None:
    rng = np.random.default_rng(6)
    count = 64
    of = spec(name)
    marked = rng.random(count) < 0.5
    choice = choices(count, temperature=rng.choice([0, 0.8, 1.4], count), top_k=rng.choice([0, 7], count), position=9)
    logits = rng.normal(0, 2, (count, VOCAB)).astype(np.float32)
    rows = packed(of, many_keys(name, count, 7), marked=marked)
    state = empty(of, count + 1)
    tokens, after = (np.asarray(jax.tree.leaves(x)[0]) for x in sample(of, logits, choice, rows, state))
    plain = np.asarray(jax.jit(sampler.sample)(logits, choice))
    same = ~marked | (np.asarray(choice.temperature) == 0)
    assert np.array_equal(tokens[same], plain[same])
    assert (tokens[~same] != plain[~same]).mean() > 0.3
    assert (after[:-1][~marked] == 0).all(), "nothing is remembered of rows that are not marked"
    alone = [sample(of, logits[[i]], type(choice)(*(c[[i]] for c in choice)), rows[[i]], state)[0] for i in range(20)]
    assert np.concatenate(alone).tolist() == tokens[:20].tolist(), "nor does the company matter"


def test_the_second_key_marks_its_share() -> None:
    """Which key is an ordinary coin: over positions, a share alpha of the tokens is what key B chooses."""
    count, alpha, logits = 4000, 0.3, np.zeros((1, 1000), np.float32)
    for name in (PHILOX, CHACHA):
        of = spec(name, dual=True, history=0)
        keys = prepared(name, 1, 2)[None]
        rows = packed(of, np.broadcast_to(keys, (count, 2, prf.WORDS)), alpha=alpha)
        choice = choices(count, slot=0, seed_low=5, position=np.arange(count))
        tokens, _ = sample(of, np.broadcast_to(logits, (count, 1000)), choice, rows, empty(of, 2))
        a, b = (np.argmax(prf.all_uniforms(name, key, [-1] * WIDTH, 1000)) for key in (1, 2))
        counts = np.bincount(np.asarray(tokens), minlength=1000)
        assert a != b
        assert counts[a] + counts[b] == count
        assert abs(counts[b] - alpha * count) < 4 * (count * alpha * (1 - alpha)) ** 0.5


# -- memory -----------------------------------------------------------------------------------------------------------


def sequence(slot: int, prompt: list[int], output: list[int], keys: np.ndarray) -> Sequence:
    mark = Mark("k", keys)
    params = SamplingParams()
    return Sequence("r", 0, prompt, params, 0, 1000, slot=slot, output=output, mark=mark)


class Generation:
    """A slot that generates by itself: the device's functions, with the host's rows, one token at a time."""

    def __init__(self, of: MarkSpec, marks: MarkSlots, state: marking.MarkState, seq: Sequence, seed: int):
        self.of, self.marks, self.state, self.seq, self.seed = of, marks, state, seq, seed
        row = marks.admit(seq)
        if row is not None:
            self.state = marking.set_slot(state, jnp.int32(seq.slot), marking.MarkState(*row))
        self.fresh: list[bool] = []

    def step(self, vocab: int) -> int:
        rows = self.marks.pack(np.array([self.seq.slot]), np.array([len(self.seq)]))
        choice = choices(1, slot=self.seq.slot, position=len(self.seq), seed_low=self.seed)
        contexts = look_up(self.of, self.state, rows, choice)
        logits = np.zeros((1, vocab), np.float32)
        tokens, self.state = sample(self.of, logits, choice, rows, self.state)
        self.fresh.append(bool(contexts.fresh[0]))
        self.seq.output.append(int(tokens[0]))
        return int(tokens[0])


@functools.partial(jax.jit, static_argnums=0)
def look_up(of, state, rows, choice):
    return marking.look_up(of, state, marking.unpack(rows), choice.slot)


def fresh_by_definition(prompt: list[int], output: list[int], of: MarkSpec) -> list[bool]:
    """Whether each output token's context was not used within the last ``history`` positions."""
    last: dict[tuple[int, ...], int] = {}
    for end in range(of.width, len(prompt) + 1) if of.after_prompt else ():
        last[tuple(prompt[end - of.width : end])] = end
    fresh, text = [], [-1] * of.width + output
    for i in range(len(output)):
        position, context = len(prompt) + i, tuple(text[i : i + of.width])
        used = of.history > 0 and context in last and last[context] >= position - of.history
        fresh.append(not used and not (of.after_prompt and i < of.width))
        last[context] = position
    return fresh


@pytest.mark.parametrize("name", [PHILOX, CHACHA])
@pytest.mark.parametrize(
    "fields",
    [{}, {"history": 0}, {"history": 9}, {"after_prompt": True}, {"after_prompt": True, "history": 12}],
    ids=str,
)
def test_a_context_is_used_once_while_it_is_remembered(name: str, fields: dict[str, Any]) -> None:
    """Three tokens, contexts of two: everything repeats soon. The slot has had another owner before."""
    of = spec(name, width=2, **fields)
    keys = np.stack([prf.prepared(name, 11, 2)] * 2)
    marks, state = MarkSlots(of, 4), empty(of, 4)
    for owner, prompt in enumerate(([0, 1, 2, 0, 0, 1], [2, 2, 0, 1, 0])):
        made = Generation(of, marks, state, sequence(1, prompt, [], keys), owner)
        for _ in range(40):
            made.step(3)
        expected = fresh_by_definition(prompt, made.seq.output, of)
        assert made.fresh == expected
        assert sum(expected) > 2
        assert of.history == 0 or not all(expected)
        state = made.state


@pytest.mark.parametrize("fields", [{}, {"after_prompt": True}, {"history": 20}], ids=str)
def test_a_sequence_that_comes_back_goes_on_as_if_it_had_never_left(fields: dict[str, Any]) -> None:
    of = spec(CHACHA, width=2, **fields)
    keys = np.stack([prf.prepared(CHACHA, 11, 2)] * 2)
    prompt = [3, 1, 4, 1, 5]
    whole = Generation(of, MarkSlots(of, 4), empty(of, 4), sequence(1, prompt, [], keys), 8)
    for _ in range(60):
        whole.step(5)
    for cut in (1, 2, 7, 30, 59):
        marks, state = MarkSlots(of, 4), empty(of, 4)
        other = Generation(of, marks, state, sequence(2, prompt[::-1], [], keys), 9)
        for _ in range(25):
            other.step(5)
        back = Generation(of, marks, other.state, sequence(2, prompt, whole.seq.output[:cut], keys), 8)
        for _ in range(60 - cut):
            back.step(5)
        assert back.seq.output == whole.seq.output
        assert back.fresh == whole.fresh[cut:]


def test_the_table_is_the_same_built_at_once_or_use_by_use() -> None:
    """Buckets that overflow keep the same contexts, so that a sequence that comes back forgets the same."""
    of = spec(CHACHA, width=1, history=512)
    keys = np.stack([prf.prepared(CHACHA, 3, 1)] * 2)
    text = np.random.default_rng(1).integers(0, 3000, 600).tolist()
    marks, state = MarkSlots(of, 2), empty(of, 2)
    seq = sequence(0, [1], [], keys)
    marks.admit(seq)
    for token in text:
        rows = marks.pack(np.array([0]), np.array([len(seq)]))
        state = remember(of, state, rows, np.array([0]), np.array([token]))
        seq.output.append(token)
    built = MarkSlots(of, 2)
    row = built.admit(seq)
    assert row is not None
    assert np.array_equal(np.asarray(state.context)[0], row.context)
    stamps = np.asarray(state.table)[0].reshape(of.buckets, slots.WAYS, 2)
    ours = {tuple(entry) for bucket in stamps for entry in bucket if entry[1] > len(seq) + 1 - of.history}
    theirs = {tuple(entry) for bucket in row.table.reshape(stamps.shape) for entry in bucket if entry[1]}
    assert theirs >= ours
    assert len(ours) > 400


@functools.partial(jax.jit, static_argnums=0)
def remember(of, state, rows, slot, tokens):
    marks = marking.unpack(rows)
    return marking.remember(of, state, marks, slot, marking.look_up(of, state, marks, slot), tokens)


def test_a_slot_whose_stamps_run_out_starts_again() -> None:
    of = spec(PHILOX, width=2)
    keys = np.stack([prf.prepared(PHILOX, 11, 2)] * 2)
    marks, state = MarkSlots(of, 4), empty(of, 4)
    marks.next[1] = slots.LAST_STAMP + 5
    made = Generation(of, marks, state, sequence(1, [1], [], keys), 8)
    assert marks.base[1] == 1
    for _ in range(30):
        made.step(3)
    assert made.fresh == fresh_by_definition([1], made.seq.output, of)
