"""A ``/v1/responses`` answer as it grows: parts of a completion in, typed events and in the end the response out."""

import copy
import time
import uuid
from collections.abc import Sequence
from typing import Any

from jaxserve.request import TokenLogprob
from serve.answer import Step
from serve.errors import ApiError
from serve.logprobs import chat_logprobs
from serve.mark import mark_fields
from serve.protocol.responses import ResponsesRequest
from serve.state import State
from serve.turn import Reasoning, Text, ToolCallArguments, ToolCallBegin

type Event = dict[str, Any]


class Response:
    """One response. ``value`` is the object as it stands; every method returns the events of what it changed."""

    def __init__(self, state: State, body: ResponsesRequest, prompt_tokens: int):
        self._state, self._body = state, body
        self._prompt_tokens = prompt_tokens
        self._made = self._thought = self._cached = 0
        self._number = 0
        self._logprobs: list[TokenLogprob] = []
        """Of tokens whose text has not come yet."""
        self.value = _blank(state, body)

    def begin(self) -> list[Event]:
        return [self._whole("response.created"), self._whole("response.in_progress")]

    def add(self, step: Step) -> list[Event]:
        """What a step adds, and the end where it is the last one."""
        self._made += len(step.token_ids)
        self._thought += step.reasoning_tokens
        self._cached += step.cached_tokens
        self._logprobs += step.logprobs or ()
        events: list[Event] = []
        for part in step.parts:
            match part:
                case Text(text):
                    events += [*self._open("message"), self._text(text)]
                case Reasoning(text):
                    events += [*self._open("reasoning"), self._reasoning(text)]
                case ToolCallBegin(_, id, name):
                    events += self._close() + self._add(_call_item(id, name))
                case ToolCallArguments(_, json):
                    self._item["arguments"] += json
                    events.append(self._event("response.function_call_arguments.delta", delta=json))
        if step.finish_reason is not None:
            self.value |= mark_fields(step.watermark)
            events += self._end(step.finish_reason == "length")
        return events

    def fail(self, error: ApiError) -> list[Event]:
        """The end of a response that went wrong after it had begun."""
        self.value["status"] = "failed"
        said = error.body()["error"]
        self.value["error"] = {"code": said["code"] or said["type"], "message": said["message"]}
        return [self._whole("response.failed")]

    def _end(self, short: bool) -> list[Event]:
        value, events = self.value, []
        if not value["output"]:
            events += self._open("message")
        if self._logprobs and self._item["type"] == "message":
            events.append(self._text(""))
        status = "incomplete" if short else "completed"
        events += self._close(status)
        value["status"] = status
        value["incomplete_details"] = {"reason": "max_output_tokens"} if short else None
        value["completed_at"] = None if short else int(time.time())
        value["usage"] = {
            "input_tokens": self._prompt_tokens,
            "input_tokens_details": {"cached_tokens": self._cached, "cache_write_tokens": 0},
            "output_tokens": self._made,
            "output_tokens_details": {"reasoning_tokens": self._thought},
            "total_tokens": self._prompt_tokens + self._made,
        }
        return [*events, self._whole(f"response.{status}")]

    # -- items ---------------------------------------------------------------------------------------------------------

    @property
    def _item(self) -> dict[str, Any]:
        """The item that is being written."""
        return self.value["output"][-1]

    def _open(self, kind: str) -> list[Event]:
        """Go on with an item of this kind, or begin one."""
        output = self.value["output"]
        if output and output[-1]["type"] == kind and output[-1]["status"] == "in_progress":
            return []
        events = self._close() + self._add(_message_item() if kind == "message" else _reasoning_item())
        part = {"type": "reasoning_text", "text": ""} if kind == "reasoning" else _text_part()
        events.append(self._event("response.content_part.added", content_index=0, part=part))
        self._item["content"].append(copy.deepcopy(part))
        return events

    def _add(self, item: dict[str, Any]) -> list[Event]:
        self.value["output"].append(item)
        return [self._item_event("response.output_item.added")]

    def _close(self, status: str = "completed") -> list[Event]:
        """End the item that is being written, if there is one."""
        output = self.value["output"]
        if not output or output[-1]["status"] != "in_progress":
            return []
        item = output[-1]
        item["status"] = status
        if item["type"] == "function_call":
            done = {"name": item["name"], "arguments": item["arguments"]}
            events = [self._event("response.function_call_arguments.done", **done)]
        else:
            part = copy.deepcopy(item["content"][0])
            text: dict[str, Any] = {"content_index": 0, "text": part["text"]}
            if item["type"] == "message":
                events = [self._event("response.output_text.done", **text, logprobs=part["logprobs"])]
            else:
                events = [self._event("response.reasoning_text.done", **text)]
            events.append(self._event("response.content_part.done", content_index=0, part=part))
        return [*events, self._item_event("response.output_item.done")]

    def _text(self, text: str) -> Event:
        part, logprobs = self._item["content"][0], self._rendered()
        part["text"] += text
        part["logprobs"] += logprobs
        return self._event("response.output_text.delta", content_index=0, delta=text, logprobs=logprobs)

    def _reasoning(self, text: str) -> Event:
        self._logprobs = []
        self._item["content"][0]["text"] += text
        return self._event("response.reasoning_text.delta", content_index=0, delta=text)

    def _rendered(self) -> list[dict[str, Any]]:
        """The log-probabilities since the last text, which they belong to."""
        entries: Sequence[TokenLogprob] = self._logprobs if self._body.with_logprobs else ()
        self._logprobs = []
        return chat_logprobs(entries, self._body.top_logprobs or 0, self._state)["content"]

    # -- events --------------------------------------------------------------------------------------------------------

    def _numbered(self, kind: str, **fields: Any) -> Event:
        event = {"type": kind, "sequence_number": self._number} | fields
        self._number += 1
        return event

    def _event(self, kind: str, **fields: Any) -> Event:
        """About the item that is being written."""
        place = {"item_id": self._item["id"], "output_index": len(self.value["output"]) - 1}
        return self._numbered(kind, **place, **fields)

    def _item_event(self, kind: str) -> Event:
        return self._numbered(kind, output_index=len(self.value["output"]) - 1, item=copy.deepcopy(self._item))

    def _whole(self, kind: str) -> Event:
        return self._numbered(kind, response=copy.deepcopy(self.value))


