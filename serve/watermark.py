"""``/v1/watermark``: was a text marked under one of this server's keys?"""

import codecs
import json
from typing import Any

from aiohttp import web

from jaxserve.request import RequestError
from jaxserve.watermark import Detection, Scheme, default_streams, detect_many
from serve.errors import ApiError, bad_request
from serve.generation import read_body
from serve.openapi import BODY_ERRORS, api
from serve.protocol.watermark import Detections, DetectRequest, WatermarkKeys
from serve.state import STATE, State

MAX_SCORES = 4_000_000
"""Most scores in a request, tokens times keys times streams: a few seconds of one thread."""
MAX_CHARACTERS = 8_000_000
SETTINGS = ("threshold", "min_scored_tokens", "statistic", "dedup", "streams")
"""Fields that decide what is called marked; where verdicts alone are told they are the operator's."""


@api(Detections, body=DetectRequest, errors=(*BODY_ERRORS, 403))
async def detect(request: web.Request) -> web.Response:
    """Was a text marked? Tries keys of this server, by their ids, on one document or several."""
    state = request.app[STATE]
    with state.work():
        allowed = state.options.watermark_detection
        if allowed == "off":
            raise ApiError(403, "detection is switched off here", code="detection_off")
        body = await read_body(request, state, DetectRequest)
        body.check()
        if allowed == "verdicts":
            _check_verdict(body)
        schemes = _schemes(body, state)
        streams = default_streams(state.llm.config.watermark) if body.streams is None else body.streams
        if body.text is not None:
            characters = sum(map(len, body.text))
            if characters > MAX_CHARACTERS:
                message = f"text holds {characters} characters; at most {MAX_CHARACTERS} are allowed"
                raise bad_request(message, param="text", code="too_many_values")
            _ = state.tokenizer
        text = await state.in_thread(lambda: _answer(body, schemes, streams, state), pool=state.detection_pool)
        return web.json_response(text=text)


@api(WatermarkKeys, errors=(500, 503))
async def keys(request: web.Request) -> web.Response:
    """The ids of the keys that detection tries."""
    state = request.app[STATE]
    config = state.llm.config.watermark
    return web.json_response(
        {
            "object": "watermark.keys",
            "keys": [] if config is None else [key.id for key in config.keys],
            "key_in_force": None if config is None else config.key_in_force().id,
            "mode": None if config is None else config.mode,
            "detection": state.options.watermark_detection,
        }
    )


def _check_verdict(body: DetectRequest) -> None:
    """Refuse what would tell more than yes or no: scores, and all that moves the line between the two. By a line that
    is moved step by step, or by one token scored many times, the score of a token can be measured."""
    asked = [name for name in ("return_token_scores", "return_spans") if getattr(body, name)]
    moved = [name for name in SETTINGS if name in body.model_fields_set and getattr(body, name) is not None]
    for name in asked + moved:
        which = "tells verdicts only" if name in asked else "tells verdicts by its own settings only"
        raise ApiError(403, f"{name}: this server {which}", param=name, code="verdicts_only")


def _schemes(body: DetectRequest, state: State) -> list[Scheme]:
    config = state.llm.config.watermark
    if config is None:
        raise bad_request("this server knows no watermark keys (--watermark-config)", code="no_watermark")
    try:
        return Scheme.of(config, body.keys)
    except ValueError as error:
        raise bad_request(str(error), param="keys") from None


def _answer(body: DetectRequest, schemes: list[Scheme], streams: int, state: State) -> str:
    """The answer as JSON. Runs beside the event loop."""
    if body.text is not None:
        documents = [state.tokenizer.encode(text, add_special_tokens=False) for text in body.text]
    else:
        documents = body.token_ids or []
        _check_ids(documents, state)
    tokens, candidates = sum(map(len, documents)), len(schemes) * max(1, streams)
    if tokens * candidates > MAX_SCORES:
        message = (
            f"{body.field}: {tokens} tokens under {candidates} keys and streams are more than {MAX_SCORES} scores; "
            "send fewer documents, or name the keys"
        )
        raise bad_request(message, param=body.field, code="too_many_scores")
    try:
        found = detect_many(
            documents,
            schemes,
            streams=streams,
            statistic=body.statistic,
            dedup=body.dedup,
            threshold=body.threshold,
            min_scored_tokens=body.min_scored_tokens,
            token_scores=body.return_token_scores,
            spans=body.return_spans,
        )
    except ValueError as error:
        name = str(error).partition(" ")[0]
        raise RequestError(str(error), param=name if name in DetectRequest.model_fields else None) from None
    told = [_told(index, *pair, state) for index, pair in enumerate(zip(documents, found, strict=True))]
    return json.dumps({"object": "watermark.detections", "model": state.model_name, "data": told})


def _check_ids(documents: list[list[int]], state: State) -> None:
    """Token ids of another model's vocabulary say nothing. Raises RequestError."""
    tokenizer = state.llm.tokenizer
    end = 2**31 if tokenizer is None else tokenizer.vocab_size
    for place, ids in enumerate(documents):
        for token in (min(ids, default=0), max(ids, default=0)):
            if not 0 <= token < end:
                message = f"token_ids[{place}]: id {token} is out of range; the vocabulary holds {end} tokens"
                raise RequestError(message, param="token_ids")


def _told(index: int, ids: list[int], one: Detection, state: State) -> dict[str, Any]:
    told: dict[str, Any] = {
        "index": index,
        "num_tokens": one.num_tokens,
        "num_scored_tokens": one.num_scored_tokens,
        "is_watermarked": one.is_watermarked,
        "enough_evidence": one.enough_evidence,
        "num_streams": one.num_streams,
    }
    if state.options.watermark_detection == "verdicts":
        return told
    names = ("score", "p_value", "log10_p_value", "stream", "statistic", "num_candidates")
    told |= {"key": one.key_name} | {name: getattr(one, name) for name in names}
    if one.token_scores is not None:
        texts = codecs.getincrementaldecoder("utf-8")("replace")
        told["tokens"] = [
            {"id": token, "text": texts.decode(state.token_text(token)[1]), "score": score}
            for token, score in zip(ids, one.token_scores, strict=True)
        ]
    if one.spans is not None:
        tokenizer = state.llm.tokenizer
        told["spans"] = [
            {
                "start": span.start,
                "end": span.end,
                "text": None if tokenizer is None else tokenizer.decode(ids[span.start : span.end]),
                "p_value": span.p_value,
                "key": span.key_name,
                "stream": span.stream,
            }
            for span in one.spans
        ]
    return told
