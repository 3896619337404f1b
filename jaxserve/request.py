"""What a user may ask for and what comes back: sampling parameters, requests, outputs and the errors of this border.

Nothing here imports jax. Every validation that needs no model happens in ``SamplingParams.__post_init__``; the checks
that need a vocabulary happen in ``SamplingParams.check``, those that need a context length in ``LLM``.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

MAX_LOGPROBS = 20
"""Most alternatives a token's log-probabilities can list."""
MAX_LOGIT_BIAS = 512
"""Most entries of ``logit_bias``."""
MAX_STOP_STRINGS = 16
MAX_BAD_WORDS = 128
MAX_CHARACTERS = 8192
"""Most characters of all stop strings, or of all bad words, together: they are tokenized where the request is taken."""
LEAST_TEMPERATURE, LEAST_TOP_P = 1e-2, 1e-3
"""Below the one, and up to the other, the likeliest token is as good as certain."""
MAX_N = 128

FinishReason = Literal["stop", "length", "abort", "error"]


class RequestError(ValueError):
    """A request that cannot be served as it stands (HTTP 400). ``param`` names the offending field."""

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None):
        super().__init__(message)
        self.param = param
        self.code = code


class QueueFullError(RuntimeError):
    """The waiting queue is full; try again later (HTTP 503)."""


class EngineDeadError(RuntimeError):
    """The engine thread has stopped; no request can be served (HTTP 500)."""


def _number(name: str, value: object, low: float, high: float, *, low_open: bool = False) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise RequestError(f"{name} must be a number, got {value!r}", param=name)
    number = math.inf if isinstance(value, int) and abs(value) > 1 << 64 else float(value)
    if not math.isfinite(number):
        raise RequestError(f"{name} must be finite, got {value!r}", param=name)
    if number < low or number > high or (low_open and number == low):
        bracket = "(" if low_open else "["
        raise RequestError(f"{name} must be in {bracket}{low:g}, {high:g}], got {value!r}", param=name)
    return number


def _integer(name: str, value: object, low: int, high: int | None = None) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise RequestError(f"{name} must be an integer, got {value!r}", param=name)
    if value < low or (high is not None and value > high):
        limit = f"at least {low}" if high is None else f"in [{low}, {high}]"
        raise RequestError(f"{name} must be {limit}, got {value}", param=name)
    return value


def _strings(name: str, value: object, most: int) -> tuple[str, ...]:
    items = (value,) if isinstance(value, str) else value
    if isinstance(items, Sequence) and len(items) > most:
        raise RequestError(f"{name} holds {len(items)} strings; at most {most} are allowed", param=name)
    if not isinstance(items, Sequence) or not all(isinstance(s, str) for s in items):
        raise RequestError(f"{name} must be a string or a list of strings, got {value!r}", param=name)
    if any(not s for s in items):
        raise RequestError(f"{name} must not contain an empty string", param=name)
    if (size := sum(map(len, items))) > MAX_CHARACTERS:
        raise RequestError(f"{name} holds {size} characters; at most {MAX_CHARACTERS} are allowed", param=name)
    return tuple(items)


def _token_ids(name: str, value: object) -> tuple[int, ...]:
    if isinstance(value, str | bytes) or not isinstance(value, Sequence):
        raise RequestError(f"{name} must be a list of token ids, got {value!r}", param=name)
    if set(map(type, value)) == {int} and min(value) >= 0:  # quick: there may be a million
        return tuple(value)
    for token in value:
        if isinstance(token, bool) or not isinstance(token, int) or token < 0:
            raise RequestError(f"{name} must hold non-negative integers, got {token!r}", param=name)
    return tuple(value)


