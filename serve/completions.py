"""``POST /v1/completions``."""

import time
import uuid
from collections.abc import AsyncGenerator, Iterator
from typing import Any

from aiohttp import web

from jaxserve.request import CompletionOutput, Delta, RequestError, RequestOutput, SamplingParams, TokenLogprob
from serve.errors import bad_request
from serve.generation import (
    Generation,
    PromptInput,
    encode_prompts,
    prompt_usage,
    read_body,
    truncate,
    truncation,
)
from serve.logprobs import CompletionLogprobs, prompt_logprobs
from serve.mark import mark_fields
from serve.openapi import RUN_ERRORS, api
from serve.protocol.answers import Completion, CompletionChunk, Error
from serve.protocol.completions import CompletionRequest
from serve.sse import Chunks, send_events
from serve.state import STATE, State
from serve.tools import named


@api(Completion, body=CompletionRequest, events=CompletionChunk | Error, errors=RUN_ERRORS)
async def completions(request: web.Request) -> web.StreamResponse:
    """Complete one prompt or several; choice ``p * n + i`` is completion i of prompt p."""
    state = request.app[STATE]
    with state.work():
        body = await read_body(request, state, CompletionRequest)
        body.check()
        params = _params(body)
        prompts = await encode_prompts(body.prompt, state, add_special_tokens=body.add_special_tokens)
        prompts = [truncate(prompt, body.truncate_prompt_tokens, params, state) for prompt in prompts]
        answer = _Answer(state, body, prompts, params)
        try:
            async with Generation(state, prompts, params, body.priority, body.cache_salt) as generation:
                if body.stream:
                    return await send_events(request, answer.stream(generation))
                return web.json_response(answer.whole(await generation.outputs()))
        except RequestError as error:
            if (error.param or "").startswith("structured_outputs"):
                raise named(error, body.language_field()) from None
            raise


def _params(body: CompletionRequest) -> SamplingParams:
    """The engine's parameters. Echo and the choice of the best are done here: the engine is asked for what it knows."""
    prompt = body.prompt_logprobs
    if body.echo and body.logprobs is not None:
        prompt = max(body.logprobs, prompt or 0)
    if body.max_tokens == 0:
        if not body.echo and prompt is None:
            raise bad_request("max_tokens 0 asks for nothing: set echo or prompt_logprobs", param="max_tokens")
        prompt = prompt or 0
    more: dict[str, Any] = {"logprobs": body.logprobs, "structured_outputs": body.language()}
    if prompt is not None:
        more["prompt_logprobs"] = prompt
    if body.best_of is not None:
        more |= {"n": body.best_of, "logprobs": body.logprobs or 0}
    try:
        return body.params(max_tokens=body.max_tokens, **more)
    except RequestError as error:
        if error.param == "n" and body.best_of is not None:
            raise bad_request(f"best_of: {error}", param="best_of") from None
        raise


def _mean(output: CompletionOutput) -> float:
    """The log-probability a token."""
    entries = output.logprobs or ()
    return sum(entry.logprob for entry in entries) / max(1, len(entries))


