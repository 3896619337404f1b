"""Stored programs: built once, loaded ever after, never a wrong or a damaged one."""

import dataclasses
import stat
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import FIXTURES, LIMITS

import jaxserve
from jaxserve import program_key
from jaxserve.executables import ExecutableStore, Program

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
    for name in (*traced, "identity", "config"):
        assert edited[name], name
    for name in ("scheduler", "engine", "llm", "output", "cli", "request", "executables", "build", "metrics"):
        assert not edited[name], name


def test_all_that_runs_while_a_program_is_traced_is_among_the_sources(programs_dir: str) -> None:
    """By evidence: a module of ours that has a say in a program, and is not watched, would serve stale code."""
    with jaxserve.LLM(str(FIXTURES / "qwen3"), **LIMITS, cache_dir=programs_dir) as llm:
        made = llm._built.programs
    programs = [*made.programs(), *dataclasses.replace(made, host_tier=True).programs(), made.zeros()]
    root = Path(program_key.__file__).parent.parent
    ran: set[Path] = set()

    def watch(frame, event: str, _: object) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(root) and path.is_relative_to(root / "tests") is False:
            ran.add(path)

    for one in {p.name.split()[0]: p for p in programs}.values():
        jitted = jax.jit(one.function, out_shardings=one.out_shardings)
        sys.setprofile(watch)
        try:
            jitted.trace(*one.args)
        finally:
            sys.setprofile(None)
    ours = {path for path in ran if path.parts[len(root.parts)] in ("jaxserve", "pallas_kernels")}
    assert root / "jaxserve" / "decoder.py" in ours
    assert ours <= set(program_key.sources())


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


def test_an_engine_compiles_once_and_never_takes_another_models_programs(tmp_path: Path) -> None:
    """Tallies of three starts: new, again, and of a model that differs in one number of its config."""
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
    assert (other["loaded"], other["compiled"]) == (0, total)
    assert all("other model" in line for line in other["why_compiled"])


def test_every_static_of_an_engines_programs_is_in_their_keys(tmp_path: Path) -> None:
    """Two program sets that differ in one field share no key of a program that the field shapes."""
    options = {**LIMITS, "max_num_seqs": 1, "cache_dir": str(tmp_path)}
    made = store(tmp_path)
    with jaxserve.LLM(str(FIXTURES / "llama3"), **options) as llm:
        programs = llm._built.programs
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
