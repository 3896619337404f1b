"""``POST /v1/completions``."""

import time
import uuid
from collections.abc import AsyncGenerator
from typing import Any

from aiohttp import web

from jaxserve.request import Delta, RequestOutput, SamplingParams, TokenLogprob
from serve.errors import bad_request
from serve.generation import Generation, PromptInput, encode_prompts, parse, prompt_usage, read_json
from serve.logprobs import CompletionLogprobs, prompt_logprobs
from serve.protocol.completions import CompletionRequest
from serve.sse import Chunks, send_events
from serve.state import STATE, State


async def completions(request: web.Request) -> web.StreamResponse:
    """Complete one prompt or several; choice ``p * n + i`` is completion i of prompt p."""
    state = request.app[STATE]
    with state.work():
        body = await parse(await read_json(request, state), CompletionRequest, state)
        body.check()
        params = _params(body)
        prompts = await encode_prompts(body.prompt, state, add_special_tokens=body.add_special_tokens)
        answer = _Answer(state, body, prompts, params)
        async with Generation(state, prompts, params, body.priority) as generation:
            if body.stream:
                return await send_events(request, answer.stream(generation))
            return web.json_response(answer.whole(await generation.outputs()))


def _params(body: CompletionRequest) -> SamplingParams:
    """The engine's parameters. Echo is done here: the engine is only asked for what it alone knows."""
    prompt = body.prompt_logprobs
    if body.echo and body.logprobs is not None:
        prompt = max(body.logprobs, prompt or 0)
    if body.max_tokens == 0:
        if not body.echo and prompt is None:
            raise bad_request("max_tokens 0 asks for nothing: set echo or prompt_logprobs", param="max_tokens")
        prompt = prompt or 0
    more: dict[str, Any] = {} if prompt is None else {"prompt_logprobs": prompt}
    return body.params(max_tokens=body.max_tokens, logprobs=body.logprobs, **more)


class _Answer:
    def __init__(self, state: State, body: CompletionRequest, prompts: list[PromptInput], params: SamplingParams):
        self._state, self._body, self._prompts, self._params = state, body, prompts, params
        self._common = {
            "id": f"cmpl-{uuid.uuid4().hex}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": state.model_name,
        }

    def _prompt_text(self, prompt: PromptInput) -> str:
        if prompt.text is not None or self._state.llm.tokenizer is None:
            return prompt.text or ""
        return self._state.tokenizer.decode(prompt.ids, skip_special_tokens=self._params.skip_special_tokens)

    def whole(self, outputs: list[RequestOutput]) -> dict[str, Any]:
        """The answer in one piece."""
        choices = [
            self._choice(prompt, output, index)
            for prompt, output in zip(self._prompts, outputs, strict=True)
            for index in range(self._params.n)
        ]
        for number, choice in enumerate(choices):
            choice["index"] = number
        made = sum(len(c.token_ids) for output in outputs for c in output.outputs)
        return self._common | {"choices": choices, "usage": prompt_usage(self._prompts, made)}

    def _choice(self, prompt: PromptInput, output: RequestOutput, index: int) -> dict[str, Any]:
        body, one = self._body, output.outputs[index]
        tokens: list[tuple[int, TokenLogprob | None]] = []
        if body.echo and body.logprobs is not None:
            tokens += zip(prompt.ids, output.prompt_logprobs or [], strict=True)
        tokens += [(entry.token_id, entry) for entry in one.logprobs or ()]
        choice: dict[str, Any] = {
            "index": index,
            "text": (self._prompt_text(prompt) if body.echo else "") + one.text,
            "logprobs": None,
            "finish_reason": one.finish_reason,
            "stop_reason": one.stop_reason,
        }
        if body.logprobs is not None:
            choice["logprobs"] = CompletionLogprobs(self._state).build(tokens, body.logprobs)
        if body.prompt_logprobs is not None and output.prompt_logprobs is not None:
            choice["prompt_logprobs"] = prompt_logprobs(output.prompt_logprobs, self._state)
        if body.return_token_ids:
            choice |= {"token_ids": one.token_ids, "prompt_token_ids": prompt.ids}
        return choice

    async def stream(self, generation: Generation) -> AsyncGenerator[list[bytes]]:
        """The chunks, in batches as they become known."""
        chunks = Chunks(self._common, include_usage=self._body.include_usage)
        pieces: dict[tuple[int, int], CompletionLogprobs] = {}
        made = 0
        async for items in generation:
            batch = []
            for prompt, delta in items:
                made += len(delta.token_ids)
                key = (prompt, delta.index)
                if key not in pieces:
                    pieces[key] = CompletionLogprobs(self._state)
                    batch += self._opening(prompt, delta, pieces[key], chunks)
                if (choice := self._piece(prompt, delta, pieces[key])) is not None:
                    batch.append(chunks.choice(choice))
            yield batch
        if self._body.include_usage:
            yield [chunks.usage(prompt_usage(self._prompts, made))]

    def _opening(self, prompt: int, delta: Delta, logprobs: CompletionLogprobs, chunks: Chunks) -> list[bytes]:
        """The prompt as a chunk of its own, where it is to be echoed."""
        body, source = self._body, self._prompts[prompt]
        if not (body.echo or body.return_token_ids):
            return []
        choice = self._empty(prompt, delta)
        if body.echo:
            choice["text"] = self._prompt_text(source)
        if body.echo and body.logprobs is not None:
            entries = zip(source.ids, delta.prompt_logprobs or (), strict=True)
            choice["logprobs"] = logprobs.build(entries, body.logprobs)
        if body.return_token_ids:
            choice |= {"token_ids": [], "prompt_token_ids": source.ids}
        return [chunks.choice(choice)]

    def _piece(self, prompt: int, delta: Delta, logprobs: CompletionLogprobs) -> dict[str, Any] | None:
        body = self._body
        if not (delta.text or delta.logprobs or delta.finish_reason or (body.return_token_ids and delta.token_ids)):
            return None
        choice = self._empty(prompt, delta)
        choice["text"], choice["finish_reason"] = delta.text, delta.finish_reason
        if delta.finish_reason is not None:
            choice["stop_reason"] = delta.stop_reason
        if body.logprobs is not None and delta.logprobs is not None:
            tokens = [(entry.token_id, entry) for entry in delta.logprobs]
            choice["logprobs"] = logprobs.build(tokens, body.logprobs)
        if body.return_token_ids:
            choice["token_ids"] = delta.token_ids
        return choice

    def _empty(self, prompt: int, delta: Delta) -> dict[str, Any]:
        number = prompt * self._params.n + delta.index
        return {"index": number, "text": "", "logprobs": None, "finish_reason": None}
