"""``jaxserve warmup``: compile ahead of time what an engine will load, and look after what is stored."""

import argparse
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

from jaxserve.commands.common import UsageError, add_model, check_engine
from jaxserve.config import EngineConfig
from jaxserve.options import add_options, given

LINE_SECONDS = 10.0
"""Between two lines on how far it is, where there is no terminal."""


def add(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Compiles every program of a configuration into the store that serve and generate load from. No weights are "
        "loaded: the checkpoint's config and headers suffice. Give the engine options that the model will be served "
        "with."
    )
    add_model(parser)
    parser.set_defaults(model=None)
    what = parser.add_argument_group("what to do").add_mutually_exclusive_group()
    what.add_argument(
        "--target",
        metavar="GPU",
        help="compile for a GPU that is not here: a100, h100, h200, b200, l40s, or a file in which XLA describes one",
    )
    what.add_argument("--list", action="store_true", help="show what is stored")
    what.add_argument(
        "--prune", action="store_true", help="remove what this installation can never load, or is damaged"
    )
    what.add_argument("--prune-to", type=float, metavar="GIB", help="and what was used longest ago, down to this size")
    what.add_argument("--verify", action="store_true", help="read every entry, and load those made for this machine")
    parser.add_argument("--json", action="store_true", help="print JSON, for scripts")
    add_options(parser, EngineConfig, title="engine", skip=("model", "served_name"))
    parser.set_defaults(command=run, kinds=(EngineConfig,))


def run(parsed: argparse.Namespace) -> int:
    if parsed.list or parsed.prune or parsed.prune_to is not None or parsed.verify:
        return _look_after(parsed)
    parsed.model = EngineConfig.model if parsed.model is None else parsed.model
    config = check_engine(parsed)
    if parsed.target is not None:
        os.environ["JAX_PLATFORMS"] = "cpu"  # before jax starts: the GPU's compiler is wanted, not a GPU
    with _signals() as terminated:
        try:
            return _warm(config, parsed.target, parsed.json)
        except KeyboardInterrupt as error:
            print(f"jaxserve: stopped: {str(error) or 'no program was begun'}", file=sys.stderr)
            return 128 + (signal.SIGTERM if terminated.is_set() else signal.SIGINT)


def _look_after(parsed: argparse.Namespace) -> int:
    if parsed.prune_to is not None and not parsed.prune_to >= 0:
        raise UsageError(f"--prune-to must be at least 0, got {parsed.prune_to:g}")
    if parsed.model is not None:
        raise UsageError(f"--list, --prune and --verify are about the programs of all models: leave out {parsed.model}")
    folder = EngineConfig.from_options(EngineConfig.model, given(parsed, EngineConfig)).cache_path / "executables"
    try:
        os.listdir(folder)
    except FileNotFoundError:
        raise FileNotFoundError(f"--cache-dir {folder.parent}: there is no such folder as {folder}") from None
    if parsed.list:
        return _list(folder, parsed.json)
    if parsed.verify:
        return _verify(folder, parsed.json)
    return _prune(folder, parsed.prune_to, parsed.json)


@contextmanager
def _signals() -> Iterator[threading.Event]:
    """Have SIGTERM end the work as Ctrl-C does; the event tells it was that."""
    terminated = threading.Event()

    def stop(*_: object) -> None:
        terminated.set()
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield terminated
    finally:
        signal.signal(signal.SIGTERM, before)


class _Lines:
    """A context that says every ten seconds, on standard error, how far the programs are."""

    def __init__(self, wanted: bool):
        self._wanted, self._at = wanted, ""
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._say, name="progress", daemon=True)

    def __enter__(self) -> Self:
        if self._wanted:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        if self._wanted:
            self._thread.join()

    def __call__(self, done: int, total: int) -> None:
        self._at = f"{done} of {total} programs"

    def _say(self) -> None:
        while not self._ended.wait(LINE_SECONDS):
            print(self._at or "the programs are being listed", file=sys.stderr, flush=True)