def _id(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex}"


def _message_item() -> dict[str, Any]:
    return {"type": "message", "id": _id("msg"), "status": "in_progress", "role": "assistant", "content": []}


def _reasoning_item() -> dict[str, Any]:
    return {"type": "reasoning", "id": _id("rs"), "status": "in_progress", "summary": [], "content": []}


def _call_item(call_id: str, name: str) -> dict[str, Any]:
    item = {"type": "function_call", "id": _id("fc"), "status": "in_progress"}
    return item | {"call_id": call_id, "name": name, "arguments": ""}


def _text_part() -> dict[str, Any]:
    return {"type": "output_text", "text": "", "annotations": [], "logprobs": []}


def _blank(state: State, body: ResponsesRequest) -> dict[str, Any]:
    """The response before anything is said: what was asked for, with what holds where nothing was said."""
    text, reasoning = body.text, body.reasoning
    form: dict[str, Any] = {"type": "text"}
    if text is not None and text.format is not None:
        form = text.format.model_dump(by_alias=True, exclude_none=True)
    return {
        "id": _id("resp"),
        "object": "response",
        "created_at": int(time.time()),
        "completed_at": None,
        "status": "in_progress",
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": None,
        "metadata": body.metadata or {},
        "model": state.model_name,
        "output": [],
        "parallel_tool_calls": body.parallel_tool_calls,
        "previous_response_id": None,
        "prompt_cache_key": body.prompt_cache_key,
        "reasoning": {"effort": None if reasoning is None else reasoning.effort, "summary": None},
        "safety_identifier": body.safety_identifier,
        "service_tier": "default",
        "store": False,
        "temperature": 1.0 if body.temperature is None else body.temperature,
        "text": {"format": form, "verbosity": "medium"},
        "tool_choice": body.tool_choice if isinstance(body.tool_choice, str) else body.tool_choice.model_dump(),
        "tools": [_tool(tool.model_dump()) for tool in body.tools or ()],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": 1.0 if body.top_p is None else body.top_p,
        "truncation": "disabled",
        "usage": None,
        "user": body.user,
    }


def _tool(tool: dict[str, Any]) -> dict[str, Any]:
    return tool | {"strict": bool(tool["strict"])}
