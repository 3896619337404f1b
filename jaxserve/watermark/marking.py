"""Marking on the device: noise from a keyed function of the last tokens in place of ordinary noise, and its memory.

Everything here is per row and static in shape. A row's noise is ordinary where it is not marked, and where its context
has been used before, since the same noise twice would make texts run in circles and spoil what a detector counts.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxserve import sampler
from jaxserve.params import Abstract
from jaxserve.sampler import Choice
from jaxserve.threefry import threefry
from jaxserve.watermark import prf as prfs
from jaxserve.watermark.slots import FIELDS, WAYS, MarkSpec

KEY_COIN = 0xFFFFFFFF
"""Stands for a vocabulary id where ordinary noise decides between the keys A and B."""


class Marks(NamedTuple):
    """What marks each row of a step, unpacked from ``MarkSlots.pack``; ``[S]`` but for the keys."""

    marked: jax.Array  # bool
    generated: jax.Array  # tokens before this one, at most W
    stamp: jax.Array  # of this use of the context
    oldest: jax.Array  # stamps below it have been forgotten
    alpha: jax.Array  # the share of key B
    keys: jax.Array  # uint32 [2, WORDS, S], prepared


class MarkState(NamedTuple):
    """What stays of every slot (one more than there are: the last is a dump).

    context: uint32 ``[slots, W]``, the last tokens generated, newest last. table: uint32
    ``[slots, buckets, 2 * WAYS]``, tag and stamp of the contexts used, as ``slots`` has it.
    """

    context: jax.Array
    table: jax.Array


class Contexts(NamedTuple):
    """What each row's context comes to."""

    words: jax.Array  # uint32 [2, WORDS, S], under the keys A and B
    tag: jax.Array  # uint32 [2, S]
    fresh: jax.Array  # bool [S]: marked, and not used before
    tokens: jax.Array  # uint32 [S, W], the context itself
    entries: jax.Array  # uint32 [S, WAYS, 2], the table's bucket for it


def unpack(packed: jax.Array) -> Marks:
    """uint32 ``[S, ROW]`` to columns."""
    marked, generated, stamp, oldest, alpha = (packed[:, i] for i in range(len(FIELDS)))
    keys = packed[:, len(FIELDS) :].T.reshape(2, prfs.WORDS, -1)
    return Marks(marked > 0, generated, stamp, oldest, lax.bitcast_convert_type(alpha, jnp.float32), keys)


def state_shapes(spec: MarkSpec, slots: int) -> MarkState:
    """Abstract shapes of ``MarkState``."""

    def array(*shape: int) -> Abstract:
        return jax.ShapeDtypeStruct(shape, jnp.uint32)

    return MarkState(array(slots, spec.width), array(slots, spec.buckets, 2 * WAYS))


def set_slot(state: MarkState, slot: jax.Array, row: MarkState) -> MarkState:
    """Replace one slot's memory."""
    return MarkState(*(array.at[slot].set(new) for array, new in zip(state, row, strict=True)))


# -- contexts ---------------------------------------------------------------------------------------------------------


def under_keys(spec: MarkSpec, marks: Marks, context: jax.Array) -> jax.Array:
    """uint32 ``[2, WORDS, S]``: what the contexts ``[W, S]`` become under the keys A and B."""
    keys = marks.keys if spec.dual else marks.keys[:1]
    with jax.enable_x64(True):
        words = jnp.stack([prfs.context_words(spec.prf, key, context, _loop) for key in keys])
    return jnp.broadcast_to(words, marks.keys.shape)


def _loop(count: int, body, x):
    return lax.fori_loop(jnp.int32(0), jnp.int32(count), body, x)


def look_up(spec: MarkSpec, state: MarkState, marks: Marks, slot: jax.Array) -> Contexts:
    """The rows' contexts, and whether they may be marked.

    All that is read of the state is read here, once, and nothing is read of it by what follows: XLA would otherwise
    copy the table in order to write to it.
    """
    return look_up_after(spec, state, marks, slot, lax.optimization_barrier(state.context[slot]))


