"""What an operator may set about the server itself (the engine has its own configuration)."""

from dataclasses import dataclass, field
from typing import Any


def _option(default: Any, help: str) -> Any:
    return field(default=default, metadata={"help": help})


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """Every field is an option of ``jaxserve serve``. Raises ValueError that names the field."""

    host: str = _option("127.0.0.1", "Address to listen on; 0.0.0.0 for all.")
    port: int = _option(8000, "Port to listen on; 0 takes a free one.")
    api_key: tuple[str, ...] = _option((), "Key clients must send as a bearer token; may be given several times.")
    ignore_unknown_fields: bool = _option(False, "Ignore request fields the server does not know, instead of refusing.")
    max_body_bytes: int = _option(32 * 2**20, "Largest request body; larger ones are refused (413).")
    shutdown_timeout: float = _option(30.0, "Seconds that running requests get to finish after SIGTERM.")
    stall_seconds: float = _option(60.0, "Seconds without a finished step, with work pending, until /health says 503.")
    access_log: bool = _option(True, "Log one line for every HTTP request (never its text).")

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ValueError(f"port must be in [0, 65535], got {self.port}")
        for name in ("max_body_bytes", "stall_seconds"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")
        if self.shutdown_timeout < 0:
            raise ValueError(f"shutdown_timeout must not be negative, got {self.shutdown_timeout}")
        if not all(self.api_key):
            raise ValueError("api_key must not be empty")
