"""The OpenAI-style HTTP server over jaxserve's public face."""

from serve.listen import Bound, bind
from serve.options import ServerOptions
from serve.routes import create_app
from serve.runner import Ended, listen, make_runner, run

__all__ = ["Bound", "Ended", "ServerOptions", "bind", "create_app", "listen", "make_runner", "run"]
