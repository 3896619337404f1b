"""What is known of one HTTP request while it runs, and the line that is logged when it ends (never its text)."""

import json
import logging
import re
import sys
import time
import uuid
from contextvars import ContextVar
from dataclasses import dataclass, field

from aiohttp import web

log = logging.getLogger("serve.access")

_SANE_ID = re.compile(r"[A-Za-z0-9._:\-]{1,128}")
MAX_PATH = 200
QUIET = frozenset({"/health", "/ready", "/ping", "/metrics"})
"""Paths that are asked every few seconds: their answers are counted and not logged, unless something is amiss."""


@dataclass(slots=True)
class Record:
    """One HTTP request. ``tokens`` and ``reasons`` are filled in by ``Generation``, ``bytes`` by whoever writes."""

    request_id: str
    """What the client called it, or a name of our own. For people only: nothing is looked up by it."""
    began: float = field(default_factory=time.perf_counter)
    status: int = 499
    """The status sent; 499 where the client went away before there was one."""
    bytes: int = 0
    prompt_tokens: int | None = None
    completion_tokens: int = 0
    reasons: dict[str, None] = field(default_factory=dict)
    """Finish reasons, each once."""
    disconnected: bool = False
    watermark: str = ""
    """What is done about the mark, where the engine has one."""
    tenant: str = ""
    """A digest of the API key it came with. Never logged."""

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self.began


CURRENT: ContextVar[Record | None] = ContextVar("record", default=None)
"""The record of the request whose task this is: every request runs in a task of its own."""


def request_id(sent: str | None) -> str:
    """The id that the client sent if it is short and plain, otherwise a new one."""
    if sent is not None and _SANE_ID.fullmatch(sent):
        return sent
    return f"req_{uuid.uuid4().hex}"


def write_line(mode: str, request: web.BaseRequest, record: Record) -> None:
    """Log the end of a request: ``mode`` is text (to the log), json (a line to standard output) or off."""
    if mode == "off" or (request.path in QUIET and record.status in (200, 503)):
        return
    path = request.rel_url.raw_path[:MAX_PATH]  # percent-encoded, without the query
    ms = round(record.seconds * 1e3, 1)
    reason = ",".join(record.reasons) or None
    if mode == "json":
        line = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "remote": request.remote,
            "method": request.method,
            "path": path,
            "status": record.status,
            "ms": ms,
            "bytes": record.bytes,
            "request_id": record.request_id,
            "prompt_tokens": record.prompt_tokens,
            "completion_tokens": None if record.prompt_tokens is None else record.completion_tokens,
            "finish_reason": reason,
            "disconnected": record.disconnected,
        }
        try:
            sys.stdout.write(json.dumps(line) + "\n")
            sys.stdout.flush()
        except (OSError, ValueError):
            pass  # nobody reads it any more
        return
    more = "" if record.prompt_tokens is None else f" {record.prompt_tokens}+{record.completion_tokens} tokens"
    more += f" {reason}" if reason else ""
    more += " (client gone)" if record.disconnected else ""
    parts = (request.remote or "-", request.method, path, record.status, record.bytes, ms, record.request_id, more)
    log.info('%s "%s %s" %d %d bytes %.1f ms %s%s', *parts)
