"""Fill the store of executables ahead of time: the programs of a configuration, from abstract shapes, without weights.

Also what else can be done with the store: list what is in it, remove what cannot be used any more, check it.
"""

import dataclasses
import logging
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

import checkpoints
from jaxserve import build, entries, models, params, program_key, targets
from jaxserve.config import ConfigError, EngineConfig, ModelConfig
from jaxserve.declare import declare, parallel_of, resolve_dtype
from jaxserve.entries import Entry
from jaxserve.executables import ExecutableStore, Tally
from jaxserve.host_tier import SIZES
from jaxserve.programs import ProgramSet
from jaxserve.report import Report

log = logging.getLogger(__name__)

Declared = tuple[ModelConfig, params.Specs, str]


ANY_HOST_KV_GIB = 2.0**-20
"""Some room: the programs that move KV pages to the host's memory are the same however much there is."""


class Interrupted(KeyboardInterrupt):
    """A warm-up that was ended by a signal; the message says how far it came."""


@dataclass(frozen=True)
class Summary:
    """What a warm-up did."""

    programs: int
    tally: Tally
    seconds: float
    folder: Path
    notes: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        return {
            "programs": self.programs,
            **self.tally.report(),
            "seconds": round(self.seconds, 2),
            "bytes": self.tally.bytes,
            "folder": str(self.folder),
            "notes": list(self.notes),
        }


def warm(
    config: EngineConfig, target: str | None = None, progress: Callable[[int, int], None] | None = None
) -> Summary:
    """Have every program of this configuration in the store, for the devices here or for a ``target``.

    Those that move KV pages to the host's memory are among them unless ``host_kv_gib`` is 0: a sidecar or
    ``disk_kv_path`` needs them also where there is no such memory by default.

    Raises ``ConfigError``, ``checkpoints.CheckpointError`` or, for ``KeyboardInterrupt``, ``Interrupted``.
    """
    begun = time.perf_counter()
    notes = []
    described = None if target is None else targets.find(target)
    if described is not None:
        if config.kv_cache_memory_bytes is None:
            raise ConfigError(
                "kv_cache_memory_bytes must be given with a target, and again when the model is served: the number of "
                "KV pages is part of the programs, and a device's memory cannot be measured without it"
            )
        if config.prefix_caching and config.host_kv_gib != 0:
            left = 2 * len(SIZES)
            notes.append(f"{left} programs that move KV pages to the host's memory are left for the first start")
        config = dataclasses.replace(
            config,
            host_kv_gib=0.0,
            disk_kv_path=None,
            disk_kv_gib=None,
            kv_checksums=False,
            load_format="random" if config.load_format == "random" else "auto",
        )
        notes.append("nothing was tuned on the device; the first start there says how many programs came from here")
    elif config.host_kv_gib is None and config.prefix_caching:
        config = dataclasses.replace(config, host_kv_gib=ANY_HOST_KV_GIB)
    mesh = build.mesh_of(config) if described is None else targets.mesh_of(described, config)
    store = ExecutableStore(
        config.cache_path, mesh.devices.flat, int(config.cache_gib * 2**30), ahead=described is not None
    )
    programs = plan(config, mesh, store, described)
    wanted = [*programs.programs(), programs.zeros()]
    try:
        store.build_all(wanted, progress=progress)
    except KeyboardInterrupt:
        stored = sum(store.has(program) for program in wanted)
        raise Interrupted(f"{stored} of {len(wanted)} programs are stored in {store.folder}") from None
    return Summary(
        len(store.used) + store.tally.not_stored.total(),
        store.tally,
        time.perf_counter() - begun,
        store.folder,
        tuple(notes),
    )


def plan(config: EngineConfig, mesh: Mesh, store: ExecutableStore, target: targets.Target | None = None) -> ProgramSet:
    """The programs that an engine of this configuration has. Of a checkpoint only config and headers are read."""
    model, specs, dtype = _declared(config)
    report = Report(None)
    available = None if target is None else target.memory
    return build.size(config, model, specs, dtype, mesh, store, report, available=available)[0]


def _declared(config: EngineConfig) -> Declared:
    with _source(config) as source:
        model = models.model_config(source.config)
        dtype = resolve_dtype(config, source, model)
        return model, declare(model, parallel_of(config), source, dtype, predictors=config.mtp), dtype


def _source(config: EngineConfig) -> checkpoints.Checkpoint:
    """The config suffices where there are no weights."""
    path = Path(config.model).expanduser()
    if (path / "config.json").is_file() and not any(path.glob("*.safetensors")) and not _converted(path):
        return checkpoints.open_config(config.model)
    return build.open_source(config)


def _converted(path: Path) -> bool:
    try:
        checkpoints.read_meta(path)
    except checkpoints.CheckpointError:
        return False
    return True


# -- the store itself -------------------------------------------------------------------------------------------------


def stale(entry: Entry) -> str | None:
    """Why this installation can never load an entry, on any device; None where it may."""
    if entry.strange:
        return entry.strange
    if not entry.facts:
        return program_key.REASONS["format"]
    here = program_key.installed()
    for name, value in here.items():
        if entry.facts.get(name) != value:
            return program_key.difference(name, entry.facts.get(name, ""), value)
    return None


def prune(folder: Path, most: int | None = None) -> list[Entry]:
    """Remove stale and damaged entries, what is no entry, and the drafts of processes that died; then those used
    longest ago until the rest takes at most ``most`` bytes. What cannot be removed is in the log."""
    found = {entry.path: entry for entry in entries.scan(folder)}
    gone = entries.remove_drafts(folder)
    for entry in found.values():
        if stale(entry) is None and not _damaged(entry):
            continue
        try:
            entries.remove(entry.path)
        except OSError as error:
            log.warning("%s cannot be removed: %s", entry.path, error.strerror)
        else:
            gone.append(entry)
    if most is not None and folder.is_dir():
        gone += [found[path] for path in entries.evict(folder, most, ()) if path in found]
    return gone


def _damaged(entry: Entry) -> bool:
    try:
        entries.read(entry.path)
    except entries.EntryError:
        return True
    return False


def verify(folder: Path) -> Iterator[tuple[Entry, str | None]]:
    """Each entry, and what is wrong with it: every byte is read, and what was made for this machine is loaded."""
    stores: dict[int, ExecutableStore] = {}
    for entry in entries.scan(folder):
        try:
            found = entries.read(entry.path)
            if found is None:
                continue
            count = re.search(r" x(\d+)$", entry.facts.get("device", ""))
            devices = jax.devices()[: int(count[1])] if count else []
            if devices and len(devices) == int(count[1] if count else 0):
                store = stores.setdefault(len(devices), ExecutableStore(folder.parent, devices))
                if all(entry.facts.get(name) == value for name, value in store.environment.items()):
                    store.decode(found[1])
        except Exception as error:
            yield entry, str(error) or type(error).__name__
        else:
            yield entry, None
