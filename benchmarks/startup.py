"""Process start to first token: cold, warm and with a sidecar, in real processes, beside peers and the floor.

Cold: an empty folder for compiled programs. Warm: the folder that the cold start filled. Sidecar: warm, and the weights
are in the memory of another process. The operating system's file cache is warm in all. Phases are those the process
marks itself; the engine's report may split them further. The floor is what importing jax takes alone.
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
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.stats import median
from benchmarks.workers import Contender, Job, Worker, WorkerError

HELP = "process start to first token: cold, warm, with a sidecar, and of peers"
CASES = ("cold", "warm", "sidecar")
SECONDS_ASKED, RATIOS_ASKED = 2.5, {"vllm": 30.0, "transformers": 3.0}
"""With a sidecar, on a small model: at most so long, and so many times quicker than these peers."""


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


def floor_start() -> dict[str, Any]:
    """Seconds in which a process imports jax and finds its devices: no engine in jax starts in less."""
    start = time.time()
    subprocess.run([sys.executable, "-c", "import jax; jax.devices()"], check=True, capture_output=True)
    return {"phases": {}, "total": time.time() - start}


def peer_start(contender: Contender, threads: int, timeout: float) -> dict[str, Any]:
    """Seconds in which a peer is ready and yields one token."""
    job = Job(1, 32, 1)
    with Worker(contender, threads=threads, max_seqs=1, max_len=64, timeout=timeout) as worker:
        token = worker.run(job.prompts(1000, 0), job.output_len).seconds
        return {
            "phases": {"ready": worker.start_seconds, "first token": token},
            "total": worker.start_seconds + token,
        }


@contextlib.contextmanager
def sidecar(model: str, engine: dict[str, Any], timeout: float) -> Iterator[dict[str, Any]]:
    """A sidecar that holds the model; yields the engine options that use it."""
    layout = {name: value for name, value in engine.items() if name in ("dtype", "tensor_parallel")}
    with tempfile.TemporaryDirectory(prefix="jaxserve-startup-sidecar-") as folder:
        command = [sys.executable, "-m", "jaxserve", "sidecar"]
        where = ["--sidecar-dir", folder]
        start = [*command, "start", model, *where, *options(layout), "--timeout", str(timeout)]
        try:
            result = subprocess.run(start, capture_output=True, text=True)
            if result.returncode:
                raise RuntimeError(f"the sidecar did not start:\n{result.stderr[-2000:]}")
            yield engine | {"load_format": "sidecar", "sidecar_dir": folder}
        finally:
            subprocess.run([*command, "stop", *where], capture_output=True, check=False)


DOORS = {"python": library_start, "server": server_start}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--door", nargs="+", choices=list(DOORS), default=list(DOORS))
    parser.add_argument("--case", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--engine", type=json.loads, default={}, metavar="JSON", help="engine options, by field")
    parser.add_argument("--rounds", type=int, default=3, help="starts of each case; of cold ones there is one a door")
    parser.add_argument(
        "--peer", action="append", default=[], metavar="NAME=PYTHON,model=PATH[,...]", help="see compare"
    )
    parser.add_argument("--threads", type=int, default=report.usable_cpus(), help="CPUs for the peers")
    parser.add_argument("--timeout", type=float, default=1200)
    parser.add_argument("--json", metavar="FILE")


def run(args: argparse.Namespace) -> None:
    try:
        peers = [Contender.parse(text) for text in args.peer]
    except ValueError as error:
        raise SystemExit(f"--peer {error}") from None
    where = report.environment()
    report.warn_if_busy()
    starts: list[dict[str, Any]] = []

    def note(door: str, case: str, result: dict[str, Any]) -> None:
        starts.append({"door": door, "case": case} | result)
        report.CONSOLE.print(f"{door} {case}: {result['total']:.2f} s", highlight=False)

    for _ in range(args.rounds):
        note("import jax", "floor", floor_start())
    for door in args.door:
        start = DOORS[door]
        with tempfile.TemporaryDirectory(prefix="jaxserve-startup-") as cache:
            engine = args.engine | {"cache_dir": cache}
            first = start(args.model, engine, args.timeout)
            if "cold" in args.case:
                note(door, "cold", first)
            if "warm" in args.case:
                for _ in range(args.rounds):
                    note(door, "warm", start(args.model, engine, args.timeout))
            if "sidecar" in args.case:
                with sidecar(args.model, engine, args.timeout) as attached:
                    start(args.model, attached, args.timeout)  # it has a few programs more
                    for _ in range(args.rounds):
                        note(door, "sidecar", start(args.model, attached, args.timeout))
    for peer in peers:
        for _ in range(args.rounds):
            try:
                note(peer.label, "peer", peer_start(peer, args.threads, args.timeout))
            except WorkerError as error:
                report.CONSOLE.print(f"{peer.label}: {error}", highlight=False)
                break
    _show(starts)
    report.save_json(args.json, {"benchmark": "startup", "environment": where, "starts": starts})


def _show(starts: list[dict[str, Any]]) -> None:
    rows: list[list[object]] = []
    for door, case in dict.fromkeys((s["door"], s["case"]) for s in starts):
        group = [s for s in starts if (s["door"], s["case"]) == (door, case)]
        for phase in group[0]["phases"]:
            rows.append([f"{door}, {case}: {phase}", median(s["phases"][phase] for s in group)])
            if phase == "ready" and "report" in group[0]:
                rows += [
                    [f"    of which {name}", median(s["report"]["phases"].get(name, 0.0) for s in group)]
                    for name in group[0]["report"]["phases"]
                ]
        what = "floor" if case == "floor" else "process start to first token"
        rows.append([f"{door}, {case}: {what}", median(s["total"] for s in group)])
    report.show("Start-up, seconds (medians)", ["phase", "s"], rows)
    report.show("Beside what was asked", ["start", "peer", "measured", "asked"], asked(starts))


def asked(starts: Sequence[dict[str, Any]]) -> list[list[object]]:
    """Rows of sidecar and warm starts: door and case, peer, figure, limit (None: nothing is asked).

    The figure is seconds where the peer is None, and else how many times longer the peer takes.
    """
    totals = {
        case: {
            door: median(s["total"] for s in starts if (s["door"], s["case"]) == (door, case))
            for door in dict.fromkeys(s["door"] for s in starts if s["case"] == case)
        }
        for case in ("sidecar", "warm", "peer")
    }
    rows: list[list[object]] = []
    for case in ("sidecar", "warm"):
        limits = case == "sidecar"
        for door, seconds in totals[case].items():
            name = f"{door}, {case}"
            rows.append([name, None, f"{seconds:.2f} s", f"at most {SECONDS_ASKED:g} s" if limits else None])
            for peer, longer in totals["peer"].items():
                least = RATIOS_ASKED.get(peer.split()[0]) if limits else None
                rows.append([name, peer, f"{longer / seconds:.1f}x", f"at least {least:g}x" if least else None])
    return rows
