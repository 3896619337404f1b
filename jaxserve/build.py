"""From an ``EngineConfig`` to a running engine: open, size, compile and load at once, report."""

import contextlib
import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import jax
from jax.sharding import Mesh

import checkpoints
from jaxserve import hot_size, memory, models, params, quantization
from jaxserve.batch import Packer
from jaxserve.buckets import Buckets
from jaxserve.chosen_kernels import chosen
from jaxserve.collector import paused
from jaxserve.config import ConfigError, EngineConfig, ModelConfig
from jaxserve.declare import declare, declare_cache, parallel_of, resolve_dtype
from jaxserve.engine import Engine
from jaxserve.executables import ExecutableStore, Finish
from jaxserve.host_tier import HostTier
from jaxserve.identity import content, identity
from jaxserve.kv_stores import check_disk, open_stores
from jaxserve.metrics import EngineMetrics
from jaxserve.pages import PagePool
from jaxserve.prefix_cache import PrefixCache
from jaxserve.programs import ProgramSet
from jaxserve.progress import Progress
from jaxserve.random_weights import RandomWeights
from jaxserve.report import Report
from jaxserve.residency import HotShape, Residency
from jaxserve.runner import DeviceState, Runner
from jaxserve.scheduler import Scheduler
from jaxserve.sharding import make_mesh
from jaxserve.sidecar.attach import Link, Wanted
from jaxserve.store_tier import StoreTier
from jaxserve.tokenizer import Tokenizer, TokenizerError, tokenizer_file
from jaxserve.watermark.slots import MarkSlots, MarkSpec
from jaxserve.windows import Windows
from pallas_kernels.dispatch import Kernels

RANDOM = "THE WEIGHTS ARE RANDOM: NO CHECKPOINT WAS READ, AND WHAT IS GENERATED MEANS NOTHING"

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Limits:
    """The engine's limits once the defaults are filled in."""

    max_model_len: int
    max_num_seqs: int
    buckets: Buckets
    num_pages: int
    host_bytes: int
    """For KV pages that leave the devices."""
    pool_bytes: int
    """For KV pages in a sidecar's memory, if there is one."""


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
    link: Link | None
    """To the sidecar that the weights come from; to be closed after everything else."""


def build(
    config: EngineConfig, on_phase: Callable[[str], None] | None = None, *, needs_tokenizer: bool = False
) -> Built:
    """Make an engine ready; ``on_phase`` is told what begins.

    Raises ``ConfigError``, ``checkpoints.CheckpointError`` or ``WeightError`` naming what is wrong; with
    ``needs_tokenizer``, ``TokenizerError`` for a model that came without one.
    """
    with paused(), contextlib.ExitStack() as undo:  # where the start fails
        built = _build(config, Report(on_phase), undo, needs_tokenizer)
        built.report.ready()
        undo.pop_all()
    return built


