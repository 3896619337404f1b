"""Owners for tests: in a process of their own, as people run them, and on a thread, where a test looks inside."""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

import checkpoints
import jaxserve
from jaxserve import memory, models
from jaxserve.declare import declare, parallel_of, resolve_dtype
from jaxserve.report import Report
from jaxserve.sharding import make_mesh
from jaxserve.sidecar import backends
from jaxserve.sidecar.attach import Link, Wanted
from jaxserve.sidecar.client import Sidecar
from jaxserve.sidecar.errors import SidecarError
from jaxserve.sidecar.holdings import Holdings
from jaxserve.sidecar.owner import Owner
from jaxserve.sidecar.place import Place
from jaxserve.sidecar.start import connect_or_start


@contextlib.contextmanager
def process(folder: Path) -> Iterator[Sidecar]:
    """A connection to an owner that is another process; killed at the end."""
    with Place(folder, "cpu", create=True) as place:
        sidecar, _ = connect_or_start(place, [], "test")
        try:
            with sidecar:
                yield sidecar
        finally:
            end(folder)


def owners(folder: Path) -> list[int]:
    """Processes that are, or are about to become, owners in this folder; one that comes late would outlive its test."""
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and str(folder).encode() in (entry / "cmdline").read_bytes().split(b"\0"):
                found.append(int(entry.name))
    return found


def end(folder: Path) -> None:
    for pid in owners(folder):
        kill(pid)


def _answers(place: Place) -> bool:
    """Whether somebody listens: the socket is there a moment before."""
    try:
        place.connect().close()
    except SidecarError:
        return False
    return True


def kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    until(lambda: not running(pid))


def running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


@contextlib.contextmanager
def thread(folder: Path, **options: Any) -> Iterator[Owner]:
    """An owner on a thread of this process."""
    with Place(folder, "cpu", create=True) as place:
        lock = place.lock()
        assert lock is not None
        owner = Owner(place, Holdings(backends.CpuBackend, lambda: memory.host().free), **options)
        server = threading.Thread(target=owner.serve)
        server.start()
        try:
            until(lambda: _answers(place))
            yield owner
        finally:
            owner.stop()
            server.join()
            place.unlock(lock)


def connect(folder: Path) -> Sidecar:
    with Place(folder, "cpu") as place:
        return Sidecar(place, "test")


def until(condition: Callable[[], Any], seconds: float = 20.0) -> Any:
    """The first true value of ``condition``."""
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.01)
    return found


def load(sidecar: Sidecar, path: Path, dtype: str = "float32", tensor_parallel: int = 1, role: str = "target") -> str:
    """Have a model loaded; its name, when it is."""
    model = sidecar.load(str(path), dtype, tensor_parallel, role)["id"]

    def state() -> dict[str, Any]:
        offer = next(o for o in sidecar.offers() if o["id"] == model)
        return {} if offer["state"] == "loading" else offer

    offer = until(state)
    assert offer["state"] == "ready", offer["error"]
    return offer["name"]


@contextlib.contextmanager
def link(
    folder: Path, model: Path, *, role: str = "target", report: Report | None = None, **options: Any
) -> Iterator[Any]:
    """An engine's link to the sidecar, its mesh, and what its weights are made of: ``(link, wanted, mesh)``."""
    chosen = {"load_format": "sidecar", "sidecar_dir": str(folder), "dtype": "float32", **options}
    config = jaxserve.EngineConfig.from_options(str(model), chosen)
    with checkpoints.open_checkpoint(checkpoints.resolve_model(str(model))) as source:
        cfg = models.model_config(source.config)
        dtype = resolve_dtype(config, source, cfg)
        specs = declare(cfg, parallel_of(config), source, dtype)
        wanted = Wanted.of(source, cfg, specs, dtype, config.tensor_parallel, gpu=False, role=role)
        mesh = make_mesh(config.tensor_parallel)
        made = Link(config, wanted, mesh, report or Report())
        try:
            yield made, wanted, mesh
        finally:
            made.close()


def damage(model: Path) -> None:
    """Other weights of the same shapes, in the same file, with the same times as far as one can set them."""
    path = model / "model.safetensors"
    before = path.stat()
    with path.open("r+b") as file:
        file.seek(-4, os.SEEK_END)
        file.write(np.float32(3.5).tobytes())
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
