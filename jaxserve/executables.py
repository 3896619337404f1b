"""Compiled programs, kept on disk: lower from abstract shapes, compile in threads, serialize; next time only load.

``program_key`` says what an entry's key covers, ``entries`` how it lies on disk. A damaged or foreign entry is
discarded with one line saying why, and rebuilt. Several processes may share a folder: what one compiles the others wait
for. A program that cannot be stored is used all the same.
"""

import functools
import logging
import os
import pickle
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
from jax.experimental import serialize_executable
from jax.experimental.compilation_cache import compilation_cache

from jaxserve import entries, program_key
from jaxserve.config import ConfigError
from jaxserve.priority import give_way

log = logging.getLogger(__name__)

Compiled = Callable[..., Any]
WAIT_SECONDS = 600.0
"""How long to wait for another process that compiles the same program, before doing it as well."""


@dataclass(frozen=True)
class Program:
    """A function to compile for abstract arguments. ``about`` tells functions with different statics apart."""

    name: str
    function: Callable[..., Any]
    args: tuple[Any, ...]
    donate: tuple[int, ...] = ()
    out_shardings: Any = None
    about: str = ""
    model: str = ""
    """What it belongs to, for people."""
    interpreted: bool = False
    """A kernel in it is interpreted: it calls back into this process, and cannot be stored."""


@dataclass
class Tally:
    """What became of the programs: for the start-up report and the metrics."""

    loaded: int = 0
    compiled: int = 0
    waiting: int = 0
    """Known to be stored, and still to be loaded."""
    untuned: int = 0
    """Of the loaded: compiled ahead on a machine without the device."""
    discarded: list[str] = field(default_factory=list)
    missed: Counter[str] = field(default_factory=Counter)
    """Compiled programs by the reason that none was found."""
    kinds: Counter[str] = field(default_factory=Counter)
    """The same by ``program_key.REASONS``."""
    not_stored: Counter[str] = field(default_factory=Counter)
    """Of the compiled, by why they could not be written."""
    evicted: int = 0
    seconds: float = 0.0
    """Summed over threads."""
    bytes: int = 0
    """Of the entries that were loaded or written."""

    def report(self) -> dict[str, Any]:
        shown: dict[str, Any] = {"loaded": self.loaded, "compiled": self.compiled, "discarded": list(self.discarded)}
        if self.missed:
            shown["why_compiled"] = [f"{count} x {text}" for text, count in self.missed.most_common(8)]
        if self.not_stored:
            shown["not_stored"] = [f"{count} x {text}" for text, count in self.not_stored.most_common(8)]
        if self.waiting:
            shown["still_to_load"] = self.waiting
        if self.untuned:
            shown["compiled_without_the_device"] = self.untuned
        return shown


