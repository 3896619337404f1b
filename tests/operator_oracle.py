"""What must hold after whatever an operator's clients send, in four parts: status, error, next request, idle."""

import json
import re
import time
from typing import Any

from tiny import idle

from tests.serving import Server

MOST = 8192
"""Bytes of an error body."""
GAUGES = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "compilations_after_ready_total")


def metric(server: Server, name: str) -> float:
    """The sum of a metric's samples, whatever their labels."""
    text = server.send("/metrics")[1]
    found = re.findall(rf"^jaxserve:{name}(?:{{.*}})? (\S+)$", text, re.MULTILINE)
    assert found, name
    return sum(map(float, found))


def at_rest(server: Server) -> None:
    """Nothing runs or waits, every page and slot has come back, and nothing was compiled."""
    idle(server.llm)
    end = time.monotonic() + 10
    while (found := {name: metric(server, name) for name in GAUGES}) != dict.fromkeys(GAUGES, 0):
        assert time.monotonic() < end, found
        time.sleep(0.02)
    assert not server.state.channels
    assert server.send("/load")[1] == {"server_load": 0, "running": 0, "waiting": 0}
    assert server.send("/health")[0] == 200


def well(server: Server) -> None:
    """The next request works, and then all is at rest."""
    status, answer, _ = server.send("/v1/completions", {"prompt": "Hi", "max_tokens": 2})
    assert status == 200, answer
    at_rest(server)


def refused(server: Server, path: str, body: Any, status: int = 400, **error: Any) -> str:
    """``body`` (JSON, or bytes as they are) is refused with ``status`` and a small error object, whose fields hold
    what ``error`` says; the server is well afterwards. Returns the message."""
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    got, answer, headers = server.send(path, raw=raw)
    assert got == status, answer
    assert set(answer) == {"error"}
    assert set(answer["error"]) == {"message", "type", "param", "code"}
    assert len(json.dumps(answer)) < MOST
    assert answer["error"]["message"]
    assert headers["X-Request-Id"]
    for name, value in error.items():
        assert answer["error"][name] == value, answer
    well(server)
    return answer["error"]["message"]
