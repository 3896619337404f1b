"""Marked text of a toy model, for tests: the sampler's rule in numpy, without its memory of contexts."""

from collections.abc import Sequence

import numpy as np

from jaxserve.watermark import Scheme
from jaxserve.watermark.prf import uniforms

CHOICES = 24


def marked(
    count: int,
    scheme: Scheme,
    *,
    seed: int,
    unmarked: float = 0.0,
    stream: int = 0,
    vocab: Sequence[int] = range(1 << 15),
) -> np.ndarray:
    """``count`` tokens, each chosen by the Gumbel-max rule among CHOICES random ids with Zipf's probabilities.

    A share ``unmarked`` of them is not chosen so, as if an edit had replaced them.
    """
    rng, vocab = np.random.default_rng(seed), np.asarray(vocab)
    keys, width = scheme.keys(stream), scheme.context_width
    logs = -np.log(np.arange(1, CHOICES + 1))
    ids = np.full(width + count, -1)
    for place in range(width, width + count):
        ids[place] = rng.choice(vocab)
        if rng.random() < unmarked:
            continue
        options = rng.choice(vocab, CHOICES, replace=False)
        key = keys[1] if scheme.alpha is not None and rng.random() < scheme.alpha else keys[0]
        contexts = np.broadcast_to(ids[place - width : place], (CHOICES, width))
        noise = -np.log(-np.log(uniforms(scheme.prf, key, contexts, options)))
        ids[place] = options[np.argmax(logs + noise)]
    return ids[width:]
