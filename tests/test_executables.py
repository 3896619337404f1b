"""Stored programs: built once, loaded ever after, never a wrong or a damaged one."""

import dataclasses
import errno
import gc
import os
import socket
import stat
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import FIXTURES, LIMITS

import jaxserve
from jaxserve import entries, executables, program_key, warmup
from jaxserve.config import ConfigError, EngineConfig
from jaxserve.executables import ExecutableStore, Program
from jaxserve.programs import ProgramSet
from jaxserve.sharding import make_mesh

X = jax.ShapeDtypeStruct((4,), jnp.float32, sharding=jax.sharding.SingleDeviceSharding(jax.devices()[0]))


def program(name: str = "double", by: float = 2.0, about: str = "", args: tuple = (X,), **more) -> Program:
    return Program(name, lambda x: x * by, args, about=about or f"by {by}", **more)


def store(folder: Path) -> ExecutableStore:
    return ExecutableStore(folder, jax.devices()[:1])


def files(folder: Path) -> list[Path]:
    return sorted((folder / "executables").iterdir())


def outcome(made: ExecutableStore) -> tuple[int, int, int]:
    return made.tally.loaded, made.tally.compiled, len(made.tally.discarded)


def test_the_second_build_loads(tmp_path: Path) -> None:
    programs = [program("double"), program("triple", 3.0)]
    told: list[tuple[int, int]] = []
    for expected in ((0, 2, 0), (2, 0, 0)):
        made = store(tmp_path)
        built = made.build_all(programs, progress=lambda done, total: told.append((done, total)))
        assert outcome(made) == expected
        assert made.tally.seconds > 0
        assert np.asarray(built["double"](np.ones(4, np.float32))).tolist() == [2.0] * 4
        assert np.asarray(built["triple"](np.ones(4, np.float32))).tolist() == [3.0] * 4
    assert told == [(1, 2), (2, 2)] * 2
    assert len(files(tmp_path)) == 2


CHANGED = {
    "name": program("other"),
    "statics": program(by=3.0),
    "shape": program(args=(jax.ShapeDtypeStruct((5,), jnp.float32, sharding=X.sharding),)),
    "dtype": program(args=(jax.ShapeDtypeStruct((4,), jnp.bfloat16, sharding=X.sharding),)),
    "device": program(
        args=(jax.ShapeDtypeStruct((4,), jnp.float32, sharding=jax.sharding.SingleDeviceSharding(jax.devices()[1])),)
    ),
    "donation": program(donate=(0,)),
    "output sharding": program(out_shardings=X.sharding),
}


@pytest.mark.parametrize("what", CHANGED)
def test_a_changed_program_never_finds_the_old_one(what: str, tmp_path: Path) -> None:
    made = store(tmp_path)
    assert made.path(CHANGED[what]) != made.path(program())
    assert made.path(program()) == store(tmp_path).path(program())


@pytest.mark.parametrize(
    "what",
    ["platform", "jax", "jaxlib", "device", "flags", "options", "cpu", "sources"],
)
def test_a_changed_environment_never_finds_the_old_one(what: str, tmp_path: Path) -> None:
    made, other = store(tmp_path), store(tmp_path)
    assert what in other.environment
    other.environment = {**other.environment, what: "another"}
    assert made.path(program()) != other.path(program())


@pytest.mark.parametrize(
    ("option", "value"), [("jax_default_matmul_precision", "highest"), ("jax_numpy_dtype_promotion", "strict")]
)
def test_a_changed_option_of_jax_is_another_environment(option: str, value: str) -> None:
    before, old = program_key.environment(jax.devices()), getattr(jax.config, option)
    jax.config.update(option, value)
    try:
        after = program_key.environment(jax.devices())
    finally:
        jax.config.update(option, old)
    assert program_key.reason(after, [before]) == ("options", "jax options changed")
    assert program_key.environment(jax.devices()) == before


def test_a_changed_xla_flag_is_another_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    before, flags = program_key.environment(jax.devices()), os.environ.get("XLA_FLAGS", "")
    monkeypatch.setenv("XLA_FLAGS", f"{flags} --xla_cpu_enable_fast_math=true")
    assert program_key.reason(program_key.environment(jax.devices()), [before]) == ("flags", "XLA flags changed")
    monkeypatch.setenv("XLA_FLAGS", f"{flags} --xla_dump_to=/tmp")
    assert program_key.environment(jax.devices()) == before


