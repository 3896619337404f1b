"""Was a text marked under a key? One document or many, one candidate key or several."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxserve.watermark.config import WatermarkConfig
from jaxserve.watermark.evidence import Ids, Scheme, as_ids, windows
from jaxserve.watermark.localise import marked_intervals
from jaxserve.watermark.prf import PHILOX, parse_key
from jaxserve.watermark.statistics import Statistic, statistics
from jaxserve.watermark.tails import Floats

MIN_SCORED_TOKENS = 16
"""Evidence that a verdict needs, however small the p-value of less: the p-values of the many snippets that people
paste are small now and then."""
LEAST_STREAMS = 8
MAX_STREAMS = 128


def default_streams(config: WatermarkConfig) -> int:
    """Streams to try on text of an engine with this configuration: those it uses, and those that requests for
    up to LEAST_STREAMS completions (``n``, ``best_of``) use."""
    return max(LEAST_STREAMS, config.streams)


@dataclass(frozen=True)
class Span:
    """A stretch of a document that is marked: tokens ``start`` to ``end`` (exclusive)."""

    start: int
    end: int
    p_value: float
    """Corrected for all stretches of the document and all keys that were looked at."""
    key_name: str = ""
    stream: int = 0


@dataclass(frozen=True)
class Detection:
    """What was found in a document. Everything is of the candidate with the smallest p-value."""

    num_tokens: int
    num_scored_tokens: int
    """Tokens after a context that had not come before."""
    score: float
    """Sum of the scores of these tokens."""
    p_value: float
    """Chance that a text without a mark looks as marked, under any of the candidates: corrected for their number."""
    is_watermarked: bool
    """The p-value is below the threshold, and there is enough evidence."""
    log10_p_value: float
    """For p-values that no float holds."""
    enough_evidence: bool
    key_name: str = ""
    stream: int = 0
    """Which completion of a request for several."""
    statistic: str = "sum"
    num_candidates: int = 1
    """Keys times streams times statistics."""
    num_streams: int = 1
    """Streams of each key that were tried: a completion beyond them is not found."""
    token_scores: tuple[float | None, ...] | None = None
    """Where asked for: of every token, None where it was not scored."""
    spans: tuple[Span, ...] | None = None
    """Where asked for, in order. The chance that a text without a mark has any is the threshold."""


def detect(
    text: str | None = None,
    token_ids: Any = None,
    *,
    key: int | str,
    context_width: int = 4,
    alpha: float | None = None,
    prf: str = PHILOX,
    dedup: bool = True,
    tokenizer: Any = None,
    dual_tail: str = "peer",
    **options: Any,
) -> Detection:
    """Was a document marked under ``key``? Give ``text`` and a ``tokenizer``, or ``token_ids``. The key
    may be text, as a configuration has it; a tokenizer is what ``jaxserve.LLM.tokenizer`` is.

    Arguments and numbers are the peer's: for a dual key (``alpha``) its approximation of the p-value too, unless
    ``dual_tail`` is "exact". Other options are those of ``detect_many``, for which "exact" is the default.

    Raises:
        ValueError: an argument makes no sense; the message names it, and never says the key.
    """
    if (text is None) == (token_ids is None):
        raise ValueError("give text or token_ids, and not both")
    ids = as_ids(token_ids) if text is None else encode(text, tokenizer)
    secret = parse_key(key.strip()) if isinstance(key, str) else key
    scheme = Scheme(key=secret, context_width=context_width, alpha=alpha, prf=prf)
    return detect_many([ids], [scheme], dedup=dedup, dual_tail=dual_tail, **options)[0]


def encode(text: Any, tokenizer: Any) -> Ids:
    """The text's tokens, without any that a prompt would begin with. Raises ValueError."""
    if not isinstance(text, str):
        raise ValueError(f"text must be a string, got {type(text).__name__}")
    if tokenizer is None:
        raise ValueError("text needs a tokenizer: that of the model that may have written it")
    if not callable(getattr(tokenizer, "encode", None)) or isinstance(tokenizer, str):
        kind = type(tokenizer).__name__
        raise ValueError(
            f"tokenizer must be an object with an encode method, such as jaxserve.LLM.tokenizer, got {kind}"
        )
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("text holds half a surrogate pair, which is no character") from None
    return as_ids(tokenizer.encode(text, add_special_tokens=False))


@dataclass(frozen=True)
class _Candidate:
    scheme: Scheme
    stream: int
    statistic: Statistic


