"""Choosing tokens on the device: penalties, bans, temperature, top-k, top-p, min-p, Gumbel-max, log-probabilities.

Every row carries its own parameters in ``Choice`` columns. Noise is a function of (seed, position, vocabulary id)
alone, so a row's token does not depend on its neighbours, its place in the batch, or the batch's size.

Thresholds for top-k and top-p are found by bisection over the bit patterns of float32 (monotone for positive numbers),
which needs no sort of the vocabulary: 30 counting passes, exact, ties kept.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxserve.batch import CHOICE_FIELDS, PROMPT_BIT
from jaxserve.params import Abstract
from jaxserve.request import MAX_LOGIT_BIAS
from jaxserve.threefry import threefry


class Choice(NamedTuple):
    """One row's sampling parameters, each ``[S]``: the columns of ``batch.CHOICE_FIELDS``."""

    slot: jax.Array  # where the chosen token is stored; the last slot is a dump for padding
    position: jax.Array  # of the token to be chosen
    seed_low: jax.Array
    seed_high: jax.Array
    temperature: jax.Array  # 0 greedy
    top_k: jax.Array  # 0 off
    top_p: jax.Array
    min_p: jax.Array
    shaped: jax.Array  # 1 where the slot's state below applies
    presence: jax.Array
    frequency: jax.Array
    repetition: jax.Array
    hold_until: jax.Array  # positions before it may not choose a token of the slot's ``hold`` set


def unpack(packed: jax.Array) -> Choice:
    """int32 ``[S, len(CHOICE_FIELDS)]`` to columns of their own dtypes."""
    columns = (lax.bitcast_convert_type(packed[:, i], kind) for i, (_, kind) in enumerate(CHOICE_FIELDS))
    return Choice(*columns)


class SlotState(NamedTuple):
    """What the sampler remembers of every slot (one more than there are: the last is a dump).

    counts: uint16 ``[slots, V]``, see PROMPT_BIT. allowed, hold: uint32 ``[slots, ceil(V / 32)]``, bit v % 32 of word
    v // 32 stands for token v. bias_ids: int32 ``[slots, MAX_LOGIT_BIAS]``, V where unused; bias: float32, the same
    shape.
    """

    counts: jax.Array
    allowed: jax.Array
    hold: jax.Array
    bias_ids: jax.Array
    bias: jax.Array


