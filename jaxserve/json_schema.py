"""What a JSON schema asks for, checked and brought into the form that the grammar compiler enforces. Imports no jax.

Everything that a standard validator would look at is either enforced or refused, with the JSON pointer and the keyword;
annotations are dropped. So two schemas that differ in descriptions alone read the same. The dialect is 2020-12, with
``definitions``, arrays in ``items`` and ``additionalItems`` of the older ones.
"""

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol
from urllib.parse import unquote

MAX_DEPTH = 64
"""Deepest nesting of a schema, and of the values in it."""
MAX_SIZE = 1 << 31
"""Largest ``minLength``, ``maxItems`` and the like."""
MAX_BOUND = 1 << 53
"""Largest ``minimum`` and the like: beyond it, floats skip integers."""

ANNOTATIONS = frozenset(
    {"$comment", "title", "description", "default", "examples", "example", "deprecated", "readOnly", "writeOnly"}
    | {"contentMediaType", "contentEncoding", "contentSchema", "discriminator"}
    | {"$defs", "definitions", "$schema", "$id", "id"}
)
"""Keywords that ask nothing of a document (definitions do where they are referred to)."""
TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")
FORMATS = ("duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")
"""Enforced by the grammar compiler as they are."""

_MONTHS = (
    "(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)|02-(?:0[1-9]|1[0-9]|2[0-8])"
)
_YEAR = "(?:[0-9]{3}[1-9]|[0-9]{2}[1-9][0-9]|[0-9][1-9][0-9]{2}|[1-9][0-9]{3})"
_LEAP = "(?:0[48]|[2468][048]|[13579][26])"
_DATE = f"(?:{_YEAR}-(?:{_MONTHS})|(?:[0-9]{{2}}{_LEAP}|{_LEAP}00)-02-29)"
_TIME = "(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\\.[0-9]{1,9})?(?:Z|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
DATES = {"date": f"^{_DATE}$", "time": f"^{_TIME}$", "date-time": f"^{_DATE}T{_TIME}$"}
"""Formats that are enforced by a pattern of ours: days that exist, no leap seconds (RFC 3339)."""

_DIALECT = re.compile(r"https?://json-schema\.org/(draft-0[4-7]/|draft/(2019-09|2020-12)/)?schema#?")


class SchemaError(ValueError):
    """A schema that cannot be enforced. ``pointer`` says where (RFC 6901), ``keyword`` what, where one is to blame."""

    def __init__(self, pointer: str, message: str, keyword: str | None = None):
        named = f"keyword {keyword!r} " if keyword else ""
        super().__init__(f"at {_short(pointer) or '/'}: {named}{message}")
        self.pointer, self.keyword = pointer, keyword


class Validate(Protocol):
    """Compiles a schema; returns the compiler's complaint, or an empty string."""

    def __call__(self, schema: Mapping[str, Any], /) -> str: ...


@dataclass
class Schema:
    """A schema in the compiler's form."""

    document: dict[str, Any]
    _pointers: dict[int, str] = field(default_factory=dict)
    """Where each part of ``document``, by identity, stands in the schema as given."""

    @classmethod
    def read(cls, given: Mapping[str, Any] | bool) -> "Schema":
        """Raises ``SchemaError``."""
        reader = _Reader(given)
        root = reader.node(given, "", 0)
        if root is False:
            raise SchemaError("", "nothing can satisfy the schema false")
        document: dict[str, Any] = {} if root is True else root
        defs: dict[str, Any] = {}
        while reader.todo:
            pointer, name = reader.todo.popitem()
            defs[name] = reader.node(reader.at(pointer), pointer, 0)
        if defs:
            document["$defs"] = defs
        made = cls(document, reader.pointers)
        made._check_finite()
        return made

    def canonical(self) -> str:
        """The same text for schemas that ask the same in the same order."""
        return json.dumps(self.document, ensure_ascii=False, allow_nan=False)

    def blame(self, complaint: str, validate: Validate) -> SchemaError:
        """The compiler's complaint about the whole, as an error that names the innermost part it is about."""
        node, message, tries = self.document, complaint, 0
        defs = self.document.get("$defs", {})
        found = True
        while found and tries < 256:
            found = False
            for child in [*_children(node), *(defs.values() if node is self.document else ())]:
                if not isinstance(child, dict) or not child:
                    continue
                tries += 1
                if own := validate({**child, "$defs": defs}):
                    node, message, found = child, own, True
                    break
        pointer = self._pointers.get(id(node), "")
        line = _essence(message)
        keyword = next((key for key in node if re.search(rf"\b{re.escape(key)}\b", line) or _about(key, line)), None)
        return SchemaError(pointer, f"cannot be enforced: {line}", keyword)

    def _check_finite(self) -> None:
        """Refuse what only an endless document could satisfy, by the least fixpoint of "something finite fits"."""
        defs = self.document.get("$defs", {})
        nodes = [n for top in (self.document, *defs.values()) for n in _walk(top)]
        finite: set[int] = set()

        def fits(node: Any) -> bool:
            return node if isinstance(node, bool) else id(node) in finite

        def target(ref: str) -> Any:
            return self.document if ref == "#" else defs[ref.rpartition("/")[2]]

        def settle(node: Mapping[str, Any]) -> bool:
            if "$ref" in node and not fits(target(node["$ref"])):
                return False
            if not all(map(fits, node.get("allOf", ()))):
                return False
            if any(key in node and not any(map(fits, node[key])) for key in ("anyOf", "oneOf")):
                return False
            if "const" in node or "enum" in node:
                return True
            kinds = node.get("type", TYPES)
            if {kinds} - {"object", "array"} if isinstance(kinds, str) else set(kinds) - {"object", "array"}:
                return True
            properties, prefix = node.get("properties", {}), node.get("prefixItems", [])
            least = node.get("minItems", 0)
            as_object = all(fits(properties.get(name, True)) for name in node.get("required", ()))
            as_array = all(map(fits, prefix[:least])) and (least <= len(prefix) or fits(node.get("items", True)))
            return ("object" in kinds and as_object) or ("array" in kinds and as_array)

        before = -1
        while len(finite) > before:
            before = len(finite)
            finite.update(id(node) for node in nodes if id(node) not in finite and settle(node))
        for node in (*defs.values(), self.document):
            if not fits(node):
                pointer = self._pointers.get(id(node), "")
                raise SchemaError(pointer, "no finite document can satisfy this part of the schema")


