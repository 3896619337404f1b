"""Starting an owner that outlives whoever starts it."""

import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from jaxserve.sidecar.client import Sidecar
from jaxserve.sidecar.errors import SidecarError
from jaxserve.sidecar.place import Place

START_SECONDS = 30.0
_PROGRAM = """\
import os, sys
if os.fork():
    os._exit(0)
os.chdir("/")
sys.path.insert(0, {root!r})
from jaxserve.sidecar.owner import main
sys.exit(main(sys.argv[1:]))
"""


def spawn(place: Place, uuids: Sequence[str]) -> None:
    """Start an owner in a session of its own, its output in the place's log. Returns before it answers.

    Where one runs already, the new one sees that by the lock, and ends.
    """
    root = Path(__file__).resolve().parents[2]
    options = ["--folder", str(place.folder), "--group", place.group, *(f"--uuid={uuid}" for uuid in uuids)]
    with open(place.log(), "ab") as log:
        # The fork in the program makes it a child of nobody who would have to wait for it.
        subprocess.run(
            [sys.executable, "-P", "-c", _PROGRAM.format(root=str(root)), *options],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            check=True,
        )


def connect_or_start(place: Place, uuids: Sequence[str], what: str) -> tuple[Sidecar, bool]:
    """A connection to the owner, started where there is none; and whether it had to be.

    Several may call this at once: one owner comes of it. Raises ``SidecarError``.
    """
    try:
        return Sidecar(place, what), False
    except SidecarError as error:
        if error.code != "gone":
            raise
    spawn(place, uuids)
    deadline = time.monotonic() + START_SECONDS
    while True:
        try:
            return Sidecar(place, what), True
        except SidecarError as error:
            if error.code != "gone" or time.monotonic() > deadline:
                raise SidecarError(f"{error}; its log is {place.log_path}", error.code) from None
        time.sleep(0.02)
