"""``POST /v1/chat/completions``."""

import time
import uuid
from collections.abc import AsyncGenerator
from typing import Any

from aiohttp import web

from jaxserve.request import CompletionOutput, Delta, RequestError, RequestOutput, SamplingParams
from serve.errors import bad_request
from serve.generation import Generation, PromptInput, parse, prompt_usage, read_json
from serve.logprobs import chat_logprobs, prompt_logprobs
from serve.openapi import RUN_ERRORS, api
from serve.protocol.answers import ChatChunk, ChatCompletion, Error
from serve.protocol.chat import ChatRequest, ChatTemplateFields
from serve.sse import Chunks, send_events
from serve.state import STATE, State
from serve.turn import Conversation, encode_conversation


@api(ChatCompletion, body=ChatRequest, events=ChatChunk | Error, errors=RUN_ERRORS)
async def chat_completions(request: web.Request) -> web.StreamResponse:
    """Answer a conversation, ``n`` times."""
    state = request.app[STATE]
    with state.work():
        body = await parse(await read_json(request, state), ChatRequest, state)
        body.check()
        params = _params(body)
        prompts = [await encode_messages(body, state)]
        answer = _Answer(state, body, prompts, params)
        async with Generation(state, prompts, params, body.priority) as generation:
            if body.stream:
                return await send_events(request, answer.stream(generation))
            return web.json_response(answer.whole((await generation.outputs())[0]))


async def encode_messages(body: ChatTemplateFields, state: State) -> PromptInput:
    """The conversation by the model's chat template, as token ids. Raises a 400 that names ``messages``."""
    conversation = Conversation(messages=body.template_messages(), template_options=body.template_options())
    return await encode_conversation(conversation, state)


def _params(body: ChatRequest) -> SamplingParams:
    most = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    try:
        return body.params(max_tokens=most, logprobs=logprobs)
    except RequestError as error:
        name = {"logprobs": "top_logprobs"}.get(error.param or "", error.param)
        if name == "max_tokens" and body.max_completion_tokens is not None:
            name = "max_completion_tokens"
        message = str(error).replace(error.param, name, 1) if error.param and name else str(error)
        raise bad_request(message, param=name, code=error.code) from None


class _Answer:
    def __init__(self, state: State, body: ChatRequest, prompts: list[PromptInput], params: SamplingParams):
        self._state, self._body, self._prompts, self._params = state, body, prompts, params
        self._common = {
            "id": f"chatcmpl-{uuid.uuid4().hex}",
            "object": "chat.completion.chunk" if body.stream else "chat.completion",
            "created": int(time.time()),
            "model": state.model_name,
        }

    def whole(self, output: RequestOutput) -> dict[str, Any]:
        """The answer in one piece."""
        made = sum(len(one.token_ids) for one in output.outputs)
        answer: dict[str, Any] = self._common | {
            "choices": [self._choice(one) for one in output.outputs],
            "usage": prompt_usage(self._prompts, made),
        }
        if self._body.prompt_logprobs is not None and output.prompt_logprobs is not None:
            answer["prompt_logprobs"] = prompt_logprobs(output.prompt_logprobs, self._state)
        if self._body.return_token_ids:
            answer["prompt_token_ids"] = self._prompts[0].ids
        return answer

    def _choice(self, one: CompletionOutput) -> dict[str, Any]:
        choice: dict[str, Any] = {
            "index": one.index,
            "message": {"role": "assistant", "content": one.text, "refusal": None},
            "logprobs": None,
            "finish_reason": one.finish_reason,
            "stop_reason": one.stop_reason,
        }
        if self._body.logprobs:
            choice["logprobs"] = chat_logprobs(one.logprobs or (), self._body.top_logprobs or 0, self._state)
        if self._body.return_token_ids:
            choice["token_ids"] = one.token_ids
        return choice

    async def stream(self, generation: Generation) -> AsyncGenerator[list[bytes]]:
        """The chunks, in batches as they become known; the role stands in each choice's first chunk only."""
        chunks = Chunks(self._common, include_usage=self._body.include_usage)
        begun: set[int] = set()
        made = 0
        async for items in generation:
            batch = []
            for _, delta in items:
                made += len(delta.token_ids)
                if delta.index not in begun:
                    begun.add(delta.index)
                    batch.append(chunks.choice(self._opening(delta)))
                batch += [chunks.choice(choice) for choice in self._pieces(delta)]
            yield batch
        if self._body.include_usage:
            yield [chunks.usage(prompt_usage(self._prompts, made))]

    def _opening(self, delta: Delta) -> dict[str, Any]:
        choice: dict[str, Any] = {
            "index": delta.index,
            "delta": {"role": "assistant", "content": ""},
            "logprobs": None,
            "finish_reason": None,
        }
        if self._body.return_token_ids:
            choice["prompt_token_ids"] = self._prompts[0].ids
        return choice

    def _pieces(self, delta: Delta) -> list[dict[str, Any]]:
        """A chunk for what the delta adds, and one with an empty delta for how it ended."""
        body, found = self._body, []
        if delta.text or delta.logprobs or (body.return_token_ids and delta.token_ids):
            logprobs = None
            if body.logprobs and delta.logprobs is not None:
                logprobs = chat_logprobs(delta.logprobs, body.top_logprobs or 0, self._state)
            choice: dict[str, Any] = {
                "index": delta.index,
                "delta": {"content": delta.text},
                "logprobs": logprobs,
                "finish_reason": None,
            }
            if body.return_token_ids:
                choice["token_ids"] = delta.token_ids
            found.append(choice)
        if delta.finish_reason is not None:
            end = {"index": delta.index, "delta": {}, "logprobs": None, "finish_reason": delta.finish_reason}
            found.append(end | {"stop_reason": delta.stop_reason})
        return found
