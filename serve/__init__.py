"""The OpenAI-style HTTP server over jaxserve's public face."""

from serve.options import ServerOptions
from serve.routes import create_app
from serve.runner import bind, make_runner, run

__all__ = ["ServerOptions", "bind", "create_app", "make_runner", "run"]
