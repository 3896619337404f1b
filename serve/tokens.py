"""``POST /tokenize`` and ``POST /detokenize``."""

import json
from functools import partial
from typing import Any

from aiohttp import web

from jaxserve.request import RequestError
from serve.chat import encode_messages
from serve.errors import bad_request
from serve.generation import read_body
from serve.openapi import BODY_ERRORS, api
from serve.protocol.answers import Detokenized, Tokens
from serve.protocol.chat import TokenizeChatRequest
from serve.protocol.completions import DetokenizeRequest, TokenizeRequest
from serve.state import STATE

PIECE = 4096
"""Entries written as JSON at a time: meanwhile no other thread runs, and there may be two million of them."""


def _kind(value: dict[str, Any]) -> type[TokenizeRequest | TokenizeChatRequest]:
    if value.get("messages") is None:
        return TokenizeRequest
    if value.get("prompt") is not None:
        raise bad_request("give prompt or messages, not both", param="messages")
    return TokenizeChatRequest


def _written(items: list[Any]) -> str:
    """A list as JSON."""
    return f"[{', '.join(json.dumps(items[i : i + PIECE])[1:-1] for i in range(0, len(items), PIECE))}]"


@api(Tokens, body=TokenizeRequest | TokenizeChatRequest, errors=BODY_ERRORS)
async def tokenize(request: web.Request) -> web.Response:
    """Token ids of a prompt, or of a conversation by the chat template."""
    state = request.app[STATE]
    with state.work():
        body = await read_body(request, state, _kind)
        if isinstance(body, TokenizeChatRequest):
            ids = (await encode_messages(body, state)).ids
        else:
            state.check_text(body.prompt)
            encode = partial(state.tokenizer.encode, body.prompt, add_special_tokens=body.add_special_tokens)
            ids = await state.offload(len(body.prompt), encode)
        most = state.llm.max_model_len

        def write() -> str:
            names = _written([state.token_text(token)[0] for token in ids]) if body.return_token_strs else "null"
            head = json.dumps({"count": len(ids), "max_model_len": most})[:-1]
            return f'{head}, "tokens": {_written(ids)}, "token_strs": {names}}}'

        return web.json_response(text=await state.offload(len(ids), write))


@api(Detokenized, body=DetokenizeRequest, errors=BODY_ERRORS)
async def detokenize(request: web.Request) -> web.Response:
    """The text of token ids."""
    state = request.app[STATE]
    with state.work():
        body = await read_body(request, state, DetokenizeRequest)
        tokenizer, tokens = state.tokenizer, body.tokens

        def decode() -> str:
            for token in (min(tokens, default=0), max(tokens, default=0)):
                if not 0 <= token < tokenizer.vocab_size:
                    message = f"tokens: id {token} is out of range; the vocabulary holds {tokenizer.vocab_size} tokens"
                    raise RequestError(message, param="tokens")
            return tokenizer.decode(tokens, skip_special_tokens=body.skip_special_tokens)

        return web.json_response({"prompt": await state.offload(len(tokens), decode)})