def slot_state_shapes(slots: int, vocab: int) -> SlotState:
    """Abstract shapes of ``SlotState``."""
    words = -(-vocab // 32)

    def array(width: int, dtype: Any) -> Abstract:
        return jax.ShapeDtypeStruct((slots, width), dtype)

    return SlotState(
        array(vocab, jnp.uint16),
        array(words, jnp.uint32),
        array(words, jnp.uint32),
        array(MAX_LOGIT_BIAS, jnp.int32),
        array(MAX_LOGIT_BIAS, jnp.float32),
    )


def set_slot(state: SlotState, slot: jax.Array, row: SlotState) -> SlotState:
    """Replace one slot's state (a sequence that shapes its logits has been admitted)."""
    return SlotState(*(array.at[slot].set(new) for array, new in zip(state, row, strict=True)))


def set_masks(allowed: jax.Array, slots: jax.Array, words: jax.Array) -> jax.Array:
    """Replace ``allowed`` of some slots ``[M]`` by ``words [M, ceil(V / 32)]``; padding rows name the dump."""
    return allowed.at[slots].set(words)


def greedy(logits: jax.Array) -> jax.Array:
    """The likeliest token of every row ``[S, V]``, the lowest id among equals; int32 ``[S]``."""
    peak = jnp.max(logits, axis=-1, keepdims=True)
    ids = jnp.arange(logits.shape[1], dtype=jnp.int32)
    return jnp.min(jnp.where(logits == peak, ids, logits.shape[1] - 1), axis=-1)  # ten times argmax's speed on a CPU


def shape_logits(logits: jax.Array, choice: Choice, state: SlotState) -> jax.Array:
    """Apply penalties, bias and bans of the rows' slots to ``logits [S, V]``; rows that are not ``shaped`` stay."""
    vocab = logits.shape[1]
    rows = SlotState(*(array[choice.slot] for array in state))
    out = rows.counts & (PROMPT_BIT - 1)
    repetition = choice.repetition[:, None]
    repeated = jnp.where(logits > 0, logits / repetition, logits * repetition)
    shaped = jnp.where(rows.counts > 0, repeated, logits)
    shaped -= choice.presence[:, None] * (out > 0) + choice.frequency[:, None] * out
    shaped = jax.vmap(lambda row, ids, bias: row.at[ids].add(bias, mode="drop"))(shaped, rows.bias_ids, rows.bias)
    held = (choice.position < choice.hold_until)[:, None] & _bits(rows.hold, vocab)
    shaped = jnp.where(_bits(rows.allowed, vocab) & ~held, shaped, -jnp.inf)
    return jnp.where((choice.shaped > 0)[:, None], shaped, logits)


def _bits(words: jax.Array, vocab: int) -> jax.Array:
    """Bool ``[S, V]`` from packed words."""
    bits = (words[:, :, None] >> jnp.arange(32, dtype=jnp.uint32)) & 1
    return bits.reshape(words.shape[0], -1)[:, :vocab] > 0


def count(state: SlotState, choice: Choice, tokens: jax.Array) -> SlotState:
    """Count the chosen tokens of shaped rows."""
    slot = jnp.where(choice.shaped > 0, choice.slot, state.counts.shape[0] - 1)
    return state._replace(counts=state.counts.at[slot, tokens].add(jnp.uint16(1)))


def sample(logits: jax.Array, choice: Choice) -> jax.Array:
    """One token a row of ``logits [S, V]``: temperature, top-k, top-p, min-p, then Gumbel-max; int32 ``[S]``."""
    drawn = gumbel_max(filtered(logits, choice), choice)
    return jnp.where(choice.temperature > 0, drawn, greedy(logits))


def filtered(logits: jax.Array, choice: Choice) -> jax.Array:
    """``logits [S, V]`` less their largest, over the temperature, and -inf where a token is not kept."""
    scaled = logits - logits.max(-1, keepdims=True)  # first, so that no temperature is too low
    scaled /= jnp.where(choice.temperature > 0, choice.temperature, 1.0)[:, None]
    return jnp.where(kept(scaled, choice), scaled, -jnp.inf)


def gumbel_max(left: jax.Array, choice: Choice) -> jax.Array:
    """Draws from the softmax of the rows of ``left [S, V]``; int32 ``[S]``.

    Gumbel-max (Gumbel 1954): argmax(logit + noise) is a draw from softmax(logit).
    """
    return greedy(lax.optimization_barrier(left + gumbel(choice, left.shape[1])))


def kept(scaled: jax.Array, choice: Choice) -> jax.Array:
    """Which tokens top-k, then top-p, then min-p leave of ``scaled [S, V]``, whose largest is 0; bool ``[S, V]``."""
    vocab = scaled.shape[1]
    # The probabilities are positive floats up to 1, so their bit patterns order as they do.
    weight = jnp.exp(scaled)
    keys = lax.bitcast_convert_type(weight, jnp.int32)
    keep = weight >= choice.min_p[:, None]
    wants_k = (choice.top_k > 0) & (choice.top_k < vocab)
    top_k = jnp.where(wants_k, choice.top_k, vocab)

    def by_rank(keep: jax.Array) -> jax.Array:
        floor = _largest_floor(keys, jnp.ones_like(weight), top_k.astype(jnp.float32))
        return keep & (keys >= floor[:, None])

    def by_mass(keep: jax.Array) -> jax.Array:
        floor = _largest_floor(keys, jnp.where(kept_by_rank, weight, 0.0), choice.top_p * total)
        return keep & ((keys >= floor[:, None]) | (choice.top_p >= 1)[:, None])

    kept_by_rank = lax.cond(jnp.any(wants_k), by_rank, lambda k: k, jnp.ones_like(keep))
    total = jnp.sum(jnp.where(kept_by_rank, weight, 0.0), -1)
    keep &= kept_by_rank
    return lax.cond(jnp.any(choice.top_p < 1), by_mass, lambda k: k, keep)


def _largest_floor(keys: jax.Array, weight: jax.Array, target: jax.Array) -> jax.Array:
    """The largest int32 floor for which ``sum(weight[keys >= floor]) >= target``, row by row, found bit by bit."""

    def step(i: jax.Array, floor: jax.Array) -> jax.Array:
        trial = floor | (1 << (29 - i))
        mass = jnp.sum(jnp.where(keys >= trial[:, None], weight, 0.0), -1)
        return jnp.where(mass >= target, trial, floor)

    return lax.fori_loop(0, 30, step, jnp.zeros(keys.shape[0], jnp.int32))


def gumbel(choice: Choice, vocab: int) -> jax.Array:
    """Standard Gumbel noise ``[S, V]``: threefry keyed by the row's seed, counting (position, vocabulary id)."""
    shape = (choice.position.shape[0], vocab)
    position = lax.bitcast_convert_type(choice.position, jnp.uint32)[:, None]
    ids = lax.broadcasted_iota(jnp.uint32, shape, 1)
    bits = threefry(choice.seed_low[:, None], choice.seed_high[:, None], jnp.broadcast_to(position, shape), ids)
    # 23 bits and a half are exact in float32; with 24 the last would round to 1, and its noise be infinite.
    uniform = ((bits >> 9).astype(jnp.float32) + 0.5) * 2.0**-23
    return -jnp.log(-jnp.log(uniform))


class Logprobs[Array](NamedTuple):
    """Log-probabilities in nats of S rows: the chosen token's, its rank (from 1), and the N likeliest, best first."""

    chosen: Array  # float32 [S]
    rank: Array  # int32 [S]
    top_ids: Array  # int32 [S, N]
    top: Array  # float32 [S, N]


def logprobs(logits: jax.Array, tokens: jax.Array, top: int) -> Logprobs[jax.Array]:
    """Of the raw ``logits [S, V]`` and the chosen ``tokens [S]``."""
    norm = jax.nn.logsumexp(logits, axis=-1)
    chosen = jnp.take_along_axis(logits, tokens[:, None], axis=1)
    rank = 1 + jnp.sum(logits > chosen, axis=-1)
    values, ids = lax.top_k(logits, top)
    return Logprobs(chosen[:, 0] - norm, rank.astype(jnp.int32), ids.astype(jnp.int32), values - norm[:, None])
