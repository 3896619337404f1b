"""Which implementation of an op runs: by device and case, or as told.

An op's package has a module for each implementation, with the op's functions and ``declines(case, kernels)``: why it
cannot run a case, or None. ``reference`` runs everything everywhere; ``mosaic`` (Pallas' Mosaic GPU) is for Hopper. A
module is imported when it may be chosen: Pallas takes its time.
"""

import functools
import importlib
import json
import os
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

MODES = ("auto", "reference", "mosaic")
INTERPRETER_THREADS = 8
"""Warpgroups and warps of an interpreted kernel that may wait for another one at once; each keeps a thread of XLA's."""


class KernelError(ValueError):
    """A kernel was asked for by name that cannot run a case; the message says why."""


@dataclass(frozen=True)
class Kernels:
    """What implementations are chosen by.

    ``capability`` is the device's, "9.0" for Hopper; None where it is no NVIDIA GPU: kernels that are asked for by name
    run in Pallas' interpreter there.
    """

    mode: str = "auto"
    device: str = "cpu"
    capability: str | None = None

    @classmethod
    def of(cls, device: Any, mode: str = "auto") -> "Kernels":
        """For a jax device. ``mode`` is one of ``MODES``."""
        gpu = device.platform in ("gpu", "cuda")
        return cls(mode, str(device.device_kind), str(device.compute_capability) if gpu else None)

    @property
    def any(self) -> bool:
        """Whether anything but a reference may run."""
        return _unfit("mosaic", self) is None

    @property
    def interpreted(self) -> bool:
        """Whether kernels run in the interpreter."""
        return self.mode == "mosaic" and self.capability is None

    @property
    def interpret(self) -> Any:
        """What ``plgpu.kernel`` takes as ``interpret``."""
        if self.capability:
            return None
        from jax.experimental.pallas import mosaic_gpu as plgpu

        return plgpu.InterpretGPUParams()

    def tuned(self, op: str) -> dict[str, Any]:
        """The parameters found for this device, by measurement."""
        return _tables(self.device).get(op, {})


REFERENCE = Kernels("reference")


@dataclass(frozen=True)
class Choice:
    """What runs a case, and why the better ones do not."""

    name: str
    module: ModuleType
    declined: tuple[tuple[str, str], ...] = ()

    def __str__(self) -> str:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in self.declined)
        return f"{self.name} ({reasons})" if reasons else self.name


def choose(package: str, case: Any, kernels: Kernels, names: tuple[str, ...] = ("mosaic", "reference")) -> Choice:
    """The first implementation that takes the case. Raises ``KernelError`` where the one asked for by name declines."""
    declined: list[tuple[str, str]] = []
    for name in names:
        reason = _unfit(name, kernels)
        if reason is None:
            module = importlib.import_module(f"{package}.{name}")
            reason = module.declines(case, kernels)
            if reason is None:
                return Choice(name, module, tuple(declined))
        declined.append((name, reason))
    op, reason = package.rsplit(".", 1)[-1], dict(declined)[kernels.mode]
    raise KernelError(f"kernels {kernels.mode} has no {op} for this model: {reason}")


def _unfit(name: str, kernels: Kernels) -> str | None:
    """Why an implementation is not looked at."""
    if kernels.mode not in ("auto", name):
        return f"kernels is {kernels.mode}"
    if name == "reference":
        return None
    if kernels.interpreted:
        return _too_few_threads()
    if kernels.capability is None:
        return "the device is no NVIDIA GPU"
    if not kernels.capability.startswith("9."):
        return f"it is for capability 9.0, the device has {kernels.capability}"
    return None


def _too_few_threads() -> str | None:
    """Why the interpreter may wait forever. XLA has a thread for each core, or for each device where they are more."""
    import jax

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads = max(cores, jax.local_device_count())
    if threads >= INTERPRETER_THREADS:
        return None
    return f"the interpreter needs {INTERPRETER_THREADS} threads, here are {threads}; JAX_NUM_CPU_DEVICES=8 makes more"


@functools.cache
def _tables(device: str) -> dict[str, dict[str, Any]]:
    """The tuning table of a device, named after it in lower case: ``tuning/nvidia_h200.json``."""
    path = Path(__file__).parent / "tuning" / f"{device.lower().replace(' ', '_')}.json"
    return json.loads(path.read_text()) if path.exists() else {}
