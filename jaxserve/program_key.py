"""What the machine code of a program depends on, as named facts: their hash is the key of a stored executable.

Kept beside the executable, the facts also say why one that is there does not fit: "sources changed", "jax 0.11.1 ->
0.11.2". Nothing volatile is among them: no path, port, working directory or variable that shapes no code.
"""

import functools
import hashlib
import importlib.metadata
import json
import os
import platform
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jaxlib

Facts = Mapping[str, str]

REASONS = {
    "new": "never compiled",
    "format": "kept in another format",
    "platform": "other platform",
    "jax": "other jax",
    "jaxlib": "other jaxlib",
    "plugin": "other plugin",
    "runtime": "other driver or libraries",
    "device": "other device",
    "cpu": "other CPU",
    "flags": "XLA flags changed",
    "options": "jax options changed",
    "sources": "sources changed",
    "model": "other model",
    "statics": "other settings",
    "arguments": "new shape",
    "damaged": "damaged",
}
"""Why an executable was compiled rather than loaded: the first fact that differs from the nearest stored one."""

_OPTIONS = (
    "jax_default_matmul_precision",
    "jax_enable_x64",
    "jax_numpy_dtype_promotion",
    "jax_threefry_partitionable",
    "jax_default_prng_impl",
    "jax_use_shardy_partitioner",
    "jax_compiler_enable_remat_pass",
    "jax_optimization_level",
    "jax_exec_time_optimization_effort",
    "jax_memory_fitting_effort",
    "jax_allow_f16_reductions",
    "jax_debug_nans",
    "jax_debug_infs",
)
"""Options of jax that change what is traced or compiled."""

_IDLE_FLAGS = ("xla_dump_", "xla_force_host_platform_device_count", "xla_hlo_profile", "xla_gpu_cuda_data_dir")
"""Beginnings of XLA flags that leave the machine code as it is."""

_PLUGINS = ("jax-cuda13-plugin", "jax-cuda13-pjrt", "jax-cuda12-plugin", "jax-cuda12-pjrt")
_LIBRARIES = ("nvidia-cudnn-cu13", "nvidia-cudnn-cu12", "nvidia-cublas", "nvidia-cublas-cu12")

ANY_RUNTIME = "any"
"""The ``runtime`` of what was compiled without the device: no driver was seen, nothing was tuned on it."""

ROOTS = ("jaxserve.programs",)
"""Where programs are made: these and all that they import are the sources that shape programs."""
NOT_TRACED = (
    "jaxserve.executables",
    "jaxserve.host_tier",
    "jaxserve.params",
    "jaxserve.request",
    "jaxserve.sequence",
)
"""What those import for types, and for numbers that show in a program's name, arguments or statics."""


def environment(devices: Sequence[Any]) -> dict[str, str]:
    """What machine code depends on beside the program. ``devices`` are those it is compiled for, in order."""
    kind = devices[0].platform
    facts = {
        **installed(),
        "platform": kind,
        "device": f"{devices[0].device_kind} x{len(devices)}",
        "flags": " ".join(xla_flags(os.environ.get("XLA_FLAGS", ""))),
        "options": " ".join(f"{name}={getattr(jax.config, name, None)}" for name in _OPTIONS),
    }
    if kind == "cpu":
        return {**facts, "cpu": cpu()}
    return {**facts, "plugin": _versions(_PLUGINS), "runtime": f"driver {driver()} {_versions(_LIBRARIES)}".strip()}


def installed() -> dict[str, str]:
    """The facts that hold for every device here."""
    return {"jax": jax.__version__, "jaxlib": jaxlib.__version__, "sources": source_hash()}


def xla_flags(text: str) -> list[str]:
    """The flags that shape machine code, sorted; of one that is given twice the last counts."""
    found = {}
    for word in text.split():
        name, _, value = word.lstrip("-").partition("=")
        if not name.startswith(_IDLE_FLAGS):
            found[name] = value
    return [f"{name}={value}" for name, value in sorted(found.items())]


def cpu() -> str:
    """The CPU's features and how many of its cores we may use: XLA cuts loops by them."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        flags = next(line for line in lines if line.startswith(("flags", "Features"))).partition(":")[2]
    except (OSError, StopIteration):
        flags = platform.processor()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{platform.machine()} {_digest(sorted(flags.split()))[:12]} with {cores} cores"


def driver() -> str:
    """The version of NVIDIA's kernel driver, or unknown."""
    try:
        found = re.search(r"\d+\.\d+(\.\d+)?", Path("/proc/driver/nvidia/version").read_text())
    except OSError:
        return "unknown"
    return found[0] if found else "unknown"