def _build(config: EngineConfig, report: Report, undo: contextlib.ExitStack, needs_tokenizer: bool) -> Built:
    check_disk(config)
    with report.phase("open checkpoint"):
        source = open_source(config)
    with source, ThreadPoolExecutor(1, "tokenizer") as side:
        if needs_tokenizer:
            tokenizer_file(source)
        # Beside a device that starts; but not beside a sidecar's attach, which would wait for the interpreter a hundred
        # times, nor before programs are on their way: those load without it.
        tokenizer = None if config.uses_sidecar else side.submit(_tokenizer, source, report)
        with report.phase("start jax"):
            mesh = mesh_of(config)
        model = models.model_config(source.config)
        dtype = resolve_dtype(config, source, model)
        specs = declare(model, parallel_of(config), source, dtype, predictors=config.mtp)
        link = None
        if config.uses_sidecar:
            with report.phase("find the sidecar"):
                gpu = mesh.devices.flat[0].platform != "cpu"
                wanted = Wanted.of(source, model, specs, dtype, config.tensor_parallel, gpu=gpu)
                link = Link(config, wanted, mesh, report)
            undo.callback(link.close)
        store = ExecutableStore(config.cache_path, mesh.devices.flat, int(config.cache_gib * 2**30))
        programs, limits = size(config, model, specs, dtype, mesh, store, report, link)
        if config.kv_checksums and not limits.host_bytes and programs.hot is None:
            raise ConfigError("kv_checksums needs host_kv_gib or sparse_host: it checks pages in host memory")
        report.add("kernels", **chosen(programs))
        with store.building(programs.programs(), first=programs.first_needed()) as finish:
            tokenizer = tokenizer or side.submit(_tokenizer, source, report)
            hashes = None
            if config.disk_kv_path is not None and (link is None or link.sidecar is None):
                hashes = side.submit(content, source, config.cache_path)
            runner = _runner(config, programs, store, finish, source, report, link)
        words = tokenizer.result()
        stores = _stores(config, programs, limits, store, source, hashes, link, runner, report)
    eos = frozenset(_eos_ids(source, words))
    marks = None
    if config.watermark is not None and programs.mark is not None:
        marks = MarkSlots(programs.mark, limits.max_num_seqs + 1, config.watermark.alpha)
    residency = None
    if programs.hot is not None:
        residency = Residency(programs.hot, limits.num_pages, config.page_size)
    packer = Packer(
        limits.buckets,
        width=programs.width,
        max_num_seqs=limits.max_num_seqs,
        vocab_size=programs.vocab,
        groups=programs.groups,
        stop_ids=tuple(eos),
        marks=marks,
        residency=residency,
    )
    pool = PagePool(limits.num_pages, config.page_size, programs.cache.windows)
    tier = None
    if limits.host_bytes:
        tier = HostTier(limits.host_bytes, programs.record_bytes, checked=config.kv_checksums)
    scheduler = Scheduler(
        pool,
        max_num_seqs=limits.max_num_seqs,
        prompt_tokens=limits.buckets.max_prompt_tokens,
        block=limits.buckets.block,
        cache=PrefixCache(pool, "" if stores is None else stores.identity, tier, stores)
        if config.prefix_caching
        else None,
        residency=residency,
    )
    metrics = EngineMetrics(
        model_name=config.served_name or config.model,
        prefix=config.metrics_prefix,
        watermark=config.watermark is not None,
        sparse_host=residency is not None,
    )
    metrics.follow_executables(store.tally)
    metrics.cache_config(
        block_size=config.page_size,
        num_gpu_blocks=limits.num_pages - 1,
        cache_dtype=dtype,
        enable_prefix_caching=config.prefix_caching,
    )
    engine = Engine(scheduler, packer, runner, metrics, overlap=config.overlap, max_queued=config.max_queued_requests)
    _describe(report, config, source, model, dtype, mesh, programs, limits, stores, store)
    if link is not None:
        link.watch(metrics.sidecar_gone)
    return Built(engine, runner, model, limits, words, eos, metrics, report, programs, link)


def open_source(config: EngineConfig) -> checkpoints.Checkpoint:
    """The checkpoint, or the config alone where the weights are made up."""
    if config.load_format == "random":
        return checkpoints.open_config(config.model)
    return checkpoints.open_checkpoint(checkpoints.resolve_model(config.model))


def mesh_of(config: EngineConfig) -> Mesh:
    """The devices the config asks for. Raises ``ConfigError`` where there are too few."""
    try:
        return make_mesh(config.tensor_parallel, config.expert_parallel)
    except ValueError as error:
        raise ConfigError(str(error)) from None


def _tokenizer(source: checkpoints.Checkpoint, report: Report) -> Tokenizer | None:
    with report.phase("tokenizer (beside)"):
        try:
            return Tokenizer.from_checkpoint(source)
        except TokenizerError as error:
            report.add("model", tokenizer=str(error))
            return None


