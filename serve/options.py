"""What an operator may set about the server itself (the engine has its own configuration)."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from serve.parsers.choose import FAMILIES, THINKING, check_names

_FAMILIES, _THINKING = ", ".join(FAMILIES), ", ".join(THINKING)
CACHE_SALTS = ("request", "api-key")
DETECTIONS = ("scores", "verdicts", "off")
ACCESS_LOGS = ("text", "json", "off")


def _option(default: Any, help: str) -> Any:
    return field(default=default, metadata={"help": help})


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """Every field is an option of ``jaxserve serve``. Raises ValueError that names the field."""

    host: str = _option("127.0.0.1", "Address to listen on; 0.0.0.0 for all.")
    port: int = _option(8000, "Port to listen on; 0 takes a free one.")
    uds: str | None = _option(None, "Unix socket to listen on, instead of host and port.")
    tls_cert: str | None = _option(None, "PEM file with the certificate chain; SIGHUP reads it again.")
    tls_key: str | None = _option(None, "PEM file with the certificate's private key.")
    api_key: tuple[str, ...] = field(
        default=(),
        repr=False,
        metadata={"help": "Key clients must send as a bearer token; may be given several times."},
    )
    api_key_file: str | None = _option(None, "File with more keys, one a line (# for comments); SIGHUP reads it again.")
    cors_origin: tuple[str, ...] = _option(
        (), "Origin whose web pages may call the server (* for any); may be given several times."
    )
    ignore_unknown_fields: bool = _option(False, "Ignore request fields the server does not know, instead of refusing.")
    max_body_bytes: int = _option(32 * 2**20, "Largest request body; larger ones are refused (413).")
    max_header_bytes: int = _option(16 * 2**10, "Longest request line or header; longer ones are refused (431).")
    header_timeout: float = _option(10.0, "Seconds a client may take to send a request's headers.")
    body_timeout: float = _option(60.0, "Seconds a client may take to send a request's body (408).")
    write_timeout: float = _option(30.0, "Seconds a client may stop reading its stream before the request is aborted.")
    keep_alive_timeout: float = _option(75.0, "Seconds an idle connection is kept.")
    request_timeout: float = _option(0.0, "Seconds the engine may take for a request (504); 0 sets no limit.")
    sse_keep_alive: float = _option(15.0, "Seconds of silence in a stream after which a comment is sent; 0: none.")
    shutdown_timeout: float = _option(30.0, "Seconds that running requests get to finish after SIGTERM.")
    stall_seconds: float = _option(60.0, "Seconds without a finished step, with work pending, until /health says 503.")
    watchdog_timeout: float = _option(
        300.0, "Seconds without a finished step, with work pending, until the process ends itself; 0: never."
    )
    cache_salt_from: str = _option(
        "request",
        "Who may find whose prompts in the prefix cache: request (all, but for their cache_salt), or api-key (each key "
        "its own).",
    )
    tool_parser: str = _option("auto", f"How the model writes tool calls: auto (by its template), none, {_FAMILIES}.")
    reasoning_parser: str = _option(
        "auto", f"How the model marks its reasoning: auto (by its template), none, {_THINKING}."
    )
    watermark_detection: str = _option(
        "scores",
        "What /v1/watermark/detect tells: scores (p-values, spans, each token's score), verdicts (yes or no alone), or "
        "off. Whoever sees scores can learn to imitate or remove the mark.",
    )
    access_log: str = _option("text", "A line for every HTTP request, never its text: text, json (to stdout) or off.")

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ValueError(f"port must be in [0, 65535], got {self.port}")
        for name in (
            *("max_body_bytes", "header_timeout", "body_timeout", "write_timeout", "keep_alive_timeout"),
            "stall_seconds",
        ):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")
        for name in ("request_timeout", "sse_keep_alive", "shutdown_timeout", "watchdog_timeout"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} must not be negative, got {getattr(self, name)}")
        if not 1024 <= self.max_header_bytes <= 2**20:
            raise ValueError(f"max_header_bytes must be in [1024, {2**20}], got {self.max_header_bytes}")
        if not all(self.api_key):
            raise ValueError("api_key must not be empty")
        if self.uds == "":
            raise ValueError("uds must not be empty")
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("tls_cert and tls_key go together")
        if self.access_log not in ACCESS_LOGS:
            raise ValueError(f"access_log must be one of {', '.join(ACCESS_LOGS)}, got {self.access_log!r}")
        for origin in self.cors_origin:
            scheme, _, host = origin.partition("://")
            if origin not in ("*", "null") and (scheme not in ("http", "https") or not host or "/" in host):
                raise ValueError(f"cors_origin must be * or like https://example.org, got {origin!r}")
        if self.cache_salt_from not in CACHE_SALTS:
            raise ValueError(f"cache_salt_from must be {' or '.join(CACHE_SALTS)}, got {self.cache_salt_from!r}")
        if self.cache_salt_from == "api-key" and not (self.api_key or self.api_key_file):
            raise ValueError("cache_salt_from api-key needs API keys: give api_key or api_key_file")
        if self.watermark_detection not in DETECTIONS:
            raise ValueError(
                f"watermark_detection must be one of {', '.join(DETECTIONS)}, got {self.watermark_detection!r}"
            )
        check_names(self.tool_parser, self.reasoning_parser)
        self.all_keys()

    def all_keys(self) -> tuple[str, ...]:
        """All API keys, those of the file read anew. Raises ValueError that names the option, never a key."""
        if self.api_key_file is None:
            return self.api_key
        try:
            lines = Path(self.api_key_file).read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
            raise ValueError(f"api_key_file {self.api_key_file} cannot be read: {reason}") from None
        found = tuple(key for line in lines if (key := line.strip()) and not key.startswith("#"))
        if not found:
            raise ValueError(f"api_key_file {self.api_key_file} holds no key")
        return self.api_key + found
