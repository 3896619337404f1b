"""Five hundred generated schemas through the engine: every whole answer validates, every refusal names its reason."""

import json
import random
import re
from collections import Counter
from fractions import Fraction
from typing import Any

import jsonschema
import pytest
from schemas import REFUSED, Maker
from tiny import idle

import jaxserve
from jaxserve.request import RequestError, SamplingParams, StructuredOutputs

COUNT = 500
MAX_TOKENS = 300
SMALLEST_WHOLE_SHARE = 0.8
"""Of the answers, those that must have come to their end: drawn by random weights, strings would never close."""
BIAS = dict.fromkeys(range(128, 256), -3.0) | {ord(" "): -1.0, ord("\n"): -2.0, ord("\t"): -4.0}
BIAS |= {ord('"'): 5.0, ord("}"): 6.0, ord("]"): 6.0, ord(","): 1.0, 2: 12.0}


def multiple_of(validator: Any, factor: Any, instance: Any, schema: Any) -> Any:
    """In exact arithmetic: jsonschema divides floats, for which 0.3 is no multiple of 0.1."""
    if validator.is_type(instance, "number") and Fraction(str(instance)) % Fraction(str(factor)):
        yield jsonschema.ValidationError(f"{instance} is not a multiple of {factor}")


Judge = jsonschema.validators.extend(jsonschema.Draft202012Validator, {"multipleOf": multiple_of})


def judge(schema: Any, text: str) -> str | None:
    """What is wrong with an answer. Formats are checked as far as the judge knows them."""
    try:
        Judge(schema, format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER).validate(json.loads(text))
    except (ValueError, jsonschema.ValidationError) as error:
        return f"{type(error).__name__}: {error!s:.200}"
    return None


@pytest.mark.timeout(300)
def test_every_whole_answer_validates_and_every_refusal_names_its_reason(llm: jaxserve.LLM) -> None:
    tally: Counter[str] = Counter()
    asked: list[tuple[int, Any]] = []
    refusals: list[RequestError] = []
    each: list[SamplingParams] = []
    for seed in range(COUNT):
        schema = Maker(random.Random(seed)).schema()
        try:
            wish = StructuredOutputs(json=schema)
            llm.check_structured_outputs(wish)
        except RequestError as error:
            tally["refused"] += 1
            refusals.append(error)
            continue
        asked.append((seed, schema))
        each.append(SamplingParams(structured_outputs=wish, seed=seed, max_tokens=MAX_TOKENS, logit_bias=BIAS))
    for error in refusals:
        assert error.param == "structured_outputs.json"
        assert re.match(r"structured_outputs\.json: at /[^:]*: .{10,}", str(error)), str(error)
    outputs = llm.generate(["Answer:"] * len(each), each, progress=False)
    for (seed, schema), output in zip(asked, outputs, strict=True):
        (one,) = output.outputs
        tally[one.finish_reason or "none"] += 1
        if one.finish_reason == "stop":
            problem = judge(schema, one.text)
            assert problem is None, (seed, problem, one.text, schema)
    print(
        f"{COUNT} schemas: {tally['refused']} refused, {tally['stop']} validated, {tally['length']} cut by their length"
    )
    assert set(tally) <= {"refused", "stop", "length"}
    assert tally["stop"] >= SMALLEST_WHOLE_SHARE * len(asked)
    assert tally["refused"] < COUNT / 3
    idle(llm)
    assert llm.compilations_after_ready == 0


@pytest.mark.parametrize("schema", REFUSED, ids=lambda schema: json.dumps(schema)[:40])
def test_each_of_these_is_refused(llm: jaxserve.LLM, schema: Any) -> None:
    """Or the test above would not try refusals."""
    with pytest.raises(RequestError):
        llm.check_structured_outputs(StructuredOutputs(json=schema))


def test_the_judge_judges() -> None:
    assert judge({"multipleOf": 0.1}, "0.3") is None
    assert judge({"multipleOf": 0.1}, "0.35") is not None
    assert judge({"type": "string"}, "1") is not None
    assert judge({}, "{") is not None
