"""Process start to first token, cold and warm, in real processes, through Python and through the server.

Cold: an empty folder for compiled programs. Warm: the folder that the cold start filled. The operating system's file
cache is warm in both. Phases are those the process marks itself; the engine's report may split them further.
"""

import argparse
import contextlib
import json
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.stats import median

HELP = "process start to first token, cold and warm, phase by phase"


def library_start(model: str, engine: dict[str, Any], timeout: float) -> dict[str, Any]:
    """Seconds of each phase of ``import jaxserve`` to the first token, from the start of the process."""
    command = [sys.executable, "-m", "benchmarks.first_token", "--model", model, "--engine", json.dumps(engine)]
    start = time.time()
    result = subprocess.run(command, capture_output=True, text=True, timeout=timeout, cwd=Path(__file__).parent.parent)
    if result.returncode:
        raise RuntimeError(f"the start failed:\n{result.stderr[-2000:]}")
    message = json.loads(result.stdout)
    phases, last = {}, start
    for name, mark in message["marks"].items():
        phases[name] = mark - last
        last = mark
    return {"phases": phases, "total": last - start, "report": message["report"]}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def options(engine: dict[str, Any]) -> list[str]:
    """Engine fields as options of the command line."""
    words = []
    for name, value in engine.items():
        option = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{option}" if value else f"--no-{option}")
        else:
            words += [f"--{option}", str(value)]
    return words


def server_start(model: str, engine: dict[str, Any], timeout: float) -> dict[str, Any]:
    """Seconds of each phase of ``jaxserve serve`` to the first streamed token, from the start of the process."""
    port = free_port()
    base = f"http://127.0.0.1:{port}"
    code = "import sys; from jaxserve.cli import main; sys.exit(main())"
    command = [sys.executable, "-c", code, "serve", model, "--host", "127.0.0.1", "--port", str(port), *options(engine)]
    with tempfile.TemporaryFile("w+", errors="replace") as log:
        start = time.time()
        server = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            while True:
                down = contextlib.suppress(urllib.error.URLError, ConnectionError, TimeoutError)
                with down, urllib.request.urlopen(base + "/ready", timeout=5):
                    break
                if server.poll() is not None or time.time() - start > timeout:
                    log.seek(0)
                    raise RuntimeError(f"the server did not come up:\n{log.read()[-2000:]}")
                time.sleep(0.01)
            ready = time.time()
            body = {"model": model, "prompt": list(range(100, 132)), "max_tokens": 2, "temperature": 0}
            body |= {"stream": True, "ignore_eos": True}
            request = urllib.request.Request(
                base + "/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
            )
            with urllib.request.urlopen(request, timeout=timeout) as answer:
                next(line for line in answer if line.startswith(b"data:"))
                first = time.time()
                answer.read()
        finally:
            server.send_signal(signal.SIGTERM)
            try:
                server.wait(timeout=30)
            except subprocess.TimeoutExpired:
                server.kill()
                server.wait()
    return {"phases": {"ready": ready - start, "first token": first - ready}, "total": first - start}


DOORS = {"python": library_start, "server": server_start}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--door", nargs="+", choices=list(DOORS), default=list(DOORS))
    parser.add_argument("--engine", type=json.loads, default={}, metavar="JSON", help="engine options, by field")
    parser.add_argument("--rounds", type=int, default=3, help="warm starts; of cold ones there is one a door")
    parser.add_argument("--timeout", type=float, default=1200)
    parser.add_argument("--json", metavar="FILE")


def run(args: argparse.Namespace) -> None:
    where = report.environment()
    report.warn_if_busy()
    starts: list[dict[str, Any]] = []
    for door in args.door:
        with tempfile.TemporaryDirectory(prefix="jaxserve-startup-") as cache:
            engine = args.engine | {"cache_dir": cache}
            for number in range(args.rounds + 1):
                result = DOORS[door](args.model, engine, args.timeout)
                starts.append({"door": door, "caches": "warm" if number else "cold"} | result)
                report.CONSOLE.print(f"{door} {starts[-1]['caches']}: {result['total']:.2f} s", highlight=False)
    rows = []
    for door in args.door:
        for caches in ("cold", "warm"):
            group = [s for s in starts if (s["door"], s["caches"]) == (door, caches)]
            if not group:
                continue
            for phase in group[0]["phases"]:
                rows.append([f"{door}, {caches}: {phase}", median(s["phases"][phase] for s in group)])
                if phase == "ready" and "report" in group[0]:
                    rows += [
                        [f"    of which {name}", median(s["report"]["phases"].get(name, 0.0) for s in group)]
                        for name in group[0]["report"]["phases"]
                    ]
            rows.append([f"{door}, {caches}: process start to first token", median(s["total"] for s in group)])
    report.show("Start-up, seconds (medians)", ["phase", "s"], rows)
    report.save_json(args.json, {"benchmark": "startup", "environment": where, "starts": starts})
