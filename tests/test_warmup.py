"""``jaxserve warmup``, and what it is for: a start in another process compiles nothing."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import jax
import pytest
from tiny import FIXTURES, LIMITS

from jaxserve import build, entries, memory, targets, warmup
from jaxserve.cli import main
from jaxserve.config import ConfigError, EngineConfig
from jaxserve.executables import ExecutableStore, Tally
from jaxserve.sharding import make_mesh

ROOT = Path(__file__).resolve().parent.parent
OPTIONS = {**LIMITS, "max_num_seqs": 1}
MODEL = FIXTURES / "llama3"
FLAGS = [
    *("--max-num-seqs", "1", "--max-num-batched-tokens", "32", "--page-size", "8", "--dtype", "float32"),
    *("--kv-cache-memory-bytes", str(4 << 20)),
]


def config_only(folder: Path) -> Path:
    """A checkpoint without weights."""
    folder.mkdir()
    shutil.copy(MODEL / "config.json", folder)
    return folder


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store that another process has filled, from a config alone."""
    folder = tmp_path_factory.mktemp("filled")
    line = [sys.executable, "-m", "jaxserve", "warmup", str(config_only(folder / "model")), *FLAGS, "--json"]
    done = subprocess.run(
        [*line, "--cache-dir", str(folder / "cache")], capture_output=True, text=True, cwd=ROOT, timeout=280, check=True
    )
    said = json.loads(done.stdout)
    assert said["compiled"] == said["programs"] > 10
    assert said["bytes"] > 0
    return folder / "cache"


def script(cwd: Path, cache: Path, root: Path = ROOT, **env: str) -> dict:
    """A start in a process of its own."""
    code = "import json, jaxserve\n"
    code += f"with jaxserve.LLM({str(MODEL)!r}, **{ {**OPTIONS, 'cache_dir': str(cache)}!r}) as llm:\n"
    code += "    out = llm.generate([[1, 2, 3]], max_tokens=4, progress=False)\n"
    code += "    llm._built.runner.compiled.finish()\n"
    code += "    report = llm.report() | {'text': out[0].outputs[0].token_ids}\n"
    code += "    print(json.dumps(report, default=str))"
    surroundings = {**os.environ, "PYTHONPATH": str(root), **env}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=cwd, env=surroundings, timeout=280, check=True
    )
    return json.loads(done.stdout)


def test_a_start_after_a_warm_up_compiles_nothing(filled: Path, tmp_path: Path) -> None:
    """Counted; in another working directory, with another environment, more visible devices and dump flags."""
    for env in ({}, {"HOME": str(tmp_path), "XLA_FLAGS": f"--xla_dump_to={tmp_path}", "JAX_NUM_CPU_DEVICES": "3"}):
        report = script(tmp_path, filled, **env)
        assert report["executables"]["compiled"] == 0, env
        assert report["executables"]["loaded"] > 10
        assert report["executables"]["discarded"] == []
        assert report["compilations_after_ready"] == 0


def test_flags_that_matter_recompile_and_are_named(filled: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=true")
    assert not any(stored(filled).values())


def stored(cache: Path, **options) -> dict[str, bool]:
    """For each program of the configuration whether this process would find it in the store."""
    config = EngineConfig(model=str(MODEL), **OPTIONS, **options)
    store = ExecutableStore(cache, jax.devices()[:1])
    programs = warmup.plan(config, make_mesh(1), store)
    return {program.name: store.has(program) for program in [*programs.programs(), programs.zeros()]}


def test_a_warm_up_is_for_starts_with_and_without_a_sidecar(filled: Path, tmp_path: Path) -> None:
    ways = ({}, {"host_kv_gib": 0.0}, {"load_format": "sidecar"}, {"disk_kv_path": str(tmp_path)}, {"sidecar": "auto"})
    found = [stored(filled, **options) for options in ways]
    assert all(all(one.values()) for one in found)
    plain, without, *kept = map(len, found)
    assert plain == without
    assert {count - plain for count in kept} == {15}, "those that move KV pages to the host's memory and back"


def test_a_changed_source_line_recompiles(filled: Path, tmp_path: Path) -> None:
    """In a copy of the sources: as they are they find everything, with a line more nothing."""
    for room in ("jaxserve", "pallas_kernels", "checkpoints"):
        shutil.copytree(ROOT / room, tmp_path / room, ignore=shutil.ignore_patterns("__pycache__"))
    code = f"import sys; sys.path[:0] = [{str(tmp_path)!r}, {str(ROOT / 'tests')!r}, {str(ROOT)!r}]\n"
    code += "import jaxserve; from pathlib import Path; from test_warmup import stored\n"
    code += f"assert jaxserve.__file__.startswith({str(tmp_path)!r})\n"
    code += f"print(sum(stored(Path({str(filled)!r})).values()))"

    def found() -> int:
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, timeout=120, check=True
        )
        return int(done.stdout)

    assert found() == len(stored(filled)) == sum(stored(filled).values())
    for name in ("jaxserve/decoder.py", "pallas_kernels/paged_attention/reference.py"):
        path = tmp_path / name
        text = path.read_text()
        path.write_text(text + "\n")
        assert found() == 0, name
        path.write_text(text)
    with (tmp_path / "jaxserve" / "scheduler.py").open("a") as file:
        file.write("\n")
    assert found() == len(stored(filled)), "host policy shapes no program"


