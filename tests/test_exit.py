"""A process may end whatever the engine is doing: no abort, no hang, and nobody needs to call close()."""

import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parent

SCRIPT = """
import sys
sys.path[:0] = [sys.argv[1], sys.argv[2]]
import jaxserve
from tiny import tiny

llm = tiny(sys.argv[3], "smollm2")
ends = []
first = llm.stream(list(range(5, 205)), max_tokens=50, ignore_eos=True)
for _ in range(4):
    llm.submit(list(range(5, 205)), jaxserve.SamplingParams(max_tokens=50, ignore_eos=True), on_delta=ends.append)
next(first)
if sys.argv[4] == "close":
    llm.close()
    assert sum(delta.request_done for delta in ends) == 4, ends
print("end")
"""


@pytest.mark.parametrize("how", ["close", "leave"])
def test_a_process_may_end_under_a_running_step(how: str, programs_dir: str) -> None:
    arguments = [str(TESTS.parent), str(TESTS), programs_dir, how]
    done = subprocess.run([sys.executable, "-c", SCRIPT, *arguments], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "end\n"), done.stderr
