"""Whoever is killed, and whenever: what is served afterwards is right.

An engine with a sidecar works under load and is killed with SIGKILL at a random moment, of its start or of its work;
so is the sidecar; so are both. After each, the golden prompt must give its golden text, and nothing may be compiled.
``python tests/test_kill_matrix.py 50`` runs as many rounds as it is told; the suite runs a few.
"""

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from tiny import LIMITS, write_model

from jaxserve.sidecar.client import Sidecar
from jaxserve.sidecar.errors import SidecarError
from jaxserve.sidecar.place import Place

TESTS = Path(__file__).parent
ROUNDS = 6
SECONDS = 120.0
"""Longer than any start takes on a machine that does other things as well."""


@dataclass
class Seen:
    """What the rounds brought."""

    killed: Counter[str] = field(default_factory=Counter)
    starts: list[dict[str, Any]] = field(default_factory=list)


@dataclass
class Matrix:
    """One engine after the other over one sidecar folder, one store of programs and one model."""

    folder: Path
    model: Path
    programs_dir: str
    rng: random.Random
    number: int = 0
    seen: Seen = field(default_factory=Seen)

    @property
    def options(self) -> dict[str, Any]:
        return {
            **LIMITS,
            "cache_dir": self.programs_dir,
            "sidecar": "auto",
            "sidecar_dir": str(self.folder),
            "host_kv_gib": 0.01,
            "kv_checksums": True,
        }

    @contextmanager
    def engine(self) -> "Iterator[subprocess.Popen[str]]":
        self.number += 1
        command = [sys.executable, str(TESTS / "kill_child.py"), str(self.model), json.dumps(self.options)]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS.parent), str(TESTS)])}
        child = subprocess.Popen(
            [*command, str(self.number)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
        )
        try:
            yield child
        finally:
            child.kill()
            child.communicate()

    def line(self, child: "subprocess.Popen[str]") -> dict[str, Any]:
        assert child.stdout is not None
        text = child.stdout.readline()
        if not text:
            pytest.fail(f"the engine died: {child.communicate()[1][-3000:]}")
        return json.loads(text)

    def golden(self) -> dict[str, Any]:
        """Start, ask the golden prompt, work a little, be killed."""
        with self.engine() as child:
            found = self.line(child)
            time.sleep(self.rng.random())
            assert child.poll() is None, child.communicate()[1][-3000:]
        self.seen.starts.append(found)
        return found

    def kill_start(self) -> None:
        """Kill an engine at some moment of its start."""
        with self.engine():
            time.sleep(self.rng.random() * 2.5)

    def owner(self) -> int | None:
        """The sidecar's process, if there is one."""
        try:
            with Place(self.folder, "cpu") as place, Sidecar(place, "the kill matrix") as sidecar:
                return sidecar.pid
        except SidecarError:
            return None

    def kill_owner(self) -> None:
        pid = self.owner()
        if pid is not None:
            os.kill(pid, signal.SIGKILL)

    def kill_owner_under_load(self) -> None:
        """The engine goes on without its owner, until it is killed as well."""
        with self.engine() as child:
            self.line(child)
            self.kill_owner()
            time.sleep(0.5 + self.rng.random())
            assert child.poll() is None, child.communicate()[1][-3000:]


def run(matrix: Matrix, rounds: int) -> Seen:
    """The matrix, with the golden prompt after every round. Raises AssertionError where something wrong is served."""
    first = matrix.golden()
    kills = {
        "engine at work": lambda: None,  # ``golden`` ends so
        "engine as it starts": matrix.kill_start,
        "sidecar under an engine": matrix.kill_owner_under_load,
        "sidecar alone": matrix.kill_owner,
    }
    weights = (6, 3, 1, 1)
    for number in range(rounds):
        name = list(kills)[number] if number < len(kills) else matrix.rng.choices(list(kills), weights)[0]
        kills[name]()
        matrix.seen.killed[name] += 1
        found = matrix.golden()
        assert found["golden"] == first["golden"], f"after round {number} ({name}): {found}"
        assert found["compiled"] == 0, f"after round {number} ({name}): {found}"
    matrix.kill_owner()
    return matrix.seen


def test_whoever_is_killed_the_golden_prompt_gives_its_golden_text(tmp_path: Path, programs_dir: str) -> None:
    folder = Path(tempfile.mkdtemp(prefix="kill-"))  # short: a socket's path has room for 107 bytes
    matrix = Matrix(folder, write_model(tmp_path / "tiny"), programs_dir, random.Random(0))
    try:
        seen = run(matrix, ROUNDS)
    finally:
        matrix.kill_owner()
    assert len(seen.killed) == 4
    assert any(start["cached"] > 90 for start in seen.starts[1:]), "no page has survived"


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(prefix="kill-") as name:
        home = Path(name)
        whole = Matrix(home / "s", write_model(home / "tiny"), str(home / "programs"), random.Random())
        print(run(whole, int(sys.argv[1])).killed)
        for start in whole.seen.starts:
            print({key: value for key, value in start.items() if key != "golden"})