def _warm(config: EngineConfig, target: str | None, as_json: bool) -> int:
    """Exit status 1 where programs could not be stored."""
    from jaxserve.progress import Progress
    from jaxserve.report import human_bytes
    from jaxserve.warmup import warm

    terminal = sys.stderr is not None and sys.stderr.isatty()
    lines = config.load_progress and not terminal and sys.stderr is not None
    with Progress(config.load_progress) as bars, _Lines(lines) as said:
        summary = warm(config, target, bars.bar("programs") if terminal else said)
    tally = summary.tally
    status = 1 if tally.not_stored else 0
    if as_json:
        print(json.dumps(summary.as_dict()))
        return status
    size = human_bytes(tally.bytes)
    print(
        f"{summary.programs} programs in {summary.seconds:.1f} s: {tally.compiled} compiled, "
        f"{summary.programs - tally.compiled} there already; {size} in {summary.folder}"
    )
    for line in (*tally.report().get("why_compiled", ()), *tally.discarded, *summary.notes):
        print(f"  {line}")
    for why, count in tally.not_stored.items():
        print(f"{count} programs could not be stored in {summary.folder}: {why}", file=sys.stderr)
    return status


def _list(folder: Path, as_json: bool) -> int:
    from jaxserve import entries
    from jaxserve.warmup import stale

    found = sorted(entries.scan(folder), key=lambda entry: entry.used, reverse=True)
    rows: list[dict[str, Any]] = [
        {
            "program": entry.facts.get("program", entry.path.name),
            "model": entry.facts.get("model", ""),
            "device": entry.facts.get("device", ""),
            "jax": entry.facts.get("jax", ""),
            "bytes": entry.size,
            "made": entry.facts.get("made", ""),
            "last_used": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(entry.used)),
            "stale": stale(entry),
            "file": entry.path.name,
        }
        for entry in found
    ]
    if as_json:
        print(json.dumps({"folder": str(folder), "entries": rows}))
        return 0
    from rich.console import Console
    from rich.table import Table

    from jaxserve.report import human_bytes

    table = Table("program", "model", "device", "jax", "size", "last used", "")
    for row in rows:
        names = ("program", "model", "device", "jax", "bytes", "last_used", "stale")
        cells = {**row, "bytes": human_bytes(row["bytes"]), "stale": row["stale"] or ""}
        table.add_row(*(str(cells[name]) for name in names))
    width = None if sys.stdout.isatty() else 160
    Console(width=width).print(table)
    print(f"{len(rows)} programs, {human_bytes(sum(row['bytes'] for row in rows))} in {folder}")
    return 0


def _prune(folder: Path, to: float | None, as_json: bool) -> int:
    from jaxserve.report import human_bytes
    from jaxserve.warmup import prune

    gone = prune(folder, None if to is None else int(to * 2**30))
    size = sum(entry.size for entry in gone)
    if as_json:
        print(json.dumps({"removed": [entry.path.name for entry in gone], "bytes": size}))
    else:
        print(f"removed {len(gone)} programs, {human_bytes(size)}, from {folder}")
    return 0


def _verify(folder: Path, as_json: bool) -> int:
    """Exit status 1 where something is wrong."""
    from jaxserve.progress import Progress
    from jaxserve.warmup import verify

    bad, count = {}, 0
    total = len(os.listdir(folder)) if folder.is_dir() else 0
    with Progress() as bars:
        bar = bars.bar("programs")
        for entry, wrong in verify(folder):
            count += 1
            bar(count, total)
            if wrong is not None:
                bad[entry.path.name] = wrong
    if as_json:
        print(json.dumps({"checked": count, "bad": bad}))
        return 1 if bad else 0
    for name, wrong in bad.items():
        print(f"{name}: {wrong}")
    print(f"checked {count} programs: {f'{len(bad)} cannot be used' if bad else 'all are whole'}")
    if bad:
        print(
            "jaxserve warmup --prune removes what is damaged or foreign; a start that needs such a program rebuilds it"
        )
    return 1 if bad else 0
