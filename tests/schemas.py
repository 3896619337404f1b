"""Random JSON schemas, from plain to nasty: what clients send, and what they had better not send."""

import random
from typing import Any

Json = Any

WORDS = ("a", "b", "name", "id", "ünï", "x y", "😀", 'q"', "a/b~c", "")
PATTERNS = ("^[a-c]{1,3}$", "a|b", "^x", "\\d{2}", "^(ab)*$", "\\W", "[^a-z]$", "^.$", "é+", "^\\S{1,4}$", "^[\\w-]+$")
FORMATS = ("date", "time", "date-time", "uuid", "ipv4", "ipv6", "email", "hostname", "duration", "uri")
REFUSED = (
    {"not": {"type": "null"}},
    {"if": {"type": "string"}, "then": {"maxLength": 2}},
    {"type": "array", "uniqueItems": True},
    {"type": "array", "contains": {"type": "integer"}},
    {"type": "object", "propertyNames": {"maxLength": 3}},
    {"type": "object", "dependentRequired": {"a": ["b"]}},
    {"type": "object", "unevaluatedProperties": False},
    {"type": "object", "minProperties": 3},
    {"type": "string", "pattern": "(?=a)b"},
    {"type": "string", "pattern": "("},
    {"type": "string", "pattern": "a\\bb"},
    {"type": "string", "pattern": "[a&&b]"},
    {"type": "string", "format": "iri"},
    {"type": "string", "minLength": -1},
    {"type": "string", "maxLength": "2"},
    {"type": "strin"},
    {"required": "a"},
    {"properties": ["a"]},
    {"enum": []},
    {"anyOf": []},
    {"minimum": "1"},
    {"multipleOf": 0},
    {"$ref": "#/nowhere"},
    {"$ref": "https://example.com/schema"},
    {"$dynamicRef": "#x"},
    {"nullable": True, "type": "string"},
    {"type": "integer", "minimum": 3, "maximum": 2},
    {"type": "string", "minLength": 3, "maxLength": 2},
    {"oneOf": [{"type": "integer"}, {"type": "number"}]},
    {"x-guidance": {"lenient": True}, "not": {}},
    {"type": "object", "required": ["a"], "additionalProperties": False},
    {"const": "\u0001"},
)
"""Each cannot be enforced, is no schema, or allows nothing."""


