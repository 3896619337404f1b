"""Engines and writers that are killed with SIGKILL: what was kept is found again, and nothing else is."""

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import sidecars
from tiny import ROOM

from jaxserve.disk_store import open_store

TESTS = Path(__file__).parent
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS.parent), str(TESTS)])}


def test_a_writer_may_be_killed_at_any_moment(tmp_path):
    """A hundred times, over memory and a disk: whatever an index names is there, byte for byte."""
    script = [sys.executable, str(TESTS / "kill_store_child.py"), str(tmp_path / "kv"), "100", "7"]
    done = subprocess.run(script, env=ENVIRONMENT, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    assert found["moved"] > 80, "a round writes something new, if the machine lets it"
    assert found["found"] > 100 * 12, "at most one record a store is under way"


@contextmanager
def talking(model: Path, options: dict[str, Any], text: list[int], count: int) -> Iterator["subprocess.Popen[str]"]:
    """An engine in a process of its own, killed at the end."""
    script = [sys.executable, str(TESTS / "talk_child.py"), str(model)]
    arguments = [json.dumps(argument) for argument in (options, text, count)]
    child = subprocess.Popen(
        [*script, *arguments], env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        yield child
    finally:
        child.send_signal(signal.SIGKILL)
        child.communicate()


def line(child: "subprocess.Popen[str]") -> str:
    assert child.stdout is not None
    found = child.stdout.readline()
    if not found:
        pytest.fail(f"the engine died: {child.communicate()[1][-3000:]}")
    return found


@pytest.fixture
def folder() -> Iterator[Path]:
    """A short path, for a socket's."""
    with tempfile.TemporaryDirectory(prefix="kv-") as name:
        yield Path(name)


@pytest.mark.parametrize("kept_by", ["disk", "sidecar", "both"])
def test_a_conversation_goes_on_after_its_engine_was_killed(kept_by, speaking, programs_dir, llm, folder):
    """Prompt and answer alike, half a second after the answer's last token; and its text is what it would have been."""
    options = {**ROOM, "cache_dir": programs_dir, "host_kv_gib": 0.005}
    if kept_by != "sidecar":
        options |= {"disk_kv_path": str(folder / "kv"), "disk_kv_gib": 0.01}
    text = random.Random(1).choices(range(5, 250), k=170)
    with ExitStack() as stack:
        if kept_by != "disk":
            stack.enter_context(sidecars.process(folder / "s"))
            options |= {"sidecar": "auto", "sidecar_dir": str(folder / "s")}
        with talking(speaking, options, text, 40) as child:
            first = json.loads(line(child))
            line(child)
        assert first["cached"] == 0
        text += [*first["answer"], 65, 66, 67]
        with talking(speaking, options, text, 12) as child:
            second = json.loads(line(child))
    assert second["cached"] >= 0.9 * len(text)
    (expected,) = llm.generate([text], max_tokens=12, temperature=0.0, ignore_eos=True)
    assert second["answer"] == expected.outputs[0].token_ids
    there = {name for name in second["kv"] if name.endswith("tokens_there") and second["kv"][name] >= 200}
    assert there == {f"{name}_tokens_there" for name in ("sidecar", "disk") if kept_by in (name, "both")}


def test_an_engine_under_load_leaves_no_record_that_is_torn(speaking, programs_dir, folder):
    """Killed at random moments while it writes; the disk holds less than comes, so that records are overwritten."""
    options = {**ROOM, "cache_dir": programs_dir, "host_kv_gib": 0.001}
    options |= {"disk_kv_path": str(folder / "kv"), "disk_kv_gib": 0.0003}
    text, answers = list(range(40, 140)), []
    for _ in range(3):
        with talking(speaking, options, text, 8) as child:
            answers.append(json.loads(line(child))["answer"])
            line(child)
            time.sleep(0.2 + random.random() / 2)
        (place,) = (folder / "kv").iterdir()
        identity = (place / "index").read_bytes().split()[1].decode()
        size = int((place / "index").read_bytes().split(b"\0")[0].split()[2])
        store = open_store(folder / "kv", identity, size, 300 << 10)
        names = list(store._slots)
        assert len(names) > 30
        assert all(store.read(name) is not None for name in names)
        assert store.counts.damaged == 0
        store.close()
    assert answers[0] == answers[1] == answers[2]
