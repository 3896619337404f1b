"""From an ``EngineConfig`` to a running engine: open, size, compile and load at once, report."""

import dataclasses
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import jax
import numpy as np
from jax.sharding import Mesh

import checkpoints
from jaxserve import memory, models, params, quantization
from jaxserve.batch import Packer
from jaxserve.buckets import Buckets
from jaxserve.cache_spec import FP8, CacheSpec
from jaxserve.config import ConfigError, EngineConfig, ModelConfig
from jaxserve.disk_store import DiskError, DiskStore
from jaxserve.disk_tier import DiskTier
from jaxserve.engine import Engine
from jaxserve.executables import ExecutableStore
from jaxserve.host_tier import HostTier
from jaxserve.identity import identity
from jaxserve.metrics import EngineMetrics
from jaxserve.models.weights import IGNORED_TENSORS, param_specs
from jaxserve.pages import PagePool
from jaxserve.prefix_cache import PrefixCache
from jaxserve.programs import ProgramSet
from jaxserve.progress import Progress
from jaxserve.report import Report
from jaxserve.runner import DeviceState, Runner
from jaxserve.scheduler import Scheduler
from jaxserve.sharding import HeadLayout, Parallel, head_layout, make_mesh
from jaxserve.tokenizer import Tokenizer, TokenizerError


@dataclass(frozen=True)
class Limits:
    """The engine's limits once the defaults are filled in."""

    max_model_len: int
    max_num_seqs: int
    buckets: Buckets
    num_pages: int
    host_bytes: int
    """For KV pages that leave the devices."""


@dataclass(frozen=True)
class Built:
    """A ready engine and what it was made of."""

    engine: Engine
    runner: Runner
    model: ModelConfig
    limits: Limits
    tokenizer: Tokenizer | None
    eos_ids: frozenset[int]
    metrics: EngineMetrics
    report: Report
    programs: ProgramSet


def build(config: EngineConfig, on_phase: Callable[[str], None] | None = None) -> Built:
    """Make an engine ready; ``on_phase`` is told what begins.

    Raises ``ConfigError``, ``checkpoints.CheckpointError`` or ``WeightError`` naming what is wrong.
    """
    report = Report(on_phase)
    with report.phase("open checkpoint"):
        source = checkpoints.open_checkpoint(checkpoints.resolve_model(config.model))
    with source, ThreadPoolExecutor(1, "tokenizer") as side:
        tokenizer = side.submit(_tokenizer, source, report)
        with report.phase("start jax"):
            mesh = mesh_of(config)
        model = models.model_config(source.config)
        dtype = resolve_dtype(config, source, model)
        specs = declare(model, parallel_of(config), source, dtype)
        store = ExecutableStore(config.cache_path, mesh.devices.flat)
        programs, limits = size(config, model, specs, dtype, mesh, store, report)
        runner = _runner(config, programs, store, source, report)
        words = tokenizer.result()
        if config.kv_checksums and not limits.host_bytes:
            raise ConfigError("kv_checksums needs host_kv_gib: it checks pages in host memory")
        disk = _disk(config, programs, runner, store, report)
    eos = frozenset(_eos_ids(source, words))
    packer = Packer(
        limits.buckets,
        width=programs.width,
        max_num_seqs=limits.max_num_seqs,
        vocab_size=programs.vocab,
        stop_ids=tuple(eos),
    )
    pool = PagePool(limits.num_pages, config.page_size)
    tier = None
    if limits.host_bytes:
        tier = HostTier(limits.host_bytes, programs.record_bytes, checked=config.kv_checksums)
    scheduler = Scheduler(
        pool,
        max_num_seqs=limits.max_num_seqs,
        prompt_tokens=limits.buckets.max_prompt_tokens,
        block=limits.buckets.block,
        cache=PrefixCache(pool, "" if disk is None else disk.store.identity, tier, disk)
        if config.prefix_caching
        else None,
    )
    metrics = EngineMetrics(model_name=config.served_name or config.model, prefix=config.metrics_prefix)
    metrics.cache_config(
        block_size=config.page_size,
        num_gpu_blocks=limits.num_pages - 1,
        cache_dtype=dtype,
        enable_prefix_caching=config.prefix_caching,
    )
    engine = Engine(scheduler, packer, runner, metrics, overlap=config.overlap, max_queued=config.max_queued_requests)
    _describe(report, config, source, model, dtype, mesh, programs, limits, disk, store)
    return Built(engine, runner, model, limits, words, eos, metrics, report, programs)