class Programs(dict[str, Compiled]):
    """Programs by name. One that is still to be loaded is loaded, or waited for, when it is asked for."""

    def __init__(self) -> None:
        self.later: dict[str, Callable[[], Compiled]] = {}
        self._loading: dict[str, Future[Compiled]] = {}
        self._pool: ThreadPoolExecutor | None = None

    def load_rest(self) -> None:
        """Begin to load what is still to be loaded, in order, on a thread that gives way to all others."""
        if self.later and self._pool is None:
            self._pool = ThreadPoolExecutor(1, "programs", initializer=give_way)
            self._loading = {name: self._pool.submit(job) for name, job in self.later.items() if name not in self}

    def __missing__(self, name: str) -> Compiled:
        job, loading = self.later[name], self._loading.get(name)
        found = job() if loading is None or loading.cancel() else loading.result()
        self[name] = found
        return found

    def finish(self) -> None:
        """Wait for all of them."""
        for name in self.later:
            self[name]

    def close(self) -> None:
        """Load no more."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)


Finish = Callable[[Callable[[int, int], None] | None], Programs]
"""Waits for programs that were begun; is given what is to be told of each: ``progress(done, total)``."""


@dataclass(frozen=True)
class _Job:
    program: Program
    facts: dict[str, str]
    path: Path
    others: tuple[Path, ...]
    """Entries that serve as well."""


class ExecutableStore:
    """Builds programs, keeping them under ``folder``. Thread-safe; several processes may share a folder.

    ``most`` bounds the folder's bytes; what this store has used is never removed for it. ``ahead`` says that the
    devices are only described: programs are compiled and stored, and cannot be loaded here. Raises ``ConfigError``
    where the folder cannot be trusted.
    """

    def __init__(self, folder: Path, devices: Iterable[Any], most: int = 4 << 30, *, ahead: bool = False):
        self.folder = folder / "executables"
        self._no_folder = ""
        try:
            entries.prepare(self.folder)
        except entries.FolderError as error:
            raise ConfigError(f"cache_dir: {error}") from None
        except OSError as error:
            self._no_folder = error.strerror or str(error)
        self.devices = list(devices)
        self.most, self.ahead = most, ahead
        self.environment = program_key.environment(self.devices)
        if ahead:
            self.environment["runtime"] = program_key.ANY_RUNTIME
        self.tally = Tally()
        self.used: set[Path] = set()
        self._memory = _default_memory(self.devices[0])
        self._lock = threading.Lock()
        self._compiling = 0
        self._cache_was_on = True
        self._files: dict[str, list[Path]] | None = None

    def build_all(
        self,
        programs: Iterable[Program],
        workers: int | None = None,
        progress: Callable[[int, int], None] | None = None,
        first: Collection[str] | None = None,
    ) -> Programs:
        """Load or compile every program, in threads; ``progress(done, total)`` is told of each. See ``building``."""
        with self.building(programs, workers, first) as finish:
            return finish(progress)

    @contextmanager
    def building(
        self, programs: Iterable[Program], workers: int | None = None, first: Collection[str] | None = None
    ) -> Iterator[Finish]:
        """Begin to load or compile programs, in threads. The function that it yields waits for them, as ``build_all``
        does.

        With ``first``, programs of these names come first, and stored ones of other names are left for
        ``Programs.load_rest``; what has to be compiled is compiled now.
        """
        jobs, begun, later = [], [], []
        pool = ThreadPoolExecutor(workers or os.cpu_count() or 1, "compile")
        try:
            for program in sorted(programs, key=lambda p: first is not None and p.name not in first):
                job = self._job(program)
                jobs.append(job)
                if first is not None and program.name not in first and self._stored(job):
                    later.append(job)
                else:
                    begun.append((job, pool.submit(self._build, job, 0.0)))
            yield functools.partial(self._finish, pool, jobs, begun, later)
        finally:  # at Ctrl-C as well: no more is begun
            pool.shutdown(cancel_futures=True)

    def _finish(
        self,
        pool: ThreadPoolExecutor,
        jobs: list[_Job],
        begun: list[tuple[_Job, "Future[Compiled | None]"]],
        later: list[_Job],
        progress: Callable[[int, int], None] | None = None,
    ) -> Programs:
        out, total = Programs(), len(begun)
        while begun:
            busy = []
            for job, building in begun:
                compiled = building.result()
                if compiled is None:  # another process is at it: what is free goes first
                    busy.append(job)
                    continue
                out[job.program.name] = compiled
                if progress:
                    progress(len(out), total)
            begun = [(job, pool.submit(self._build, job, WAIT_SECONDS)) for job in busy]
        self.tally.waiting = len(later)
        out.later = {job.program.name: functools.partial(self._late, job) for job in later}
        self._trim([path for job in jobs for path in (job.path, *job.others)])
        return out

    def build(self, program: Program) -> Compiled:
        """Load the program from disk, or compile and store it."""
        compiled = self._build(self._job(program), WAIT_SECONDS)
        assert compiled is not None
        return compiled

    def has(self, program: Program) -> bool:
        """Whether the program is stored, by a look at its file's size."""
        return self._stored(self._job(program))

    def _stored(self, job: _Job) -> bool:
        return any(entries.whole(path) for path in (job.path, *job.others))

    def path(self, program: Program) -> Path:
        """Where the program is kept."""
        return self._job(program).path

    def _job(self, program: Program) -> _Job:
        facts = {**self.environment, **program_key.describe(program, self._memory)}
        stem = _file_name(program.name)
        others: tuple[Path, ...] = ()
        if "runtime" in facts and not self.ahead:
            untuned = program_key.key({**facts, "runtime": program_key.ANY_RUNTIME})
            others = (self.folder / f"{stem}-{untuned}",)
        return _Job(program, facts, self.folder / f"{stem}-{program_key.key(facts)}", others)

    def _late(self, job: _Job) -> Compiled:
        try:
            compiled = self._build(job, WAIT_SECONDS)
        finally:
            with self._lock:
                self.tally.waiting -= 1
        assert compiled is not None
        return compiled

    def _build(self, job: _Job, wait: float) -> Compiled | None:
        """The program; None where another process is compiling it, after ``wait`` seconds, if that is 0."""
        begun = time.perf_counter()
        compiled = self._load(job)
        if compiled is None:
            with entries.making(job.path, wait) as draft:
                if draft is None and not wait:
                    return None
                compiled = self._load(job)  # somebody else may have made it in the meantime
                if compiled is None:
                    compiled = self._make(job, draft)
        with self._lock:
            self.tally.seconds += time.perf_counter() - begun
        return compiled

    def _make(self, job: _Job, draft: entries.Draft | entries.Refused | None) -> Compiled:
        kind, why = self._reason(job)
        compiled = self._compile(job.program)
        data: bytes = b""
        trouble: str | None = "its kernels are interpreted"
        if not job.program.interpreted:
            facts = {**job.facts, "made": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())}
            data = entries.encode(facts, pickle.dumps(serialize_executable.serialize(compiled)))
            trouble = self._write(draft, data)
        with self._lock:
            if trouble is None:
                self.used.add(job.path)
                self.tally.bytes += len(data)
            else:
                if trouble not in self.tally.not_stored:
                    log.warning("programs are used, and cannot be stored in %s: %s", self.folder, trouble)
                self.tally.not_stored[trouble] += 1
            self.tally.compiled += 1
            self.tally.missed[why] += 1
            self.tally.kinds[kind] += 1
        return compiled

    def _write(self, draft: entries.Draft | entries.Refused | None, data: bytes) -> str | None:
        """Store an entry; what is in the way of it otherwise."""
        if draft is None:
            return "another process has been at it for too long"
        try:
            draft.write(data)
        except OSError as error:
            return self._no_folder or error.strerror or str(error)
        return None

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

    def _load(self, job: _Job) -> Compiled | None:
        for path in (job.path, *job.others):
            try:
                found = entries.read(path)
                if found is None:
                    continue
                compiled = self.decode(found[1])
            except Exception as error:
                self._discard(path, str(error) or type(error).__name__)
                continue
            entries.touch(path)
            with self._lock:
                self.used.add(path)
                self.tally.loaded += 1
                self.tally.untuned += path != job.path
                self.tally.bytes += len(found[1])
            return compiled
        return None

    def decode(self, code: memoryview) -> Compiled:
        """A program from an entry's code. Raises whatever is wrong with it."""
        payload, in_tree, out_tree = pickle.loads(code)
        if self.ahead:
            return _cannot_run
        return serialize_executable.deserialize_and_load(
            payload, in_tree, out_tree, backend=self.devices[0].client, execution_devices=self.devices
        )

    def _discard(self, path: Path, why: str) -> None:
        reason = f"{path.name}: {why}"
        log.warning("discarding a stored executable, %s", reason)
        with self._lock:
            self.tally.discarded.append(reason)
        with suppress(OSError):  # then it cannot be replaced either, which is said
            entries.remove(path)

    def _reason(self, job: _Job) -> tuple[str, str]:
        """Why the program was not found."""
        with self._lock:
            if any(text.startswith(job.path.name) for text in self.tally.discarded):
                return "damaged", program_key.REASONS["damaged"]
            if self._files is None:
                self._files = {}
                for name in os.listdir(self.folder) if self.folder.is_dir() else ():
                    self._files.setdefault(name.rpartition("-")[0], []).append(self.folder / name)
        others = (entries.facts(path) for path in self._files.get(_file_name(job.program.name), ()))
        return program_key.reason(job.facts, [facts for facts in others if facts])

    def _trim(self, needed: Iterable[Path]) -> None:
        gone = entries.evict(self.folder, self.most, self.used.union(needed)) if self.folder.is_dir() else []
        self.tally.evicted += len(gone)
        if gone:
            log.info("removed %d stored executables that were used longest ago, to keep to the bound", len(gone))


def _cannot_run(*_: Any) -> Any:
    raise RuntimeError("this program was compiled for another machine's devices")


def _default_memory(device: Any) -> str | None:
    """The kind of memory that shardings on the device mean by default; None for devices that are only described."""
    try:
        return device.default_memory().kind
    except (RuntimeError, NotImplementedError):  # XlaRuntimeError: unimplemented
        return None


def _file_name(name: str) -> str:
    return "".join(c if c.isalnum() or c in "+-_." else "_" for c in name)
