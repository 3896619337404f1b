"""Command-line options out of dataclass fields: names, types, defaults and help are said once, in the dataclass.

A field's help is its ``help`` metadata or the docstring that follows it in the source.
"""

import argparse
import ast
import dataclasses
import functools
import inspect
import itertools
import json
import re
import textwrap
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line, and which accepts no abbreviations."""

    def __init__(self, **kwargs: Any):
        super().__init__(**{"allow_abbrev": False, **kwargs})

    def error(self, message: str) -> typing.NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\n")


def add_options(
    parser: argparse.ArgumentParser,
    kind: type,
    *,
    title: str,
    only: Sequence[str] | None = None,
    skip: Sequence[str] = (),
    flags: Mapping[str, Sequence[str]] = types.MappingProxyType({}),
    defaults: Mapping[str, Any] = types.MappingProxyType({}),
) -> None:
    """Add an option for every field of the dataclass ``kind`` (or ``only`` some, or without ``skip``).

    ``max_tokens`` becomes ``--max-tokens``, unless ``flags`` gives other spellings. ``defaults`` are shown in the help
    in place of the dataclass's. Options that are not given leave no trace: see ``given``.
    """
    group = parser.add_argument_group(title)
    hints = typing.get_type_hints(kind)
    docs = field_docs(kind)
    for field in dataclasses.fields(kind):
        if field.name in skip or (only is not None and field.name not in only):
            continue
        default = defaults.get(field.name, field.default)
        shown = "" if default in (None, (), "") or default is dataclasses.MISSING else f"(default: {_show(default)})"
        text = " ".join(part for part in (field.metadata.get("help") or docs.get(field.name, ""), shown) if part)
        names = flags.get(field.name) or ["--" + field.name.replace("_", "-")]
        group.add_argument(
            *names,
            dest=_dest(kind, field.name),
            default=argparse.SUPPRESS,
            help=text.replace("%", "%%"),
            **_how(hints[field.name]),
        )


def given(arguments: argparse.Namespace, kind: type) -> dict[str, Any]:
    """The fields of ``kind`` that were given on the command line."""
    names = {_dest(kind, field.name): field.name for field in dataclasses.fields(kind)}
    return {names[dest]: value for dest, value in vars(arguments).items() if dest in names}


def as_flags(message: str, *kinds: type) -> str:
    """``message``, with the kinds' fields spelled as on the command line: ``max_num_seqs must`` as ``--max-num-seqs``.

    A field of one word is only known as such at the beginning; no field is sought in paths and quotes.
    """
    names = {field.name for kind in kinds for field in dataclasses.fields(kind)}

    def spell(match: re.Match[str]) -> str:
        name = match[0]
        known = name in names and ("_" in name or match.start() == 0)
        return "--" + name.replace("_", "-") if known else name

    return re.sub(r"(?<![\w./\\'\"-])[a-z_]+(?![\w./\\'\"-])", spell, message)


def _dest(kind: type, name: str) -> str:
    return f"{kind.__name__}.{name}"


def _show(value: Any) -> str:
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else str(value)


def _how(hint: Any) -> dict[str, Any]:
    """argparse's keywords for a type."""
    if hint in (bool, bool | None):
        return {"action": argparse.BooleanOptionalAction}
    choices = [
        option
        for option in (typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,))
        if option is not type(None)
    ]
    for option in choices:
        origin = typing.get_origin(option)
        if dataclasses.is_dataclass(option):
            return {"type": functools.partial(_dataclass, option), "metavar": "JSON"}
        if origin is Mapping:
            return {"type": _json_object, "metavar": "JSON"}
        if origin in (Sequence, tuple):
            if typing.get_args(option)[0] is int:
                return {"type": _integers, "metavar": "N,N,..."}
            return {"action": "append", "metavar": "TEXT"}
    scalar = choices[0]
    if scalar not in (int, float, str):
        raise TypeError(f"no command-line form for {hint}")
    return {"type": scalar, "metavar": {int: "N", float: "X", str: "TEXT"}[scalar]}


def _integers(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of integers like 1,2,3") from None


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is not a JSON object")
    return value


def _dataclass(kind: Any, text: str) -> Any:
    fields = _json_object(text)
    known = [field.name for field in dataclasses.fields(kind)]
    if unknown := set(fields) - set(known):
        raise argparse.ArgumentTypeError(f"unknown field {min(unknown)!r}; known: {', '.join(known)}")
    try:
        return kind(**fields)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


@functools.cache
def field_docs(kind: type) -> dict[str, str]:
    """The docstrings that follow a class's fields in its source, by field; empty where there is no source."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(kind)))
    except (OSError, TypeError, SyntaxError):
        return {}
    body = typing.cast(ast.ClassDef, tree.body[0]).body
    found = {}
    for statement, after in itertools.pairwise(body):
        if not (isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name)):
            continue
        if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant) and isinstance(after.value.value, str):
            found[statement.target.id] = " ".join(after.value.value.split())
    return found
