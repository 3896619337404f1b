"""Progress bars on the terminal for long work; silent where there is no terminal or none is wanted."""

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress


class Progress:
    """A context that shows bars for what it is told about. Thread-safe."""

    def __init__(self, wanted: bool = True):
        self._items = _bars() if wanted and sys.stderr is not None and sys.stderr.isatty() else None

    def __enter__(self) -> Self:
        if self._items is not None:
            self._items.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._items is not None:
            self._items.stop()

    def bar(self, name: str, unit: str = "items") -> Callable[[int, int], None]:
        """A function ``(done, total)`` that moves a bar of this name."""
        items = self._items
        if items is None:
            return lambda done, total: None
        task = items.add_task(name, total=None)
        scale = 1 << 20 if unit == "bytes" else 1
        label = f"{name} (MiB)" if unit == "bytes" else name

        def move(done: int, total: int) -> None:
            items.update(task, description=label, completed=done // scale, total=total // scale)

        return move


def _bars() -> "RichProgress":
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as RichProgress

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return RichProgress(*columns, console=Console(stderr=True))
