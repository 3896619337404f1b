"""``POST /v1/chat/completions``."""

import dataclasses
import time
import uuid
from collections.abc import AsyncGenerator
from typing import Any

from aiohttp import web

from jaxserve.request import RequestError, SamplingParams
from serve.answer import Answer, Completion, Step
from serve.errors import bad_request
from serve.generation import PromptInput, prompt_usage, read_body, truncate, truncation
from serve.logprobs import chat_logprobs, prompt_logprobs
from serve.mark import mark_fields
from serve.openapi import RUN_ERRORS, api
from serve.parsers.parts import Part, Reasoning, Text, ToolCallArguments, ToolCallBegin
from serve.protocol.answers import ChatChunk, ChatCompletion, Error
from serve.protocol.chat import ChatRequest, ChatTemplateFields
from serve.sse import Chunks, send_events
from serve.state import STATE, State
from serve.turn import Conversation, Turn, encode_conversation, prepare_turn


@api(ChatCompletion, body=ChatRequest, events=ChatChunk | Error, errors=RUN_ERRORS)
async def chat_completions(request: web.Request) -> web.StreamResponse:
    """Answer a conversation, ``n`` times."""
    state = request.app[STATE]
    with state.work():
        body = await read_body(request, state, ChatRequest)
        body.check()
        params = _params(body)
        turn = await prepare_turn(_conversation(body), params, state)
        turn = dataclasses.replace(turn, prompt=truncate(turn.prompt, body.truncate_prompt_tokens, params, state))
        render = _Render(state, body, turn)
        async with Answer(state, turn, body.priority, body.cache_salt) as answer:
            if body.stream:
                return await send_events(request, render.stream(answer))
            return web.json_response(render.whole(await answer.completions()))


async def encode_messages(body: ChatTemplateFields, state: State) -> PromptInput:
    """The conversation by the model's chat template, as token ids. Raises a 400 that names ``messages``."""
    return await encode_conversation(Conversation(**_asked(body)), state)


def _asked(body: ChatTemplateFields) -> dict[str, Any]:
    return {
        "messages": body.template_messages(),
        "tools": body.tool_definitions(),
        "tool_choice": body.chosen_tool(),
        "reasoning_effort": body.reasoning_effort,
        "template_options": body.template_options(),
    }


def _conversation(body: ChatRequest) -> Conversation:
    return Conversation(
        **_asked(body),
        parallel_tool_calls=body.parallel_tool_calls is not False,
        structured_outputs=body.language(),
        structured_field=body.language_field(),
    )


def _params(body: ChatRequest) -> SamplingParams:
    most = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    if most == 0 and body.prompt_logprobs is None:
        field = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
        raise bad_request(f"{field} must be at least 1, got 0", param=field)
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    try:
        return body.params(max_tokens=most, logprobs=logprobs)
    except RequestError as error:
        name = {"logprobs": "top_logprobs"}.get(error.param or "", error.param)
        if name == "max_tokens" and body.max_completion_tokens is not None:
            name = "max_completion_tokens"
        message = str(error).replace(error.param, name, 1) if error.param and name else str(error)
        raise bad_request(message, param=name, code=error.code) from None


