"""The surroundings of every test: JAX on eight CPU devices and one compilation cache for the whole session.

All of it is said through JAX's own environment variables, before anything imports jax or numpy, so tests that need
neither stay quick and processes that a test starts live in the same surroundings.
"""

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    import jaxserve


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--gpu", action="store_true", help="let JAX use the GPU instead of eight CPU devices")
    parser.addoption("--whole", action="store_true", help="every family on 1, 2, 4 and 8 devices (half an hour)")


def pytest_configure(config: pytest.Config) -> None:
    if not config.getoption("--gpu"):
        os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["JAX_NUM_CPU_DEVICES"] = "8"
    # Threads of numpy's BLAS and of the tokenizers would only fight XLA's.
    os.environ["OPENBLAS_NUM_THREADS"] = "1"
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:  # a developer may keep one over many sessions
        folder = tempfile.mkdtemp(prefix="jaxserve-test-compile-cache-")
        os.environ["JAX_COMPILATION_CACHE_DIR"] = folder
        config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.05"


@pytest.fixture(scope="session")
def programs_dir(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Where every engine of the session keeps its compiled programs, so that each is compiled once."""
    return str(tmp_path_factory.mktemp("programs"))


@pytest.fixture(scope="session")
def speaking(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with a tokenizer, whose tokens are bytes."""
    from tiny import write_model

    return write_model(tmp_path_factory.mktemp("speaking") / "tiny")


@pytest.fixture(scope="session")
def llm(speaking: Path, programs_dir: str) -> "Iterator[jaxserve.LLM]":
    """One roomy engine for all tests that leave it idle."""
    from tiny import roomy

    with roomy(programs_dir, speaking) as made:
        yield made