def _children(node: Mapping[str, Any]) -> Iterator[Any]:
    """The schemas right inside one."""
    for key in ("properties", "patternProperties"):
        yield from node.get(key, {}).values()
    for key in ("allOf", "anyOf", "oneOf", "prefixItems"):
        yield from node.get(key, ())
    for key in ("items", "additionalProperties"):
        if key in node:
            yield node[key]


def _walk(node: Any) -> Iterator[Mapping[str, Any]]:
    if isinstance(node, Mapping):
        yield node
        for child in _children(node):
            yield from _walk(child)


def _essence(message: str) -> str:
    """The telling line of the compiler's complaint."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    told = [line.removeprefix("error: ") for line in lines if line.startswith("error:")]
    return _short(" ".join([lines[0], *told]) if lines else "no reason given", 200)


def _about(key: str, line: str) -> bool:
    words = {"patternProperties": "patternProperty", "pattern": "regex", "$ref": "$ref"}
    return key in words and words[key] in line


def _short(text: str, most: int = 120) -> str:
    return text if len(text) <= most else text[: most - 3] + "..."


class _Reader:
    """Reads the parts of one schema, and notes which others they refer to."""

    def __init__(self, root: Any):
        self.root = root
        self.names: dict[str, str] = {}
        """Pointer of each referred part -> its name among the ``$defs`` that are written."""
        self.todo: dict[str, str] = {}
        self.pointers: dict[int, str] = {}

    def at(self, pointer: str) -> Any:
        value = self.root
        for part in pointer.split("/")[1:]:
            key = part.replace("~1", "/").replace("~0", "~")
            if isinstance(value, Mapping) and key in value:
                value = value[key]
            elif isinstance(value, list | tuple) and key.isdecimal() and int(key) < len(value):
                value = value[int(key)]
            else:
                raise KeyError(pointer)
        return value

    def node(self, given: Any, where: str, depth: int) -> dict[str, Any] | bool:
        if isinstance(given, bool):
            return given
        if not isinstance(given, Mapping):
            raise SchemaError(where, f"a schema is an object or a boolean, not {_name(given)}")
        if depth > MAX_DEPTH:
            raise SchemaError(where, f"the schema is nested more than {MAX_DEPTH} levels deep")
        out: dict[str, Any] = {}
        for key, value in given.items():
            if not isinstance(key, str):
                raise SchemaError(where, f"{key!r:.40} is no keyword")
            self.keyword(out, given, key, value, where, depth)
        self.format(out, given, where)
        if "minProperties" in out and out["minProperties"] <= len(out.get("required", ())):
            del out["minProperties"]  # said already
        elif out.get("minProperties", 0) > 1:
            raise SchemaError(where, "is not supported above 1 and the number of required ones", "minProperties")
        self.pointers[id(out)] = where
        return out

    def keyword(
        self, out: dict[str, Any], given: Mapping[str, Any], key: str, value: Any, where: str, depth: int
    ) -> None:
        """Check one keyword and put what it asks into ``out``."""
        below = f"{where}/{_escape(key)}"
        if key in ("$defs", "definitions"):
            if not isinstance(value, Mapping):
                raise SchemaError(where, "must be an object", key)
        elif key == "$schema":
            if not isinstance(value, str) or not _DIALECT.fullmatch(value):
                raise SchemaError(where, "names a dialect that is not known", key)
        elif key in ("$id", "id"):
            if where:
                raise SchemaError(where, "is supported at the top only", key)
        elif key in ANNOTATIONS or (key.startswith("x-") and key != "x-guidance"):
            pass
        elif key in ("allOf", "anyOf", "oneOf", "prefixItems"):
            self.schemas(out, key, value, where, depth)
        elif key == "items" and isinstance(value, list | tuple):  # as in the older dialects
            self.schemas(out, "prefixItems", value, where, depth, said="items")
            rest = given.get("additionalItems", True)
            if rest is not True:
                out["items"] = self.node(rest, f"{where}/additionalItems", depth + 1)
        elif key == "additionalItems":
            if not isinstance(given.get("items"), list | tuple) and not isinstance(value, bool | Mapping):
                raise SchemaError(where, "must be a schema", key)
        elif key in ("items", "additionalProperties"):
            out[key] = self.node(value, below, depth + 1)
        elif key in ("properties", "patternProperties"):
            if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
                raise SchemaError(where, "must be an object", key)
            for name in value:
                self.text(name, where, key)
                if key == "patternProperties":
                    self.pattern(name, where, key)
            out[key] = {name: self.node(v, f"{below}/{_escape(name)}", depth + 1) for name, v in value.items()}
        elif key == "$ref":
            out[key] = self.reference(value, where)
        elif key == "required":
            if not isinstance(value, list | tuple) or not all(isinstance(name, str) for name in value):
                raise SchemaError(where, "must be a list of strings", key)
            if len(set(value)) != len(value):
                raise SchemaError(where, "names a property twice", key)
            for name in value:
                self.text(name, where, key)
            out[key] = list(value)
        elif key == "type":
            kinds = [value] if isinstance(value, str) else value
            if not isinstance(kinds, list | tuple) or not kinds or not all(kind in TYPES for kind in kinds):
                raise SchemaError(where, f"must be one or more of {', '.join(TYPES)}", key)
            out[key] = value if isinstance(value, str) else list(dict.fromkeys(kinds))
        elif key == "enum":
            if not isinstance(value, list | tuple) or not value:
                raise SchemaError(where, "must be a list that is not empty", key)
            out[key] = [self.value(item, where, key, depth) for item in value]
        elif key == "const":
            out[key] = self.value(value, where, key, depth)
        elif key in ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"):
            out[key] = self.size(value, where, key)
        elif key in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"):
            out[key] = self.number(value, where, key)
        elif key == "pattern":
            self.pattern(value, where, key)
            out[key] = value
        elif key == "format":
            pass  # below, where the type is known
        elif key == "uniqueItems":
            if not isinstance(value, bool):
                raise SchemaError(where, "must be true or false", key)
            if value and not (isinstance(given.get("maxItems"), int) and given["maxItems"] <= 1):
                raise SchemaError(where, "is not supported", key)
        else:
            raise SchemaError(where, "is not supported", _short(key, 60))

    def schemas(
        self, out: dict[str, Any], key: str, value: Any, where: str, depth: int, said: str | None = None
    ) -> None:
        said = said or key
        if not isinstance(value, list | tuple) or (not value and said != "items"):
            raise SchemaError(where, "must be a list of schemas that is not empty", said)
        made = []
        for i, item in enumerate(value):
            pointer = f"{where}/{said}/{i}"
            if key == "oneOf" and isinstance(item, Mapping) and set(item) - ANNOTATIONS == {"$ref"}:
                # Alternatives can be told apart where they are written out.
                self.reference(item["$ref"], pointer)
                item, pointer = self.at(self.inside(item["$ref"], pointer)), self.inside(item["$ref"], pointer)
            made.append(self.node(item, pointer, depth + 1))
        out[key] = made

    def inside(self, value: Any, where: str) -> str:
        """The pointer that a reference stands for."""
        if not isinstance(value, str):
            raise SchemaError(where, "must be a string", "$ref")
        pointer = unquote(value[1:])
        if not value.startswith("#") or (pointer and not pointer.startswith("/")):
            raise SchemaError(where, "is supported only into the schema itself (#/...)", "$ref")
        try:
            self.at(pointer)
        except KeyError:
            raise SchemaError(where, f"leads nowhere: {_short(value)}", "$ref") from None
        return pointer

    def reference(self, value: Any, where: str) -> str:
        pointer = self.inside(value, where)
        if pointer and pointer not in self.names:
            self.names[pointer] = self.todo[pointer] = str(len(self.names))
        return f"#/$defs/{self.names[pointer]}" if pointer else "#"

    def format(self, out: dict[str, Any], given: Mapping[str, Any], where: str) -> None:
        if "format" not in given:
            return
        name = given["format"]
        if not isinstance(name, str):
            raise SchemaError(where, "must be a string", "format")
        kinds = out.get("type", "string")
        if "string" not in ([kinds] if isinstance(kinds, str) else kinds):
            return  # it speaks of strings
        if name in DATES:
            pattern = {"pattern": DATES[name]}
            out.update({"allOf": [*out.get("allOf", ()), pattern]} if "pattern" in out else pattern)
        elif name in FORMATS:
            out["format"] = name
        else:
            raise SchemaError(where, f"{_short(name, 40)!r} is not supported", "format")

    def text(self, value: str, where: str, key: str) -> None:
        """Refuse text that no answer can hold."""
        if any("\ud800" <= char <= "\udfff" for char in value):
            raise SchemaError(where, "holds a lone surrogate, which is no text", key)
        if any((char < " " and char not in "\b\f\n\r\t") or char == "\x7f" for char in value):
            raise SchemaError(where, "holds a control character that is not supported", key)

    def value(self, value: Any, where: str, key: str, depth: int) -> Any:
        if depth > MAX_DEPTH:
            raise SchemaError(where, f"holds a value nested more than {MAX_DEPTH} levels deep", key)
        if isinstance(value, str):
            self.text(value, where, key)
        elif isinstance(value, Mapping):
            for name in value:
                if not isinstance(name, str):
                    raise SchemaError(where, f"holds a name that is no string: {name!r:.40}", key)
                self.text(name, where, key)
            return {name: self.value(item, where, key, depth + 1) for name, item in value.items()}
        elif isinstance(value, list | tuple):
            return [self.value(item, where, key, depth + 1) for item in value]
        elif isinstance(value, int | float) and not isinstance(value, bool):
            if not math.isfinite(value) if isinstance(value, float) else not -(1 << 63) <= value < 1 << 64:
                raise SchemaError(where, "holds a number that is too large", key)
        elif value is not None and not isinstance(value, bool):
            raise SchemaError(where, f"holds a value that is not JSON: {_name(value)}", key)
        return value

    def size(self, value: Any, where: str, key: str) -> int:
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MAX_SIZE:
            raise SchemaError(where, f"must be an integer in [0, {MAX_SIZE}]", key)
        return value

    def number(self, value: Any, where: str, key: str) -> int | float:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise SchemaError(where, f"must be a number, not {_name(value)}", key)
        if not -MAX_BOUND <= value <= MAX_BOUND:
            raise SchemaError(where, "must not be beyond 2^53", key)
        if key == "multipleOf" and not value > 0:
            raise SchemaError(where, "must be greater than 0", key)
        return int(value) if isinstance(value, float) and value.is_integer() else value

    def pattern(self, value: Any, where: str, key: str) -> None:
        if not isinstance(value, str):
            raise SchemaError(where, "must be a string", key)
        if any("\ud800" <= char <= "\udfff" for char in value):
            raise SchemaError(where, "holds a lone surrogate, which is no text", key)
        if problem := pattern_problem(value):
            raise SchemaError(where, f"uses {problem}, which is not supported", key)


_GROUP = re.compile(r"\(\?(?!:|P?<(?![=!]))")
_ESCAPE = re.compile(r"\\(?![dDwWsStnrfv]|x[0-9A-Fa-f]{2}|u[0-9A-Fa-f]{4}|[pP]\{\w+(=\w+)?\}|[^0-9A-Za-z_])")


def pattern_problem(pattern: str) -> str | None:
    """What in a regular expression the compiler takes differently than ECMA 262 does, or not at all."""
    pieces = re.sub(r"\\\\", "..", pattern)
    if found := _ESCAPE.search(pieces):
        return f"the escape {pieces[found.start() : found.start() + 2]!r}"
    bare = re.sub(r"\\.", "..", pieces, flags=re.DOTALL)
    inside = [match.group()[1:-1] for match in re.finditer(r"\[\^?\]?[^\]]*\]", bare)]
    if any("[" in text or "&&" in text or "--" in text or "~~" in text for text in inside):
        return "a set within a set"
    outside = re.sub(r"\[\^?\]?[^\]]*\]", "..", bare)
    if found := _GROUP.search(outside):
        return f"the group {outside[found.start() : found.start() + 4]!r}"
    if re.search(r"\{,", outside):
        return "a repetition without a lower bound"
    return None


def _name(value: Any) -> str:
    if value is None:
        return "null"
    kinds = {bool: "a boolean", str: "a string", int: "a number", float: "a number", list: "a list", dict: "an object"}
    return kinds.get(type(value), type(value).__name__)


def _escape(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")
