"""What several commands share: the model's argument, checks before anything is loaded, and loading."""

import argparse
import errno
import os
from typing import Any

from jaxserve.config import EngineConfig
from jaxserve.options import given

MODEL_HELP = "a Hugging Face folder, a .gguf file, a converted folder, or smollm2-135m"


class UsageError(Exception):
    """The command line asks for something that makes no sense; exit status 2."""


def add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", default=EngineConfig.model, help=MODEL_HELP)


def check_engine(parsed: argparse.Namespace) -> EngineConfig:
    """The configuration that was asked for. Raises ConfigError or UsageError before anything is loaded."""
    config = EngineConfig.from_options(parsed.model, given(parsed, EngineConfig))
    try:
        config.cache_path.mkdir(parents=True, exist_ok=True)
        if not os.access(config.cache_path, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):  # programs are used without being stored, which is said
            raise UsageError(f"--cache-dir {config.cache_path}: {error.strerror}") from None
    return config


def load(parsed: argparse.Namespace, **more: Any) -> Any:
    """The ``LLM``, a context manager. jax is imported here and no sooner."""
    import jaxserve

    return jaxserve.LLM(parsed.model, **given(parsed, EngineConfig), **more)