def look_up_after(spec: MarkSpec, state: MarkState, marks: Marks, slot: jax.Array, tokens: jax.Array) -> Contexts:
    """The same after other last ``tokens [S, W]`` than the slots' own."""
    missing = jnp.arange(spec.width, 0, -1, dtype=jnp.uint32) > marks.generated[:, None]
    tokens = jnp.where(missing, prfs.MISSING, tokens)
    words = under_keys(spec, marks, tokens.T)
    tag = prfs.context_tag(spec.prf, words[0])
    entries = bucket_of(spec, state, slot, tag)
    fresh = marks.marked
    if spec.history:
        used = (entries[..., 0] == tag[1][:, None]) & (entries[..., 1] >= marks.oldest[:, None])
        fresh &= ~used.any(-1)
    if spec.after_prompt:
        fresh &= marks.generated >= spec.width
    return Contexts(words, tag, fresh, tokens, entries)


def bucket_of(spec: MarkSpec, state: MarkState, slot: jax.Array, tag: jax.Array) -> jax.Array:
    """The entries ``[S, WAYS, 2]`` among which the contexts are, if they have been used."""
    return lax.optimization_barrier(state.table[slot, tag[0] % spec.buckets]).reshape(-1, WAYS, 2)


def remember(
    spec: MarkSpec, state: MarkState, marks: Marks, slot: jax.Array, contexts: Contexts, tokens: jax.Array
) -> MarkState:
    """The marked rows have used their contexts and chosen ``tokens [S]``."""
    slot = jnp.where(marks.marked, slot, state.context.shape[0] - 1)
    context = jnp.concatenate([contexts.tokens[:, 1:], tokens[:, None].astype(jnp.uint32)], axis=1)
    table = state.table
    if spec.history:
        tag, entries = contexts.tag, contexts.entries
        bucket = tag[0] % spec.buckets
        age = jnp.where(entries[..., 0] == tag[1][:, None], 0, entries[..., 1])  # itself first, then the oldest
        way = jnp.argmin(age, axis=-1)[:, None] * 2 + jnp.arange(2)
        entry = jnp.stack([tag[1], marks.stamp], axis=-1)
        table = table.at[slot[:, None], bucket[:, None], way].set(entry)
    return MarkState(state.context.at[slot].set(context), table)


def sample(
    spec: MarkSpec, logits: jax.Array, choice: Choice, marks: Marks, state: MarkState
) -> tuple[jax.Array, MarkState]:
    """``sampler.sample`` with the mark in the rows that have one: int32 ``[S]``, and what is remembered of them."""
    contexts = look_up(spec, state, marks, choice.slot)
    words = plain_words(spec, choice, marks, contexts.words)
    drawn = draw(spec, sampler.filtered(logits, choice), choice, marks.marked, contexts.fresh, words)
    tokens = jnp.where(choice.temperature > 0, drawn, sampler.greedy(logits))
    return tokens, remember(spec, state, marks, choice.slot, contexts, tokens)


# -- noise ------------------------------------------------------------------------------------------------------------


def coin(choice: Choice, stands_for: int) -> jax.Array:
    """An ordinary uniform number for each row, in (0, 1), that no token's noise has: float32 ``[S]``."""
    position = lax.bitcast_convert_type(choice.position, jnp.uint32)
    bits = threefry(choice.seed_low, choice.seed_high, position, jnp.full_like(position, stands_for))
    return ((bits >> 9).astype(jnp.float32) + 0.5) * 2.0**-23


def plain_words(spec: MarkSpec, choice: Choice, marks: Marks, words: jax.Array) -> jax.Array:
    """The words ``[WORDS, S]`` of the key that marks where nothing is drafted: B with probability alpha, else A."""
    return jnp.where(coin(choice, KEY_COIN) < marks.alpha, words[1], words[0]) if spec.dual else words[0]