@dataclass(frozen=True, kw_only=True)
class StructuredOutputs:
    """The language that a completion must belong to. Exactly one field is given.

    Enforced by masks over the vocabulary at every token; what cannot be enforced is refused when the request is
    submitted, with a ``RequestError`` that names path and keyword.
    """

    json: Mapping[str, object] | bool | None = None
    """A JSON schema."""
    json_object: bool = False
    """Any JSON object."""
    regex: str | None = None
    choice: Sequence[str] | None = None
    """One of these strings, exactly."""
    grammar: str | None = None
    """A context-free grammar in llguidance's dialect of Lark."""

    def __post_init__(self) -> None:
        given = self._given()
        if len(given) != 1:
            names = " and ".join(given) or "none"
            message = f"structured_outputs needs exactly one of json, json_object, regex, choice, grammar; got {names}"
            raise RequestError(message, param="structured_outputs")
        kinds = {"json": (Mapping, bool), "json_object": (bool,), "regex": (str,), "choice": (), "grammar": (str,)}
        name = given[0]
        if kinds[name] and not isinstance(getattr(self, name), kinds[name]):
            raise RequestError(f"structured_outputs.{name} has the wrong type", param=f"structured_outputs.{name}")
        if self.choice is not None:
            choice = self.choice
            if isinstance(choice, str) or not choice or not all(isinstance(item, str) and item for item in choice):
                message = "structured_outputs.choice must be a list of strings that are not empty"
                raise RequestError(message, param="structured_outputs.choice")
            object.__setattr__(self, "choice", tuple(choice))

    def _given(self) -> list[str]:
        empty = {"json": (None,), "json_object": (None, False)}
        names = [each.name for each in dataclasses.fields(self)]
        return [name for name in names if not any(getattr(self, name) is no for no in empty.get(name, (None,)))]

    @property
    def kind(self) -> str:
        """The name of the field that is given."""
        return self._given()[0]


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How to choose the next tokens of one request.

    The order on the device is: penalties, ``logit_bias``, bans (``allowed_token_ids``, ``bad_words``, ``min_tokens``),
    temperature, top-k, top-p, min-p, and then Gumbel-max noise keyed by (seed, position, vocabulary id).

    Log-probabilities are those of the model before any of this ("raw"), in nats.
    """

    n: int = 1
    """How many completions of the prompt; completion i draws from ``seed + i``."""
    temperature: float = 1.0
    """0 is greedy."""
    top_k: int = 0
    """Keep the k likeliest tokens (ties with the k-th are kept); 0 or -1 keeps all."""
    top_p: float = 1.0
    """Keep the likeliest tokens whose probabilities first reach this sum."""
    min_p: float = 0.0
    """Drop tokens below this share of the likeliest token's probability."""
    seed: int | None = None
    """None draws a fresh seed for every completion."""
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] = ()
    min_tokens: int = 0
    """Tokens before the end-of-sequence token or a stop token id may be chosen."""
    max_tokens: int | None = 16
    """Most tokens to generate; None goes on to the end of the context."""
    ignore_eos: bool = False
    stop: Sequence[str] | str = ()
    stop_token_ids: Sequence[int] = ()
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    keep_special_ids: Sequence[int] = ()
    """Special tokens that stay in the text where the others are skipped."""
    logprobs: int | None = None
    """Alternatives to list beside the chosen token's log-probability; 0 lists the chosen one alone."""
    prompt_logprobs: int | None = None
    """The same for every prompt token but the first."""
    echo: bool = False
    """Put the prompt before the completion, in the text and in the token ids."""
    watermarking: bool | None = None
    """Whether to mark the text, as far as the operator leaves that to the request; None is the operator's own wish."""
    structured_outputs: StructuredOutputs | None = None
    """The language the completion must belong to, such as {"choice": ["yes", "no"]}; one of json (a schema),
    json_object, regex, choice, grammar (Lark)."""

    def __post_init__(self) -> None:
        def put(name: str, value: object) -> None:
            object.__setattr__(self, name, value)

        _integer("n", self.n, 1, MAX_N)
        put("temperature", _number("temperature", self.temperature, 0.0, 100.0))
        _integer("top_k", self.top_k, -1)
        put("top_p", _number("top_p", self.top_p, 0.0, 1.0, low_open=True))
        put("min_p", _number("min_p", self.min_p, 0.0, 1.0))
        if self.seed is not None:
            _integer("seed", self.seed, -(2**63), 2**63 - 1)
        put("presence_penalty", _number("presence_penalty", self.presence_penalty, -2.0, 2.0))
        put("frequency_penalty", _number("frequency_penalty", self.frequency_penalty, -2.0, 2.0))
        put("repetition_penalty", _number("repetition_penalty", self.repetition_penalty, 0.0, 100.0, low_open=True))
        if self.logit_bias is not None:
            put("logit_bias", _logit_bias(self.logit_bias))
        if self.allowed_token_ids is not None:
            ids = _token_ids("allowed_token_ids", self.allowed_token_ids)
            if not ids:
                raise RequestError("allowed_token_ids must not be empty", param="allowed_token_ids")
            put("allowed_token_ids", ids)
        put("bad_words", _strings("bad_words", self.bad_words, MAX_BAD_WORDS))
        _integer("min_tokens", self.min_tokens, 0)
        if self.max_tokens is not None:
            _integer("max_tokens", self.max_tokens, 0)
            if self.min_tokens > self.max_tokens:
                message = f"min_tokens ({self.min_tokens}) must not exceed max_tokens ({self.max_tokens})"
                raise RequestError(message, param="min_tokens")
        put("stop", _strings("stop", self.stop, MAX_STOP_STRINGS))
        put("stop_token_ids", _token_ids("stop_token_ids", self.stop_token_ids))
        put("keep_special_ids", _token_ids("keep_special_ids", self.keep_special_ids))
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                _integer(name, getattr(self, name), 0, MAX_LOGPROBS)
        for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens", "echo"):
            if not isinstance(getattr(self, name), bool):
                raise RequestError(f"{name} must be true or false, got {getattr(self, name)!r}", param=name)
        mark: object = self.watermarking
        if mark is not None and not isinstance(mark, bool):
            raise RequestError(f"watermarking must be true or false, got {mark!r:.80}", param="watermarking")
        self._check_structured()
        if self.max_tokens == 0 and not (self.echo or self.prompt_logprobs is not None):
            raise RequestError("max_tokens 0 asks for nothing: set echo or prompt_logprobs", param="max_tokens")

    def _check_structured(self) -> None:
        wish: object = self.structured_outputs
        if wish is None:
            return
        if not isinstance(wish, StructuredOutputs):
            message = f"structured_outputs must be StructuredOutputs, not {type(wish).__name__}"
            raise RequestError(message, param="structured_outputs")
        for name in ("allowed_token_ids", "bad_words"):
            if getattr(self, name):
                raise RequestError(f"{name} does not go with structured_outputs", param=name)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0 or self.top_k == 1

    @property
    def choiceless(self) -> str | None:
        """The setting that leaves one token to choose from, or as good as one, where it is not ``greedy`` by name."""
        alone = self.allowed_token_ids is not None and len(set(self.allowed_token_ids)) == 1
        found = {
            "temperature": self.temperature < LEAST_TEMPERATURE,
            "top_p": self.top_p <= LEAST_TOP_P,
            "min_p": self.min_p >= 1.0,
            "allowed_token_ids": alone,
        }
        return next((name for name, leaves_none in found.items() if leaves_none), None)

    @property
    def shapes_logits(self) -> bool:
        """True where the logits must be changed before the choice, so that plain argmax does not do."""
        return bool(
            self.presence_penalty
            or self.frequency_penalty
            or self.repetition_penalty != 1.0
            or self.logit_bias
            or self.allowed_token_ids is not None
            or self.bad_words
            or self.min_tokens
            or self.structured_outputs is not None
        )

    def check(self, vocab_size: int) -> None:
        """Refuse token ids outside ``[0, vocab_size)``, naming field and id."""
        fields = {
            "logit_bias": self.logit_bias or (),
            "allowed_token_ids": self.allowed_token_ids or (),
            "stop_token_ids": self.stop_token_ids,
        }
        for name, ids in fields.items():
            if (token := max(ids, default=0)) >= vocab_size:
                message = f"{name}: token id {token} is out of range; the vocabulary holds {vocab_size} tokens"
                raise RequestError(message, param=name)

    def replace(self, **changes: object) -> "SamplingParams":
        return dataclasses.replace(self, **changes)  # type: ignore[arg-type]


