"""``POST /v1/responses``: items in, items out; nothing is stored."""

from collections.abc import AsyncGenerator

from aiohttp import web

from jaxserve.request import RequestError
from serve.answer import Answer
from serve.errors import ApiError, as_api_error
from serve.generation import read_body
from serve.openapi import RUN_ERRORS, api
from serve.protocol.response_answers import ResponseEvent, ResponseObject
from serve.protocol.responses import ResponsesRequest, renamed
from serve.response_input import conversation
from serve.response_output import Event, Response
from serve.sse import dumps, send_events
from serve.state import STATE
from serve.turn import prepare_turn


@api(ResponseObject, body=ResponsesRequest, events=ResponseEvent, done=False, errors=RUN_ERRORS)
async def responses(request: web.Request) -> web.StreamResponse:
    """Answer a conversation given as items."""
    state = request.app[STATE]
    with state.work():
        body = await read_body(request, state, ResponsesRequest)
        body.check()
        try:
            turn = await prepare_turn(conversation(body), body.sampling(), state)
            response = Response(state, body, len(turn.prompt.ids))
            async with Answer(state, turn, body.priority, body.cache_salt) as answer:
                if body.stream:
                    return await send_events(request, _stream(answer, response), end=b"")
                response.begin()
                async for steps in answer:
                    for step in steps:
                        response.add(step)
                return web.json_response(response.value)
        except (RequestError, ApiError) as error:
            raise renamed(error) from error


async def _stream(answer: Answer, response: Response) -> AsyncGenerator[list[bytes]]:
    """The events, in batches as they come. What goes wrong on the way is an event as well."""
    yield [_written(event) for event in response.begin()]
    try:
        async for steps in answer:
            yield [_written(event) for step in steps for event in response.add(step)]
    except ConnectionError:
        raise
    except Exception as error:
        yield [_written(event) for event in response.fail(as_api_error(error))]


def _written(event: Event) -> bytes:
    return f"event: {event['type']}\ndata: {dumps(event)}\n\n".encode()
