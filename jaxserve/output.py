"""From sampled tokens to what the user sees: text, stop conditions, log-probabilities, deltas. Imports no jax."""

from dataclasses import dataclass, field

import numpy as np

from jaxserve.detokenizer import IncrementalDetokenizer, StopMatcher
from jaxserve.request import Delta, FinishReason, TokenLogprob
from jaxserve.sequence import Sequence
from jaxserve.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class LogprobRows:
    """Log-probabilities of several rows on the host, as ``sampler.Logprobs`` has them."""

    chosen: np.ndarray
    rank: np.ndarray
    top_ids: np.ndarray
    top: np.ndarray

    def row(self, i: int, token: int, count: int) -> TokenLogprob:
        """Row i as the log-probability of ``token`` with the ``count`` likeliest beside it."""
        best = zip(self.top_ids[i, :count].tolist(), self.top[i, :count].tolist(), strict=True)
        return TokenLogprob(token, float(self.chosen[i]), int(self.rank[i]), tuple(best))


@dataclass(slots=True)
class SequenceOutput:
    """The text side of one sequence. ``tokenizer`` None gives token ids only.

    ``eos_ids`` end it unless the request ignores them; ``echo`` is the prompt's text to put first, or None.
    """

    seq: Sequence
    tokenizer: Tokenizer | None
    eos_ids: frozenset[int]
    echo: str | None = None
    started: bool = False
    _detokenizer: IncrementalDetokenizer | None = field(init=False, default=None)
    _stops: StopMatcher | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        params = self.seq.params
        if self.tokenizer is not None:
            self._detokenizer = IncrementalDetokenizer(
                self.tokenizer, self.seq.prompt, params.skip_special_tokens, params.keep_special_ids
            )
            if params.stop:
                self._stops = StopMatcher(params.stop, params.include_stop_str_in_output)

    def accept(self, token: int, logprob: TokenLogprob | None) -> tuple[Delta, FinishReason | None, int | str | None]:
        """Append a sampled token to the sequence. Returns its delta, and how it ends if it does."""
        seq, params = self.seq, self.seq.params
        if seq.limit <= len(seq.prompt):  # max_tokens 0: the prompt was all that was wanted
            return self._delta((), "", None, "length", None), "length", None
        seq.output.append(token)
        reason: FinishReason | None = None
        stop: int | str | None = None
        if token in params.stop_token_ids:
            reason, stop = "stop", token
        elif token in self.eos_ids and (not params.ignore_eos or seq.constraint is not None):
            reason = "stop"
        elif len(seq) >= seq.limit and seq.constraint is None:  # else it may be whole: the next mask tells
            reason = "length"
        hidden = reason == "stop" and not (stop is not None and params.include_stop_str_in_output)
        text, matched = self._text((token,) if not hidden else (), reason is not None)
        if matched is not None:
            reason, stop = "stop", matched
        return self._delta((token,), text, logprob, reason, stop), reason, stop

    def _text(self, tokens: tuple[int, ...], last: bool) -> tuple[str, str | None]:
        if self._detokenizer is None:
            return "", None
        text = self._detokenizer.push(tokens)
        if last:
            text += self._detokenizer.flush()
        if self._stops is None:
            return text, None
        text, matched = self._stops.push(text)
        if last and matched is None:
            text += self._stops.flush()
        return text, matched

    def end(self, reason: FinishReason, error: str | None = None) -> Delta:
        """The last delta of a sequence that no token ends (abort, failure, a complete grammar): the text held back."""
        text, _ = self._text((), True)
        return self._delta((), text, None, reason, None, error)

    def _delta(
        self,
        tokens: tuple[int, ...],
        text: str,
        logprob: TokenLogprob | None,
        reason: FinishReason | None,
        stop: int | str | None,
        error: str | None = None,
    ) -> Delta:
        prompt_logprobs = cached = None
        if not self.started:
            self.started = True
            cached = self.seq.cached if self.seq.index == 0 else None
            if self.seq.prompt_logprobs is not None:
                prompt_logprobs = tuple(self.seq.prompt_logprobs)
            if self.echo is not None:
                text, tokens = self.echo + text, (*self.seq.prompt, *tokens)
        logprobs = (logprob,) if logprob is not None else None
        return Delta(
            self.seq.request_id,
            self.seq.index,
            tokens,
            text,
            logprobs,
            prompt_logprobs,
            reason,
            stop,
            error=error,
            cached_tokens=cached,
            watermark=self.seq.watermark,
        )
