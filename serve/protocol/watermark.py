"""``POST /v1/watermark/detect``, and what other answers say of their mark."""

from typing import Annotated, Any, Literal, NotRequired, TypedDict

from pydantic import Field, PlainValidator, WithJsonSchema

from serve.errors import bad_request
from serve.protocol.answers import closed
from serve.protocol.base import Body
from serve.protocol.completions import MAX_PROMPTS
from serve.protocol.sampling import TOKEN_IDS, said

MAX_DOCUMENTS = MAX_PROMPTS

_MANY: Any = {"type": "array", "minItems": 1, "maxItems": MAX_DOCUMENTS}


def _documents(value: object, kinds: set[type], what: str) -> list[Any]:
    """One document or several as a list of them; ``kinds`` is what one is made of."""
    one = isinstance(value, str) if kinds == {str} else isinstance(value, list) and not {list} & set(map(type, value))
    found = [value] if one else value
    if not isinstance(found, list) or not found:
        raise ValueError(f"must be {what}, or a list of such that is not empty")
    if len(found) > MAX_DOCUMENTS:
        raise ValueError(f"holds {len(found)} documents; at most {MAX_DOCUMENTS} are allowed")
    for place, item in enumerate(found):
        if kinds == {str}:
            fine = isinstance(item, str)
        else:
            fine = isinstance(item, list) and set(map(type, item)) <= {int}
        if not fine:
            raise ValueError(f"{'' if one else f'[{place}] '}must be {what}")
    return found


def _texts(value: object) -> list[str]:
    return _documents(value, {str}, "a string")


def _ids(value: object) -> list[list[int]]:
    return _documents(value, {int}, "a list of token ids")


class DetectRequest(Body):
    """``POST /v1/watermark/detect``: either ``text`` or ``token_ids``."""

    model: str | None = None
    text: Annotated[
        list[str] | None,
        PlainValidator(_texts),
        WithJsonSchema({"anyOf": [{"type": "string"}, _MANY | {"items": {"type": "string"}}]}),
    ] = None
    """Read with the served model's tokenizer, without special tokens."""
    token_ids: Annotated[
        list[list[int]] | None,
        PlainValidator(_ids),
        WithJsonSchema({"anyOf": [TOKEN_IDS, _MANY | {"items": TOKEN_IDS}]}),
    ] = None
    keys: Annotated[list[str] | None, Field(min_length=1, max_length=64)] = None
    """Ids of keys to try; all where absent."""
    streams: Annotated[int | None, said(minimum=1, maximum=128)] = None
    """Try so many of the keys that each key's completions and seeds are spread over; those of the configuration where
    absent, and eight at least."""
    statistic: Literal["sum", "likelihood", "both"] = "sum"
    dedup: bool = True
    """Score a token only where its context is new in the document."""
    threshold: Annotated[float, said(exclusiveMinimum=0, exclusiveMaximum=1)] = 0.01
    """p-value below which a document is called marked."""
    min_scored_tokens: Annotated[int, said(minimum=0)] = 16
    """Evidence that a verdict needs."""
    return_token_scores: bool = False
    return_spans: bool = False
    """Tell which stretches of a document are marked."""

    def check(self) -> None:
        """Refuse combinations that make no sense."""
        if (self.text is None) == (self.token_ids is None):
            raise bad_request(
                "give text or token_ids, and not both", param="text" if self.text is None else "token_ids"
            )

    @property
    def field(self) -> str:
        """The field that the documents came in."""
        return "text" if self.text is not None else "token_ids"


@closed
class DetectedSpan(TypedDict):
    start: int
    end: int
    """Tokens from start to end, that one excluded."""
    text: str | None
    """null where the model came without a tokenizer."""
    p_value: float
    """Corrected for every stretch and every key that was looked at."""
    key: str
    stream: int


@closed
class DetectedToken(TypedDict):
    id: int
    text: str
    """A character that is spread over tokens comes with the last of them."""
    score: float | None
    """null where the token's context had come before: it is not scored."""


@closed
class Detected(TypedDict):
    """One document. What is said is of the key and stream with the smallest p-value."""

    index: int
    num_tokens: int
    num_scored_tokens: int
    is_watermarked: bool
    """The p-value is below the threshold, and there is enough evidence."""
    enough_evidence: bool
    num_streams: int
    """Streams of each key that were tried: a completion beyond them is not found."""
    score: NotRequired[float]
    p_value: NotRequired[float]
    """Chance that a text without a mark looks as marked under any of the keys and streams."""
    log10_p_value: NotRequired[float]
    key: NotRequired[str]
    stream: NotRequired[int]
    statistic: NotRequired[Literal["sum", "likelihood"]]
    num_candidates: NotRequired[int]
    tokens: NotRequired[list[DetectedToken]]
    spans: NotRequired[list[DetectedSpan]]


@closed
class Detections(TypedDict):
    object: Literal["watermark.detections"]
    model: str
    data: list[Detected]


@closed
class WatermarkKeys(TypedDict):
    """What ``POST /v1/watermark/detect`` has to try. ``keys`` are ids; keys themselves are never told."""

    object: Literal["watermark.keys"]
    keys: list[str]
    key_in_force: str | None
    mode: str | None
    """null where nothing is marked here, and no key is known."""
    detection: Literal["scores", "verdicts", "off"]
