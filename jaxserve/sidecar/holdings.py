"""What an owner holds and who uses it: models and KV pools, without a word of sockets. Nothing here imports jax."""

import hashlib
import logging
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxserve.sidecar import files
from jaxserve.sidecar.errors import SidecarError

if TYPE_CHECKING:
    from jaxserve.sidecar.loading import Backend, Loaded

log = logging.getLogger(__name__)

MAX_MODELS = 16
MAX_POOLS = 32
MAX_NAMES = 8


@dataclass(eq=False)
class Client:
    """A process that is connected."""

    pid: int
    what: str = ""
    since: float = field(default_factory=time.time)

    def as_json(self) -> dict[str, Any]:
        return {"pid": self.pid, "what": self.what, "since": round(self.since, 3)}


@dataclass(frozen=True)
class Wish:
    """What an owner is asked to load."""

    path: str
    dtype: str
    tensor_parallel: int
    role: str
    name: str = field(default="", compare=False)
    """What people call the model; the last part of the path by default."""


class Progress:
    """How far a load has come, in bytes. Its threads write, others read."""

    def __init__(self) -> None:
        self.done, self.total = 0, 0
        self.key: dict[str, Any] | None = None
        """Known before the weights are."""
        self.cancelled = False
        self._lock = threading.Lock()

    def add(self, count: int) -> None:
        """Raises ``SidecarError`` where nobody wants the rest."""
        with self._lock:
            self.done += count
        if self.cancelled:
            raise SidecarError("evicted while it was loaded", "unknown")


@dataclass(eq=False)
class Model:
    """One set of weights: ``loading``, ``ready`` or ``failed``."""

    id: str
    name: str
    wish: Wish
    progress: Progress = field(default_factory=Progress)
    loaded: "Loaded | None" = None
    error: str | None = None
    since: float = field(default_factory=time.time)
    clients: list[Client] = field(default_factory=list)
    outdated: bool = False
    """Its files have changed since; kept as long as it is used."""
    other_names: list[str] = field(default_factory=list)
    """Names that it was asked for by later."""

    @property
    def state(self) -> str:
        return "failed" if self.error is not None else "loading" if self.loaded is None else "ready"

    def as_json(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "name": self.name,
            "role": self.wish.role,
            "path": self.wish.path,
            "state": self.state,
            "done": self.progress.done,
            "total": self.progress.total,
            "error": self.error,
        }


@dataclass(eq=False)
class Pool:
    """Memory for one engine's KV pages: an index and records, which the engine itself makes as long as it needs."""

    identity: str
    index: int
    records: int
    room: int = 0
    """Bytes that both may grow to."""
    used_at: float = 0.0
    client: Client | None = None

    @property
    def used(self) -> int:
        return sum(os.fstat(fd).st_blocks * 512 for fd in (self.index, self.records))

    @property
    def name(self) -> str:
        return f"pool:{self.identity[:16]}"

    def close(self) -> None:
        os.close(self.index)
        os.close(self.records)