def parallel_of(config: EngineConfig) -> Parallel:
    return Parallel(config.tensor_parallel, config.expert_parallel)


def mesh_of(config: EngineConfig) -> Mesh:
    """The devices the config asks for. Raises ``ConfigError`` where there are too few."""
    try:
        return make_mesh(parallel_of(config))
    except ValueError as error:
        raise ConfigError(str(error)) from None


def _tokenizer(source: checkpoints.Checkpoint, report: Report) -> Tokenizer | None:
    with report.phase("tokenizer (beside)"):
        try:
            return Tokenizer.from_checkpoint(source)
        except TokenizerError as error:
            report.add("model", tokenizer=str(error))
            return None


def resolve_dtype(config: EngineConfig, source: checkpoints.Checkpoint, model: ModelConfig) -> str:
    """The engine's dtype. ``auto`` keeps float32 and bfloat16; float16 and quantized weights become bfloat16."""
    if isinstance(source, checkpoints.OrbaxCheckpoint) and config.dtype not in ("auto", model.dtype):
        raise ConfigError(
            f"dtype {config.dtype}: this folder was converted as {model.dtype}; leave dtype out, "
            f"or convert the original again with dtype {config.dtype}"
        )
    if config.dtype != "auto":
        return config.dtype
    if source.format == "gguf":
        encodings = {info.encoding for info in source.tensors.values() if len(info.shape) > 1}
        return "float32" if encodings == {"F32"} else "bfloat16"
    return model.dtype if model.dtype in ("float32", "bfloat16") else "bfloat16"


def declare(model: ModelConfig, parallel: Parallel, source: checkpoints.Checkpoint, dtype: str) -> params.Specs:
    """The model's parameters, checked against the checkpoint's tensors. ``dtype`` is the engine's."""
    family = models.FAMILIES[model.model_type]
    if isinstance(source, checkpoints.OrbaxCheckpoint):
        saved = (source.meta.get("layout") or {}).get("tensor_parallel")
        if not isinstance(saved, int) or saved < 1:
            raise ConfigError(f"{source.path}: jaxserve.json does not say which tensor_parallel it was converted for")
        model = dataclasses.replace(model, tie_embeddings="head" not in source.tensors)
        _check_layout(model, Parallel(saved), parallel)
        return param_specs(model, family, parallel, ())
    specs = param_specs(model, family, parallel, source.tensors)
    rule = quantization.rule(source.config)
    if rule is not None:
        specs = quantization.quantized(specs, rule, source, parallel, dtype)
    params.check(specs, source, IGNORED_TENSORS, family.unused(model))
    return specs


def _check_layout(model: ModelConfig, saved: Parallel, wanted: Parallel) -> None:
    def layout(parallel: Parallel) -> tuple[HeadLayout, list[tuple[int, ...]]]:
        specs = param_specs(model, models.FAMILIES[model.model_type], parallel, ())
        return head_layout(model.num_heads, model.num_kv_heads, parallel.devices), params.shapes(specs)

    if layout(saved) != layout(wanted):
        raise ConfigError(
            f"tensor_parallel {wanted.devices}: this folder was converted for tensor_parallel {saved.devices}, which "
            "lays heads out differently; convert the original again"
        )