def _logit_bias(value: object) -> dict[int, float]:
    if not isinstance(value, Mapping):
        raise RequestError(f"logit_bias must map token ids to numbers, got {value!r}", param="logit_bias")
    if len(value) > MAX_LOGIT_BIAS:
        message = f"logit_bias holds {len(value)} entries; at most {MAX_LOGIT_BIAS} are allowed"
        raise RequestError(message, param="logit_bias")
    bias = {}
    for key, number in value.items():
        try:
            token = int(key)
        except (TypeError, ValueError):
            token = -1
        if token < 0 or isinstance(key, bool | float):
            raise RequestError(f"logit_bias: {key!r} is not a token id", param="logit_bias")
        bias[token] = _number(f"logit_bias[{token}]", number, -100.0, 100.0)
    return bias


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """The chosen token's log-probability, its rank (1 is likeliest), and the ``top`` likeliest, best first (nats)."""

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()


class OwnFault(str):
    """An error that comes while a request runs, and that the request itself is to blame for (HTTP 400)."""


@dataclass(frozen=True, slots=True)
class Watermark:
    """What was done about the watermark of a completion, where the engine has one.

    ``skipped``: it was to be marked and could not be. ``reason`` says why a completion is not marked.
    """

    status: Literal["watermarked", "skipped", "not_watermarked"]
    reason: str | None = None
    key_id: str | None = None
    stream: int | None = None
    """Which key derived from that one: a detector has to try so many and one."""