def test_editing_a_traced_source_changes_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every module of ours that a step is traced through is watched; host policy is not."""
    root = Path(program_key.__file__).parent
    before = program_key.source_hash()
    read = Path.read_bytes
    edited = {}
    for path in sorted(root.glob("*.py")):
        monkeypatch.setattr(Path, "read_bytes", lambda self, path=path: read(self) + b"#" * (self == path))
        edited[path.stem] = program_key.source_hash() != before
    traced = ("sampler", "decoder", "layers", "layer_spec", "moe", "experts", "programs", "rope", "buckets", "batch")
    for name in (*traced, "config"):
        assert edited[name], name
    for name in ("scheduler", "engine", "llm", "output", "cli", "request", "executables", "build", "metrics"):
        assert not edited[name], name


def planned(folder: Path, **options) -> ProgramSet:
    """The programs of a tiny engine, compiled for nothing."""
    config = EngineConfig(model=str(FIXTURES / "qwen3"), **{**LIMITS, "max_num_seqs": 1, **options})
    return warmup.plan(config, make_mesh(1), store(folder))


def test_all_that_runs_while_a_program_is_traced_is_among_the_sources(tmp_path: Path) -> None:
    """By evidence: a module of ours that has a say in a program, and is not watched, would serve stale code."""
    made = planned(tmp_path, host_kv_gib=0.01, watermark_config={"key": 7})
    root = Path(program_key.__file__).parent.parent
    ran: set[Path] = set()

    def watch(frame, event: str, _: object) -> None:
        if event == "call":
            ran.add(Path(frame.f_code.co_filename))

    for one in {p.name.split()[0]: p for p in [*made.programs(), made.zeros()]}.values():
        jitted = jax.jit(one.function, out_shardings=one.out_shardings)
        gc.disable()  # what an engine before this one leaves to do is not ours
        sys.setprofile(watch)
        try:
            jitted.trace(*one.args)
        finally:
            sys.setprofile(None)
            gc.enable()
    ours = {path for path in ran if path.is_relative_to(root / "jaxserve") or path.is_relative_to(root / "serve")}
    ours |= {path for path in ran if path.is_relative_to(root / "pallas_kernels")}
    assert root / "jaxserve" / "decoder.py" in ours
    assert ours - {root / "jaxserve" / "llm.py"} <= set(program_key.sources()), "llm.py listens for compilations"


def test_the_sources_follow_every_import() -> None:
    """The quick reader of imports finds what Python's own parser finds."""
    from tests.test_house import imports_of, jaxserve_module

    found = set(program_key.sources())
    root = Path(program_key.__file__).parent.parent
    for path in found:
        for name in imports_of(path):
            module = jaxserve_module(name)
            if module is None or module in program_key.NOT_TRACED:
                continue
            place = root.joinpath(*module.split("."))
            assert place.with_suffix(".py") in found or place / "__init__.py" in found, f"{path}: {module}"


DAMAGE = {
    "truncated": lambda data: data[: len(data) // 2],
    "empty": lambda data: b"",
    "garbage": lambda data: b"garbage" * 100,
    "one bit": lambda data: data[:-10] + bytes([data[-10] ^ 1]) + data[-9:],
    "another version": lambda data: data.replace(b"jaxserve-exe-2", b"jaxserve-exe-1"),
}


@pytest.mark.parametrize("how", DAMAGE)
def test_a_damaged_entry_is_discarded_with_a_reason_and_rebuilt(how: str, tmp_path: Path, caplog) -> None:
    store(tmp_path).build(program())
    (path,) = files(tmp_path)
    path.write_bytes(DAMAGE[how](path.read_bytes()))
    made = store(tmp_path)
    built = made.build(program())
    assert np.asarray(built(np.ones(4, np.float32))).tolist() == [2.0] * 4
    assert outcome(made) == (0, 1, 1)
    assert path.name in made.tally.discarded[0]
    assert "discarding a stored executable" in caplog.text
    again = store(tmp_path)
    again.build(program())
    assert outcome(again) == (1, 0, 0)
    assert files(tmp_path) == [path], "no drafts are left"


def test_the_folder_is_private(tmp_path: Path) -> None:
    """Its entries are code that will be run."""
    store(tmp_path / "cache").build(program())
    assert stat.S_IMODE((tmp_path / "cache" / "executables").stat().st_mode) == 0o700
    assert [stat.S_IMODE(path.stat().st_mode) for path in files(tmp_path / "cache")] == [0o600]


def test_what_belongs_to_somebody_else_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog) -> None:
    store(tmp_path).build(program())
    made, uid = store(tmp_path), os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: uid + 1)
    with pytest.raises(ConfigError, match=f"cache_dir: .* belongs to user {uid}, not to us"):
        store(tmp_path)
    assert made._load(made._job(program())) is None
    assert f"belongs to user {uid}" in caplog.text


