"""Random requests after ``/openapi.json``, by schemathesis: no 5xx, no status, body or event that is not described.

``python -m tests.fuzz --examples 2000`` tries at least so many over all routes, on a stand-in for the engine;
with ``--engine`` on a real one with a tiny model.
"""

import argparse
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.fake_llm import FakeLLM
from tests.serving import Server, serving

CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_headers_conformance",
    "response_schema_conformance",
    "negative_data_rejection",
    "unsupported_method",
    "allow_header_conformance",
)


def fuzz(server: Server, *, each: int, seed: int = 0) -> tuple[bool, int, str]:
    """Whether all went well, how many requests were made, and the report. ``each`` is for every route."""
    command = [str(Path(sys.executable).with_name("schemathesis")), "run", server.url + "/openapi.json"]
    command += ["--checks", ",".join(CHECKS), "--phases", "coverage,fuzzing", "--continue-on-failure", "--no-color"]
    command += ["--max-examples", str(each), "--seed", str(seed), "--request-timeout", "60", "--warnings", "off"]
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    made = re.search(r"(\d+) generated", done.stdout)
    return done.returncode == 0, int(made[1]) if made else 0, done.stdout + done.stderr


def check_well(server: Server) -> None:
    """The next request works, and nothing is left behind."""
    status, answer, _ = server.send("/v1/completions", {"prompt": "Hi", "max_tokens": 2})
    assert status == 200, answer
    assert not server.state.channels
    assert server.send("/health")[1]["running"] == 0


def _engine(folder: str) -> Any:
    from tests.tiny import roomy, write_model

    return roomy(folder, write_model(Path(folder) / "tiny"), served_name="tiny", max_queued_requests=200_000)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--examples", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--engine", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        llm = _engine(folder) if options.engine else FakeLLM(most=200_000)
        with serving(llm) as server:
            routes = sum(len(item) for item in server.send("/openapi.json")[1]["paths"].values())
            well, made, report = fuzz(server, each=-(-options.examples // routes), seed=options.seed)
            check_well(server)
    print(report)
    print(f"{made} requests over {routes} routes")
    return 0 if well and made >= options.examples else 1


if __name__ == "__main__":
    sys.exit(main())
