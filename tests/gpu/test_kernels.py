"""The kernels' own tests once more, on a GPU and not interpreted: ``python -m pytest --gpu tests/gpu``."""

import importlib

import pytest
from hopper import MOSAIC

if not (MOSAIC.capability or "").startswith("9."):
    pytest.skip("needs a Hopper GPU, and --gpu", allow_module_level=True)

MODULES = (
    "test_paged_attention",
    "test_mla_attention",
    "test_sparse_mla",
    "test_indexer",
    "test_kv_write",
    "test_grouped_matmul",
    "test_moe",
    "test_resolver",
    "test_host_rows",
    "test_kernels_engine",
)


def tests_of(name: str) -> type:
    """A class of the module's tests."""
    module = importlib.import_module(name)
    return type(name, (), {key: staticmethod(test) for key, test in vars(module).items() if key.startswith("test_")})


globals().update({f"Test{name.title()}": tests_of(name) for name in MODULES})
