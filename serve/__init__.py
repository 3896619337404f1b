"""The OpenAI-style HTTP server over jaxserve's public face."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from serve.options import ServerOptions
    from serve.routes import create_app
    from serve.runner import Ended, listen, make_runner, run
    from serve.sockets import Bound, bind

__all__ = ["Bound", "Ended", "ServerOptions", "bind", "create_app", "listen", "make_runner", "run"]

_HOMES = {
    "Bound": "sockets",
    "bind": "sockets",
    "ServerOptions": "options",
    "create_app": "routes",
    "Ended": "runner",
    "listen": "runner",
    "make_runner": "runner",
    "run": "runner",
}


def __getattr__(name: str) -> Any:
    """The server's library takes a third of a second to import: only where it is used, not to show options."""
    if name in _HOMES:
        return getattr(importlib.import_module(f"serve.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