@dataclass(frozen=True, slots=True)
class Delta:
    """What one engine step adds to one completion of a request.

    The first delta of completion 0 carries ``prompt_logprobs`` where asked for (None for the first prompt token). The
    last delta of a completion has a ``finish_reason``; ``request_done`` is True on the last delta of the whole request.
    """

    request_id: str
    index: int
    token_ids: tuple[int, ...] = ()
    text: str = ""
    logprobs: tuple[TokenLogprob, ...] | None = None
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    """The stop string or stop token id that ended it; None for end of sequence."""
    request_done: bool = False
    error: str | None = None
    """What went wrong; an ``OwnFault`` where the request is to blame."""
    cached_tokens: int | None = None
    """Prompt tokens that were known and not computed; in the first delta of completion 0."""
    watermark: Watermark | None = None
    """What is done about the mark, in every delta, where the engine has a watermark."""


@dataclass(slots=True)
class CompletionOutput:
    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    watermark: Watermark | None = None
    """None where the engine has no watermark."""


@dataclass(slots=True)
class RequestOutput:
    """A request and all its completions, whole."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    prompt_logprobs: list[TokenLogprob | None] | None = None
    error: str | None = None
    cached_tokens: int = 0
    """Prompt tokens that were known and not computed."""

    @property
    def finished(self) -> bool:
        return all(output.finish_reason is not None for output in self.outputs)

    def add(self, delta: Delta) -> None:
        """Fold one delta in."""
        output = self.outputs[delta.index]
        output.text += delta.text
        output.token_ids.extend(delta.token_ids)
        if delta.logprobs is not None:
            output.logprobs = output.logprobs or []
            output.logprobs.extend(delta.logprobs)
        if delta.cached_tokens is not None:
            self.cached_tokens = delta.cached_tokens
        if delta.prompt_logprobs is not None:
            self.prompt_logprobs = list(delta.prompt_logprobs)
        if delta.finish_reason is not None:
            output.finish_reason = delta.finish_reason
            output.stop_reason = delta.stop_reason
            output.watermark = delta.watermark
        if delta.error is not None:
            self.error = delta.error
