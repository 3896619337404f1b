"""What every benchmark shows and keeps: the machine, a table for people, JSON, and a plot (extra ``bench``)."""

import datetime
import json
import os
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

CONSOLE = Console(width=None if sys.stdout.isatty() else 140)
PACKAGES = ("jaxserve", "jax", "jaxlib", "numpy")


def usable_cpus() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def _commit() -> str | None:
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        result = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return result.stdout.strip()


def environment() -> dict[str, Any]:
    """Where and when a figure was measured. The load average tells whether the machine was quiet."""
    versions: dict[str, str | None] = {}
    for package in PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = None
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "cpu": _cpu_model(),
        "cpus": usable_cpus(),
        "system": platform.platform(),
        "python": sys.version.split()[0],
        "versions": versions,
        "commit": _commit(),
        "load_average_at_start": list(os.getloadavg()),
    }


def warn_if_busy() -> None:
    load = os.getloadavg()[0]
    if load > 0.5:
        CONSOLE.print(f"[yellow]The machine is not quiet (load {load:.1f}): trust ratios, not figures.[/yellow]")


def cell(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 10 else f"{value:.1f}" if abs(value) < 1000 else f"{value:,.0f}"
    return str(value)


def show(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]], caption: str | None = None) -> None:
    """Print a table; the first column is left-aligned, None is shown as a dash."""
    table = Table(title=title, caption=caption, title_justify="left", caption_justify="left")
    for i, column in enumerate(columns):
        table.add_column(column, justify="left" if i == 0 else "right")
    for row in rows:
        table.add_row(*(cell(value) for value in row))
    CONSOLE.print(table)


def save_json(path: str | Path | None, payload: Mapping[str, Any]) -> None:
    """Write ``payload`` where a path was asked for."""
    if path is None:
        return
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(payload, indent=1, allow_nan=False) + "\n")
    CONSOLE.print(f"Wrote {path}")


def _pyplot() -> Any:
    try:
        import matplotlib
    except ModuleNotFoundError:
        raise SystemExit("plots need matplotlib: install jaxserve[bench]") from None
    matplotlib.use("agg")
    from matplotlib import pyplot

    return pyplot


def plot_bars(
    path: str | Path | None,
    title: str,
    ylabel: str,
    groups: Sequence[str],
    series: Mapping[str, Sequence[float | None]],
) -> None:
    """One group of bars a scenario, one bar a series; where a path was asked for."""
    if path is None:
        return
    figure, axes = _pyplot().subplots(figsize=(2 + 1.8 * len(groups), 4.5), layout="constrained")
    width = 0.8 / max(1, len(series))
    for i, (name, values) in enumerate(series.items()):
        heights = [value or 0.0 for value in values]
        bars = axes.bar([g + i * width for g in range(len(groups))], heights, width, label=name)
        axes.bar_label(bars, [cell(value) for value in values], fontsize=7, rotation=90, padding=2)
    axes.set_xticks([g + 0.4 - width / 2 for g in range(len(groups))], groups)
    axes.set(title=title, ylabel=ylabel)
    axes.margins(y=0.15)
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=120)
    CONSOLE.print(f"Wrote {path}")


def plot_lines(
    path: str | Path | None, title: str, xlabel: str, ylabel: str, lines: Mapping[str, Sequence[tuple[float, float]]]
) -> None:
    """One line a name over (x, y) points; where a path was asked for."""
    if path is None:
        return
    figure, axes = _pyplot().subplots(figsize=(7, 4.5), layout="constrained")
    for name, points in lines.items():
        axes.plot([x for x, _ in points], [y for _, y in points], marker="o", label=name)
    axes.set(title=title, xlabel=xlabel, ylabel=ylabel)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=120)
    CONSOLE.print(f"Wrote {path}")