def size(
    config: EngineConfig,
    model: ModelConfig,
    specs: params.Specs,
    dtype: str,
    mesh: Mesh,
    store: ExecutableStore,
    report: Report,
    link: Link | None = None,
    available: memory.Memory | None = None,
) -> tuple[ProgramSet, Limits]:
    """Fill in the limits from the model, the device's kind and its measured memory, of which a sidecar may hold some
    for other models than this one."""
    device = mesh.devices.flat[0]
    gpu = device.platform != "cpu"
    max_num_seqs = config.max_num_seqs or (256 if gpu else 64)
    buckets = Buckets.make(max_num_seqs, config.max_num_batched_tokens or (8192 if gpu else 512))
    longest = _max_model_len(config, model)
    cache = declare_cache(model, config, dtype)
    per_program = 0 if gpu and config.layers_per_program is None else config.layers_per_program
    page_bytes = cache.device_bytes(config.tensor_parallel) * config.page_size
    host_bytes = memory.host_budget(config, gpu=gpu)
    if host_bytes and not gpu:
        memory.reuse_freed_blocks()

    hot_size.check(config, model, gpu=gpu)

    def programs(num_pages: int, max_model_len: int, hot: HotShape | None = None) -> ProgramSet:
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
            mark=mark_spec(config, max_model_len),
            kernels=Kernels.of(device, config.kernels),
            layers_per_program=per_program,
            hot=hot,
        )

    weights = params.nbytes(specs, dtype) // config.tensor_parallel
    temporaries = 0
    if gpu:  # a probe with a two-page cache: arguments scale exactly, temporaries do not grow with the pool
        chosen(probe := programs(2, longest))  # what is refused says so before it is compiled
        with report.phase("measure a step"):
            temporaries = step_bytes(probe, store)
    available, held = available or memory.measure(device), link.held if link else 0
    budget = memory.kv_budget(config, available, gpu=gpu, weights=weights + held, temporaries=temporaries)
    windows, step = Windows(cache.windows, config.page_size), buckets.max_prompt_tokens
    need = sum(windows.most(0, longest, step))
    most = min(budget // page_bytes, max_num_seqs * -(-longest // config.page_size) * len(windows) + 1)

    def fits(pages: int) -> int:
        return windows.longest(pages - 1, step, longest)

    hot = None
    if config.sparse_host == "off":
        num_pages = _steady(most, need + 1, lambda pages: store.has(programs(pages, fits(pages)).zeros()))
    else:
        pool = hot_size.pool_bytes(config, cache, longest, max_num_seqs)
        sizes = {"budget": budget, "pool": pool, "longest": longest, "max_num_seqs": max_num_seqs}
        hot, num_pages = hot_size.hot_shape(config, model, cache, **sizes, block=buckets.block)
    if (length := fits(num_pages)) < longest:
        if config.max_model_len is not None or length < 2:
            raise ConfigError(
                f"max_model_len {longest} does not fit: the KV cache holds {length} tokens in {budget} bytes; "
                "lower max_model_len or raise kv_cache_memory_bytes"
            )
        report.add("limits", max_model_len_lowered_from=longest)
        longest = length
    pool_bytes = 0
    if link is not None and link.sidecar is not None:
        text = sum(windows.most(0, longest, step)) * config.page_size * cache.token_bytes
        pool_bytes, host_bytes = host_bytes, memory.staging(host_bytes, text)
    return programs(num_pages, longest, hot), Limits(longest, max_num_seqs, buckets, num_pages, host_bytes, pool_bytes)


def _steady(most: int, least: int, stored: Callable[[int], bool]) -> int:
    """A number of pages of at most ``most`` that is the same again at the next start, where memory measures otherwise.

    It is part of every program. Of 32 steps an octave the highest is taken, or the one below if only its programs are
    stored; not less than ``least`` where there are so many.
    """
    high = memory.step_below(most)
    low = memory.step_below(high - 1)
    chosen = low if low > 0 and not stored(high) and stored(low) else high
    return max(chosen, min(least, most))


def mark_spec(config: EngineConfig, max_model_len: int) -> MarkSpec | None:
    """How the programs mark; None where there is nothing to mark with, or it is switched off."""
    mark = config.watermark
    return None if mark is None or mark.mode == "off" else MarkSpec.of(mark, max_model_len)


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
    config: EngineConfig,
    programs: ProgramSet,
    store: ExecutableStore,
    finish: Finish,
    source: checkpoints.Checkpoint,
    report: Report,
    link: Link | None,
) -> Runner:
    """Load the weights and make the KV cache while programs, begun before, compile (or load)."""
    with Progress(config.load_progress) as bars, ThreadPoolExecutor(2, "load") as side:
        weights = side.submit(_load, programs, source, report, bars.bar("weights", "bytes"), link)
        state = side.submit(_state, programs, store, report)
        with report.phase("programs (beside)"):
            compiled = finish(bars.bar("programs"))
        with report.phase("wait for weights"):
            return Runner(programs, compiled, weights.result(), state.result())


def _stores(
    config: EngineConfig,
    programs: ProgramSet,
    limits: Limits,
    store: ExecutableStore,
    source: checkpoints.Checkpoint,
    hashes: Future[dict[str, str]] | None,
    link: Link | None,
    runner: Runner,
    report: Report,
) -> StoreTier | None:
    """Open what keeps KV pages over restarts: a sidecar's pool, a folder, both or none."""
    sidecar = None if link is None else link.sidecar
    if not limits.host_bytes or (sidecar is None and config.disk_kv_path is None):
        return None
    with report.phase("KV pages of before"):
        found = link.content if link is not None else None
        if found is None:
            found = content(source, config.cache_path) if hashes is None else hashes.result()
        return open_stores(
            config,
            identity(programs, found, store.environment),
            record_bytes=programs.record_bytes,
            pool_bytes=limits.pool_bytes,
            sidecar=sidecar,
            place=runner.place,
            report=report,
        )


