"""What a serving benchmark sends and when: prompts, their lengths, and arrival times."""

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Prompt:
    """One request: a ``prompt`` (text or token ids) or chat ``messages``, and how many tokens to ask for."""

    body: dict[str, Any]
    output_len: int

    @property
    def endpoint(self) -> str:
        return "/v1/chat/completions" if "messages" in self.body else "/v1/completions"


def random_prompts(
    count: int, *, input_len: int, output_len: int, spread: float, prefix_len: int, vocab_size: int, seed: int
) -> list[Prompt]:
    """Random token ids. Lengths are uniform within ``spread`` (a share) of the mean; all begin with the same
    ``prefix_len`` tokens."""
    if not 0 <= spread < 1:
        raise ValueError(f"spread must be in [0, 1), got {spread}")
    rng = random.Random(seed)
    low = min(100, vocab_size // 2)

    def length(mean: int) -> int:
        return rng.randint(max(1, int(mean * (1 - spread))), max(1, int(mean * (1 + spread))))

    def ids(size: int) -> list[int]:
        return [rng.randrange(low, vocab_size) for _ in range(size)]

    prefix = ids(prefix_len)
    return [Prompt({"prompt": prefix + ids(length(input_len))}, length(output_len)) for _ in range(count)]


def dataset_prompts(path: str | Path, count: int, *, output_len: int, seed: int) -> list[Prompt]:
    """``count`` requests drawn from a file of JSON lines, each with ``prompt`` or ``messages`` and perhaps
    ``output_len``. ValueError names a line that has neither."""
    prompts = []
    for number, line in enumerate(Path(path).read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        entry = json.loads(line)
        body = {key: entry[key] for key in ("prompt", "messages") if key in entry}
        if len(body) != 1:
            raise ValueError(f"{path}, line {number}: exactly one of prompt and messages is wanted")
        prompts.append(Prompt(body, int(entry.get("output_len", output_len))))
    if not prompts:
        raise ValueError(f"{path} holds no request")
    rng = random.Random(seed)
    rng.shuffle(prompts)
    return [prompts[i % len(prompts)] for i in range(count)]


def arrival_times(count: int, rate: float, burstiness: float, seed: int) -> Sequence[float]:
    """Seconds from the start at which each request is sent.

    Gaps are gamma distributed with shape ``burstiness`` and mean 1 / ``rate``: 1 is a Poisson process, less is
    burstier, more is evener. As in the peer's benchmark the times are scaled so that the last falls on
    ``count / rate``. An infinite rate sends everything at once.
    """
    if rate <= 0 or burstiness <= 0:
        raise ValueError(f"rate and burstiness must be positive, got {rate} and {burstiness}")
    if np.isinf(rate):
        return [0.0] * count
    gaps = np.random.default_rng(seed).gamma(shape=burstiness, scale=1 / (rate * burstiness), size=count)
    times = np.cumsum(gaps)
    return (times * (count / rate / times[-1])).tolist()
