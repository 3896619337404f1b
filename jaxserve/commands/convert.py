"""``jaxserve convert``: a checkpoint as the engine keeps it."""

import argparse
from pathlib import Path

from jaxserve.commands.common import MODEL_HELP, UsageError
from jaxserve.config import EngineConfig
from jaxserve.options import add_options, given


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", help=MODEL_HELP)
    parser.add_argument("target", type=Path, help="folder to write; it must not exist or be empty")
    add_options(parser, EngineConfig, title="layout", only=("tensor_parallel", "dtype"))
    parser.set_defaults(command=run, kinds=(EngineConfig,))


def run(parsed: argparse.Namespace) -> int:
    options = given(parsed, EngineConfig)
    EngineConfig.from_options(str(parsed.source), options)
    if parsed.target.exists() and (not parsed.target.is_dir() or any(parsed.target.iterdir())):
        raise UsageError(f"{parsed.target} exists and is not an empty folder")
    from jaxserve.convert import convert

    convert(parsed.source, parsed.target, **options)
    return 0