def size(
    config: EngineConfig,
    model: ModelConfig,
    specs: params.Specs,
    dtype: str,
    mesh: Mesh,
    store: ExecutableStore,
    report: Report,
) -> tuple[ProgramSet, Limits]:
    """Fill in the limits from the model, the device's kind and its measured memory."""
    device = mesh.devices.flat[0]
    gpu = device.platform != "cpu"
    max_num_seqs = config.max_num_seqs or (256 if gpu else 64)
    buckets = Buckets.make(max_num_seqs, config.max_num_batched_tokens or (8192 if gpu else 512))
    longest = _max_model_len(config, model)
    layout = head_layout(model.num_heads, model.num_kv_heads, config.tensor_parallel)
    kept = kv_dtype(config, dtype)
    cache = CacheSpec("paged", tuple(range(model.num_layers)), layout.kv_heads, model.head_dim, kept)
    per_program = 0 if gpu and config.layers_per_program is None else config.layers_per_program
    page_bytes = cache.token_bytes * config.page_size // config.tensor_parallel
    host_bytes = memory.host_budget(config, gpu=gpu)
    if host_bytes and not gpu:
        memory.reuse_freed_blocks()

    def programs(num_pages: int, max_model_len: int) -> ProgramSet:
        width = -(-max_model_len // config.page_size)
        return ProgramSet(
            cfg=model,
            mesh=mesh,
            buckets=buckets,
            cache=cache,
            specs=specs,
            dtype=dtype,
            num_pages=num_pages,
            page_size=config.page_size,
            width=width,
            max_num_seqs=max_num_seqs,
            host_tier=host_bytes > 0,
            layers_per_program=per_program,
        )

    weights = params.nbytes(specs, dtype) // config.tensor_parallel
    temporaries = 0
    if gpu:  # a probe with a two-page cache: arguments scale exactly, temporaries do not grow with the pool
        with report.phase("measure a step"):
            temporaries = step_bytes(programs(2, longest), store)
    available = memory.measure(device)
    budget = memory.kv_budget(config, available, gpu=gpu, weights=weights, temporaries=temporaries)
    num_pages = min(budget // page_bytes, max_num_seqs * -(-longest // config.page_size) + 1)
    fits = (num_pages - 1) * config.page_size
    if fits < longest:
        if config.max_model_len is not None or fits < 2:
            raise ConfigError(
                f"max_model_len {longest} does not fit: the KV cache holds {max(fits, 0)} tokens in {budget} bytes; "
                "lower max_model_len or raise kv_cache_memory_bytes"
            )
        report.add("limits", max_model_len_lowered_from=longest)
        longest = fits
    return programs(num_pages, longest), Limits(longest, max_num_seqs, buckets, num_pages, host_bytes)


def kv_dtype(config: EngineConfig, dtype: str) -> str:
    """What the pages are made of. Raises ``ConfigError`` where the model has nothing that a format is for."""
    if config.kv_cache_dtype == "fp8_ds_mla":
        raise ConfigError("kv_cache_dtype fp8_ds_mla is for latents; this model keeps keys and values of heads: fp8")
    return FP8 if config.kv_cache_dtype == "fp8" else dtype


def _max_model_len(config: EngineConfig, model: ModelConfig) -> int:
    if config.max_model_len is None:
        return model.max_position
    if config.max_model_len > model.max_position:
        raise ConfigError(
            f"max_model_len {config.max_model_len} exceeds the model's own limit of {model.max_position} positions"
        )
    return config.max_model_len


def step_bytes(programs: ProgramSet, store: ExecutableStore) -> int:
    """Bytes of temporaries and outputs of the largest step, by the compiler's own account."""
    bucket = max(programs.buckets.steps(), key=lambda b: b.tokens)
    largest = 0
    for program in (
        programs.layers(bucket, programs.segments(bucket)[0]),
        *programs.heads(programs.buckets.samples[-1]),
    ):
        analysis = getattr(store.build(program), "memory_analysis", lambda: None)()
        if analysis is not None:
            largest = max(largest, analysis.temp_size_in_bytes + analysis.output_size_in_bytes)
    return largest


def _runner(
    config: EngineConfig, programs: ProgramSet, store: ExecutableStore, source: checkpoints.Checkpoint, report: Report
) -> Runner:
    """Compile (or load) the programs while the weights load and the KV cache is made."""
    with Progress(config.load_progress) as bars, ThreadPoolExecutor(2, "load") as side:
        weights = side.submit(_load, programs, source, report, bars.bar("weights", "bytes"))
        state = side.submit(_state, programs, store, report)
        with report.phase("programs (beside)"):
            compiled = store.build_all(programs.programs(), progress=bars.bar("programs"))
        with report.phase("wait for weights"):
            return Runner(programs, compiled, weights.result(), state.result())


def _disk(
    config: EngineConfig, programs: ProgramSet, runner: Runner, store: ExecutableStore, report: Report
) -> DiskTier | None:
    """Open the disk tier. Raises ``ConfigError`` where the folder cannot be used."""
    if config.disk_kv_path is None:
        return None
    with report.phase("KV pages on disk"):
        name = identity(programs, runner.weights, store)
        try:
            found = DiskStore(Path(config.disk_kv_path), name, programs.record_bytes, memory.disk_budget(config))
        except DiskError as error:
            raise ConfigError(f"disk_kv_path: {error}") from None
        return DiskTier(found, runner.place)


def _state(programs: ProgramSet, store: ExecutableStore, report: Report) -> DeviceState:
    with report.phase("KV cache (beside)"):
        return jax.block_until_ready(DeviceState(*store.build(programs.zeros())()))


def _load(
    programs: ProgramSet, source: checkpoints.Checkpoint, report: Report, progress: Callable[[int, int], None]
) -> params.Params:
    with report.phase("weights (beside)"):
        if source.format == "orbax":
            return checkpoints.load_tree(source.path, programs.params)
        return params.load(programs.specs, source, programs.dtype, programs.mesh, progress)


def _eos_ids(source: checkpoints.Checkpoint, tokenizer: Tokenizer | None) -> tuple[int, ...]:
    if tokenizer is not None:
        return tokenizer.eos_token_ids
    ids: list[int] = []
    for table in (source.generation_config, source.config):
        eos = table.get("eos_token_id")
        ids += eos if isinstance(eos, list) else [] if eos is None else [eos]
    return tuple(dict.fromkeys(ids))


def _describe(
    report: Report,
    config: EngineConfig,
    source: checkpoints.Checkpoint,
    model: ModelConfig,
    dtype: str,
    mesh: Mesh,
    programs: ProgramSet,
    limits: Limits,
    disk: DiskTier | None,
    store: ExecutableStore,
) -> None:
    count = sum(int(np.prod(leaf.shape)) for leaf in jax.tree.leaves(programs.params))
    weight_bytes = params.nbytes(programs.specs, dtype)
    report.add(
        "model",
        name=config.served_name or config.model,
        family=model.model_type,
        format=source.format,
        parameters=count,
    )
    report.add("run", dtype=dtype, quantization=str(quantization.rule(source.config) or "none"))
    report.add("run", weight_bytes=weight_bytes, mesh=dict(mesh.shape), overlap=config.overlap)
    report.add("run", devices=[f"{d.platform} {d.device_kind}" for d in mesh.devices.flat])
    report.add("run", attention="reference (jnp): no GPU kernel is built yet")
    page = programs.cache.token_bytes * config.page_size
    report.add(
        "kv cache",
        kind=programs.cache.kind,
        dtype="fp8 (e4m3, a scale for each token and head)" if programs.cache.dtype == FP8 else programs.cache.dtype,
        bytes_per_token=programs.cache.token_bytes,
        pages=limits.num_pages - 1,
        tokens_that_fit=(limits.num_pages - 1) * config.page_size,
        total_bytes=page * limits.num_pages,
        host_tokens_that_fit=limits.host_bytes // programs.record_bytes * config.page_size,
        disk_tokens_that_fit=0 if disk is None else disk.store.capacity * config.page_size,
        prefix_reuse="on" if config.prefix_caching else "off: prefix_caching is false",
    )
    if disk is not None:
        report.add("kv cache", disk_folder=str(disk.store.folder), disk_tokens_there=len(disk.store) * config.page_size)
    report.add(
        "limits",
        max_model_len=limits.max_model_len,
        max_num_seqs=limits.max_num_seqs,
        prompt_tokens_a_step=limits.buckets.max_prompt_tokens,
    )
    tally = store.tally
    report.add("executables", loaded=tally.loaded, compiled=tally.compiled, discarded=tally.discarded)
