"""Opens what keeps KV pages over restarts: memory in a sidecar, a folder on disk, or both."""

import contextlib
import logging
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from jaxserve import memory
from jaxserve.config import ConfigError, EngineConfig
from jaxserve.disk_store import ENGINES, PATIENCE_SECONDS, check_folder, open_store
from jaxserve.record_store import HEADER, STRIDE, RecordStore, capacity
from jaxserve.report import Report
from jaxserve.sidecar.client import Sidecar
from jaxserve.sidecar.errors import SidecarError
from jaxserve.store_tier import StoreTier

log = logging.getLogger(__name__)


def check_disk(config: EngineConfig) -> None:
    """See at once that the folder for KV pages can be used, if there is to be one. Raises ``ConfigError``."""
    if config.disk_kv_path is not None:
        with _named():
            check_folder(Path(config.disk_kv_path), memory.disk_budget(config))


@contextlib.contextmanager
def _named() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigError(f"disk_kv_path: {error}") from None


def open_stores(
    config: EngineConfig,
    identity: str,
    *,
    record_bytes: int,
    pool_bytes: int,
    sidecar: Sidecar | None,
    place: Callable[[np.ndarray], Any],
    report: Report,
) -> StoreTier | None:
    """The stores that the config asks for, the fastest first; None where it asks for none.

    Raises ``ConfigError`` where the folder cannot be used, ``SidecarError`` where the sidecar has no room for
    ``pool_bytes``.
    """
    stores: list[RecordStore] = []
    try:
        if sidecar is not None and pool_bytes >= record_bytes:
            stores += _pool(config, sidecar, identity, record_bytes, pool_bytes, report)
        if config.disk_kv_path is not None:
            folder = Path(config.disk_kv_path)
            with _named():
                stores.append(open_store(folder, identity, record_bytes, memory.disk_budget(config)))
    except BaseException:
        for store in stores:
            store.close()
        raise
    return StoreTier(stores, place) if stores else None


def _pool(
    config: EngineConfig, sidecar: Sidecar, identity: str, record_bytes: int, pool_bytes: int, report: Report
) -> list[RecordStore]:
    """The store in the sidecar; none where there cannot be one and the config would rather go without."""
    try:
        records = capacity(pool_bytes, record_bytes)
        index, file, number = _lease(sidecar, identity, HEADER + records * STRIDE, records * record_bytes)
    except SidecarError as error:
        if config.sidecar_fallback == "error":
            raise
        log.warning("KV PAGES WILL NOT OUTLIVE THIS ENGINE IN THE SIDECAR: %s", error)
        report.add("kv cache", sidecar_place=f"none: {error}")
        return []
    where = f"the sidecar, process {sidecar.pid}" + (f", pool {number}" if number > 1 else "")
    with contextlib.ExitStack() as undo:
        undo.callback(os.close, index)
        undo.callback(os.close, file)
        about: dict[str, Any] = {"identity": identity, "record_bytes": record_bytes, "capacity": records}
        store = RecordStore("sidecar", index, file, **about, place=where, near=True)
        undo.pop_all()
    return [store]


def _lease(sidecar: Sidecar, identity: str, index_bytes: int, records_bytes: int) -> tuple[int, int, int]:
    """The first pool of this identity that no other engine has, and its number.

    An engine that has been killed has its pool until the last of its writes has ended and the sidecar has noticed.
    """
    deadline = time.monotonic() + PATIENCE_SECONDS
    number = 1
    while True:
        try:
            name = identity if number == 1 else f"{identity}.{number}"
            found = sidecar.pool(name, index_bytes, records_bytes)
        except SidecarError as error:
            if error.code != "busy" or number == ENGINES:
                raise
            if time.monotonic() < deadline:
                time.sleep(0.02)
            else:
                number += 1
        else:
            if number > 1:
                log.warning("another engine has the KV pool of this model; this one has a pool of its own, %d", number)
            return *found, number
