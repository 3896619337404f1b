"""The engine's side: find an owner or start one, find the wanted weights in it or say what differs, and map them."""

import dataclasses
import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import Mesh

import checkpoints
from jaxserve.config import EngineConfig, ModelConfig
from jaxserve.params import Params, ParamSpec, Specs
from jaxserve.report import Report
from jaxserve.sharding import sharding
from jaxserve.sidecar import files, key
from jaxserve.sidecar.client import Sidecar
from jaxserve.sidecar.errors import SidecarError
from jaxserve.sidecar.groups import CPU, group_of
from jaxserve.sidecar.holdings import asked_name
from jaxserve.sidecar.layout import Layout, compare, plan
from jaxserve.sidecar.place import Place

log = logging.getLogger(__name__)

POLL_SECONDS = 0.05
MOST_SHOWN = 3
"""Differences in one message."""
WIDEST = 120
"""Characters of one of them."""
TELLING = ("model.model_type", "role", "dtype", "tensor_parallel", "layout_version")
"""Fields that are shown before others."""


@dataclass(frozen=True)
class Wanted:
    """The weights an engine needs."""

    source: checkpoints.Checkpoint
    specs: Specs
    key: key.Fields
    layout: Layout
    """As an owner would lay them out; offsets and hashes are the owner's to say."""

    @classmethod
    def of(
        cls,
        source: checkpoints.Checkpoint,
        model: ModelConfig,
        specs: Specs,
        dtype: str,
        tensor_parallel: int,
        *,
        gpu: bool,
        role: str = "target",
    ) -> "Wanted":
        fields = key.fields(model, dtype, tensor_parallel, specs, role)
        return cls(source, specs, fields, plan(specs, dtype, tensor_parallel, arena_each=gpu))

    @property
    def path(self) -> str:
        return os.path.abspath(self.source.path)

    def matches(self, offer: dict[str, Any]) -> bool:
        """Whether the fields are equal, as far as they are known yet; files are compared once they have been read."""
        if offer.get("key") is None:
            return offer.get("state") == "loading" and offer.get("path") == self.path
        return not key.differences(offer["key"], self.key)

    def is_surely(self, offer: dict[str, Any]) -> bool:
        """Whether a model is the wanted one, as far as that is known without reading the checkpoint."""
        if offer["state"] != "ready" or not self.matches(offer):
            return False
        return files.unchanged(_files(offer), self.source.files, self.source.path)

    def differences(self, offer: dict[str, Any]) -> list[str]:
        """What keeps a model from being the wanted one, in words. Reads files that seem to have changed.

        Files are compared where all fields are equal: no other model's are worth reading.
        """
        found = key.differences(offer.get("key") or {}, self.key)
        return found or files.differences(_files(offer), self.source.files, self.source.path)


