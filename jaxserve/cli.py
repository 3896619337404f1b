"""The command line's roof: which commands there are, and what becomes of their errors.

A command is a module under ``jaxserve/commands``, imported only when it is chosen: a list of commands is shown at once.
"""

import argparse
import importlib
import logging
import os
import sys
from collections.abc import Sequence

from jaxserve import __version__
from jaxserve.commands.common import UsageError
from jaxserve.config import ConfigError
from jaxserve.options import Parser, as_flags
from jaxserve.request import EngineDeadError, QueueFullError, RequestError

COMMANDS = {
    "serve": "serve a model by an OpenAI-style HTTP API",
    "generate": "complete prompts, or answer chat messages, without a server",
    "convert": "write a checkpoint as a sharded tree that needs no conversion to serve",
    "warmup": "compile ahead of time what a configuration will load, and look after what is stored",
    "sidecar": "keep weights and KV pages in memory that outlives the engine",
    "bench": "measure a configuration, also of a model whose weights are not here",
    "detect": "tell whether texts were marked",
}
"""Modules under ``jaxserve/commands``, and what each does."""


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; returns the exit status. Errors of the user's making are one line, without a traceback."""
    words = sys.argv[1:] if arguments is None else arguments
    parsed = _parser(words).parse_args(words)
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    for name in ("jaxserve", "serve"):
        logging.getLogger(name).setLevel(logging.INFO)
    try:
        return parsed.command(parsed)
    except (UsageError, ConfigError) as error:
        return _fail(error, 2, parsed.kinds)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115  (keeps the interpreter from flushing into the pipe again)
        return 1
    except (RequestError, QueueFullError, EngineDeadError, OSError) as error:
        return _fail(error, 1)
    except ValueError as error:
        if type(error) is ValueError:  # not one of our named errors (CheckpointError, TokenizerError): a bug
            raise
        return _fail(error, 1)


def _fail(error: BaseException, status: int, kinds: Sequence[type] = ()) -> int:
    text = as_flags(" ".join(str(error).split()), *kinds)
    print(f"jaxserve: error: {text}", file=sys.stderr)
    return status


def _parser(words: Sequence[str]) -> argparse.ArgumentParser:
    """The parser of a command line: only the chosen command has its options."""
    parser = Parser(prog="jaxserve", description="An LLM inference engine in JAX.")
    parser.add_argument("--version", action="version", version=f"jaxserve {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    chosen = next((word for word in words if not word.startswith("-")), None)
    for name, text in COMMANDS.items():
        command = commands.add_parser(name, help=text)
        if name == chosen:
            importlib.import_module(f"jaxserve.commands.{name}").add(command)
    return parser
