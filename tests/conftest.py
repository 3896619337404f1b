"""The surroundings of every test: JAX on eight CPU devices and one compilation cache for the whole session.

All of it is said through JAX's own environment variables, before anything imports jax or numpy, so tests that need
neither stay quick and processes that a test starts live in the same surroundings.
"""

import os
import shutil
import tempfile

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--gpu", action="store_true", help="let JAX use the GPU instead of eight CPU devices")


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
