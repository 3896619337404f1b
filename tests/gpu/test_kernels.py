"""The kernels' own tests once more, on a GPU and not interpreted: ``python -m pytest --gpu tests/gpu``."""

import importlib

import jax
import pytest
from hopper import MOSAIC

if not (MOSAIC.capability or "").startswith("9."):
    pytest.skip("needs a Hopper GPU, and --gpu", allow_module_level=True)

MODULES = {
    "test_paged_attention": "",
    "test_mla_attention": "hopper",
    "test_sparse_mla": "hopper",
    "test_indexer": "kernel",
    "test_kv_write": "",
    "test_grouped_matmul": "",
    "test_moe": "hopper",
    "test_resolver": "",
    "test_host_rows": "",
    "test_kernels_engine": "",
}
"""And what is in the names of those of their tests that run kernels; others count what programs cost on a CPU."""


@pytest.fixture(autouse=True, scope="module")
def products_in_float32():
    """Those of the references too, which XLA would round to 10 bits (TF32) on a GPU."""
    before = jax.config.jax_default_matmul_precision
    jax.config.update("jax_default_matmul_precision", "highest")
    yield
    jax.config.update("jax_default_matmul_precision", before)


def suite(name: str, part: str) -> dict[str, object]:
    """A class of the module's tests, and the fixtures that they name."""
    held = vars(importlib.import_module(name))
    tests = {key: staticmethod(test) for key, test in held.items() if key.startswith("test_") and part in key}
    fixtures = {key: one for key, one in held.items() if type(one).__name__ == "FixtureFunctionDefinition"}
    return {f"Test{name.title()}": type(name, (), tests), **fixtures}


for module, part in MODULES.items():
    globals().update(suite(module, part))
