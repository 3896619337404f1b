"""What an operator says about the mark: keys, scheme, policy. Keys stay out of messages and reprs. Imports no jax."""

import dataclasses
import json
import logging
import os
import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import numpy as np

from jaxserve.watermark import prf as prfs

log = logging.getLogger(__name__)

Algorithm = Literal["gumbel", "dual_key_gumbel"]
Deduplication = Literal["none", "single_turn", "all"]
Mode = Literal["off", "opt-in", "default-on", "enforced"]
Unmarkable = Literal["allow", "refuse"]
Status = Literal["watermarked", "skipped", "not_watermarked"]

CHOICES: dict[str, tuple[str, ...]] = {
    "algorithm": ("gumbel", "dual_key_gumbel"),
    "deduplicate_contexts": ("none", "single_turn", "all"),
    "mode": ("off", "opt-in", "default-on", "enforced"),
    "unmarkable": ("allow", "refuse"),
}
PRF_NAMES = {"philox": prfs.PHILOX} | {name: name for name in prfs.KEY_BITS}
"""The peer's configurations call their function by a name without a version."""
DEFAULT_ALPHA = 0.1
MAX_CONTEXT_WIDTH = 64
MAX_KEYS = 64
MAX_STREAMS = 64
MAX_FILE_BYTES = 1 << 20
SCHEME = ("algorithm", "alpha", "context_width", "prf")
"""What a text marked with one key may have other than one marked with the next."""


class WatermarkConfigError(ValueError):
    """A configuration that cannot be used; the message names the field, and never a key."""


@dataclass(frozen=True)
class WatermarkKey:
    """A secret, the name it is spoken of by, and when it comes into force (None: from the beginning)."""

    id: str
    secret: int = field(repr=False)
    active_from: datetime | None = None
    algorithm: Algorithm | None = None
    alpha: float | None = None
    context_width: int | None = None
    prf: str | None = None
    """Of text of this key, where it is other than the configuration's. In a configuration all four are filled in."""

    @property
    def scheme(self) -> tuple[Any, ...]:
        return tuple(getattr(self, name) for name in SCHEME)


@dataclass(frozen=True)
class Mark:
    """What marks one sequence: the key in force for it, derived for its place among a request's completions."""

    key_id: str
    words: np.ndarray = field(repr=False, compare=False)
    """uint32 ``[2, WORDS]``: the prepared keys A and B; the same twice for a single key."""


@dataclass(frozen=True)
class Decision:
    """What becomes of a request, and why where it goes unmarked."""

    status: Status
    reason: str | None = None


