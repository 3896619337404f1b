"""Requests made from ``/openapi.json`` by schemathesis: no 5xx, no status, body or event that is not described.

``python -m tests.fuzz`` tries every limit that is described and ``--each`` random requests a route (some 3,500 in all)
on a stand-in for the engine; with ``--engine`` on a real one with a tiny model.
"""

import argparse
import re
import subprocess
import sys
import tempfile
from pathlib import Path

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


def fuzz(server: Server, *, each: int, seed: int = 0, limits: bool = True) -> tuple[bool, int, str]:
    """Whether all went well, how many requests were made, and the report.

    ``each`` is how many random requests a route gets, beside those that try all limits that are described.
    """
    phases = "coverage,fuzzing" if limits else "fuzzing"
    command = [str(Path(sys.executable).with_name("schemathesis")), "run", server.url + "/openapi.json"]
    command += ["--checks", ",".join(CHECKS), "--phases", phases, "--continue-on-failure", "--no-color"]
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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--each", type=int, default=80)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--engine", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if options.engine:
            from tests.tiny import idle, roomy, write_model

            model = write_model(Path(folder) / "tiny")
            with roomy(folder, model, max_queued_requests=200_000) as llm, serving(llm, close_llm=False) as server:
                well, made, report = fuzz(server, each=options.each, seed=options.seed)
                check_well(server)
                idle(llm)
        else:
            with serving(FakeLLM(most=200_000)) as server:
                well, made, report = fuzz(server, each=options.each, seed=options.seed)
                check_well(server)
    print(report)
    print(f"{made} requests: {'all well' if well else 'not all well'}")
    return 0 if well else 1


if __name__ == "__main__":
    sys.exit(main())
