"""Progress bars on the terminal for long work; silent where there is no terminal or none is wanted."""

from collections.abc import Callable
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as RichProgress


class Progress:
    """A context that shows bars for what it is told about. Thread-safe."""

    def __init__(self, wanted: bool = True):
        console = Console(stderr=True)
        show = wanted and console.is_terminal
        text = TextColumn("{task.description}")
        self._items = RichProgress(
            text, BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), console=console, disable=not show
        )
        self._show = show

    def __enter__(self) -> Self:
        self._items.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._items.stop()

    def bar(self, name: str, unit: str = "items") -> Callable[[int, int], None]:
        """A function ``(done, total)`` that moves a bar of this name."""
        if not self._show:
            return lambda done, total: None
        task = self._items.add_task(name, total=None)
        scale = 1 << 20 if unit == "bytes" else 1
        label = f"{name} (MiB)" if unit == "bytes" else name

        def move(done: int, total: int) -> None:
            self._items.update(task, description=label, completed=done // scale, total=total // scale)

        return move