def test_links_are_refused(tmp_path: Path, caplog) -> None:
    real = tmp_path / "real"
    store(real).build(program())
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "executables").symlink_to(real / "executables")
    with pytest.raises(ConfigError, match=r"cache_dir: .* is a link"):
        store(tmp_path / "other")
    (path,) = files(real)
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    made = store(real)
    made.build(program())
    assert outcome(made) == (0, 1, 1)
    assert "is a link" in caplog.text
    assert not path.is_symlink()
    assert (tmp_path / "elsewhere").is_file(), "only the link is removed"


def test_an_entry_that_others_may_write_is_not_run(tmp_path: Path, caplog) -> None:
    store(tmp_path).build(program())
    files(tmp_path)[0].chmod(0o666)
    made = store(tmp_path)
    made.build(program())
    assert outcome(made) == (0, 1, 1)
    assert "may be written by others" in caplog.text


def full(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("where", ["os.ftruncate", "os.replace", "entries._lock", "entries.prepare"])
def test_a_full_disk_costs_the_next_start_and_not_this_one(where: str, tmp_path: Path, monkeypatch, caplog) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(*{"os": (os, where[3:]), "entries": (entries, where[8:])}[where.partition(".")[0]], full)
        made = store(tmp_path)
        built = made.build_all([program(), program("triple", 3.0)])
    assert np.asarray(built["double"](np.ones(4, np.float32))).tolist() == [2.0] * 4
    assert outcome(made) == (0, 2, 0)
    assert made.tally.report()["not_stored"] == ["2 x No space left on device"]
    assert (made.tally.bytes, made.used) == (0, set())
    assert caplog.text.count("cannot be stored in") == 1
    assert f"{tmp_path / 'executables'}: No space left on device" in caplog.text
    assert not any((tmp_path / "executables").glob("*")), "no drafts are left"
    again = store(tmp_path)
    again.build(program())
    assert (again.tally.compiled, again.tally.not_stored) == (1, {})


def listen(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(os.path.relpath(path))


STRANGE = {"pipe": os.mkfifo, "socket": listen, "folder": Path.mkdir}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("suffix", ["", ".new"])
@pytest.mark.parametrize("what", STRANGE)
def test_what_is_no_file_is_replaced(what: str, suffix: str, tmp_path: Path, monkeypatch, caplog) -> None:
    """And nothing waits for the other end of a pipe."""
    made = store(tmp_path)
    path = made.path(program())
    monkeypatch.chdir(path.parent)
    STRANGE[what](Path(f"{path}{suffix}"))
    assert [entry.strange for entry in entries.scan(path.parent)] == ([] if suffix else [f"is a {what}"])
    made.build_all([program()], first=set())
    assert outcome(made) == (0, 1, 0 if suffix else 1)
    assert suffix or f"is a {what}" in caplog.text
    assert made.tally.not_stored == {}
    assert files(tmp_path) == [path]
    assert entries.whole(path)


def test_a_folder_with_something_in_the_place_of_an_entry_is_left(tmp_path: Path, caplog) -> None:
    made = store(tmp_path)
    (made.path(program()) / "mine").mkdir(parents=True)
    built = made.build(program())
    assert np.asarray(built(np.ones(4, np.float32))).tolist() == [2.0] * 4
    assert made.tally.report()["not_stored"] == ["1 x Is a directory"]
    assert "is a folder" in caplog.text
    assert (made.path(program()) / "mine").is_dir()


def slow(seconds: float, name: str = "slow") -> Program:
    def function(x: jax.Array) -> jax.Array:
        time.sleep(seconds)
        return x + 1

    return Program(name, function, (X,))


def test_two_that_start_together_compile_a_program_once(tmp_path: Path) -> None:
    """Also where each finds the other's work in its way: it does what is free first."""
    stores = [store(tmp_path), store(tmp_path)]
    programs = [slow(0.2, f"slow {i}") for i in range(6)]
    with ThreadPoolExecutor(2) as pool:
        built = list(pool.map(lambda made: made.build_all(programs, workers=2), stores))
    assert [sorted(one) for one in built] == [sorted(p.name for p in programs)] * 2
    assert sum(made.tally.compiled for made in stores) == len(programs)
    assert sum(made.tally.loaded for made in stores) == len(programs)
    assert len(files(tmp_path)) == len(programs), "no drafts are left"


def test_a_dead_ones_lock_and_draft_do_no_harm(tmp_path: Path) -> None:
    made = store(tmp_path)
    path = made.path(program())
    script = "import fcntl, os, sys, signal\n"
    script += "fd = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT, 0o600); fcntl.flock(fd, fcntl.LOCK_EX)\n"
    script += "os.write(fd, b'half an entry'); os.kill(os.getpid(), signal.SIGKILL)"
    subprocess.run([sys.executable, "-c", script, f"{path}.new"], check=False, timeout=30)
    assert Path(f"{path}.new").read_bytes() == b"half an entry"
    made.build(program())
    assert outcome(made) == (0, 1, 0)
    assert files(tmp_path) == [path]


def test_one_that_hangs_is_not_waited_for_forever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executables, "WAIT_SECONDS", 0.2)
    made = store(tmp_path)
    with entries.making(made.path(program()), 0.0) as draft:
        assert draft is not None
        built = made.build_all([program(), program("triple", 3.0)])
        assert np.asarray(built["double"](np.ones(4, np.float32))).tolist() == [2.0] * 4
    assert outcome(made) == (0, 2, 0)
    assert [path.name.split("-")[0] for path in files(tmp_path)] == ["triple"], "the other's draft is the other's"


def test_a_program_that_fails_leaves_no_draft(tmp_path: Path) -> None:
    def broken(x: jax.Array) -> jax.Array:
        raise ValueError("no such program")

    with pytest.raises(ValueError, match="no such program"):
        store(tmp_path).build(Program("broken", broken, (X,)))
    assert files(tmp_path) == []


def test_those_used_longest_ago_go_when_there_is_no_room(tmp_path: Path) -> None:
    programs = [program(f"p{i}", by=float(i)) for i in range(4)]
    store(tmp_path).build_all(programs)
    for age, path in enumerate(files(tmp_path)):
        os.utime(path, (time.time() - 100 + age, time.time() - 100 + age))
    size = files(tmp_path)[0].stat().st_size
    made = ExecutableStore(tmp_path, jax.devices()[:1], int(2.5 * size))
    made.build_all(programs[:1])
    assert made.tally.evicted == 2
    assert [path.name[:2] for path in files(tmp_path)] == ["p0", "p3"], "the oldest is in use"
    least = ExecutableStore(tmp_path, jax.devices()[:1], 0)
    least.build_all([programs[0], programs[3]], first={"p0"})
    assert [path.name[:2] for path in files(tmp_path)] == ["p0", "p3"], "what this start uses stays, loaded or not"


def test_the_first_are_loaded_at_once_and_the_others_when_asked_for(tmp_path: Path) -> None:
    programs = [program(f"p{i}", by=float(i)) for i in range(6)]
    store(tmp_path).build_all(programs[:5])
    made = store(tmp_path)
    built = made.build_all(programs, first={"p0"})
    assert set(built) == {"p0", "p5"}, "what is not there is compiled before anybody runs"
    assert made.tally.report() | {"why_compiled": []} == {
        "loaded": 1,
        "compiled": 1,
        "discarded": [],
        "why_compiled": [],
        "still_to_load": 4,
    }
    built.load_rest()
    assert np.asarray(built["p4"](np.ones(4, np.float32))).tolist() == [4.0] * 4
    built.finish()
    assert outcome(made) == (5, 1, 0)
    assert made.tally.waiting == 0
    assert "still_to_load" not in made.tally.report()
    with pytest.raises(KeyError):
        built["p6"]
    built.close()


def test_a_damaged_entry_is_rebuilt_however_late_it_is_found(tmp_path: Path) -> None:
    programs = [program("p0", 1.0), program("p1", 3.0)]
    store(tmp_path).build_all(programs)
    path = next(path for path in files(tmp_path) if path.name.startswith("p1"))
    path.write_bytes(DAMAGE["one bit"](path.read_bytes()))
    made = store(tmp_path)
    built = made.build_all(programs, first={"p0"})
    assert np.asarray(built["p1"](np.ones(4, np.float32))).tolist() == [3.0] * 4
    assert outcome(made) == (1, 1, 1)
    path.write_bytes(b"short")
    again = store(tmp_path)
    assert set(again.build_all(programs, first={"p0"})) == {"p0", "p1"}, "a torn file shows before anybody runs"


WHY = {
    "jax": ({"jax": "0.11.1"}, {"jax": "0.11.2"}, ("jax", "jax 0.11.1 -> 0.11.2")),
    "sources": ({"sources": "a"}, {"sources": "b"}, ("sources", "sources changed")),
    "shape": ({"arguments": "a"}, {"arguments": "b"}, ("arguments", "new shape")),
    "two": (
        {"jaxlib": "1", "sources": "a"},
        {"jaxlib": "2", "sources": "b"},
        ("jaxlib", "jaxlib 1 -> 2, sources changed"),
    ),
    "nothing there": (None, {"jax": "0.11.2"}, ("new", "never compiled")),
    "another platform": ({"platform": "gpu"}, {}, ("new", "never compiled")),
}


@pytest.mark.parametrize("what", WHY)
def test_a_miss_has_a_reason(what: str) -> None:
    old, new, expected = WHY[what]
    base = {"platform": "cpu", "model": "m"}
    stored = [] if old is None else [{**base, "model": "other", **old, "flags": "x"}, {**base, **old}]
    assert program_key.reason({**base, **new}, stored) == expected


def test_the_reason_is_found_in_the_store(tmp_path: Path) -> None:
    store(tmp_path).build_all([program(), program("other", 5.0)])
    made = store(tmp_path)
    made.environment = {**made.environment, "jax": "0.0.1"}
    made.build(program())
    assert made.tally.report()["why_compiled"] == [f"1 x jax {jax.__version__} -> 0.0.1"]
    assert made.tally.kinds == {"jax": 1}


def test_what_was_compiled_without_the_device_is_found_on_it(tmp_path: Path) -> None:
    """A machine with the device has a driver, of which the one that compiled knew nothing; its own entries go first."""

    def on(runtime: str) -> ExecutableStore:
        made = store(tmp_path)
        made.environment = {**made.environment, "runtime": runtime}
        return made

    on(program_key.ANY_RUNTIME).build(program())
    made = on("driver 1.2")
    made.build_all([program(), program("other", 5.0)], first=set())
    assert made.has(program())
    found = made.build(program())
    assert np.asarray(found(np.ones(4, np.float32))).tolist() == [2.0] * 4
    assert made.tally.untuned == 1
    assert made.tally.report()["compiled_without_the_device"] == 1
    made._make(made._job(program()), None)
    with entries.making(made.path(program()), 0.0) as draft:
        made._make(made._job(program()), draft)
    again = on("driver 1.2")
    again.build(program())
    assert (again.tally.loaded, again.tally.untuned) == (1, 0)


def test_only_flags_that_matter_are_in_the_key() -> None:
    read = program_key.xla_flags
    assert read("") == read("--xla_dump_to=/tmp/x  --xla_force_host_platform_device_count=8") == []
    assert read("--b=1 --a=2") == read("--a=1 --b=1 --a=2") == ["a=2", "b=1"]
    assert read("--a") != read("--a=true") != read("")


def test_a_folder_that_others_may_write_is_not_trusted(tmp_path: Path) -> None:
    folder = tmp_path / "executables"
    folder.mkdir(mode=0o777)
    folder.chmod(0o777)
    store(tmp_path).build(program())
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_jaxs_own_cache_is_left_as_it_was(tmp_path: Path) -> None:
    for value in (True, False):
        jax.config.update("jax_enable_compilation_cache", value)
        try:
            store(tmp_path).build_all([program(f"p{i}{value}", by=float(i)) for i in range(4)])
            assert jax.config.jax_enable_compilation_cache is value
        finally:
            jax.config.update("jax_enable_compilation_cache", True)


def test_a_program_never_comes_from_jaxs_own_cache(tmp_path: Path) -> None:
    """Also where jax has used its cache before: what comes out of it cannot be stored again."""
    hits: list[str] = []

    def listen(event: str, **_: object) -> None:
        hits.extend([event] * ("cache_hits" in event))

    least = jax.config.jax_persistent_cache_min_compile_time_secs
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.monitoring.register_event_listener(listen)
    try:
        for _ in range(2):
            jax.jit(lambda x: x * 7.25 + 1).lower(X).compile()
        assert hits, "jax's cache is in use"
        hits.clear()
        for folder in "ab":
            store(tmp_path / folder).build(program(by=7.25))
        assert not hits
        jax.jit(lambda x: x * 7.25 + 1).lower(X).compile()
        assert hits, "and is in use again"
    finally:
        jax.monitoring.unregister_event_listener(listen)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", least)


def test_a_program_that_cannot_be_compiled_says_so(tmp_path: Path) -> None:
    def broken(x: jax.Array) -> jax.Array:
        raise ValueError("no such program")

    with pytest.raises(ValueError, match="no such program"):
        store(tmp_path).build_all([program(), Program("broken", broken, (X,))])
    assert jax.config.jax_enable_compilation_cache


def test_an_engine_compiles_once_and_takes_of_another_model_what_serves_any(tmp_path: Path) -> None:
    """Tallies of three starts: new, again, and of a model with as many tokens: its samplers are there."""
    options = {**LIMITS, "max_num_seqs": 1, "cache_dir": str(tmp_path)}

    def start(family: str) -> dict:
        with jaxserve.LLM(str(FIXTURES / family), **options) as llm:
            llm.generate([[1, 2, 3]], max_tokens=4, temperature=0.5, progress=False)
            assert llm.compilations_after_ready == 0
            llm._built.runner.compiled.finish()
            return llm.report()["executables"]

    first, second, other = start("llama3"), start("llama3"), start("ministral3")
    total = first["compiled"]
    assert total > 10
    assert first == {"loaded": 0, "compiled": total, "discarded": [], "why_compiled": [f"{total} x never compiled"]}
    assert second == {"loaded": total, "compiled": 0, "discarded": []}
    assert other["loaded"] + other["compiled"] == total
    assert total / 2 < other["loaded"] < total
    assert all("other model" in line for line in other["why_compiled"])


def test_every_static_of_an_engines_programs_is_in_their_keys(tmp_path: Path) -> None:
    """Two program sets that differ in one field share no key of a program that the field shapes."""
    made, programs = store(tmp_path), planned(tmp_path)
    keys = {p.name: made.path(p) for p in programs.programs()}
    assert keys == {p.name: made.path(p) for p in programs.programs()}
    assert len(set(keys.values())) == len(keys)
    cfg = programs.cfg
    mixer = cfg.layers[0].mixer
    rope = dataclasses.replace(mixer, rope=dataclasses.replace(mixer.rope, factor=9.0))
    window = dataclasses.replace(cfg.layers[0], mixer=dataclasses.replace(mixer, window=7))
    changes = {
        "norm_eps": dataclasses.replace(programs, cfg=dataclasses.replace(cfg, norm_eps=1e-3)),
        "rope": dataclasses.replace(
            programs, cfg=dataclasses.replace(cfg, layers=tuple(dataclasses.replace(s, mixer=rope) for s in cfg.layers))
        ),
        "window": dataclasses.replace(programs, cfg=dataclasses.replace(cfg, layers=(window, *cfg.layers[1:]))),
        "page_size": dataclasses.replace(programs, page_size=16),
        "width": dataclasses.replace(programs, width=5),
        "num_pages": dataclasses.replace(programs, num_pages=7),
    }
    for name, changed in changes.items():
        others = {p.name: made.path(p) for p in changed.programs()}
        same = {n for n in keys if others.get(n) == keys[n]}
        assert not any(n.startswith("layers") for n in same), name
        assert {"greedy 1", "shaped 1", "set_slot"} <= same, name
