"""The two configurations: ``ModelConfig`` says what a model is, ``EngineConfig`` how to run it.

``ModelConfig`` is built from a Hugging Face ``config.json`` by the family files under ``models/``; it is frozen and
hashable, so it can be a static argument of a compiled function. ``EngineConfig`` is the one typed configuration of the
engine; the command line is derived from its fields and their ``help``. No environment variable is read.
"""

import dataclasses
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jaxserve.layer_spec import Attention, Latent, LayerSpec, Mixer
from jaxserve.rope import RopeConfig
from jaxserve.watermark.config import WatermarkConfig, WatermarkConfigError
from pallas_kernels.dispatch import MODES

DTYPES = ("float32", "bfloat16", "float16")
KV_DTYPES = ("auto", "fp8", "fp8_ds_mla")


class ConfigError(ValueError):
    """A configuration that cannot be run; the message names the field."""


@dataclass(frozen=True)
class ModelConfig:
    """A decoder-only transformer: what all its layers share. Letters as in docs/shapes.md."""

    model_type: str
    vocab_size: int  # V
    hidden_size: int  # E
    layers: tuple[LayerSpec, ...]  # L of them
    norm_eps: float
    max_position: int
    tie_embeddings: bool
    embed_scale: float = 1.0
    """Embeddings are multiplied by it, rounded to their dtype."""
    logit_softcap: float | None = None
    """Logits become ``logit_softcap * tanh(logit / logit_softcap)``."""
    dtype: str | None = None
    """The dtype the checkpoint says it was saved in."""
    predictors: tuple[LayerSpec, ...] = ()
    """Layers for multi-token prediction, which stand behind the others and are no part of the decoder (see ``mtp``)."""

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def mixers(self) -> tuple[Mixer, ...]:
        """The distinct ones."""
        return tuple(dict.fromkeys(layer.mixer for layer in self.layers))

    @property
    def ropes(self) -> tuple[RopeConfig, ...]:
        """The distinct ones."""
        return tuple(dict.fromkeys(mixer.rope for mixer in self.mixers))

    @property
    def owners(self) -> tuple[int, ...]:
        """For each layer, the number of the one whose keys and values it attends to."""
        found: list[int] = []
        last: dict[int | None, int] = {}
        for number, layer in enumerate(self.layers):
            window = layer.mixer.window if isinstance(layer.mixer, Attention) else None
            borrows = isinstance(layer.mixer, Attention) and layer.mixer.borrows
            last[window] = last[window] if borrows else number
            found.append(last[window])
        return tuple(found)

    @property
    def embeds_per_layer(self) -> bool:
        """Whether layers have embeddings of their own."""
        return any(layer.per_layer is not None for layer in self.layers)

    @property
    def handed_on(self) -> int | None:
        """How many tokens an indexer chooses, where later layers use its choice; None: there are no such layers."""
        if not any(isinstance(mixer, Latent) and mixer.takes_choice for mixer in self.mixers):
            return None
        return max(m.indexer.top_k for m in self.mixers if isinstance(m, Latent) and m.indexer is not None)


