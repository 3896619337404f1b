"""``jaxserve serve``: the HTTP server, over an engine that loads while the server listens already."""

import argparse
import logging
import os
import sys
from typing import Any

from jaxserve.collector import paused
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
    with paused():
        from serve import bind
        from serve import run as serve

    try:
        chosen = given(parsed, ServerOptions)
        fields: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in chosen.items()
        }
        options = ServerOptions(**fields)
        bound = bind(options)  # before the model is loaded: a port in use is known at once
    except ValueError as error:
        raise UsageError(error) from None
    ended = serve(lambda on_phase: load(parsed, on_phase=on_phase), options, bound=bound)
    if not ended.clean:  # threads are left that may never come back
        logging.shutdown()
        sys.stdout.flush()
        os._exit(ended.status)
    return ended.status
