"""``POST /tokenize`` and ``POST /detokenize``."""

from functools import partial

from aiohttp import web

from jaxserve.request import RequestError
from serve.chat import encode_messages
from serve.errors import bad_request
from serve.generation import parse, read_json
from serve.openapi import BODY_ERRORS, api
from serve.protocol.answers import Detokenized, Tokens
from serve.protocol.chat import TokenizeChatRequest
from serve.protocol.completions import DetokenizeRequest, TokenizeRequest
from serve.state import STATE


@api(Tokens, body=TokenizeRequest | TokenizeChatRequest, errors=BODY_ERRORS)
async def tokenize(request: web.Request) -> web.Response:
    """Token ids of a prompt, or of a conversation by the chat template."""
    state = request.app[STATE]
    with state.work():
        value = await read_json(request, state)
        if value.get("messages") is not None:
            if value.get("prompt") is not None:
                raise bad_request("give prompt or messages, not both", param="messages")
            chat = await parse(value, TokenizeChatRequest, state)
            ids, strings = (await encode_messages(chat, state)).ids, chat.return_token_strs
        else:
            text = await parse(value, TokenizeRequest, state)
            encode = partial(state.tokenizer.encode, text.prompt, add_special_tokens=text.add_special_tokens)
            ids, strings = await state.offload(len(text.prompt), encode), text.return_token_strs
        names = [state.token_text(token)[0] for token in ids] if strings else None
        answer = {"count": len(ids), "max_model_len": state.llm.max_model_len, "tokens": ids, "token_strs": names}
        return web.json_response(answer)


@api(Detokenized, body=DetokenizeRequest, errors=BODY_ERRORS)
async def detokenize(request: web.Request) -> web.Response:
    """The text of token ids."""
    state = request.app[STATE]
    with state.work():
        body = await parse(await read_json(request, state), DetokenizeRequest, state)
        tokenizer = state.tokenizer
        for token in body.tokens:
            if not 0 <= token < tokenizer.vocab_size:
                message = f"tokens: id {token} is out of range; the vocabulary holds {tokenizer.vocab_size} tokens"
                raise RequestError(message, param="tokens")
        text = await state.offload(
            len(body.tokens), lambda: tokenizer.decode(body.tokens, skip_special_tokens=body.skip_special_tokens)
        )
        return web.json_response({"prompt": text})
