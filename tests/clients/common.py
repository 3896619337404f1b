"""What the Python clients share: where the server is, a question, two tools, and a way to run checks."""

import argparse
from collections.abc import Callable, Iterable

QUESTION = "What is the capital of France?"
WEATHER = {
    "name": "get_weather",
    "description": "The weather in a city, today.",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 20}, "unit": {"enum": ["celsius", "fahrenheit"]}},
        "required": ["city", "unit"],
        "additionalProperties": False,
    },
}
TIME = {"name": "get_time", "description": "The time now.", "parameters": {"type": "object", "properties": {}}}


def arguments() -> tuple[str, str]:
    """The server's address and the model's name."""
    parser = argparse.ArgumentParser()
    parser.add_argument("url")
    parser.add_argument("model")
    given = parser.parse_args()
    return given.url, given.model


def check_weather(arguments: dict) -> None:
    assert set(arguments) == {"city", "unit"}, arguments
    assert arguments["unit"] in ("celsius", "fahrenheit"), arguments
    assert isinstance(arguments["city"], str), arguments


def run(title: str, checks: Iterable[Callable[..., object]], *given: object) -> None:
    """Call every check with ``given``; a line for each, with what it returned."""
    print(title)
    for check in checks:
        print(f"  {check.__name__.replace('_', ' ')}: {check(*given)!r}"[:118], flush=True)