class _Answer:
    def __init__(self, state: State, body: CompletionRequest, prompts: list[PromptInput], params: SamplingParams):
        self._state, self._body, self._prompts, self._params = state, body, prompts, params
        self._n = body.n or 1
        self._common = {
            "id": f"cmpl-{uuid.uuid4().hex}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": state.model_name,
        } | truncation(prompts, body.truncate_prompt_tokens)

    def _prompt_text(self, prompt: PromptInput) -> str:
        if prompt.text is not None or self._state.llm.tokenizer is None:
            return prompt.text or ""
        return self._state.tokenizer.decode(prompt.ids, skip_special_tokens=self._params.skip_special_tokens)

    def whole(self, outputs: list[RequestOutput]) -> dict[str, Any]:
        """The answer in one piece. All that was made is counted, chosen or not."""
        choices = []
        for prompt, output in zip(self._prompts, outputs, strict=True):
            best = output.outputs
            if len(best) > self._n:
                best = sorted(best, key=_mean, reverse=True)[: self._n]
            choices += [self._choice(prompt, output, one) for one in best]
        for number, choice in enumerate(choices):
            choice["index"] = number
        made = sum(len(c.token_ids) for output in outputs for c in output.outputs)
        cached = sum(output.cached_tokens for output in outputs)
        return self._common | {"choices": choices, "usage": prompt_usage(self._prompts, made, cached)}

    def _choice(self, prompt: PromptInput, output: RequestOutput, one: CompletionOutput) -> dict[str, Any]:
        body = self._body
        tokens: list[tuple[int, TokenLogprob | None]] = []
        if body.echo and body.logprobs is not None:
            tokens += zip(prompt.ids, output.prompt_logprobs or [], strict=True)
        tokens += [(entry.token_id, entry) for entry in one.logprobs or ()]
        choice: dict[str, Any] = {
            "index": 0,
            "text": (self._prompt_text(prompt) if body.echo else "") + one.text,
            "logprobs": None,
            "finish_reason": one.finish_reason,
            "stop_reason": one.stop_reason,
        } | mark_fields(one.watermark)
        if body.logprobs is not None:
            choice["logprobs"] = CompletionLogprobs(self._state).build(tokens, body.logprobs)
        if body.prompt_logprobs is not None and output.prompt_logprobs is not None:
            choice["prompt_logprobs"] = prompt_logprobs(output.prompt_logprobs, self._state, body.prompt_logprobs)
        if body.return_token_ids:
            choice |= {"token_ids": one.token_ids, "prompt_token_ids": prompt.ids}
        return choice

    async def stream(self, generation: Generation) -> AsyncGenerator[list[bytes]]:
        """The chunks, in batches as they become known."""
        body, chunks = self._body, Chunks(self._common, include_usage=self._body.include_usage)
        order, pieces = _ScoresFirst(self._params), dict[tuple[int, int], CompletionLogprobs]()
        made = cached = 0
        async for items in generation:
            batch = []
            cached += sum(delta.cached_tokens or 0 for _, delta in items)
            for prompt, delta, scores in order.of(items):
                made += len(delta.token_ids)
                found = []
                if (key := (prompt, delta.index)) not in pieces:
                    pieces[key] = CompletionLogprobs(self._state)
                    found = self._opening(prompt, delta, scores, pieces[key])
                found += self._piece(prompt, delta, pieces[key])
                usage = prompt_usage(self._prompts, made, cached) if body.continuous_usage else None
                batch += [chunks.choice(choice, usage) for choice in found]
            yield batch
        if body.include_usage:
            yield [chunks.usage(prompt_usage(self._prompts, made, cached))]

    def _opening(
        self, prompt: int, delta: Delta, scores: tuple[TokenLogprob | None, ...], logprobs: CompletionLogprobs
    ) -> list[dict[str, Any]]:
        """What is said of the prompt, as a chunk of its own."""
        body, source = self._body, self._prompts[prompt]
        if not (body.echo or body.return_token_ids or body.prompt_logprobs is not None):
            return []
        choice = self._empty(prompt, delta)
        if body.echo:
            choice["text"] = self._prompt_text(source)
        if body.echo and body.logprobs is not None:
            choice["logprobs"] = logprobs.build(zip(source.ids, scores, strict=True), body.logprobs)
        if body.prompt_logprobs is not None:
            choice["prompt_logprobs"] = prompt_logprobs(scores, self._state, body.prompt_logprobs)
        if body.return_token_ids:
            choice |= {"token_ids": [], "prompt_token_ids": source.ids}
        return [choice]

    def _piece(self, prompt: int, delta: Delta, logprobs: CompletionLogprobs) -> list[dict[str, Any]]:
        body = self._body
        if not (delta.text or delta.logprobs or delta.finish_reason or (body.return_token_ids and delta.token_ids)):
            return []
        choice = self._empty(prompt, delta)
        choice["text"], choice["finish_reason"] = delta.text, delta.finish_reason
        if delta.finish_reason is not None:
            choice |= {"stop_reason": delta.stop_reason} | mark_fields(delta.watermark)
        if body.logprobs is not None and delta.logprobs is not None:
            tokens = [(entry.token_id, entry) for entry in delta.logprobs]
            choice["logprobs"] = logprobs.build(tokens, body.logprobs)
        if body.return_token_ids:
            choice["token_ids"] = delta.token_ids
        return [choice]

    def _empty(self, prompt: int, delta: Delta) -> dict[str, Any]:
        number = prompt * self._n + delta.index
        return {"index": number, "text": "", "logprobs": None, "finish_reason": None}


class _ScoresFirst:
    """Holds back a prompt's completions until its log-probabilities are known: completion 0 brings them for all."""

    def __init__(self, params: SamplingParams):
        self._wanted = params.prompt_logprobs is not None
        self._scores: dict[int, tuple[TokenLogprob | None, ...]] = {}
        self._held: dict[int, list[Delta]] = {}

    def of(self, items: list[tuple[int, Delta]]) -> Iterator[tuple[int, Delta, tuple[TokenLogprob | None, ...]]]:
        """What may go out now, each with the prompt's log-probabilities where they are wanted."""
        for prompt, delta in items:
            if delta.prompt_logprobs is not None:
                self._scores[prompt] = delta.prompt_logprobs
            scores = self._scores.get(prompt, ())
            if self._wanted and not scores:
                self._held.setdefault(prompt, []).append(delta)
                continue
            for one in (*self._held.pop(prompt, ()), delta):
                yield prompt, one, scores