def draw(
    spec: MarkSpec, left: jax.Array, choice: Choice, marked: jax.Array, fresh: jax.Array, words: jax.Array
) -> jax.Array:
    """Draws from the softmax of the rows of ``left [S, V]``; int32 ``[S]``.

    By noise keyed by ``words [WORDS, S]`` in ``fresh`` rows, by ordinary noise in all others. Rows that are not
    ``marked`` get what ``sampler.gumbel_max`` gives them.
    """
    if spec.prf == prfs.CHACHA:
        return sampler.gumbel_max(left, _instead(choice, fresh, words))
    keyed = philox_max(left, _ordinary(choice, fresh, words))
    return lax.cond(
        jnp.any(~marked & (choice.temperature > 0)),
        lambda: jnp.where(marked, keyed, sampler.gumbel_max(left, choice)),
        lambda: keyed,
    )


def _instead(choice: Choice, fresh: jax.Array, words: jax.Array) -> Choice:
    """The key and the counter of ordinary noise, with a context's in fresh rows."""
    position = lax.bitcast_convert_type(words[2], jnp.int32)
    return choice._replace(
        seed_low=jnp.where(fresh, words[0], choice.seed_low),
        seed_high=jnp.where(fresh, words[1], choice.seed_high),
        position=jnp.where(fresh, position, choice.position),
    )


def _ordinary(choice: Choice, fresh: jax.Array, words: jax.Array) -> jax.Array:
    """The same for Philox, whose ordinary noise is keyed by the seed and counts the position."""
    position = lax.bitcast_convert_type(choice.position, jnp.uint32)
    zero = jnp.zeros_like(position)
    own = jnp.stack([position, zero, zero, zero, choice.seed_low, choice.seed_high, zero, zero])
    return jnp.where(fresh, words, own)


def philox_max(left: jax.Array, words: jax.Array) -> jax.Array:
    """``sampler.gumbel_max`` by Philox, keyed by ``words [WORDS, S]``.

    A call serves four tokens, of which the best goes on; which it was is found for the winners alone. So nothing of the
    vocabulary's size is written, and XLA on a CPU does not compute all four words for each.
    """
    rows, vocab = left.shape
    fours = jnp.pad(left, ((0, 0), (0, -vocab % 4)), constant_values=-jnp.inf).reshape(rows, -1, 4)
    blocks = lax.broadcasted_iota(jnp.uint32, fours.shape[:2], 1)
    best = functools.reduce(jnp.maximum, _noisy(fours, words[:, :, None], blocks))
    block = sampler.greedy(lax.optimization_barrier(best))
    winners = jnp.take_along_axis(fours, block[:, None, None], axis=1)[:, 0]
    lane = sampler.greedy(jnp.stack(_noisy(winners, words, block.astype(jnp.uint32)), axis=-1))
    return block * 4 + lane


def _noisy(fours: jax.Array, words: jax.Array, blocks: jax.Array) -> list[jax.Array]:
    """Tokens' logits ``[..., 4]`` with their noise, by lane."""
    with jax.enable_x64(True):
        drawn = prfs.philox_words(words, blocks)
    return [fours[..., lane] + gumbel(bits) for lane, bits in enumerate(drawn)]


def gumbel(bits: jax.Array) -> jax.Array:
    """Standard Gumbel noise of u = ((bits >> 8) + 1) / (2^24 + 1), which float32 cannot hold near 1.

    Below a half u is rounded; above it 1 - u is, and Kahan's log1p corrects the logarithm for the rounding of u.
    """
    part = 1.0 / (2.0**24 + 1)
    low = ((bits >> 8) + 1).astype(jnp.float32) * part
    high = (2**24 - (bits >> 8)).astype(jnp.float32) * part  # 1 - u; both factors are exact
    below = bits < jnp.uint32(1 << 31)
    u = jnp.where(below, low, 1 - high)
    return -jnp.log(-jnp.log(u) * jnp.where(below, 1.0, high / (1 - u)))
