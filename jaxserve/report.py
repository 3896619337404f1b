"""The start-up report: what runs, how, and why; phases with seconds. One table in the log, one dict over HTTP."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.table import Table


class Report:
    """Facts by section, in the order they were added, and the phases of the start; ``on_phase`` hears them begin."""

    def __init__(self, on_phase: Callable[[str], None] | None = None) -> None:
        self._on_phase = on_phase
        self.begun = time.perf_counter()
        self.sections: dict[str, dict[str, Any]] = {}
        self.phases: dict[str, float] = {}
        self._followed: dict[str, Callable[[], dict[str, Any]]] = {}

    def add(self, section: str, **facts: Any) -> None:
        self.sections.setdefault(section, {}).update(facts)

    def follow(self, section: str, facts: Callable[[], dict[str, Any]]) -> None:
        """Add a section whose facts are asked for whenever the report is."""
        self._followed[section] = facts

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time a part of the start; phases in different threads may overlap."""
        begun = time.perf_counter()
        if self._on_phase is not None:
            self._on_phase(name)
        try:
            yield
        finally:
            self.phases[name] = self.phases.get(name, 0.0) + time.perf_counter() - begun

    def as_dict(self) -> dict[str, Any]:
        """JSON-able: the sections, and ``phases`` in seconds."""
        followed = {section: facts() for section, facts in self._followed.items()}
        return {
            **self.sections,
            **followed,
            "phases": {name: round(seconds, 3) for name, seconds in self.phases.items()},
        }

    def table(self) -> Table:
        table = Table(show_header=False, title="jaxserve is ready", title_justify="left")
        for section, facts in self.as_dict().items():
            table.add_section()
            for i, (name, value) in enumerate(facts.items()):
                table.add_row(section if i == 0 else "", name.replace("_", " "), _show(name, value))
        return table

    def print(self, console: Console | None = None) -> None:
        (console or Console(stderr=True)).print(self.table())


def _show(name: str, value: Any) -> str:
    if isinstance(value, int) and not isinstance(value, bool) and name.endswith("bytes"):
        return human_bytes(value)
    if isinstance(value, float):
        return f"{value:.2f}"
    if isinstance(value, list):
        return "\n".join(map(str, value)) or "none"
    return str(value)


def human_bytes(size: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.4g} {unit}"
        size /= 1024
    return f"{size:.4g} GiB"
