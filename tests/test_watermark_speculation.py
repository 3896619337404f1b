"""Speculation seen from the sampler, with a double for the drafter: the target's law, both keys' evidence, one use."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_sampler import chi_square, choices
from test_watermark_sampler import empty, fresh_by_definition, many_keys, packed, spec

from jaxserve.watermark import marking, prf, speculation
from jaxserve.watermark.prf import CHACHA, PHILOX
from jaxserve.watermark.slots import MarkSpec

VOCAB = 12
DRAFTS = 3


@functools.partial(jax.jit, static_argnums=0)
def block(of: MarkSpec, drafter, target, choice, rows, state):
    """A block as an engine would run it: DRAFTS drafts, verification, a token more. Laws ``[V]``, for all places.

    Returns tokens ``[S, DRAFTS + 1]``, how many of them count, whose drafts were taken, freshness, and the state.
    """
    marks = marking.unpack(rows)
    count = rows.shape[0]
    drafter, target = (jnp.broadcast_to(x, (count, VOCAB)) for x in (drafter, target))
    drafts = jnp.zeros((count, 0), jnp.int32)
    places, taken, others = [], [], []
    for i in range(DRAFTS + 1):
        now, then = speculation.ahead(of, choice, marks, i)
        places.append(speculation.look_up(of, state, then, choice.slot, drafts, places))
        if i == DRAFTS:
            others.append(speculation.bonus(of, target, now, then, places[i]))
            break
        new = speculation.draft(of, drafter, now, then, places[i])
        taken.append(speculation.accept(drafter, target, new, now))
        others.append(speculation.replace(of, drafter, target, now, then, places[i]))
        drafts = jnp.concatenate([drafts, new[:, None]], axis=1)
    run = jnp.cumprod(jnp.stack(taken, axis=1), axis=1).sum(1)
    own = jnp.arange(DRAFTS + 1) < run[:, None]
    tokens = jnp.where(own, jnp.pad(drafts, ((0, 0), (0, 1))), jnp.stack(others, axis=1))
    state = speculation.remember(of, state, choice, marks, places, tokens, run + 1)
    return tokens, run + 1, own, jnp.stack([place.fresh for place in places], axis=1), state


def laws(seed: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    return rng.normal(0, 1, VOCAB).astype(np.float32), rng.normal(0, 1.3, VOCAB).astype(np.float32)


def softmax(x: np.ndarray) -> np.ndarray:
    return np.exp(x) / np.exp(x).sum()


KINDS = {"dual": {"dual": True}, "single": {}, "used before": {"dual": True, "after_prompt": True}}


@pytest.mark.parametrize("name", [PHILOX, CHACHA])
@pytest.mark.parametrize("kind", KINDS)
def test_tokens_follow_the_target_and_are_taken_as_often_as_ever(name: str, kind: str) -> None:
    count = 20_000
    drafter, target = laws(1)
    of = spec(name, **KINDS[kind])
    rows = packed(of, many_keys(name, count, 2, dual=of.dual), alpha=0.1)
    choice = choices(count, position=5)
    tokens, lengths, own, _ = (np.asarray(x) for x in block(of, drafter, target, choice, rows, empty(of, 1))[:4])
    p, q = softmax(target), softmax(drafter)
    rate = np.minimum(p, q).sum()
    assert abs(own[:, 0].mean() - rate) < 4 * (rate * (1 - rate) / count) ** 0.5
    for place in range(DRAFTS + 1):
        there = lengths > place
        counts = np.bincount(tokens[there, place], minlength=VOCAB)
        assert chi_square(counts, there.sum() * p) < 40, place  # 11 degrees
    pairs = np.bincount(tokens[lengths > 1, 0] * VOCAB + tokens[lengths > 1, 1], minlength=VOCAB**2)
    taken = np.minimum(p, q) / rate
    assert chi_square(pairs, (lengths > 1).sum() * np.outer(taken, p).ravel()) < 230, "independent"  # 143 degrees


@pytest.mark.parametrize("name", [PHILOX, CHACHA])
def test_drafts_bear_key_a_and_the_rest_key_b(name: str) -> None:
    """With one key drafts are unmarked, and what is put in their place bears it."""
    count = 300
    drafter, target = laws(3)
    for dual in (True, False):
        of = spec(name, dual=dual, width=1)
        secrets = [(i, i + 1000 if dual else i) for i in range(count)]
        keys = np.stack([[prf.prepared(name, key, 1) for key in pair] for pair in secrets])
        choice, rows = choices(count, position=5), packed(of, keys)
        made = block(of, drafter, target, choice, rows, empty(of, count + 1))
        tokens, lengths, own, fresh = (np.asarray(x) for x in made[:4])
        found: dict[tuple[bool, int], list[float]] = {}
        for i in range(count):
            for place in range(lengths[i]):
                if not fresh[i, place]:
                    continue
                context = [[tokens[i, place - 1] if place else -1]]
                for half, key in enumerate(secrets[i]):
                    u = prf.uniforms(name, key, context, [tokens[i, place]])[0]
                    found.setdefault((bool(own[i, place]), half), []).append(-np.log1p(-u))
        mean = {which: np.mean(values) for which, values in found.items()}
        assert mean[False, 1] > 1.5, "replacements and bonus tokens bear B"
        if dual:
            assert mean[True, 0] > 1.5, "drafts bear A"
            assert max(mean[True, 1], mean[False, 0]) < 1.25
        else:
            assert mean[True, 0] < 1.25


@pytest.mark.parametrize("fields", [{}, {"after_prompt": True}, {"history": 12}], ids=str)
def test_a_context_is_marked_once_in_a_block_and_over_blocks(fields: dict[str, Any]) -> None:
    of = spec(CHACHA, dual=True, **{"width": 1, **fields})
    keys = np.stack([prf.prepared(CHACHA, key, 1) for key in (5, 6)])[None]
    drafter, target = (x * 0.3 for x in laws(4))
    state, output, fresh = empty(of, 2), [], []
    for _ in range(12):
        position = len(output)
        stamp = 50 + position
        oldest = max(50, stamp - of.history)
        rows = packed(of, keys, generated=min(position, 1), stamp=stamp, oldest=oldest)
        tokens, lengths, _, new, state = block(of, drafter, target, choices(1, position=position), rows, state)
        output += np.asarray(tokens)[0, : int(lengths[0])].tolist()
        fresh += np.asarray(new)[0, : int(lengths[0])].tolist()
    assert fresh == fresh_by_definition([], output, of)
    assert len(output) > 18