class Holdings:
    """Thread-safe. ``backend`` is made when the first weights are wanted; ``free`` tells bytes of free host memory."""

    def __init__(self, backend: "Callable[[], Backend]", free: Callable[[], int]):
        self._backend, self._free = backend, free
        self._lock = threading.RLock()
        self._loader = ThreadPoolExecutor(1, "jaxserve-load")
        self._count = 0
        self.models: dict[str, Model] = {}
        self.pools: dict[str, Pool] = {}

    # -- models -------------------------------------------------------------------------------------------------------

    def load(self, wish: Wish) -> Model:
        """The model that this wish gives: the one held, if its files are what they were, or a new one, now loading.

        Copies of what the files were before go: now where nobody uses them, else when the new one is there or later.

        Raises ``SidecarError`` where there are too many.
        """
        name = wish.name or default_name(wish.path)
        with self._lock:
            for held in list(self.models.values()):
                if not _same_place(held.wish, wish):
                    continue
                if held.state == "ready":
                    held.outdated = held.outdated or not _unchanged(held)
                if held.wish == wish and (held.state == "loading" or (held.state == "ready" and not held.outdated)):
                    if name not in (held.name, *held.other_names) and len(held.other_names) < MAX_NAMES:
                        held.other_names.append(name)
                    return held
                if held.outdated and not held.clients:
                    log.info("%s is out of date: evicted", held.name)
                    self._drop(held)
                elif held.state == "failed" and held.wish == wish:
                    self._drop(held)
            failed = [model for model in self.models.values() if model.state == "failed"]
            if len(self.models) >= MAX_MODELS and failed:
                self._drop(failed[0])
            if len(self.models) >= MAX_MODELS:
                raise SidecarError(f"{MAX_MODELS} models are held already; evict one", "memory")
            self._count += 1
            made = Model(f"m{self._count}", self._unique(name), wish)
            self.models[made.id] = made
        log.info("loading %s (%s, %s) from %r", made.name, wish.role, wish.dtype, wish.path)
        self._loader.submit(self._load, made)
        return made

    def _unique(self, name: str) -> str:
        taken = {model.name for model in self.models.values()}
        found, number = name, 1
        while found in taken:
            number += 1
            found = f"{name}#{number}"
        return found

    def _load(self, model: Model) -> None:
        try:
            from jaxserve.sidecar import loading  # jax, which an owner of KV pools alone does without

            loaded = loading.load(model.wish, self._backend(), model.progress, self._make_way)
        except Exception as error:
            with self._lock:
                model.error = f"{type(error).__name__}: {error}"[:4000]
            log.warning("%s could not be loaded: %s", model.name, error, exc_info=not isinstance(error, ValueError))
            return
        with self._lock:
            if model.progress.cancelled:
                loaded.arenas.close()
                return
            model.loaded = loaded
            log.info("%s is ready: %d bytes in %.2f s", model.name, loaded.layout.nbytes, loaded.seconds)
            self._drop_outdated()

    def _drop_outdated(self) -> None:
        """Let go of copies that nobody uses any more and that newer ones have come for."""
        for old in [model for model in self.models.values() if model.outdated and not model.clients]:
            newer = [m for m in self.models.values() if m.state == "ready" and not m.outdated]
            if any(_same_place(m.wish, old.wish) for m in newer):
                log.info("%s is out of date and not in use: evicted", old.name)
                self._drop(old)

    def attach(self, model_id: str, client: Client) -> "Loaded":
        """The weights, now in use by ``client``. Raises ``SidecarError``: ``loading``, ``failed`` or ``unknown``."""
        with self._lock:
            model = self.models.get(model_id)
            if model is None:
                raise SidecarError("no such model is held", "unknown")
            if model.error is not None:
                raise SidecarError(f"{model.name} could not be loaded: {model.error}", "failed")
            if model.loaded is None:
                facts = {"done": model.progress.done, "total": model.progress.total}
                raise SidecarError(f"{model.name} is loading", "loading", facts)
            if client not in model.clients:
                model.clients.append(client)
            return model.loaded

    def ready(self, name: str) -> "Loaded":
        """The weights of a model by name or id, to look at. Raises ``SidecarError``."""
        with self._lock:
            model = self._find(name)
            if model.loaded is None:
                raise SidecarError(f"{model.name} is {model.state}", model.state)
            return model.loaded

    def _find(self, name: str) -> Model:
        held = list(self.models.values())
        for model in held:
            if name in (model.name, model.id):
                return model
        found = [model for model in held if name in (model.wish.path, *model.other_names)]
        if len(found) > 1:
            names = ", ".join(model.name for model in found)
            raise SidecarError(f"several models are meant by that; say which of {names}", "invalid")
        if not found:
            raise SidecarError("no model of that name is held", "unknown")
        return found[0]

    # -- pools --------------------------------------------------------------------------------------------------------

    def pool(self, identity: str, index_bytes: int, records_bytes: int, client: Client) -> Pool:
        """The pool of this identity, leased to ``client`` until it goes; empty where it is new.

        Raises ``SidecarError``: ``busy`` where another has it, ``memory`` where host memory is not there for it.
        """
        with self._lock:
            pool = self.pools.get(identity)
            if pool is not None and pool.client is not None and pool.client is not client:
                raise SidecarError(f"the KV pool is in use by process {pool.client.pid}", "busy")
            wanted = index_bytes + records_bytes
            self._make_room(identity, wanted)
            if pool is None:
                if len(self.pools) >= MAX_POOLS and not self._evict_idle_pool(identity):
                    raise SidecarError(f"{MAX_POOLS} KV pools are in use", "memory")
                index = os.memfd_create("jaxserve-kv-index", os.MFD_CLOEXEC)
                try:
                    records = os.memfd_create("jaxserve-kv-records", os.MFD_CLOEXEC)
                except OSError:
                    os.close(index)
                    raise
                pool = self.pools[identity] = Pool(identity, index, records)
            pool.room, pool.used_at, pool.client = wanted, time.time(), client
            return pool

    def _make_room(self, identity: str, wanted: int) -> None:
        while True:
            mine = self.pools.get(identity)
            promised = sum(max(0, p.room - p.used) for p in self.pools.values() if p is not mine and p.client)
            free, there = self._free() - promised, mine.used if mine else 0
            if wanted - there <= free:
                return
            if not self._evict_idle_pool(identity):
                raise SidecarError(
                    f"a KV pool of {wanted} bytes does not fit: {max(0, free)} bytes of host memory are free"
                    + (f", beside {there} that it has" if there else ""),
                    "memory",
                )

    def _make_way(self) -> bool:
        """Give back the idle pool that was not used for longest, for weights; False where there is none."""
        with self._lock:
            return self._evict_idle_pool(None)

    def _evict_idle_pool(self, but: str | None) -> bool:
        idle = [pool for pool in self.pools.values() if pool.client is None and pool.identity != but]
        if not idle:
            return False
        pool = min(idle, key=lambda pool: pool.used_at)
        log.info("%s makes way for others: it was idle for %.0f s", pool.name, time.time() - pool.used_at)
        self._drop_pool(pool)
        return True

    def _drop_pool(self, pool: Pool) -> None:
        log.info("%s is evicted: %d bytes", pool.name, pool.used)
        del self.pools[pool.identity]
        pool.close()

    # -- both ---------------------------------------------------------------------------------------------------------

    def evict(self, name: str, *, force: bool = False) -> int:
        """Let go of a model or a pool by name; how many bytes that were.

        Raises ``SidecarError``: ``unknown``, or ``busy`` where a process uses it, unless ``force``: then that process
        keeps the memory until it ends.
        """
        with self._lock:
            for pool in list(self.pools.values()):
                if name in (pool.name, pool.identity):
                    _idle(pool.name, [pool.client] if pool.client else [], force)
                    used = pool.used
                    self._drop_pool(pool)
                    return used
            model = self._find(name)
            _idle(model.name, model.clients, force or model.state == "failed")
            log.info("%s is evicted", model.name)
            return self._drop(model)

    def _drop(self, model: Model) -> int:
        del self.models[model.id]
        model.progress.cancelled = True
        if model.loaded is None:
            return 0
        model.loaded.arenas.close()
        return model.loaded.layout.nbytes

    def leave(self, client: Client) -> None:
        """A client has gone: nothing is in use by it any more."""
        with self._lock:
            for model in self.models.values():
                if client in model.clients:
                    model.clients.remove(client)
                    log.info("process %d (%s) has gone: it used %s", client.pid, client.what, model.name)
            self._drop_outdated()
            for pool in self.pools.values():
                if pool.client is client:
                    pool.client, pool.used_at = None, time.time()
                    log.info("process %d (%s) has gone: it used %s", client.pid, client.what, pool.name)

    def offers(self) -> list[dict[str, Any]]:
        """Models with what a client compares: keys and files."""
        with self._lock:
            return [
                {
                    **model.as_json(),
                    "key": model.progress.key,
                    "files": None if model.loaded is None else [file.as_json() for file in model.loaded.files],
                    "arenas": None if model.loaded is None else list(model.loaded.layout.arenas),
                }
                for model in self.models.values()
            ]

    def status(self) -> dict[str, Any]:
        with self._lock:
            models = [
                {
                    **model.as_json(),
                    "dtype": (model.progress.key or {}).get("dtype", model.wish.dtype),
                    "tensor_parallel": model.wish.tensor_parallel,
                    "bytes": 0 if model.loaded is None else model.loaded.layout.nbytes,
                    "outdated": model.outdated,
                    "other_names": list(model.other_names),
                    "seconds": None if model.loaded is None else round(model.loaded.seconds, 3),
                    "since": round(model.since, 3),
                    "clients": [client.as_json() for client in model.clients],
                }
                for model in self.models.values()
            ]
            pools = [
                {
                    "name": pool.name,
                    "identity": pool.identity,
                    "room": pool.room,
                    "bytes": pool.used,
                    "client": pool.client.as_json() if pool.client else None,
                }
                for pool in self.pools.values()
            ]
        return {"models": models, "pools": pools, "host_free_bytes": self._free()}


def default_name(path: str) -> str:
    """A model's name from its path: short, and harmless in a log."""
    name = Path(path).name.removesuffix(".gguf")
    return name if name.isprintable() and 0 < len(name) <= 100 else hashlib.sha256(path.encode()).hexdigest()[:12]


def asked_name(model: str) -> str:
    """A model's name from what a person has typed: a path's last part, or the name of one that is built in."""
    return default_name(model) if os.path.exists(os.path.expanduser(model)) else model


def _same_place(one: Wish, other: Wish) -> bool:
    return (one.path, one.role) == (other.path, other.role)


def _idle(name: str, clients: list[Client], force: bool) -> None:
    if clients and not force:
        pids = ", ".join(str(client.pid) for client in clients[:8])
        raise SidecarError(f"{name} is in use by process {pids}; --force lets go of it all the same", "busy")


def _unchanged(model: Model) -> bool:
    assert model.loaded is not None
    root = Path(model.wish.path)
    try:
        for file in model.loaded.files:
            path = root if root.is_file() else root / file.name
            if files.look(path) != file.stat:
                return False
    except SidecarError:
        return False
    return True