class Link:
    """An engine's connection to the sidecar that its weights come from; ``sidecar`` is None where they come from disk.

    With ``sidecar_fallback`` disk, whatever fails is said loudly and leads there; otherwise it is a ``SidecarError``.
    """

    def __init__(self, config: EngineConfig, wanted: Wanted, mesh: Mesh, report: Report):
        self._config, self._wanted, self._mesh, self._report = config, wanted, mesh, report
        self._auto = config.sidecar == "auto"
        # A draft's path is not the config's model
        self._name = asked_name(config.model) if wanted.key["role"] == "target" else ""
        self.sidecar: Sidecar | None = None
        self._params: Params | None = None
        self._refused = False
        self.content: dict[str, str] | None = None
        """SHA-256 of the files that the weights were made from, by name; None where they come from disk."""
        self.held = 0
        """Bytes of one device that the sidecar has given to other models."""
        try:
            group, uuids = group_of(mesh)
            with Place(config.sidecar_dir, group, create=self._auto) as place:
                what = f"engine {config.served_name or config.model}"[:200]
                if self._auto:
                    from jaxserve.sidecar.start import connect_or_start

                    self.sidecar, started = connect_or_start(place, uuids, what)
                    report.add("weights", owner="started by this engine" if started else "was there")
                else:
                    self.sidecar = Sidecar(place, what)
            offers = self.sidecar.about["models"]
            self.held = sum(max(o["arenas"] or [0]) for o in offers if not wanted.matches(o))
            begun = time.perf_counter()
            for offer in offers:
                if self._params is None and wanted.is_surely(offer):  # before other threads want the interpreter's lock
                    self._attach(self.sidecar, offer, begun)
            if not self._auto and not any(wanted.matches(o) for o in offers if o["state"] != "failed"):
                # before anything is compiled for it; differences in files come to light later, beside that
                ready = {o["id"]: wanted.differences(o) for o in offers if o["state"] == "ready"}
                raise self._nothing(offers, ready)
        except SidecarError as error:
            self._refuse(error)

    def _refuse(self, error: SidecarError) -> None:
        if self._config.sidecar_fallback == "error":
            self.close()
            if error.code == "gone":
                raise SidecarError(
                    f"{error}; start one with `jaxserve sidecar start`, or let the engine do it with --sidecar auto, "
                    "or read the checkpoint with --sidecar-fallback disk",
                    error.code,
                ) from None
            raise error
        self._refused = True
        log.warning("WEIGHTS ARE READ FROM DISK, NOT TAKEN FROM THE SIDECAR: %s", error)
        self._report.add("weights", source="disk, not the sidecar", why=str(error))

    def weights(self, progress: Callable[[int, int], None]) -> Params | None:
        """The weights, in the sidecar's memory; None: they come from disk.

        Waits while the sidecar loads them, which ``progress(done, total)`` is told in bytes.
        """
        if self.sidecar is None or self._refused or self._params is not None:
            return self._params
        try:
            begun = time.perf_counter()
            self._attach(self.sidecar, self._find(self.sidecar, progress), begun)
        except SidecarError as error:
            self._refuse(error)
        return self._params

    def _attach(self, sidecar: Sidecar, offer: dict[str, Any], begun: float) -> None:
        """Map the weights of an offer that was found to be the wanted one since ``begun``."""
        found = time.perf_counter()
        layout, descriptors = sidecar.attach(offer["id"])
        try:
            if differences := compare(layout, self._wanted.layout):
                raise SidecarError(_mismatch(offer, differences), "mismatch")
            by_name = {tensor.name: tensor for tensor in layout.tensors}
            mine = tuple(by_name[tensor.name] for tensor in self._wanted.layout.tensors)
            layout = dataclasses.replace(layout, tensors=mine)
            leaves, tree = jax.tree.flatten(self._wanted.specs, is_leaf=lambda x: isinstance(x, ParamSpec))
            kinds = {leaf.axes: sharding(self._mesh, leaf.axes) for leaf in leaves}
            arrays = _adopt(descriptors, layout, self._mesh, [kinds[leaf.axes] for leaf in leaves])
        finally:
            for fd in descriptors:
                os.close(fd)
        self._params = jax.tree.unflatten(tree, arrays)
        self.content = {file.name: file.sha256 for file in _files(offer)}
        attached = time.perf_counter()
        self._report.add(
            "weights",
            source=f"sidecar, process {sidecar.pid}",
            socket=str(sidecar.socket_path),
            model=offer["name"],
            mapped_bytes=layout.nbytes,
            wait_seconds=round(found - begun, 4),
            attach_seconds=round(attached - found, 4),
        )

    def _find(self, sidecar: Sidecar, progress: Callable[[int, int], None]) -> dict[str, Any]:
        """The offer that is wanted and ready. Raises ``SidecarError``: what differs, or that it takes too long."""
        deadline = time.monotonic() + self._config.sidecar_timeout
        refused: dict[str, list[str]] = {}
        asked: str | None = None
        while True:
            offers = sidecar.offers()
            for offer in offers:
                if offer["state"] == "ready" and offer["id"] not in refused:
                    differences = self._wanted.differences(offer)
                    if not differences:
                        return offer
                    refused[offer["id"]] = differences
            for offer in offers:
                if offer["id"] == asked and offer["state"] == "failed":
                    raise SidecarError(f"the sidecar could not load {offer['path']}: {offer['error']}")
            coming = [o for o in offers if o["state"] == "loading" and (o["id"] == asked or self._wanted.matches(o))]
            if coming:
                progress(coming[0]["done"], coming[0]["total"] or 1)
                if time.monotonic() > deadline:
                    raise SidecarError(
                        f"the sidecar is still loading {coming[0]['name']} after {self._config.sidecar_timeout:g} s "
                        f"({coming[0]['done']} of {coming[0]['total']} bytes); sidecar_timeout says how long to wait",
                        "loading",
                    )
                time.sleep(POLL_SECONDS)
            elif self._auto and asked is None:
                for text in (_mismatch(o, refused[o["id"]]) for o in offers if o["path"] == self._wanted.path):
                    log.warning("%s; the sidecar loads it again", text)
                about = self._wanted.key
                wish = self._wanted.path, about["dtype"], about["tensor_parallel"], about["role"]
                asked = sidecar.load(*wish, self._name)["id"]
            else:
                raise self._nothing(offers, refused)

    def _nothing(self, offers: list[dict[str, Any]], refused: dict[str, list[str]]) -> SidecarError:
        failed = [f"{o['name']} could not be loaded: {o['error']}" for o in offers if o["path"] == self._wanted.path]
        ready = [offer for offer in offers if offer["id"] in refused]
        role = self._wanted.key["role"]
        advice = f"`jaxserve sidecar start {'--draft ' * (role == 'draft')}{self._config.model}` has it load this one"
        if not ready:
            about = "".join(f"; {text}" for text in failed) or f"; {advice}"
            return SidecarError(f"the sidecar does not hold {self._wanted.path}{about}", "unknown")
        nearest = min(ready, key=lambda o: (o["path"] != self._wanted.path, o["role"] != role, len(refused[o["id"]])))
        room = f"`jaxserve sidecar evict {nearest['name']}` makes room"
        return SidecarError(f"{_mismatch(nearest, refused[nearest['id']])}; {advice}, {room}", "mismatch")

    def watch(self, on_gone: Callable[[], None]) -> None:
        """Say once that the owner has died: in the log, in the report, and by ``on_gone``."""
        sidecar = self.sidecar
        if sidecar is None:
            return

        def gone() -> None:
            what = (
                "its weights stay mapped, and a new sidecar holds a second copy"
                if self._params is not None
                else "without it"
            )
            log.warning("the sidecar (process %d) is gone; this engine goes on: %s", sidecar.pid, what)
            self._report.add("weights", sidecar=f"gone; {what}")
            on_gone()

        sidecar.watch(gone)

    def close(self) -> None:
        if self.sidecar is not None:
            self.sidecar.close()


