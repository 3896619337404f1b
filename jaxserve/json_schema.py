"""What a JSON schema asks for, checked and brought into the form that the grammar compiler enforces. Imports no jax.

Everything that a standard validator would look at is either enforced or refused, with the JSON pointer and the keyword;
annotations are dropped. So two schemas that differ in descriptions alone read the same. The dialect is 2020-12, with
``definitions``, arrays in ``items`` and ``additionalItems`` of the older ones. The parts are read by ``schema_reader``;
here is what concerns the whole.
"""

import json
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from jaxserve.schema_reader import TYPES, Reader, SchemaError, short

MAX_PATTERNS = 8
"""Most patterns and formats that one string must match together: twelve take a moment, eighteen take minutes."""
MAX_BLAMED = 256
"""Most parts that are compiled alone to find which one a complaint is about."""
_UNSATISFIABLE = "Unsatisfiable"


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
        reader = Reader(given)
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
        made._check_patterns()
        return made

    def canonical(self) -> str:
        """The same text for schemas that ask the same in the same order."""
        return json.dumps(self.document, ensure_ascii=False, allow_nan=False)

    def blame(self, complaint: str, validate: Validate) -> SchemaError:
        """The compiler's complaint about the whole, as an error that names the innermost part it is about."""
        defs = self.document.get("$defs", {})

        def complaint_of(part: Any) -> str:
            if isinstance(part, bool) or not part:
                return ""
            return validate({**part, "$defs": defs})

        node, message, seen = self.document, complaint, {id(self.document)}
        while True:
            empty = _UNSATISFIABLE in message
            parts = self._needed(node) if empty else [*_children(node), *(defs.values() if len(seen) == 1 else ())]
            for part in parts:
                if id(part) in seen or len(seen) > MAX_BLAMED:
                    continue
                seen.add(id(part))
                own = complaint_of(part)
                if own and (_UNSATISFIABLE in own) == empty:
                    node, message = part, own
                    break
            else:
                break
        pointer = self._pointers.get(id(node), "")
        line = _essence(message)
        keyword = next((key for key in node if re.search(rf"\b{re.escape(key)}\b", line) or _about(key, line)), None)
        return SchemaError(pointer, f"cannot be enforced: {line}", keyword)

    def _target(self, ref: str) -> Any:
        return self.document if ref == "#" else self.document["$defs"][ref.rpartition("/")[2]]

    def _needed(self, node: Mapping[str, Any]) -> list[Any]:
        """The parts of a schema that it cannot be satisfied without."""
        properties = node.get("properties", {})
        parts = [properties[name] for name in node.get("required", ()) if name in properties] + node.get("allOf", [])
        parts += [self._target(node["$ref"])] if "$ref" in node else []
        least = node.get("minItems", 0)
        parts += node.get("prefixItems", [])[:least]
        if least > len(node.get("prefixItems", ())) and "items" in node:
            parts.append(node["items"])
        for key in ("anyOf", "oneOf"):
            parts += node[key] if len(node.get(key, ())) == 1 else []
        return parts

    def _check_patterns(self) -> None:
        """Refuse strings that must match many patterns at once, which takes the compiler exponential time."""
        counts: dict[int, int] = {}

        def together(node: Mapping[str, Any], key: str) -> list[Any]:
            return [part for part in node.get(key, ()) if isinstance(part, Mapping)]

        def total(node: Mapping[str, Any]) -> int:
            own = ("pattern" in node) + ("format" in node)
            if "$ref" in node:
                own += counts.get(id(self._target(node["$ref"])), 0)
            own += sum(counts[id(part)] for part in together(node, "allOf"))
            return own + sum(max([counts[id(p)] for p in together(node, key)], default=0) for key in ("anyOf", "oneOf"))

        tops = (self.document, *self.document.get("$defs", {}).values())
        todo = [(node, False) for top in tops for node in _walk(top)]
        while todo:
            node, below_done = todo.pop()
            if below_done:
                counts[id(node)] = total(node)
                if counts[id(node)] > MAX_PATTERNS:
                    pointer = self._pointers.get(id(node), "")
                    raise SchemaError(pointer, f"more than {MAX_PATTERNS} patterns for one string are not supported")
            elif id(node) not in counts:
                counts[id(node)] = 0  # a loop adds nothing
                todo.append((node, True))
                parts = [part for key in ("allOf", "anyOf", "oneOf") for part in together(node, key)]
                target = self._target(node["$ref"]) if "$ref" in node else None
                todo += [(part, False) for part in (*parts, target) if isinstance(part, Mapping)]

    def _check_finite(self) -> None:
        """Refuse what only an endless document could satisfy, by the least fixpoint of "something finite fits"."""
        defs = self.document.get("$defs", {})
        nodes = [n for top in (self.document, *defs.values()) for n in _walk(top)]
        finite: set[int] = set()

        def fits(node: Any) -> bool:
            return node if isinstance(node, bool) else id(node) in finite

        def settle(node: Mapping[str, Any]) -> bool:
            if "$ref" in node and not fits(self._target(node["$ref"])):
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

        users: defaultdict[int, list[Mapping[str, Any]]] = defaultdict(list)
        """Of each part, by identity, the schemas that it may settle."""
        for node in nodes:
            for part in (*_children(node), *([self._target(node["$ref"])] if "$ref" in node else ())):
                users[id(part)].append(node)
        while nodes:  # from the end: children first
            node = nodes.pop()
            if id(node) not in finite and settle(node):
                finite.add(id(node))
                nodes += users[id(node)]
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
    return short(" ".join([lines[0], *told]) if lines else "no reason given", 200)


def _about(key: str, line: str) -> bool:
    words = {"patternProperties": "patternProperty", "pattern": "regex", "$ref": "$ref"}
    return key in words and words[key] in line