class _Render:
    def __init__(self, state: State, body: ChatRequest, turn: Turn):
        self._state, self._body, self._turn = state, body, turn
        self._common: dict[str, Any] = {
            "id": f"chatcmpl-{uuid.uuid4().hex}",
            "object": "chat.completion.chunk" if body.stream else "chat.completion",
            "created": int(time.time()),
            "model": state.model_name,
        } | truncation([turn.prompt], body.truncate_prompt_tokens)
        self._calls = bool(body.tools) and body.tool_choice != "none"

    def _usage(self, made: int, reasoning: int, cached: int) -> dict[str, Any]:
        usage = prompt_usage([self._turn.prompt], made, cached)
        if self._state.formats.thinking is not None:
            usage["completion_tokens_details"] = {"reasoning_tokens": reasoning}
        return usage

    def whole(self, completions: list[Completion]) -> dict[str, Any]:
        """The answer in one piece."""
        made = sum(len(one.token_ids) for one in completions)
        reasoning = sum(one.reasoning_tokens for one in completions)
        answer: dict[str, Any] = self._common | {
            "choices": [self._choice(one) for one in completions],
            "usage": self._usage(made, reasoning, completions[0].cached_tokens),
        }
        if self._body.prompt_logprobs is not None and completions[0].prompt_logprobs is not None:
            answer["prompt_logprobs"] = prompt_logprobs(completions[0].prompt_logprobs, self._state)
        if self._body.return_token_ids:
            answer["prompt_token_ids"] = self._turn.prompt.ids
        return answer

    def _choice(self, one: Completion) -> dict[str, Any]:
        content = one.text if one.text is not None or one.tool_calls else ""
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if one.reasoning is not None:
            message["reasoning_content"] = one.reasoning
        if one.tool_calls:
            message["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in one.tool_calls
            ]
        choice: dict[str, Any] = {
            "index": one.index,
            "message": message,
            "logprobs": None,
            "finish_reason": one.finish_reason,
            "stop_reason": one.stop_reason,
        } | mark_fields(one.watermark)
        if self._body.logprobs:
            choice["logprobs"] = chat_logprobs(one.logprobs or (), self._body.top_logprobs or 0, self._state)
        if self._body.return_token_ids:
            choice["token_ids"] = one.token_ids
        return choice

    async def stream(self, answer: Answer) -> AsyncGenerator[list[bytes]]:
        """The chunks, in batches as they become known; the role stands in each choice's first chunk only."""
        body, chunks = self._body, Chunks(self._common, include_usage=self._body.include_usage)
        begun: set[int] = set()
        made = reasoning = cached = 0
        async for steps in answer:
            batch = []
            for step in steps:
                made += len(step.token_ids)
                reasoning += step.reasoning_tokens
                cached += step.cached_tokens
                found = []
                if step.index not in begun:
                    begun.add(step.index)
                    found.append(self._opening(step))
                found += self._pieces(step)
                usage = self._usage(made, reasoning, cached) if body.continuous_usage else None
                batch += [chunks.choice(choice, usage) for choice in found]
            yield batch
        if body.include_usage:
            yield [chunks.usage(self._usage(made, reasoning, cached))]

    def _opening(self, step: Step) -> dict[str, Any]:
        # Where calls may come, whether there will be content is not known yet.
        choice = self._piece(step, {"role": "assistant", "content": None if self._calls else ""})
        if step.prompt_logprobs is not None:
            choice["prompt_logprobs"] = prompt_logprobs(step.prompt_logprobs, self._state)
        if self._body.return_token_ids:
            choice["prompt_token_ids"] = self._turn.prompt.ids
        return choice

    def _pieces(self, step: Step) -> list[dict[str, Any]]:
        """A chunk for each part the step adds, and one with an empty delta for how it ended.

        The first carries the tokens and their log-probabilities, whatever became of their text.
        """
        body = self._body
        found = [self._piece(step, _delta(part)) for part in step.parts]
        tells = (body.logprobs and step.logprobs) or (body.return_token_ids and step.token_ids)
        if tells and not found:
            found.append(self._piece(step, {}))
        if tells and body.logprobs and step.logprobs is not None:
            found[0]["logprobs"] = chat_logprobs(step.logprobs, body.top_logprobs or 0, self._state)
        if tells and body.return_token_ids:
            found[0]["token_ids"] = step.token_ids
        if step.finish_reason is not None:
            end = {"finish_reason": step.finish_reason, "stop_reason": step.stop_reason}
            found.append(self._piece(step, {}) | end | mark_fields(step.watermark))
        return found

    def _piece(self, step: Step, delta: dict[str, Any]) -> dict[str, Any]:
        return {"index": step.index, "delta": delta, "logprobs": None, "finish_reason": None}


def _delta(part: Part) -> dict[str, Any]:
    match part:
        case Text(text):
            return {"content": text}
        case Reasoning(text):
            return {"reasoning_content": text}
        case ToolCallBegin(index, id, name):
            function = {"name": name, "arguments": ""}
            return {"tool_calls": [{"index": index, "id": id, "type": "function", "function": function}]}
        case ToolCallArguments(index, json):
            return {"tool_calls": [{"index": index, "function": {"arguments": json}}]}
