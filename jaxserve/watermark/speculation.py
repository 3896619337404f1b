"""The sampler's side of speculation: marked drafts, and marked tokens where drafts are not taken. Nothing drafts yet.

Drafts are drawn under key A and accepted by ordinary coins with probability min(1, p / q), as without a mark; what
replaces a rejected draft, and the token after the last, is drawn under key B (Dathathri et al., Nature 634, 2024,
supplementary algorithm 6). One key for both would tie the replacement to the draft it replaces, and the tokens would no
longer follow p: with a single key drafts are not marked. Ordinary noise of drafts is another than that of
replacements, for the same reason.

For each place of a block: ``ahead`` and ``look_up`` its context, ``draft``; then, with the target's law at hand,
``accept``, and ``replace`` or (after the last draft) ``bonus``; in the end ``remember`` what has been used.
"""

import jax
import jax.numpy as jnp

from jaxserve.sampler import Choice
from jaxserve.watermark import marking
from jaxserve.watermark.marking import Contexts, Marks, MarkState
from jaxserve.watermark.slots import MarkSpec

ACCEPT_COIN = 0xFFFFFFFE
"""Stands for a vocabulary id where ordinary noise decides whether a draft is taken."""
DRAFT_SEED = 0xD4AF7000
"""Turns a seed into that of the drafts' ordinary noise."""


def ahead(spec: MarkSpec, choice: Choice, marks: Marks, count: int) -> tuple[Choice, Marks]:
    """The rows ``count`` tokens later."""
    stamp = marks.stamp + jnp.uint32(count)
    beyond = jnp.where(stamp > spec.history, stamp - jnp.uint32(spec.history), 0)
    generated = jnp.minimum(marks.generated + jnp.uint32(count), jnp.uint32(spec.width))
    later = marks._replace(generated=generated, stamp=stamp, oldest=jnp.maximum(marks.oldest, beyond))
    return choice._replace(position=choice.position + count), later


def look_up(
    spec: MarkSpec, state: MarkState, marks: Marks, slot: jax.Array, drafts: jax.Array, earlier: list[Contexts]
) -> Contexts:
    """The context after the slot's own tokens and ``drafts [S, K]``; ``marks`` are of K tokens ahead.

    ``earlier`` are those of the block's places before it: what one of them has, counts as used.
    """
    tokens = jnp.concatenate([state.context[slot], drafts.astype(jnp.uint32)], axis=1)[:, -spec.width :]
    contexts = marking.look_up_after(spec, state, marks, slot, tokens)
    fresh = contexts.fresh
    for other in earlier if spec.history else ():
        fresh &= (contexts.tag != other.tag).any(0)
    return contexts._replace(fresh=fresh)


def draft(spec: MarkSpec, left: jax.Array, choice: Choice, marks: Marks, contexts: Contexts) -> jax.Array:
    """Drafts from the softmax of the drafter's ``left [S, V]``; int32 ``[S]``."""
    own = choice._replace(seed_high=choice.seed_high ^ jnp.uint32(DRAFT_SEED))
    fresh = contexts.fresh if spec.dual else jnp.zeros_like(contexts.fresh)
    return marking.draw(spec, left, own, marks.marked, fresh, contexts.words[0])


def accept(drafter: jax.Array, target: jax.Array, drafts: jax.Array, choice: Choice) -> jax.Array:
    """Which of the ``drafts [S]`` are taken; the laws of drafter and target are logits ``[S, V]``; bool ``[S]``."""
    q, p = (jnp.take_along_axis(jax.nn.softmax(x), drafts[:, None], axis=1)[:, 0] for x in (drafter, target))
    return marking.coin(choice, ACCEPT_COIN) * q < p


def replace(
    spec: MarkSpec,
    drafter: jax.Array,
    target: jax.Array,
    choice: Choice,
    marks: Marks,
    contexts: Contexts,
) -> jax.Array:
    """What stands for a draft that is not taken: a draw in proportion to max(p - q, 0); int32 ``[S]``."""
    rest = jnp.maximum(jax.nn.softmax(target) - jax.nn.softmax(drafter), 0)
    return bonus(spec, jnp.log(rest / rest.max(-1, keepdims=True)), choice, marks, contexts)


def bonus(spec: MarkSpec, left: jax.Array, choice: Choice, marks: Marks, contexts: Contexts) -> jax.Array:
    """A token of the target's own, after the last draft; int32 ``[S]``."""
    return marking.draw(spec, left, choice, marks.marked, contexts.fresh, contexts.words[1])


def remember(
    spec: MarkSpec,
    state: MarkState,
    choice: Choice,
    marks: Marks,
    places: list[Contexts],
    tokens: jax.Array,
    count: jax.Array,
) -> MarkState:
    """The first ``count [S]`` of a block's ``places`` have been used, for ``tokens [S, len(places)]``."""
    for i, contexts in enumerate(places):
        _, now = ahead(spec, choice, marks, i)
        now = now._replace(marked=marks.marked & (i < count))
        contexts = contexts._replace(entries=marking.bucket_of(spec, state, choice.slot, contexts.tag))
        state = marking.remember(spec, state, now, choice.slot, contexts, tokens[:, i])
    return state