def _adopt(descriptors: list[int], layout: Layout, mesh: Mesh, shardings: list[Any]) -> list[jax.Array]:
    if group_of(mesh)[0] == CPU:
        from jaxserve.sidecar import shared

        return shared.attach(descriptors, layout, mesh, shardings)
    from jaxserve.sidecar import cuda

    return cuda.attach(descriptors, layout, mesh, shardings)


def _files(offer: dict[str, Any]) -> list[files.SourceFile]:
    return [files.SourceFile.from_json(entry) for entry in offer.get("files") or ()]


def _mismatch(offer: dict[str, Any], differences: list[str]) -> str:
    """What keeps an offer from being the wanted weights, in a line that can be read."""
    about = {text.partition(":")[0]: text for text in differences}
    shown = sorted(differences, key=lambda text: TELLING.index(n) if (n := text.partition(":")[0]) in TELLING else 99)
    text = "; ".join(one if len(one) <= WIDEST else f"{one[: WIDEST - 3]}..." for one in shown[:MOST_SHOWN])
    if len(shown) > MOST_SHOWN:
        text += f"; and {len(shown) - MOST_SHOWN} more"
    other_code = "layout_version" in about
    if other_code:
        text += (
            "; the sidecar runs other code than this engine: end it with `jaxserve sidecar stop`, and start it again"
        )
    held = f"{offer['name']} ({offer['path']})"
    parts = ("file ",) if other_code else ("file ", "model.")
    if "model.model_type" in about or any(name.startswith(parts) for name in about):
        return f"the sidecar holds {held}, not this model: {text}"
    return f"the sidecar holds no weights that fit; those of {held} differ: {text}"