@dataclass(frozen=True, kw_only=True)
class WatermarkConfig:
    """The mark of one engine. ``read`` makes one of JSON, a file or a mapping.

    Raises ``WatermarkConfigError`` naming what is wrong.
    """

    keys: tuple[WatermarkKey, ...]
    """In the order of their dates. All of them detect; the one in force marks.

    An engine's programs mark in one way, that of the key in force when its options are read. ``algorithm``, ``alpha``,
    ``context_width`` and ``prf`` are those of that key then, and a key that has others comes into force no earlier than
    with the next start.
    """
    key_id: str | None = None
    """The key that marks, whatever the dates."""
    algorithm: Algorithm = "gumbel"
    alpha: float | None = None
    """Share of tokens that key B marks where nothing is drafted; of dual_key_gumbel alone."""
    context_width: int = 4
    deduplicate_contexts: Deduplication = "single_turn"
    deduplicate_contexts_max_history: int | None = 8192
    """Contexts that are remembered; None: all."""
    streams: int = 1
    """Keys derived from the key, among which a request's seed chooses: so many answers to one prompt can differ. A
    detector has to try them all."""
    prf: str = prfs.PHILOX
    mode: Mode = "default-on"
    unmarkable: Unmarkable = "allow"
    """What becomes of requests that leave no choice, which cannot be marked, where the mode is enforced."""
    warnings: tuple[str, ...] = field(default=(), repr=False, compare=False)
    """What is allowed and not wise; whoever uses the configuration logs it, once (``warn``)."""

    def __post_init__(self) -> None:
        for name, known in CHOICES.items():
            if getattr(self, name) not in known:
                raise WatermarkConfigError(
                    f"{name} must be one of {', '.join(known)}, got {shown(getattr(self, name))}"
                )
        self._put("prf", _prf(self.prf))
        _integer("context_width", self.context_width, 1, MAX_CONTEXT_WIDTH)
        _integer("streams", self.streams, 1, MAX_STREAMS)
        history = self.deduplicate_contexts_max_history
        if history is not None:
            _integer("deduplicate_contexts_max_history", history, 1, 1 << 24)
            if history < 1024:
                self._warn(f"deduplicate_contexts_max_history {history} forgets within one answer")
        self._put("alpha", _alpha(self.algorithm, self.alpha))
        self._check_keys()
        marks = self._latest(datetime.now(UTC))
        for name in SCHEME:
            self._put(name, getattr(marks, name))
        for width in sorted({key.context_width or 0 for key in self.keys}):
            if width > 16:
                self._warn(f"context_width {width}: one edit spoils as many scores and one")
        for key in self.keys:
            if key.prf == prfs.CHACHA and key.secret < 1 << 64:
                self._warn(f"key {key.id} is weak: it has no more than 64 bits, where {key.prf} takes 256 random ones")
            if self._to_come(key) and key.scheme != marks.scheme:
                self._warn(
                    f"key {key.id} marks in another way: it comes into force with the first start after its date"
                )

    def _put(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    def _warn(self, message: str) -> None:
        if message not in self.warnings:
            self._put("warnings", (*self.warnings, message))

    def warn(self) -> None:
        """Log what is not wise about the configuration."""
        for message in self.warnings:
            log.warning("watermark: %s", message)

    def _to_come(self, key: WatermarkKey) -> bool:
        return self.key_id is None and key.active_from is not None and key.active_from > datetime.now(UTC)

    def _filled(self, key: WatermarkKey) -> WatermarkKey:
        """The key with the configuration's ways where it has none of its own. Raises WatermarkConfigError."""
        algorithm = self.algorithm if key.algorithm is None else key.algorithm
        if algorithm not in CHOICES["algorithm"]:
            known = ", ".join(CHOICES["algorithm"])
            raise WatermarkConfigError(f"algorithm must be one of {known}, got {shown(algorithm)}")
        own = self.alpha if key.alpha is None and algorithm == "dual_key_gumbel" else key.alpha
        width = self.context_width if key.context_width is None else key.context_width
        _integer("context_width", width, 1, MAX_CONTEXT_WIDTH)
        prf = self.prf if key.prf is None else _prf(key.prf)
        prfs.check_key(prf, key.secret)
        alpha = _alpha(algorithm, own)
        return dataclasses.replace(key, algorithm=algorithm, alpha=alpha, context_width=width, prf=prf)

    def _check_keys(self) -> None:
        if not 1 <= len(self.keys) <= MAX_KEYS:
            raise WatermarkConfigError(f"keys must hold 1 to {MAX_KEYS} keys, got {len(self.keys)}")
        filled = []
        for key in self.keys:
            if not re.fullmatch(r"[A-Za-z0-9._-]{1,64}", key.id):
                raise WatermarkConfigError("a key's id must be 1 to 64 letters, digits, dots, dashes and underscores")
            try:
                filled.append(self._filled(key))
            except ValueError as error:
                raise WatermarkConfigError(f"key {key.id}: {error}") from None
        for what, values in (("id", [k.id for k in self.keys]), ("secret", [k.secret for k in self.keys])):
            if len(set(values)) < len(values):
                raise WatermarkConfigError(f"two keys have the same {what}")
        begin = datetime.min.replace(tzinfo=UTC)
        order = sorted(filled, key=lambda key: key.active_from or begin)
        self._put("keys", tuple(order))
        if self.key_id is not None and self.key_id not in {key.id for key in self.keys}:
            raise WatermarkConfigError(f"key_id {shown(self.key_id)} is the id of no key")
        if self.key_id is None:
            dates = [key.active_from for key in self.keys]
            if len(set(dates)) < len(dates):
                raise WatermarkConfigError("two keys come into force at the same time: give active_from, or key_id")

    @property
    def dual(self) -> bool:
        return self.algorithm == "dual_key_gumbel"

    def key_in_force(self, now: datetime | None = None) -> WatermarkKey:
        """The key that marks what is asked for ``now``: of those that have come, the last of this engine's scheme."""
        if self.key_id is not None:
            return next(key for key in self.keys if key.id == self.key_id)
        scheme = tuple(getattr(self, name) for name in SCHEME)
        ours = [key for key in self.keys if key.scheme == scheme]
        now = now or datetime.now(UTC)
        return next((key for key in reversed(ours) if key.active_from is None or key.active_from <= now), ours[0])

    def _latest(self, now: datetime) -> WatermarkKey:
        """The key in force, of whatever scheme."""
        if self.key_id is not None:
            return next(key for key in self.keys if key.id == self.key_id)
        begun = [key for key in self.keys if key.active_from is None or key.active_from <= now]
        if not begun:
            raise WatermarkConfigError("no key is in force yet: every active_from is in the future")
        return begun[-1]

    def decide(self, wish: bool | None, greedy: bool, choiceless: str | None = None) -> Decision:
        """What becomes of a request that wishes (or not) to be marked. Raises ValueError where policy refuses it.

        ``choiceless`` names a setting that leaves nothing to draw from: marked all the same, to no avail.
        """
        if wish is False and self.mode == "enforced":
            raise ValueError("watermarking is enforced here and cannot be turned off")
        if wish is True and self.mode == "off":
            raise ValueError("watermarking is switched off here")
        if self.mode == "off":
            return Decision("not_watermarked", "switched off")
        if wish is False or (wish is None and self.mode == "opt-in"):
            return Decision("not_watermarked", "not asked for" if wish is None else "opted out")
        refused = self.mode == "enforced" and self.unmarkable == "refuse"
        if refused and greedy:
            raise ValueError("watermarking is enforced here, and greedy choice (temperature 0, top_k 1) has no mark")
        if refused and choiceless is not None:
            raise ValueError(f"watermarking is enforced here, and {choiceless} leaves one token, which has no mark")
        if greedy:
            return Decision("skipped", "greedy")
        return Decision("watermarked")

    def stream(self, seed: int, index: int, n: int) -> int:
        """The stream of completion ``index`` of the ``n`` of a request."""
        return (seed % self.streams + index) % max(self.streams, n)

    def mark(self, stream: int = 0, now: datetime | None = None) -> Mark:
        """The mark of one stream; 0 is marked by the key itself."""
        key = self.key_in_force(now)
        secret = prfs.stream_key(key.secret, stream)
        pair = prfs.dual_keys(secret) if self.dual else (secret, secret)
        return Mark(key.id, np.stack([prfs.prepared(self.prf, each, self.context_width) for each in pair]))

    def describe(self) -> dict[str, Any]:
        """Facts for reports: ids of keys, and nothing of the keys."""
        history = self.deduplicate_contexts_max_history
        remembered = "" if self.deduplicate_contexts == "none" else f", {history or 'all'} contexts"
        return {
            "mode": self.mode,
            "algorithm": self.algorithm if self.alpha is None else f"{self.algorithm}, alpha {self.alpha:g}",
            "prf": self.prf,
            "context_width": self.context_width,
            "streams": self.streams,
            "repeated_contexts": self.deduplicate_contexts + remembered,
            "key_in_force": self.key_in_force().id,
            "keys": [key.id for key in self.keys],
        }

    @classmethod
    def read(cls, source: "WatermarkConfig | Mapping[str, Any] | str | Path") -> "WatermarkConfig":
        """A configuration of a mapping, of JSON text (which begins with a brace), or of a file of JSON.

        ``key`` or ``key_file`` give the only key, ``keys`` several: ``{"id", "key" or "key_file", "active_from"}``,
        and where the text of one is marked otherwise, ``algorithm``, ``alpha``, ``context_width``, ``prf``.
        A key is an integer, or text or a file with one, in decimal or as 0x and hexadecimal digits.
        """
        if isinstance(source, WatermarkConfig):
            return source
        folder, warnings = Path(), list[str]()
        readable = False
        if isinstance(source, str | Path):
            text = str(source).strip()
            if re.fullmatch(r"(0[xX])?[0-9a-fA-F]*", text):  # a key, by mistake, which no message may repeat
                raise WatermarkConfigError("must be a JSON object, or the path of a file with one")
            if not text.startswith("{"):
                folder = Path(text).parent
                text, readable = _text_of(Path(text), "the file")
            try:
                source = json.loads(text)
            except ValueError as error:
                raise WatermarkConfigError(f"no valid JSON: {error}") from None
        if not isinstance(source, Mapping):
            raise WatermarkConfigError("must be a JSON object")
        fields = dict(source)
        known = ({each.name for each in dataclasses.fields(cls)} | {"key", "key_file"}) - {"warnings"}
        if unknown := set(map(str, fields)) - known:
            raise WatermarkConfigError(f"unknown field {shown(min(unknown))}; known: {', '.join(sorted(known))}")
        listed = fields.pop("keys", None)
        single = {name: fields.pop(name) for name in ("key", "key_file") if name in fields}
        if (listed is None) == (not single):
            raise WatermarkConfigError("exactly one of key, key_file, keys must be given")
        if listed is None:
            listed = [{"id": fields.get("key_id") or "default", **single}]
        if not isinstance(listed, list):
            raise WatermarkConfigError("keys must be a list of objects with id, key or key_file, and active_from")
        keys = tuple(_key(item, folder, warnings) for item in listed)
        if readable and any("key" in item for item in listed):
            warnings.append("the configuration's file holds a key, and can be read by others than its owner")
        return cls(keys=keys, warnings=tuple(warnings), **fields)


def _prf(value: Any) -> str:
    try:
        return prfs.check_prf(PRF_NAMES.get(value, value))
    except (TypeError, ValueError):
        raise WatermarkConfigError(f"prf must be one of {', '.join(PRF_NAMES)}, got {shown(value)}") from None


def _alpha(algorithm: str, alpha: object) -> float | None:
    """The share of key B: None for a single key."""
    if algorithm == "gumbel":
        if alpha is not None:
            raise WatermarkConfigError("alpha needs algorithm dual_key_gumbel")
        return None
    share: object = DEFAULT_ALPHA if alpha is None else alpha
    if isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share < 1:
        raise WatermarkConfigError(f"alpha must be a number between 0 and 1, got {shown(share)}")
    return float(share)


def shown(value: object) -> str:
    """A wrong value as a message may repeat it: not where it looks like a key in the wrong place."""
    return "what looks like a key, and is not repeated" if prfs.like_a_key(str(value)) else f"{value!r:.80}"


def _integer(name: str, value: object, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise WatermarkConfigError(f"{name} must be an integer from {low} to {high}, got {shown(value)}")


def _key(item: Any, folder: Path, warnings: list[str]) -> WatermarkKey:
    if not isinstance(item, Mapping):
        raise WatermarkConfigError("keys must be a list of objects with id, key or key_file, and active_from")
    if unknown := set(map(str, item)) - {"id", "key", "key_file", "active_from", *SCHEME}:
        raise WatermarkConfigError(f"unknown field {shown(min(unknown))} of a key")
    name = item.get("id")
    if not isinstance(name, str):
        raise WatermarkConfigError("every key needs an id")
    if prfs.like_a_key(name) and len(name) > 16:
        raise WatermarkConfigError("a key's id is no secret, and one of the ids looks like a key: give it another name")
    if ("key" in item) == ("key_file" in item):
        raise WatermarkConfigError(f"key {name:.80}: exactly one of key, key_file must be given")
    secret = item.get("key")
    if "key_file" in item:
        if not isinstance(item["key_file"], str):
            raise WatermarkConfigError(f"key {name:.80}: key_file must be a path")
        path = folder / item["key_file"]
        text = item["key_file"].strip()
        if (prfs.like_a_key(text) or text.isdecimal() or text[:2] in ("0x", "0X")) and not os.path.exists(path):
            raise WatermarkConfigError(
                f"key {name:.80}: key_file names no file; a key belongs into key, or into a file"
            )
        secret, readable = _text_of(path, f"key {name:.80}: key_file")
        secret = secret.strip()
        if readable:
            warnings.append(f"the file of key {name} can be read by others than its owner")
    if isinstance(secret, str):
        try:
            secret = prfs.parse_key(secret)
        except ValueError:
            message = f"key {name:.80} is neither a decimal number nor 0x and hexadecimal digits"
            raise WatermarkConfigError(message) from None
    if isinstance(secret, bool) or not isinstance(secret, int):
        raise WatermarkConfigError(f"key {name:.80} must be an integer, or text with one")
    own = {each: item[each] for each in SCHEME if each in item}
    return WatermarkKey(name, secret, _date(name, item.get("active_from")), **own)


def _text_of(path: Path, what: str) -> tuple[str, bool]:
    """A file's text, and whether others than its owner can read it. Devices and pipes, which may never end, are
    refused."""
    try:
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
            mode = os.fstat(file.fileno()).st_mode
            if not stat.S_ISREG(mode):
                raise OSError(0, "is no regular file")
            text = file.read(MAX_FILE_BYTES + 1)
            if len(text) > MAX_FILE_BYTES:
                raise OSError(0, f"has more than {MAX_FILE_BYTES} bytes")
            return text.decode(), bool(mode & 0o077)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "is no text"
        raise WatermarkConfigError(f"{what} {str(path)!r:.200}: {reason}") from None


def _date(name: str, value: object) -> datetime | None:
    if value is None:
        return None
    try:
        date = datetime.fromisoformat(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        message = f"key {name:.80}: active_from must be a date like 2026-12-01 or 2026-12-01T08:00:00+01:00"
        raise WatermarkConfigError(message) from None
    return date if date.tzinfo else date.replace(tzinfo=UTC)