def test_a_second_warm_up_finds_everything(filled: Path, capsys) -> None:
    assert main(["warmup", str(MODEL), *FLAGS, "--cache-dir", str(filled)]) == 0
    said = capsys.readouterr().out
    assert " 0 compiled, " in said
    assert "MiB in" in said


def test_the_store_is_listed_verified_and_pruned(filled: Path, tmp_path: Path, capsys, caplog) -> None:
    cache = tmp_path / "cache"
    shutil.copytree(filled, cache)
    where = ["--cache-dir", str(cache)]

    def say(*words: str) -> dict:
        main(["warmup", *words, *where, "--json"])
        return json.loads(capsys.readouterr().out)

    listed = say("--list")["entries"]
    assert len(listed) > 10
    assert {entry["stale"] for entry in listed} == {None}
    assert {entry["device"] for entry in listed} == {"cpu x1"}
    assert {entry["model"].split()[0] for entry in listed} == {"llama", "any"}
    assert main(["warmup", "--list", *where]) == 0
    assert f"{len(listed)} programs" in capsys.readouterr().out
    assert say("--verify") == {"checked": len(listed), "bad": {}}

    folder = cache / "executables"
    damaged, torn, old = sorted(folder.iterdir())[:3]
    data = damaged.read_bytes()
    damaged.write_bytes(data[:-9] + bytes([data[-9] ^ 1]) + data[-8:])
    torn.write_bytes(torn.read_bytes()[:100])
    facts, code = entries.read(old)
    old.write_bytes(entries.encode({**facts, "jax": "0.0.1"}, bytes(code)))
    assert set(say("--verify")["bad"]) == {damaged.name, torn.name}
    assert main(["warmup", "--verify", *where]) == 1
    said = capsys.readouterr().out
    assert "2 cannot be used" in said
    assert "--prune removes" in said
    stale = {entry["file"]: entry["stale"] for entry in say("--list")["entries"] if entry["stale"]}
    assert stale == {old.name: f"jax 0.0.1 -> {jax.__version__}", torn.name: "kept in another format"}
    draft, held = folder / "double-1.new", folder / "double-2.new"
    draft.write_bytes(b"half an entry")
    (folder / "notes.txt").write_text("not ours")
    (folder / "empty").mkdir()
    (folder / "mine" / "things").mkdir(parents=True)
    os.mkfifo(folder / "pipe")
    others = {"notes.txt": "kept in another format", "pipe": "is a pipe", "empty": "is a folder", "mine": "is a folder"}
    stale = {entry["file"]: entry["stale"] for entry in say("--list")["entries"] if entry["stale"]}
    assert others.items() <= stale.items()
    bad = say("--verify")["bad"]
    assert set(bad) == {damaged.name, torn.name, *others}
    assert bad["pipe"] == "is a pipe"
    with entries.making(folder / "double-2", 0.0):
        gone = {old.name, torn.name, damaged.name, draft.name, "notes.txt", "pipe", "empty"}
        assert set(say("--prune")["removed"]) == gone
        assert held.exists(), "somebody is at it"
    assert "mine cannot be removed: Directory not empty" in caplog.text
    shutil.rmtree(folder / "mine")
    assert main(["warmup", "--verify", *where]) == 0
    assert "all are whole" in capsys.readouterr().out
    assert len(list(folder.iterdir())) == len(listed) - 3
    assert say("--prune-to", "0")["bytes"] > 0
    assert list(folder.iterdir()) == []
    assert say("--list")["entries"] == []


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--target", "gtx1"], "--target gtx1: no such GPU is known"),
        (["--target", "h200"], "--kv-cache-memory-bytes must be given"),
        (["--prune-to", "-1"], "--prune-to must"),
        (["--page-size", "0"], "--page-size must"),
        (["--cache-gib", "-1"], "--cache-gib must"),
        (["--list"], "leave out"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_bad_wishes_are_one_line(arguments, named, capsys, monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(targets, "_check_compiler", lambda: None)
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    assert main(["warmup", str(MODEL), *arguments, "--cache-dir", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert named in error


@pytest.mark.parametrize("what", [["--list"], ["--verify"], ["--prune"], ["--prune-to", "1"]])
def test_a_mistyped_folder_is_not_made(what: list[str], tmp_path: Path, capsys) -> None:
    assert main(["warmup", *what, "--cache-dir", str(tmp_path / "mistyped")]) == 1
    assert f"--cache-dir {tmp_path}/mistyped: there is no such folder" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("what", [[], ["--list"]])
def test_a_folder_without_a_name_is_refused(what: list[str], capsys) -> None:
    assert main(["warmup", *what, "--cache-dir", ""]) == 2
    assert "--cache-dir must name a folder, got ''" in capsys.readouterr().err


@pytest.mark.parametrize("more", [[], ["--json"]])
def test_what_could_not_be_stored_fails_the_warm_up(more: list[str], tmp_path: Path, capsys, monkeypatch) -> None:
    tally = Tally(compiled=5, not_stored=Counter({"No space left on device": 3}))
    monkeypatch.setattr(warmup, "warm", lambda *_: warmup.Summary(5, tally, 1.0, tmp_path, ()))
    assert main(["warmup", str(MODEL), "--cache-dir", str(tmp_path), *more]) == 1
    said = capsys.readouterr()
    if more:
        assert json.loads(said.out)["not_stored"] == ["3 x No space left on device"]
    else:
        assert f"3 programs could not be stored in {tmp_path}: No space left on device" in said.err


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_without_a_terminal_it_says_how_far_it_is_and_came(number: int, status: int, tmp_path: Path) -> None:
    code = "import signal, sys; from jaxserve.cli import main; from jaxserve.commands import warmup\n"
    code += "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # a shell's job in the background ignores it
    code += "warmup.LINE_SECONDS = 0.2; sys.exit(main(sys.argv[1:]))"
    line = [sys.executable, "-c", code, "warmup", str(MODEL), *FLAGS, "--cache-dir", str(tmp_path)]
    with subprocess.Popen(line, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT) as running:
        until = time.monotonic() + 120
        while not any((tmp_path / "executables").glob("*-*[0-9a-f]")) and time.monotonic() < until:
            time.sleep(0.05)
        time.sleep(0.3)
        running.send_signal(number)
        out, said = running.communicate(timeout=120)
    assert (running.returncode, out) == (status, "")
    last = re.fullmatch(r"jaxserve: stopped: (\d+) of (\d+) programs are stored in .*", said.splitlines()[-1])
    assert last is not None, said
    kept = [path for path in (tmp_path / "executables").iterdir() if entries.whole(path)]
    assert 0 < int(last[1]) == len(kept) < int(last[2])
    assert re.search(rf"^\d+ of {last[2]} programs$", said, re.MULTILINE)


def test_a_machine_without_the_gpus_compiler_says_what_it_lacks(monkeypatch) -> None:
    def find_spec(name: str):
        return None if "plugin" in name or name == "nvidia" else object()

    monkeypatch.setattr(targets.importlib.util, "find_spec", find_spec)
    with pytest.raises(ConfigError, match=f"jax-cuda13-plugin=={jax.__version__}"):
        targets.find("h200")
    monkeypatch.setattr(targets.importlib.util, "find_spec", lambda name: None if name == "nvidia" else object())
    monkeypatch.setattr(targets.importlib.metadata, "version", lambda name: "0.0.1")
    with pytest.raises(ConfigError, match=r"is 0\.0\.1, and jax is"):
        targets.find("h200")
    monkeypatch.setattr(targets.importlib.metadata, "version", lambda name: jax.__version__)
    monkeypatch.setattr(targets.shutil, "which", lambda name: None)
    with pytest.raises(ConfigError, match="ptxas is not there"):
        targets.find("h200")


def test_a_target_may_be_a_file(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(targets, "_check_compiler", lambda: None)
    path = tmp_path / "gpu.pbtxt"
    path.write_text(targets.GPUS["h200"].text)
    assert targets.find(str(path)) == targets.find("h200")
    path.write_text("nothing of the kind")
    with pytest.raises(ConfigError, match="no description of a GPU"):
        targets.find(str(path))


@pytest.mark.parametrize("pages", [1, 2, 31, 32, 63, 64, 65, 100, 1000, 12345, 10**6])
def test_pages_are_rounded_down_by_a_thirty_second_at_most(pages: int) -> None:
    step = memory.step_below(pages)
    assert 0 < step <= pages
    assert pages - step <= pages / 32
    assert memory.step_below(step) == step


def test_the_number_of_pages_is_steady() -> None:
    """Memory that measures a little otherwise gives the pages of the programs that are stored."""
    kept: set[int] = set()
    first = build._steady(10_000, 100, kept.__contains__)
    kept.add(first)
    assert build._steady(10_200, 100, kept.__contains__) == first
    assert build._steady(9_990, 100, kept.__contains__) == first
    assert build._steady(20_000, 100, kept.__contains__) == memory.step_below(20_000)
    assert build._steady(101, 101, kept.__contains__) == 101, "what a sequence needs is not rounded away"
    assert build._steady(first - 1, 100, kept.__contains__) < first, "never more than there is room for"
