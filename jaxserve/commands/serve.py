"""``jaxserve serve``: the HTTP server, over an engine that loads while the server listens already."""

import argparse
import logging
import os
import sys
from typing import Any

from jaxserve.commands.common import UsageError, add_model, check_engine, load
from jaxserve.config import EngineConfig
from jaxserve.options import add_options, given
from serve.options import ServerOptions


def add(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    add_options(parser, ServerOptions, title="server")
    names = {"served_name": ("--served-model-name", "--served-name")}
    add_options(parser, EngineConfig, title="engine", skip=("model",), flags=names)
    parser.set_defaults(command=run, kinds=(ServerOptions, EngineConfig))


def run(parsed: argparse.Namespace) -> int:
    check_engine(parsed)
    import serve

    try:
        chosen = given(parsed, serve.ServerOptions)
        fields: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in chosen.items()
        }
        options = serve.ServerOptions(**fields)
        bound = serve.bind(options)  # before the model is loaded: a port in use is known at once
    except ValueError as error:
        raise UsageError(error) from None
    ended = serve.run(lambda on_phase: load(parsed, on_phase=on_phase), options, bound=bound)
    if not ended.clean:  # threads are left that may never come back
        logging.shutdown()
        sys.stdout.flush()
        os._exit(ended.status)
    return ended.status
