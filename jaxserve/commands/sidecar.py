"""``jaxserve sidecar``: the process that keeps weights and KV pages in memory while engines come and go."""

import argparse
import json
import logging
import math
import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from jaxserve.commands.common import MODEL_HELP, UsageError
from jaxserve.config import EngineConfig
from jaxserve.options import Parser, add_options, given
from jaxserve.progress import Progress
from jaxserve.report import human_bytes
from jaxserve.sidecar.errors import SidecarError
from jaxserve.sidecar.place import Place, default_folder, groups

log = logging.getLogger(__name__)


def add(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(title="actions", required=True, metavar="ACTION", parser_class=Parser)
    start = _action(actions, "start", _start, "start a sidecar, or go to the one that runs, and have it load models")
    start.add_argument("models", nargs="*", metavar="MODEL", help=MODEL_HELP)
    start.add_argument("--draft", action="append", default=[], metavar="MODEL", help="a model to draft with")
    start.add_argument(
        "--foreground", action="store_true", help="be the sidecar, and log to the terminal (for systemd)"
    )
    start.add_argument("--gpus", metavar="N,N,...", help="numbers of the GPUs; the first ones by default")
    start.add_argument(
        "--timeout", type=float, default=3600.0, metavar="SECONDS", help="how long to wait for the models"
    )
    add_options(start, EngineConfig, title="layout", only=("tensor_parallel", "dtype"))
    status = _action(actions, "status", _status, "what the sidecars hold, and who uses it")
    status.add_argument("--json", action="store_true", help="a JSON object for each, a line each")
    status.add_argument("--wait", type=float, metavar="SECONDS", help="until every model is loaded, at most so long")
    stop = _action(actions, "stop", _stop, "end a sidecar; engines keep what they have mapped")
    stop.add_argument("--kill", action="store_true", help="though it does not answer: kill the process")
    evict = _action(actions, "evict", _evict, "have a sidecar let go of a model or a KV pool")
    evict.add_argument("name", metavar="NAME", help="as in status, or the model's path")
    evict.add_argument("--force", action="store_true", help="though a process uses it: that one keeps the memory")
    verify = _action(actions, "verify", _verify, "hash a model's memory again, and compare")
    verify.add_argument("name", metavar="NAME", help="as in status, or the model's path")


def _action(actions: Any, name: str, command: Callable[[argparse.Namespace], int], text: str) -> Any:
    parser = actions.add_parser(name, help=text, description=text)
    parser.add_argument("--sidecar-dir", metavar="FOLDER", help="jaxserve-UID in the temporary folder by default")
    if name != "start":
        parser.add_argument(
            "--group", metavar="NAME", help="a group of devices, as in status; needed where there are several"
        )
    parser.set_defaults(command=command, kinds=(EngineConfig,))
    return parser


# -- start ------------------------------------------------------------------------------------------------------------


def _start(parsed: argparse.Namespace) -> int:
    _seconds("--timeout", parsed.timeout)
    options = given(parsed, EngineConfig)
    config = EngineConfig.from_options("models", options)
    from jaxserve.sidecar.holdings import Wish, asked_name

    named = [(model, "target") for model in parsed.models] + [(model, "draft") for model in parsed.draft]
    wishes = [Wish(*_resolve(model, options), config.tensor_parallel, role, asked_name(model)) for model, role in named]
    group, uuids = _devices(parsed, config.tensor_parallel)
    with Place(parsed.sidecar_dir, group, create=True) as place:
        if parsed.foreground:
            from jaxserve.sidecar.owner import run

            return run(place, uuids, wishes)
        from jaxserve.sidecar.start import connect_or_start

        sidecar, started = connect_or_start(place, uuids, "jaxserve sidecar start")
        with sidecar:
            print(f"sidecar {group}: process {sidecar.pid}, {'started' if started else 'was running'}", flush=True)
            ids = [sidecar.load(w.path, w.dtype, w.tensor_parallel, w.role, w.name)["id"] for w in wishes]
            paths = dict(zip(ids, (w.path for w in wishes), strict=True))
            return _await(sidecar, paths, parsed.timeout, place)


def _seconds(option: str, value: float) -> None:
    if not (math.isfinite(value) and value >= 0):
        raise UsageError(f"{option} must be seconds, 0 or more, got {value:g}")


def _resolve(model: str, options: dict[str, Any]) -> tuple[str, str]:
    """The absolute path of a model, and the dtype that an engine would choose. Raises what opening it does."""
    import checkpoints
    from jaxserve import models
    from jaxserve.declare import resolve_dtype

    path = os.path.abspath(checkpoints.resolve_model(model))
    with checkpoints.open_checkpoint(path) as source:
        return path, resolve_dtype(
            EngineConfig.from_options(model, options), source, models.model_config(source.config)
        )


def _devices(parsed: argparse.Namespace, count: int) -> tuple[str, list[str]]:
    """The group, and the UUIDs of its GPUs: none where there are none to be seen, or jax is told to use the CPU."""
    import jax

    from jaxserve.sidecar import cuda
    from jaxserve.sidecar.groups import CPU, gpu_group

    if parsed.gpus is None and jax.config.jax_platforms == "cpu":
        return CPU, []
    try:
        numbers = range(count) if parsed.gpus is None else [int(number) for number in parsed.gpus.split(",")]
    except ValueError:
        raise UsageError(f"--gpus {parsed.gpus}: must be numbers like 0,1") from None
    if len(numbers) != count:
        raise UsageError(f"--gpus {parsed.gpus}: --tensor-parallel {count} needs {count}")
    try:
        uuids = [cuda.uuid(number) for number in numbers]
    except SidecarError as error:
        if parsed.gpus is None and error.code == "unsupported":
            return CPU, []
        raise
    return gpu_group(uuids), uuids


def _await(sidecar: Any, paths: dict[str, str], seconds: float, place: Place) -> int:
    """Wait for models (paths by id), with a bar for each; 1 where one fails."""
    deadline = time.monotonic() + seconds
    with Progress() as progress:
        bars = {model_id: progress.bar(os.path.basename(path), "bytes") for model_id, path in paths.items()}
        while True:
            offers = {offer["id"]: offer for offer in sidecar.offers() if offer["id"] in bars}
            for model_id, offer in offers.items():
                bars[model_id](offer["done"], offer["total"] or 1)
            if all(offer["state"] != "loading" for offer in offers.values()):
                break
            if time.monotonic() > deadline:
                raise SidecarError(f"still loading after {seconds:g} s; it goes on, see {place.log_path}", "loading")
            time.sleep(0.05)
    status = 0
    held = {model["id"]: model for model in sidecar.status()["models"]}
    for model_id, path in paths.items():
        model = held.get(model_id)
        if model is None or model["state"] != "ready":
            status = 1
            print(f"{path}: {'evicted' if model is None else model['error']}")
        else:
            print(f"{model['name']}: {human_bytes(model['bytes'])} in {model['seconds']:.2f} s")
    return status


# -- the others -------------------------------------------------------------------------------------------------------


def _running(parsed: argparse.Namespace, absent: list[SidecarError]) -> Iterator[tuple[Place, Any]]:
    """Every sidecar that answers, or the one that was named; what is the matter with the others goes to ``absent``."""
    from jaxserve.sidecar.client import Sidecar

    for group in [parsed.group] if parsed.group else groups(parsed.sidecar_dir):
        with Place(parsed.sidecar_dir, group) as place:
            if not (parsed.group or place.visible() or place.holder()):
                continue  # it has ended
            try:
                sidecar = Sidecar(place, f"jaxserve sidecar {parsed.command.__name__.strip('_')}")
            except SidecarError as error:
                if error.code not in ("gone", "silent"):
                    raise
                absent.append(error)
                continue
            with sidecar:
                yield place, sidecar


def _none(parsed: argparse.Namespace, absent: list[SidecarError]) -> SidecarError:
    """Why there is no sidecar to talk to."""
    if absent:
        return SidecarError("; ".join(map(str, absent)), absent[0].code)
    folder = default_folder() if parsed.sidecar_dir is None else Path(parsed.sidecar_dir).expanduser().absolute()
    missing = "" if folder.exists() else ", which does not exist"
    return SidecarError(f"no sidecar runs in {folder}{missing}; --sidecar-dir says where to look", "gone")


def _one(parsed: argparse.Namespace, stack: ExitStack) -> tuple[Place, Any]:
    """The only sidecar that runs, or the named one, until ``stack`` ends. Raises ``SidecarError`` or UsageError."""
    absent: list[SidecarError] = []
    names = [place.group for place, _ in _running(parsed, absent)]
    if not names:
        raise _none(parsed, absent)
    if len(names) > 1:
        raise UsageError(f"--group: say which of {', '.join(names)}")
    from jaxserve.sidecar.client import Sidecar

    place = stack.enter_context(Place(parsed.sidecar_dir, names[0]))
    return place, stack.enter_context(Sidecar(place, "jaxserve sidecar"))


def _status(parsed: argparse.Namespace) -> int:
    if parsed.wait is not None:
        _seconds("--wait", parsed.wait)
        deadline = time.monotonic() + parsed.wait
        while True:
            absent: list[SidecarError] = []
            found = [model for _, sidecar in _running(parsed, absent) for model in sidecar.status()["models"]]
            if any(error.code == "silent" for error in absent):
                raise _none(parsed, absent)
            if found and all(model["state"] != "loading" for model in found):
                break
            if time.monotonic() > deadline:
                raise SidecarError(f"not ready after {parsed.wait:g} s", "loading")
            time.sleep(0.1)
    ready, count, absent = True, 0, []
    for _, sidecar in _running(parsed, absent):
        status = sidecar.status()
        count += 1
        ready = ready and all(model["state"] != "failed" for model in status["models"])
        print(json.dumps(status) if parsed.json else _shown(status))
    if not count or any(error.code == "silent" for error in absent):
        raise _none(parsed, absent)
    return 0 if ready else 1


def _shown(status: dict[str, Any]) -> str:
    now = time.time()
    lines = [
        f"sidecar {status['group']}: process {status['pid']}, up {_ago(now - status['since'])}, "
        f"{human_bytes(status['host_free_bytes'])} of host memory free, log {status['log']}"
    ]
    for model in status["models"]:
        state = model["state"]
        if state == "loading":
            state += f" {model['done']}/{model['total']} bytes"
        elif state == "failed":
            state += f": {model['error']}"
        elif model.get("outdated"):  # an older owner does not say
            state += ", out of date"
        about = f"{model['role']}, {model['dtype']}, tensor_parallel {model['tensor_parallel']}"
        name = ", also ".join([model["name"], *model.get("other_names", ())])
        lines.append(f"  {name} ({about}): {state}, {human_bytes(model['bytes'])}, from {model['path']}")
        lines += [f"    used by {_client(client, now)}" for client in model["clients"]]
    for pool in status["pools"]:
        user = f"used by {_client(pool['client'], now)}" if pool["client"] else "idle"
        lines.append(f"  {pool['name']}: {human_bytes(pool['bytes'])} of {human_bytes(pool['room'])} KV pages, {user}")
    return "\n".join(lines)


def _client(client: dict[str, Any], now: float) -> str:
    return f"process {client['pid']} ({client['what']}) for {_ago(now - client['since'])}"


def _ago(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    return (
        f"{minutes // 60} h {minutes % 60} min"
        if minutes >= 60
        else f"{minutes} min {rest} s"
        if minutes
        else f"{rest} s"
    )


def _stop(parsed: argparse.Namespace) -> int:
    if parsed.kill:
        return _kill(parsed)
    with ExitStack() as stack:
        place, sidecar = _one(parsed, stack)
        users = {c["pid"] for model in sidecar.status()["models"] for c in model["clients"]}
        sidecar.stop()
        _ended(place, sidecar.pid)
        kept = f"; {len(users)} engines keep what they have mapped" if users else ""
        print(f"sidecar {place.group}: process {sidecar.pid} has ended{kept}")
    return 0


def _kill(parsed: argparse.Namespace) -> int:
    """End the only owner that lives, or the named one, without asking it."""
    living = []
    for group in [parsed.group] if parsed.group else groups(parsed.sidecar_dir):
        with Place(parsed.sidecar_dir, group) as place:
            living += [group] if place.holder() else []
    if not living:
        raise _none(parsed, [])
    if len(living) > 1:
        raise UsageError(f"--group: say which of {', '.join(living)}")
    with Place(parsed.sidecar_dir, living[0]) as place:
        pid = place.kill()
        _ended(place, pid)
        print(f"sidecar {place.group}: process {pid} was killed")
    return 0


def _ended(place: Place, pid: int) -> None:
    """Wait until an owner has let go of its lock, and take a socket away that it has left."""
    deadline = time.monotonic() + 10
    while (lock := place.lock()) is None and time.monotonic() < deadline:
        time.sleep(0.02)
    if lock is None:
        raise SidecarError(f"process {pid} has not ended after 10 s")
    place.forget()
    place.unlock(lock)


def _evict(parsed: argparse.Namespace) -> int:
    with ExitStack() as stack:
        _, sidecar = _one(parsed, stack)
        print(f"{parsed.name}: {human_bytes(sidecar.evict(_held(parsed), force=parsed.force))} given back")
    return 0


def _held(parsed: argparse.Namespace) -> str:
    """What the owner knows a model by: paths, wherever they are given from, are absolute there."""
    name: str = parsed.name
    if os.sep not in name:
        return name
    import checkpoints

    with suppress(checkpoints.CheckpointError):  # what is no longer there may be held all the same
        name = str(checkpoints.resolve_model(name))
    return os.path.abspath(os.path.expanduser(name))


def _verify(parsed: argparse.Namespace) -> int:
    with ExitStack() as stack:
        _, sidecar = _one(parsed, stack)
        damaged = sidecar.verify(_held(parsed))
    print(f"{parsed.name}: damaged: {', '.join(damaged)}" if damaged else f"{parsed.name}: as it was loaded")
    return 1 if damaged else 0
