"""For models whose template knows no tools: the system message explains them, and calls are written as Hermes does."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

from serve.parsers.family import Messages
from serve.parsers.hermes import CLOSE, HERMES, OPEN

_LESSON = """You can call functions. These are all there are, each with its name, purpose and parameters as JSON:
<tools>
{tools}
</tools>

To call one, write nothing but its name and arguments as JSON between tags, like this:
{open}
{{"name": "the function's name", "arguments": {{"parameter": "value"}}}}
{close}

The result comes back between <tool_response> tags. If no function helps, answer in plain words."""


def teach(messages: Messages, tools: Sequence[Mapping[str, Any]]) -> Messages:
    """The conversation without anything that only tool templates understand, and with the tools explained."""
    found: list[dict[str, Any]] = []
    for message in messages:
        if message["role"] == "tool":
            text = f"<tool_response>\n{message.get('content') or ''}\n</tool_response>"
            if found and found[-1].get("answers_calls"):
                found[-1]["content"] += f"\n{text}"
            else:
                found.append({"role": "user", "content": text, "answers_calls": True})
        elif message.get("tool_calls"):
            calls = [_spell(call["function"]) for call in message["tool_calls"]]
            text = "\n".join([*([message["content"]] if message.get("content") else []), *calls])
            found.append({"role": "assistant", "content": text})
        else:
            found.append(dict(message))
    for message in found:
        message.pop("answers_calls", None)
    if tools:
        lesson = _LESSON.format(tools="\n".join(json.dumps(tool["function"]) for tool in tools), open=OPEN, close=CLOSE)
        if found and found[0]["role"] == "system":
            found[0]["content"] = f"{found[0]['content']}\n\n{lesson}"
        else:
            found.insert(0, {"role": "system", "content": lesson})
    return found


def _spell(function: Mapping[str, Any]) -> str:
    call = {"name": function["name"], "arguments": function["arguments"]}
    return f"{OPEN}\n{json.dumps(call, ensure_ascii=False)}\n{CLOSE}"


GENERIC = dataclasses.replace(HERMES, name="json", teach=teach)