def _option(default: Any, help: str, **more: Any) -> Any:
    return field(default=default, metadata={"help": help}, **more)


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """How to run a model. Every field is an option of ``jaxserve serve`` and a keyword of ``jaxserve.LLM``."""

    model: str = _option("smollm2-135m", "A Hugging Face folder, a .gguf file, a converted folder, or smollm2-135m.")
    served_name: str | None = _option(None, "The name clients call the model by; the model argument by default.")
    dtype: str = _option(
        "auto",
        "Weights, and KV cache where kv_cache_dtype is auto: auto (the checkpoint's), float32, bfloat16 or float16.",
    )
    tensor_parallel: int = _option(1, "Devices to shard the weights and the KV heads over.")
    expert_parallel: int = _option(
        1, "Groups of devices that experts are divided among; a divisor of tensor_parallel. Experts are cut otherwise."
    )
    max_model_len: int | None = _option(None, "Longest sequence, prompt and output; the model's own limit by default.")
    max_num_seqs: int | None = _option(None, "Most sequences running at once; 64 on a CPU, 256 on a GPU by default.")
    max_num_batched_tokens: int | None = _option(
        None, "Most prompt tokens computed in a step, in blocks of 32; 512 on a CPU, 8192 on a GPU by default."
    )
    max_queued_requests: int = _option(4096, "Most sequences that may wait; further requests are refused (503).")
    page_size: int = _option(32, "Tokens a KV page holds.")
    kv_cache_dtype: str = _option(
        "auto", "KV cache: auto (as dtype says), fp8 (of heads or latents), or fp8_ds_mla (its name for latents alone)."
    )
    kv_cache_memory_bytes: int | None = _option(None, "Bytes a device gives to the KV cache; measured by default.")
    device_memory_utilization: float | None = _option(
        None, "Share of a device's memory the engine may fill; 0.9 on a GPU, 0.5 (and 1 GiB of KV) on a CPU by default."
    )
    host_kv_gib: float | None = _option(
        None, "GiB of host memory for KV pages, in the sidecar if there is one; 8 on a GPU, 0 (1 to be kept) on a CPU."
    )
    disk_kv_path: str | None = _option(
        None, "A folder that keeps KV pages over restarts: each is copied soon after it is computed. None by default."
    )
    disk_kv_gib: float | None = _option(None, "GiB that the folder may take; 16 by default.")
    kv_checksums: bool = _option(
        False, "Compare every KV page with its checksum before it comes back from the host (to find faults; slow)."
    )
    sparse_host: str = _option(
        "off",
        "Latents of sparse attention in host memory: off, auto (a sequence reads from there when the device runs "
        "short), or always (after its prompt).",
    )
    sparse_host_gib: float | None = _option(
        None, "GiB of host memory for them; by default what the longest sequences take, at most half of what is free."
    )
    hot_buffer_tokens: int | None = _option(
        None,
        "Latents that a device keeps of a sequence that reads from the host; twice the indexer's choice by default.",
    )
    mtp: bool = _option(
        False, "Load the checkpoint's layers for multi-token prediction too. Nothing uses them yet but jaxserve.mtp."
    )
    prefix_caching: bool = _option(True, "Keep KV pages after a request, for prompts that begin like it.")
    overlap: bool = _option(True, "Prepare the next step on the host while the device runs this one.")
    kernels: str = _option(
        "auto",
        "Implementations of attention: auto (the best for the device), reference (jnp), or mosaic (Hopper's; elsewhere "
        "interpreted, which is for tests).",
    )
    layers_per_program: int | None = _option(
        None, "Layers compiled into one program (0: all); all on a GPU, 1 on a CPU (6 in decode steps) by default."
    )
    load_format: str = _option(
        "auto",
        "Where weights come from: auto (the checkpoint), sidecar (memory that outlives the engine; ipc_cache), or "
        "random (made up: model may be a config.json alone).",
    )
    sidecar: str = _option(
        "off", "auto: load_format sidecar, and start a sidecar, or have it load the model, if need be."
    )
    sidecar_fallback: str = _option(
        "error",
        "Without the right weights in the sidecar: error (refuse to start), or disk (say so, read the checkpoint).",
    )
    sidecar_dir: str | None = _option(None, "The sidecar's folder; jaxserve-UID in the temporary folder by default.")
    sidecar_timeout: float = _option(600.0, "Seconds to wait for weights that the sidecar is still loading.")
    cache_dir: str | None = _option(None, "Where compiled programs are kept; ~/.cache/jaxserve by default.")
    cache_gib: float = _option(4.0, "GiB that they may take; those used longest ago go first, never one in use.")
    metrics_prefix: str = _option("jaxserve", "What metric names begin with; vllm suits that project's dashboards.")
    load_progress: bool = _option(True, "Show progress while weights load and programs compile.")
    forbid_compile: bool = _option(False, "After ready, make any compilation an error (tests); otherwise it is logged.")
    watermark_config: str | None = _option(
        None, "JSON, or a file of JSON, that says how to mark generated text; see docs/watermark.md.", repr=False
    )
    seed: int | None = _option(None, "Seed of the seeds that unseeded requests draw; fresh by default.")

    def __post_init__(self) -> None:
        for name, low in (
            ("tensor_parallel", 1),
            ("expert_parallel", 1),
            ("max_model_len", 2),
            ("max_num_seqs", 1),
            ("max_num_batched_tokens", 1),
            ("max_queued_requests", 1),
            ("page_size", 1),
            ("kv_cache_memory_bytes", 1),
            ("layers_per_program", 0),
            ("hot_buffer_tokens", 1),
        ):
            value = getattr(self, name)
            if value is None and type(self).__dataclass_fields__[name].default is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < low:
                raise ConfigError(f"{name} must be an integer of at least {low}, got {value!r}")
        if self.tensor_parallel % self.expert_parallel:
            raise ConfigError(
                f"expert_parallel ({self.expert_parallel}) must divide tensor_parallel ({self.tensor_parallel})"
            )
        if self.dtype not in ("auto", *DTYPES):
            raise ConfigError(f"dtype must be one of auto, {', '.join(DTYPES)}, got {self.dtype!r}")
        if self.kv_cache_dtype not in KV_DTYPES:
            raise ConfigError(f"kv_cache_dtype must be one of {', '.join(KV_DTYPES)}, got {self.kv_cache_dtype!r}")
        share = self.device_memory_utilization
        if share is not None and (isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share <= 1):
            raise ConfigError(f"device_memory_utilization must be in (0, 1], got {share!r}")
        for name in ("sparse_host_gib", "hot_buffer_tokens"):
            if getattr(self, name) is not None and self.sparse_host == "off":
                raise ConfigError(f"{name} needs sparse_host auto or always")
        for name in ("host_kv_gib", "disk_kv_gib", "sparse_host_gib"):
            room = getattr(self, name)
            if room is None:
                continue
            if isinstance(room, bool) or not isinstance(room, int | float) or not 0 <= room < 2**20:
                raise ConfigError(f"{name} must be a number of at least 0, got {room!r}")
            if room and name != "sparse_host_gib" and not self.prefix_caching:
                raise ConfigError(f"{name} needs prefix_caching")
        if self.disk_kv_path is not None and not (isinstance(self.disk_kv_path, str) and self.disk_kv_path.strip()):
            raise ConfigError(f"disk_kv_path must name a folder, got {self.disk_kv_path!r}")
        if self.disk_kv_path is not None and not self.prefix_caching:
            raise ConfigError("disk_kv_path needs prefix_caching")
        if self.disk_kv_path is not None and self.host_kv_gib == 0:
            raise ConfigError("disk_kv_path needs host_kv_gib: pages go to the disk and come back through host memory")
        if self.disk_kv_gib is not None and self.disk_kv_path is None:
            raise ConfigError("disk_kv_gib needs disk_kv_path")
        room = self.cache_gib
        if isinstance(room, bool) or not isinstance(room, int | float) or not 0 <= room < 2**20:
            raise ConfigError(f"cache_gib must be a number of at least 0, got {room!r}")
        for name, known in (
            ("kernels", MODES),
            ("load_format", ("auto", "sidecar", "ipc_cache", "random")),
            ("sidecar", ("off", "auto")),
            ("sidecar_fallback", ("error", "disk")),
            ("sparse_host", ("off", "auto", "always")),
        ):
            if getattr(self, name) not in known:
                raise ConfigError(f"{name} must be one of {', '.join(known)}, got {getattr(self, name)!r}")
        if self.sidecar_dir is not None and not (isinstance(self.sidecar_dir, str) and self.sidecar_dir.strip()):
            raise ConfigError(f"sidecar_dir must name a folder, got {self.sidecar_dir!r}")
        if not self.uses_sidecar and (self.sidecar_dir is not None or self.sidecar_fallback != "error"):
            name = "sidecar_dir" if self.sidecar_dir is not None else "sidecar_fallback"
            raise ConfigError(f"{name} needs load_format sidecar or sidecar auto")
        if self.uses_sidecar and self.mtp:
            raise ConfigError("mtp needs weights from the checkpoint: a sidecar holds the decoder alone")
        if self.uses_sidecar and self.expert_parallel != 1:
            raise ConfigError("expert_parallel needs weights from the checkpoint: a sidecar cuts every expert by width")
        if self.load_format == "random":
            for name, off in (("sidecar", "off"), ("disk_kv_path", None)):
                if getattr(self, name) != off:
                    raise ConfigError(f"{name} does not go with load_format random: nothing is kept of made-up weights")
        elif self.model.lower().endswith(".json"):
            raise ConfigError(f"model {self.model}: a config without weights runs with load_format random alone")
        if self.cache_dir is not None and not str(self.cache_dir).strip():
            raise ConfigError(f"cache_dir must name a folder, got {self.cache_dir!r}")
        wait = self.sidecar_timeout
        if isinstance(wait, bool) or not isinstance(wait, int | float) or not 0 < wait <= 86_400:
            raise ConfigError(f"sidecar_timeout must be seconds in (0, 86400], got {wait!r}")
        for name in ("mtp", "overlap", "kv_checksums", "prefix_caching", "load_progress", "forbid_compile"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name} must be true or false, got {getattr(self, name)!r}")
        if self.seed is not None and (isinstance(self.seed, bool) or not isinstance(self.seed, int)):
            raise ConfigError(f"seed must be an integer, got {self.seed!r}")
        if not isinstance(self.metrics_prefix, str) or not re.fullmatch("[a-zA-Z_][a-zA-Z0-9_]*", self.metrics_prefix):
            raise ConfigError(f"metrics_prefix must be letters, digits and underscores, got {self.metrics_prefix!r}")
        if self.watermark_config is not None:
            try:
                object.__setattr__(self, "_watermark", WatermarkConfig.read(self.watermark_config))
            except WatermarkConfigError as error:
                raise ConfigError(f"watermark_config: {error}") from None
        if not self.model.strip():
            raise ConfigError("model must name a folder, a file or a built-in model, got an empty string")

    @classmethod
    def from_options(cls, model: str, options: dict[str, Any]) -> "EngineConfig":
        """Build from keywords, naming one that does not exist."""
        known = {f.name for f in dataclasses.fields(cls)}
        for name in options:
            if name not in known:
                raise ConfigError(f"unknown engine option {name!r}; known: {', '.join(sorted(known))}")
        return cls(model=str(model), **options)

    @property
    def uses_sidecar(self) -> bool:
        return self.load_format in ("sidecar", "ipc_cache") or self.sidecar == "auto"

    @property
    def watermark(self) -> WatermarkConfig | None:
        """How to mark; None: not at all. As it was read when the engine's options were."""
        return getattr(self, "_watermark", None)

    @property
    def cache_path(self) -> Path:
        return Path(self.cache_dir) if self.cache_dir else Path.home() / ".cache" / "jaxserve"