class Maker:
    """Draws schemas from ``rng``."""

    def __init__(self, rng: random.Random):
        self.rng = rng
        self.defs: dict[str, Json] = {}

    def schema(self) -> Json:
        """A whole schema."""
        rng = self.rng
        root = self.node(rng.randrange(4))
        if rng.random() < 0.1:
            root = self.spoilt(root)
        if self.defs and isinstance(root, dict):
            root["$defs"] = self.defs
        if isinstance(root, dict) and rng.random() < 0.2:
            root |= {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "T", "x-note": 1}
        return root

    def spoilt(self, node: Json) -> Json:
        """A schema with something in it that is refused."""
        bad = dict(self.rng.choice(REFUSED))
        where = self.rng.randrange(3)
        if where == 0 or not isinstance(node, dict):
            return bad
        if where == 1:
            return {"type": "array", "items": bad, "minItems": 1}
        return {"type": "object", "properties": {"k": node, "bad": bad}, "required": ["k", "bad"]}

    def node(self, depth: int) -> Json:
        rng = self.rng
        kinds = [self.string, self.number, self.constant, self.simple]
        if depth > 0:
            kinds += [
                self.object,
                self.object,
                self.array,
                self.union,
                self.reference,
                self.both,
                self.tagged,
                self.mixed,
            ]
        made = rng.choice(kinds)(depth)
        if isinstance(made, dict) and rng.random() < 0.15:
            made |= {"description": rng.choice(WORDS), "default": rng.randrange(3), "examples": [1]}
        return made

    def simple(self, depth: int) -> Json:
        return self.rng.choice(
            [{"type": "null"}, {"type": "boolean"}, {"type": ["integer", "null"]}, {"type": "integer"}]
        )

    def string(self, depth: int) -> Json:
        rng = self.rng
        made: dict[str, Json] = {"type": "string"}
        if rng.random() < 0.3:
            made["pattern"] = rng.choice(PATTERNS)
        elif rng.random() < 0.3:
            made["format"] = rng.choice(FORMATS)
        if rng.random() < 0.6:
            made["maxLength"] = rng.randrange(1, 12)
        if rng.random() < 0.2:
            made["minLength"] = rng.randrange(4)
        return made

    def number(self, depth: int) -> Json:
        rng = self.rng
        kind = rng.choice(["integer", "number"])

        def bound() -> Json:
            near = [rng.randrange(-200, 200), round(rng.uniform(-9, 9), rng.randrange(4)), 0]
            return rng.choice([*near, rng.choice([1e-7, -1e-7, 1e9, -(2**53), 123456.789])])

        made: dict[str, Json] = {"type": kind}
        if rng.random() < 0.6:
            made[rng.choice(["minimum", "exclusiveMinimum"])] = bound()
        if rng.random() < 0.6:
            made[rng.choice(["maximum", "exclusiveMaximum"])] = bound()
        if rng.random() < 0.2:
            made["multipleOf"] = rng.choice([1, 2, 7, 10, 0.5, 0.25, 0.1, 0.01])
        return made

    def value(self, depth: int) -> Json:
        rng = self.rng
        scalars = [None, True, 0, -3, 1.5, 10**15, *WORDS, "line\nbreak\ttab\\"]
        if depth == 0 or rng.random() < 0.7:
            return rng.choice(scalars)
        if rng.random() < 0.5:
            return [self.value(depth - 1) for _ in range(rng.randrange(3))]
        return {rng.choice(WORDS): self.value(depth - 1) for _ in range(rng.randrange(3))}

    def constant(self, depth: int) -> Json:
        if self.rng.random() < 0.4:
            return {"const": self.value(2)}
        return {"enum": [self.value(2) for _ in range(self.rng.randrange(1, 5))]}

    def object(self, depth: int) -> Json:
        rng = self.rng
        names = rng.sample(WORDS, rng.randrange(1, 5))
        made: dict[str, Json] = {"type": "object", "properties": {n: self.node(depth - 1) for n in names}}
        if rng.random() < 0.8:
            made["required"] = rng.sample(names, rng.randrange(len(names) + 1))
            if rng.random() < 0.1:
                made["required"].append("extra")
        if rng.random() < 0.7:
            made["additionalProperties"] = rng.choice([False, False, False, self.node(0)])
        if rng.random() < 0.1:
            made["patternProperties"] = {rng.choice(["^x_", "_y$", "^[0-9]+$"]): self.node(0)}
        if rng.random() < 0.1:
            made["minProperties"] = rng.randrange(3)
        if rng.random() < 0.1:
            made["maxProperties"] = rng.randrange(5)
        return made

    def array(self, depth: int) -> Json:
        rng = self.rng
        made: dict[str, Json] = {"type": "array"}
        if rng.random() < 0.8:
            made["items"] = self.node(depth - 1)
        if rng.random() < 0.2:
            made["prefixItems"] = [self.node(depth - 1) for _ in range(rng.randrange(1, 3))]
        if rng.random() < 0.8:
            made["maxItems"] = rng.randrange(5)
        if rng.random() < 0.3:
            made["minItems"] = rng.randrange(3)
        return made

    def union(self, depth: int) -> Json:
        rng = self.rng
        options = [self.node(depth - 1) for _ in range(rng.randrange(1, 4))]
        return {rng.choice(["anyOf", "anyOf", "oneOf"]): options}

    def tagged(self, depth: int) -> Json:
        """Alternatives told apart by a constant, as clients write them."""
        options = []
        for tag in ("one", "two"):
            own = {"kind": {"const": tag}, "value": self.node(depth - 1)}
            option = {"type": "object", "properties": own, "required": ["kind", "value"], "additionalProperties": False}
            name = f"{tag}{len(self.defs)}"
            self.defs[name] = option
            options.append({"$ref": f"#/$defs/{name}"})
        return {"oneOf": options, "discriminator": {"propertyName": "kind"}}

    def mixed(self, depth: int) -> Json:
        """Keywords of several types at once, with or without a type."""
        rng, made = self.rng, {}
        for kind in rng.sample([self.string, self.number, self.object, self.array, self.union], 2):
            made |= kind(depth)
        if rng.random() < 0.5:
            del made["type"]
        elif rng.random() < 0.5:
            made["type"] = rng.sample(["string", "number", "object", "array", "boolean", "null"], 2)
        return made

    def both(self, depth: int) -> Json:
        return {"allOf": [self.node(depth - 1), self.node(depth - 1)]}

    def reference(self, depth: int) -> Json:
        """A part of its own, perhaps one that holds itself."""
        name = f"d{len(self.defs)}"
        self.defs[name] = {}
        own = {"v": self.node(depth - 1), "next": {"anyOf": [{"type": "null"}, {"$ref": f"#/$defs/{name}"}]}}
        again = {"type": "object", "properties": own, "required": ["v", "next"], "additionalProperties": False}
        self.defs[name] = again if self.rng.random() < 0.5 else self.node(depth - 1)
        return {"$ref": f"#/$defs/{name}"}