def _versions(names: Iterable[str]) -> str:
    found = []
    for name in names:
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return ", ".join(found)


def describe(program: Any, default_memory: str | None) -> dict[str, str]:
    """A ``Program`` as facts. ``default_memory`` is the devices' own kind of memory, which shardings need not name."""
    leaves, tree = jax.tree.flatten(program.args)
    inputs = [f"{leaf.dtype}{list(leaf.shape)} {_sharding(leaf.sharding, default_memory)}" for leaf in leaves]
    outputs = jax.tree.map(lambda leaf: _sharding(leaf, default_memory), program.out_shardings)
    return {
        "program": program.name,
        "model": program.model,
        "statics": _digest(program.about),
        "arguments": _digest([str(tree), inputs, str(program.donate), str(outputs)]),
    }


@functools.lru_cache
def _sharding(sharding: Any, default_memory: str | None) -> str:
    """Mesh, axes and kind of memory; not which devices: those are given when it is loaded."""
    kind = "" if sharding.memory_kind in (None, default_memory) else f" in {sharding.memory_kind}"
    if isinstance(sharding, jax.sharding.NamedSharding):
        return f"{dict(sharding.mesh.shape)} {sharding.spec}{kind}"
    return f"{sharding}{kind}"


def key(facts: Facts) -> str:
    return _digest(sorted(facts.items()))


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:32]


def reason(facts: Facts, stored: Iterable[Facts]) -> tuple[str, str]:
    """Why none of the ``stored`` facts of this program's name fit: a key of ``REASONS``, and a text."""
    nearest: list[str] | None = None
    old: Facts = {}
    for other in stored:
        if other.get("platform") != facts["platform"]:
            continue
        differ = [name for name in REASONS if facts.get(name, "") != other.get(name, "")]
        if nearest is None or len(differ) < len(nearest):
            nearest, old = differ, other
    if not nearest:
        return "new", REASONS["new"]
    texts = [difference(name, old.get(name, ""), facts.get(name, "")) for name in nearest]
    return nearest[0], ", ".join(texts)


def difference(name: str, old: str, new: str) -> str:
    """In words."""
    if name in ("jax", "jaxlib", "device", "platform", "runtime", "plugin"):
        return f"{name} {old or 'none'} -> {new or 'none'}"
    return REASONS[name]


_IMPORT = re.compile(r"^[ \t]*from[ \t]+(jaxserve[\w.]*)[ \t]+import[ \t]+(\([^)]*\)|[^\n]*)", re.MULTILINE)


def sources() -> list[Path]:
    """The files that programs are traced from: ``ROOTS``, what they import of ``jaxserve``, and the kernels."""
    root = Path(__file__).resolve().parent.parent
    modules = _modules(root / "jaxserve")
    found: dict[str, Path] = {}
    todo = list(ROOTS)
    while todo:
        name = todo.pop()
        if name in ("jaxserve", *NOT_TRACED) or name in found or name not in modules:
            continue
        found[name] = modules[name]
        for package, names in _IMPORT.findall(modules[name].read_text()):
            todo += [package, *(f"{package}.{word}" for word in re.findall(r"\w+", names))]
    kernels = root / "pallas_kernels"
    return sorted([*found.values(), *kernels.rglob("*.py"), *kernels.rglob("*.json")])


def _modules(package: Path) -> dict[str, Path]:
    """The modules of a package and of those in it, by name."""
    found = {}
    for folder, _, files in os.walk(package):
        stem = ".".join(Path(folder).relative_to(package.parent).parts)
        for file in files:
            if file.endswith(".py"):
                found[stem if file == "__init__.py" else f"{stem}.{file[:-3]}"] = Path(folder, file)
    return found


def source_hash() -> str:
    """Hash of the sources that shape programs. Editing anything else keeps the stored executables."""
    digest = hashlib.sha256()
    root = Path(__file__).resolve().parent.parent
    for path in sources():
        text = path.read_bytes()
        digest.update(f"{path.relative_to(root).as_posix()} {len(text)}\n".encode() + text)
    return digest.hexdigest()[:32]
