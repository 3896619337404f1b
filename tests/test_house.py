"""The house rules that can be read off the source: who may import whom, no environment variables, short files."""

import ast
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("jaxserve", "pallas_kernels", "checkpoints", "serve", "benchmarks")
LEAVES = ("pallas_kernels", "checkpoints")
HOST_POLICY = ("request", "pages", "prefix_cache", "scheduler", "buckets")
PUBLIC_MODULES = ("jaxserve.request", "jaxserve.tokenizer", "jaxserve.detokenizer")
"""What ``serve`` may import besides the names in ``jaxserve`` itself."""
LIBRARY_VARIABLES = ("XLA_", "JAX_", "CUDA_", "NCCL_")
MAX_LINES = 500


def source_files(*packages: str) -> list[Path]:
    return sorted(path for package in packages for path in (ROOT / package).rglob("*.py"))


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(source: str, module: str, *, package: bool = False) -> Iterator[str]:
    """Dotted names that the source imports, wherever in the file; ``from a import b`` gives ``a.b``.

    ``module`` is the importer's own name, which relative imports start from; ``package`` says it is an ``__init__``.
    """
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = module.split(".")
                keep = len(parts) - node.level + package
                base = ".".join([*parts[:keep], *([base] if base else [])])
            yield from (f"{base}.{alias.name}" for alias in node.names)


def imports_of(path: Path) -> set[str]:
    return set(imports(path.read_text(), module_name(path), package=path.name == "__init__.py"))


def within(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


def jaxserve_module(name: str) -> str | None:
    """The module file inside jaxserve that a dotted name leads to, None for names that are no module."""
    parts = name.split(".")
    for size in range(len(parts), 1, -1):
        path = ROOT.joinpath(*parts[:size])
        if path.with_suffix(".py").is_file() or (path / "__init__.py").is_file():
            return ".".join(parts[:size])
    return None


def reads_environment(source: str) -> list[int]:
    """Lines that use ``os.environ`` or ``os.getenv`` for anything but a literally named variable of a library below us.

    Those may be set before the library starts, and read where they shape what it compiles.
    """
    tree = ast.parse(source)
    fine = set()
    for node in ast.walk(tree):
        key: ast.expr | None = None
        if isinstance(node, ast.Subscript):
            key, used = node.slice, node.value
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args:
            key, used = node.args[0], node.func if node.func.attr == "getenv" else node.func.value
        if isinstance(key, ast.Constant) and str(key.value).startswith(LIBRARY_VARIABLES):
            fine.add(used)
    lines = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in ("environ", "environb", "getenv") and node not in fine:
            lines.append(node.lineno)
        elif isinstance(node, ast.ImportFrom) and node.module == "os":
            lines.extend(node.lineno for alias in node.names if alias.name in ("environ", "environb", "getenv"))
    return sorted(lines)


@pytest.mark.parametrize("path", source_files(*LEAVES), ids=module_name)
def test_leaf_packages_import_no_other_room(path):
    own = module_name(path).split(".")[0]
    others = [package for package in PACKAGES if package != own]
    assert not [name for name in imports_of(path) if any(within(name, package) for package in others)]


@pytest.mark.parametrize("path", source_files("serve"), ids=module_name)
def test_serve_sees_only_the_public_face(path):
    for name in imports_of(path):
        if within(name, "jaxserve"):
            module = jaxserve_module(name)
            assert module is None or module in PUBLIC_MODULES, f"{module_name(path)} imports {name}"
        assert not within(name, "checkpoints"), f"{module_name(path)} imports {name}"
        assert not within(name, "pallas_kernels"), f"{module_name(path)} imports {name}"


def is_roof(module: str) -> bool:
    return module == "jaxserve.cli" or within(module, "jaxserve.commands")


@pytest.mark.parametrize("path", source_files("jaxserve"), ids=module_name)
def test_only_the_command_line_imports_the_server(path):
    if not is_roof(module_name(path)):
        assert not [name for name in imports_of(path) if within(name, "serve") or within(name, "benchmarks")]


@pytest.mark.parametrize("path", source_files(*PACKAGES), ids=module_name)
def test_nothing_imports_the_command_line(path):
    """The commands do not know each other either: each is imported when it is chosen, and only then."""
    module = module_name(path)
    if module != "jaxserve.__main__":
        found = {name for name in imports_of(path) if is_roof(name)}
        common = {name for name in found if within(name, "jaxserve.commands.common")}
        assert found - common == set(), f"{module} imports {found - common}"
        assert is_roof(module) or not common, f"{module} imports {common}"


@pytest.mark.parametrize("policy", HOST_POLICY)
def test_host_policy_reaches_no_jax(policy):
    todo, seen = [f"jaxserve.{policy}"], set()
    while todo:
        module = todo.pop()
        path = ROOT.joinpath(*module.split("."))
        path = path.with_suffix(".py") if path.with_suffix(".py").is_file() else path / "__init__.py"
        if module in seen or not path.is_file():
            continue
        seen.add(module)
        for name in imports_of(path):
            assert name.split(".")[0] not in ("jax", "jaxlib", "flax"), f"{module} imports {name}"
            if within(name, "jaxserve") and (inner := jaxserve_module(name)):
                todo.append(inner)


@pytest.mark.parametrize("path", source_files("jaxserve", "serve", *LEAVES), ids=module_name)
def test_no_environment_variables_of_our_own(path):
    assert reads_environment(path.read_text()) == []


@pytest.mark.filterwarnings("default:.* lines; does it still have one job:UserWarning")
def test_files_are_short():
    for path in source_files(*PACKAGES):
        count = len(path.read_text().splitlines())
        if count > MAX_LINES:
            warnings.warn(f"{module_name(path)} has {count} lines; does it still have one job?", stacklevel=1)


@pytest.mark.parametrize(
    ("source", "module", "package", "expected"),
    [
        ("import jax.numpy as jnp", "jaxserve.pages", False, {"jax.numpy"}),
        ("from jax import lax", "jaxserve.pages", False, {"jax.lax"}),
        ("def f():\n    from jaxserve import engine", "serve.app", False, {"jaxserve.engine"}),
        ("from .engine import Engine", "jaxserve.llm", False, {"jaxserve.engine.Engine"}),
        ("from . import engine", "jaxserve", True, {"jaxserve.engine"}),
        ("from ..config import X", "jaxserve.models.llama", False, {"jaxserve.config.X"}),
    ],
)
def test_the_import_reader_sees_every_form(source, module, package, expected):
    assert set(imports(source, module, package=package)) == expected


def test_the_environment_reader_tells_our_variables_from_the_libraries():
    assert reads_environment("import os\nx = os.environ['A']") == [2]
    assert reads_environment("import os\nx = os.getenv('A')\ny = os.environ.get('B')") == [2, 3]
    assert reads_environment("from os import environ") == [1]
    assert reads_environment("import os\nx = dict(os.environ)\ny = os.environ[name]") == [2, 3]
    assert reads_environment("import os\nos.environ['XLA_FLAGS'] = os.environ.get('XLA_FLAGS', '') + '--a'") == []
    assert reads_environment("import os\nx = os.getenv('CUDA_VISIBLE_DEVICES')") == []