def _state(programs: ProgramSet, store: ExecutableStore, report: Report) -> DeviceState:
    with report.phase("KV cache (beside)"):
        return jax.block_until_ready(DeviceState(*store.build(programs.zeros())()))


def _load(
    programs: ProgramSet,
    source: checkpoints.Checkpoint,
    report: Report,
    progress: Callable[[int, int], None],
    link: Link | None,
) -> params.Params:
    with report.phase("weights (beside)"):
        if link is not None and (held := link.weights(progress)) is not None:
            return held
        if source.format == "orbax":
            return checkpoints.load_tree(source.path, programs.params)
        tensors: params.Source = source
        if isinstance(source, checkpoints.ConfigOnly):
            report.add("model", weights=RANDOM)
            log.warning(RANDOM)
            tensors = RandomWeights(programs.specs, programs.dtype)
        return params.load(programs.specs, tensors, programs.dtype, programs.mesh, progress)


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
    stores: StoreTier | None,
    store: ExecutableStore,
) -> None:
    weight_bytes = params.nbytes(programs.specs, dtype)
    report.add(
        "model",
        name=config.served_name or config.model,
        family=model.model_type,
        format=source.format,
        parameters=quantization.count_numbers(programs.specs),
    )
    if model.predictors:
        report.add("model", mtp_layers=f"{len(model.predictors)}, {'loaded' if config.mtp else 'not loaded'}")
    report.add("run", dtype=dtype, quantization=str(quantization.rule(source.config) or "none"))
    report.add("run", weight_bytes=weight_bytes, mesh=dict(mesh.shape), overlap=config.overlap)
    report.add("run", devices=[f"{d.platform} {d.device_kind}" for d in mesh.devices.flat])
    _describe_cache(report, config, model, programs, limits, stores)
    report.add(
        "limits",
        max_model_len=limits.max_model_len,
        max_num_seqs=limits.max_num_seqs,
        prompt_tokens_a_step=limits.buckets.max_prompt_tokens,
    )
    if config.watermark is not None:
        config.watermark.warn()
        report.add("watermark", **config.watermark.describe())
    report.follow("executables", store.tally.report)


def _describe_cache(
    report: Report,
    config: EngineConfig,
    model: ModelConfig,
    programs: ProgramSet,
    limits: Limits,
    stores: StoreTier | None,
) -> None:
    cache, size, pages = programs.cache, config.page_size, limits.num_pages - 1
    windows, step = Windows(cache.windows, size), limits.buckets.max_prompt_tokens
    near = 0 if programs.hot is None else hot_size.device_bytes(programs.hot, cache, size, limits.num_pages)
    report.add(
        "kv cache",
        dtype=cache.dtypes,
        bytes_per_token=cache.token_bytes * len(windows),
        pages=pages,
        tokens_that_fit=windows.fit(pages, step, limits.max_model_len),
        total_bytes=cache.token_bytes * size * limits.num_pages + near,
        host_tokens_that_fit=limits.host_bytes // programs.record_bytes // len(windows) * size,
        prefix_reuse="on" if config.prefix_caching else "off: prefix_caching is false",
    )
    if programs.hot is not None:
        report.add(
            "sparse host", **hot_size.describe(programs.hot, cache, size, limits.num_pages, limits.max_model_len)
        )
    if any(cache.windows):
        held = windows.most(0, limits.max_model_len, step)
        groups = [
            f"{[layer.group for layer in cache.layers].count(group)} layers, {cache.token_bytes} bytes a token, "
            + ("all tokens" if window is None else f"window {window}: at most {most * size} tokens a sequence")
            for group, (window, most) in enumerate(zip(cache.windows, held, strict=True))
        ]
        report.add("kv cache", groups=groups)
    elif any((getattr(mixer, "window", None) or limits.max_model_len) < limits.max_model_len for mixer in model.mixers):
        report.add("kv cache", groups="one: layers keep pages of different kinds, so none are freed behind a window")
    for kept in () if stores is None else stores.stores:
        tokens = {"tokens_that_fit": kept.capacity, "tokens_there": len(kept)}
        report.add("kv cache", **{f"{kept.name}_{name}": n // len(windows) * size for name, n in tokens.items()})
        report.add("kv cache", **{f"{kept.name}_place": kept.place})
