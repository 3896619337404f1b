"""Compiled programs, kept on disk: lower from abstract shapes, compile in threads, serialize; next time only load.

An entry's key covers everything that shapes the machine code: versions, XLA flags, device kind and count, CPU
features, the program's own description (model config, shapes, dtypes, shardings) and a hash of our sources. Entries are
executable code: the folder is private to the user. A damaged or stale entry is discarded with one line saying why, and
rebuilt.
"""

import hashlib
import json
import logging
import os
import pickle
import platform
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import jaxlib
from jax.experimental import serialize_executable
from jax.experimental.compilation_cache import compilation_cache

log = logging.getLogger(__name__)

Compiled = Callable[..., Any]
_MAGIC = b"jaxserve-exe-1\n"


@dataclass(frozen=True)
class Program:
    """A function to compile for abstract arguments. ``about`` tells functions with different statics apart."""

    name: str
    function: Callable[..., Any]
    args: tuple[Any, ...]
    donate: tuple[int, ...] = ()
    out_shardings: Any = None
    about: str = ""


@dataclass
class Tally:
    """What became of the programs: for the start-up report."""

    loaded: int = 0
    compiled: int = 0
    discarded: list[str] = field(default_factory=list)
    seconds: float = 0.0
    """Summed over threads."""


class ExecutableStore:
    """Builds programs, keeping them under ``folder``. Thread-safe; several processes may share a folder."""

    def __init__(self, folder: Path, devices: Iterable[jax.Device]):
        self.folder = folder / "executables"
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.folder.chmod(0o700)  # it may have been there
        self.devices = list(devices)
        self.environment = _environment(self.devices)
        self.tally = Tally()
        self._lock = threading.Lock()
        self._compiling = 0
        self._cache_was_on = True

    def build_all(
        self,
        programs: Iterable[Program],
        workers: int | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> dict[str, Compiled]:
        """Load or compile every program, in threads; ``progress(done, total)`` is told of each."""
        programs = list(programs)
        out = {}
        with ThreadPoolExecutor(workers or os.cpu_count() or 1, "compile") as pool:
            for program, compiled in zip(programs, pool.map(self.build, programs), strict=True):
                out[program.name] = compiled
                if progress:
                    progress(len(out), len(programs))
        return out

    def build(self, program: Program) -> Compiled:
        """Load the program from disk, or compile and store it."""
        begun = time.perf_counter()
        path = self.folder / f"{_file_name(program.name)}-{self._key(program)}"
        compiled = self._load(path)
        fresh = compiled is None
        if compiled is None:
            compiled = self._compile(program)
            self._save(path, compiled)
        with self._lock:
            self.tally.loaded += not fresh
            self.tally.compiled += fresh
            self.tally.seconds += time.perf_counter() - begun
        return compiled

    def _compile(self, program: Program) -> Any:
        jitted = jax.jit(program.function, donate_argnums=program.donate, out_shardings=program.out_shardings)
        lowered = jitted.lower(*program.args)
        with self._fresh_compilation():
            return lowered.compile()

    @contextmanager
    def _fresh_compilation(self) -> Iterator[None]:
        """Keep jax's own compilation cache out: what it returns on a CPU serializes to something that cannot run.

        jax looks at the option once a process, so that switching it takes a reset as well.
        """
        with self._lock:
            if self._compiling == 0:
                self._cache_was_on = jax.config.jax_enable_compilation_cache
                jax.config.update("jax_enable_compilation_cache", False)
                compilation_cache.reset_cache()
            self._compiling += 1
        try:
            yield
        finally:
            with self._lock:
                self._compiling -= 1
                if self._compiling == 0:
                    jax.config.update("jax_enable_compilation_cache", self._cache_was_on)
                    compilation_cache.reset_cache()

    def _key(self, program: Program) -> str:
        leaves, tree = jax.tree.flatten(program.args)
        described = [f"{leaf.dtype}{leaf.shape}{leaf.sharding}" for leaf in leaves]
        parts = [self.environment, program.name, program.about, str(tree), described, str(program.donate)]
        parts.append(str(program.out_shardings))
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]

    def _load(self, path: Path) -> Any | None:
        try:
            data = path.read_bytes()
        except OSError:
            return None
        try:
            magic, digest, body = data[: len(_MAGIC)], data[len(_MAGIC) : len(_MAGIC) + 32], data[len(_MAGIC) + 32 :]
            if magic != _MAGIC or hashlib.sha256(body).digest() != digest:
                raise ValueError("damaged file")
            payload, in_tree, out_tree = pickle.loads(body)
            return serialize_executable.deserialize_and_load(
                payload, in_tree, out_tree, backend=self.devices[0].client, execution_devices=self.devices
            )
        except Exception as error:
            reason = f"{path.name}: {error}"
            log.warning("discarding a stored executable, %s", reason)
            with self._lock:
                self.tally.discarded.append(reason)
            path.unlink(missing_ok=True)
            return None

    def _save(self, path: Path, compiled: Any) -> None:
        body = pickle.dumps(serialize_executable.serialize(compiled))
        with tempfile.NamedTemporaryFile(dir=self.folder, delete=False) as file:  # 0600, renamed into place
            file.write(_MAGIC + hashlib.sha256(body).digest() + body)
        os.replace(file.name, path)


def _file_name(name: str) -> str:
    return "".join(c if c.isalnum() or c in "+-_." else "_" for c in name)


def _environment(devices: list[jax.Device]) -> dict[str, Any]:
    """What machine code depends on beside the program."""
    client = devices[0].client
    return {
        "jax": jax.__version__,
        "jaxlib": jaxlib.__version__,
        "platform": client.platform,
        "platform_version": client.platform_version,
        "devices": [d.device_kind for d in devices],
        "visible": len(client.devices()),
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
        "cpu": _cpu_features() if client.platform == "cpu" else "",
        "matmul_precision": str(jax.config.jax_default_matmul_precision),
        "sources": source_hash(),
    }


def _cpu_features() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line for line in lines if line.startswith(("flags", "Features")))
    except (OSError, StopIteration):
        return platform.processor()


_TRACED = (
    "batch",
    "buckets",
    "config",
    "decoder",
    "experts",
    "layer_spec",
    "layers",
    "moe",
    "programs",
    "quantization/array",
    "rope",
    "sampler",
    "sharding",
)
"""Modules of ours that programs are traced from, beside the kernels."""


def source_hash() -> str:
    """Hash of the sources that shape programs. Editing anything else keeps the stored executables."""
    digest = hashlib.sha256()
    root = Path(__file__).resolve().parent.parent
    files = [root / "jaxserve" / f"{name}.py" for name in _TRACED]
    for path in [*files, *sorted((root / "pallas_kernels").rglob("*.py"))]:
        digest.update(path.relative_to(root).as_posix().encode() + path.read_bytes())
    return digest.hexdigest()