def detect_many(
    documents: Sequence[Any],
    schemes: Sequence[Scheme],
    *,
    streams: int = 1,
    statistic: str = "sum",
    dual_tail: str = "exact",
    dedup: bool = True,
    threshold: float = 0.01,
    min_scored_tokens: int = MIN_SCORED_TOKENS,
    token_scores: bool = False,
    spans: bool = False,
) -> list[Detection]:
    """Try every scheme, and ``streams`` completions of each, on every document (token ids).

    Args:
        statistic: ``sum``, as the peer; ``likelihood``, which needs fewer tokens where the text was edited and more
            elsewhere; or ``both``, which counts as two tries.
        dual_tail: of the sum under a dual key: ``exact``, or the peer's ``peer``, which is too small far out.
        dedup: score a token only where its context is new. Without it p-values mean nothing on texts that repeat.
        threshold: p-value below which a document is called marked; also the level of ``spans``.
        token_scores, spans: tell these too.

    Raises:
        ValueError: an argument makes no sense; the message names it.
    """
    _check(schemes, streams, threshold, min_scored_tokens)
    ids = [as_ids(one, f"documents[{place}]") for place, one in enumerate(documents)]
    candidates = [
        _Candidate(scheme, stream, one)
        for scheme in schemes
        for stream in range(streams)
        for one in statistics(statistic, scheme.alpha, dual_tail)
    ]
    counts, totals = _sums(ids, candidates, dedup)
    logs = np.stack([one.statistic.log_tail(counts[i], totals[i]) for i, one in enumerate(candidates)])
    best = np.argmin(logs, axis=0)
    found = []
    for place, document in enumerate(ids):
        number = int(best[place])
        chosen = candidates[number]
        log_p = min(0.0, float(logs[number, place]) + math.log(len(candidates)))
        count, p_value = int(counts[number, place]), math.exp(log_p)
        enough = count >= min_scored_tokens
        found.append(
            Detection(
                len(document),
                count,
                float(totals[number, place]),
                p_value,
                enough and p_value < threshold,
                log_p / math.log(10),
                enough,
                chosen.scheme.name,
                chosen.stream,
                chosen.statistic.name,
                len(candidates),
                streams,
                token_scores=_by_token(document, chosen, dedup) if token_scores else None,
                spans=_spans(document, candidates, dedup, threshold) if spans else None,
            )
        )
    return found


def _check(schemes: Sequence[Scheme], streams: Any, threshold: Any, least: Any) -> None:
    if not schemes:
        raise ValueError("schemes must hold at least one")
    if isinstance(streams, bool) or not isinstance(streams, int) or not 1 <= streams <= MAX_STREAMS:
        raise ValueError(f"streams must be an integer from 1 to {MAX_STREAMS}, got {streams!r:.80}")
    if isinstance(threshold, bool) or not isinstance(threshold, int | float) or not 0 < threshold < 1:
        raise ValueError(f"threshold must be a number between 0 and 1, got {threshold!r:.80}")
    if isinstance(least, bool) or not isinstance(least, int) or least < 0:
        raise ValueError(f"min_scored_tokens must be an integer of at least 0, got {least!r:.80}")


def _sums(ids: Sequence[Ids], candidates: Sequence[_Candidate], dedup: bool) -> tuple[Floats, Floats]:
    """Scored tokens, and the sum of their scores: ``[candidate, document]`` each."""
    counts, totals = np.zeros((2, len(candidates), len(ids)))
    for width in {one.scheme.context_width for one in candidates}:
        for part in windows(ids, width, dedup=dedup):
            size = part.documents.stop - part.documents.start
            count = np.bincount(part.document, minlength=size)
            evidence: tuple[Scheme | None, int, Any] = (None, 0, None)
            for number, one in enumerate(candidates):
                if one.scheme.context_width == width:
                    if evidence[:2] != (one.scheme, one.stream):  # candidates that differ in their statistic share it
                        evidence = (one.scheme, one.stream, part.evidence(one.scheme, one.stream))
                    scores = one.statistic.scores(evidence[2])
                    counts[number, part.documents] = count
                    totals[number, part.documents] = np.bincount(part.document, scores, minlength=size)
    return counts, totals


def _scored(document: Ids, one: _Candidate, dedup: bool) -> tuple[Ids, Floats]:
    """Positions of a document's scored tokens, and their scores."""
    part = next(windows([document], one.scheme.context_width, dedup=dedup))
    return part.position, one.statistic.scores(part.evidence(one.scheme, one.stream))


def _by_token(document: Ids, one: _Candidate, dedup: bool) -> tuple[float | None, ...]:
    found: list[float | None] = [None] * len(document)
    for position, score in zip(*_scored(document, one, dedup), strict=True):
        found[position] = float(score)
    return tuple(found)


def _spans(document: Ids, candidates: Sequence[_Candidate], dedup: bool, level: float) -> tuple[Span, ...]:
    found = []
    tried = [one for one in candidates if one.statistic.name == candidates[0].statistic.name]
    for one in tried:
        position, scores = _scored(document, one, dedup)
        for part in marked_intervals(scores, one.statistic, level=level, tests=len(tried)):
            start, end = int(position[part.start]), int(position[part.end - 1]) + 1
            found.append(Span(start, end, part.p_value, one.scheme.name, one.stream))
    return tuple(sorted(found, key=lambda span: (span.start, span.end)))
