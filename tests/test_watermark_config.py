"""What an operator says about the mark: refused by name where it is wrong, and never repeated where it is secret."""

import dataclasses
import json
import logging
import os
import re
import shlex
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from jaxserve import ConfigError, EngineConfig, RequestError, SamplingParams
from jaxserve.watermark import Scheme
from jaxserve.watermark.config import WatermarkConfig, WatermarkConfigError
from jaxserve.watermark.prf import CHACHA, PHILOX, prepared

SECRET = 7766554433221100
HEX = "0x" + "c0ffee5ec2e7" * 5

WRONG = {
    "key of 65 bits for philox": ({"key": 1 << 64}, "key default: key must be an integer from 0 to 2^64"),
    "negative key": ({"key": -5}, "key must be an integer from 0"),
    "key of 257 bits": ({"key": 1 << 256, "prf": CHACHA}, "key must be an integer from 0 to 2^256"),
    "key is true": ({"key": True}, "key default must be an integer"),
    "key is a fraction": ({"key": 1.5}, "key default must be an integer"),
    "key is a word": ({"key": "secretword"}, "neither a decimal number nor"),
    "no key": ({}, "exactly one of key, key_file, keys"),
    "two ways": ({"key": 1, "keys": []}, "exactly one of key, key_file, keys"),
    "no keys": ({"keys": []}, "keys must hold 1 to"),
    "keys of a wrong kind": ({"keys": {"id": "a"}}, "keys must be a list"),
    "a key of a wrong kind": ({"keys": [7]}, "keys must be a list of objects"),
    "a key without a name": ({"keys": [{"key": 1}]}, "every key needs an id"),
    "a strange name": ({"keys": [{"id": "a b", "key": 1}]}, "a key's id must be"),
    "unknown field of a key": ({"keys": [{"id": "a", "key": 1, "from": "x"}]}, "unknown field 'from' of a key"),
    "a key twice": ({"keys": [{"id": "a", "key": 1}, {"id": "b", "key": 1}]}, "two keys have the same secret"),
    "a name twice": ({"keys": [{"id": "a", "key": 1}, {"id": "a", "key": 2}]}, "two keys have the same id"),
    "no telling which": ({"keys": [{"id": "a", "key": 1}, {"id": "b", "key": 2}]}, "come into force at the same time"),
    "nobody's name": ({"keys": [{"id": "a", "key": 1}], "key_id": "b"}, "key_id 'b' is the id of no key"),
    "no date": ({"keys": [{"id": "a", "key": 1, "active_from": "soon"}]}, "active_from must be a date"),
    "no key yet": ({"keys": [{"id": "a", "key": 1, "active_from": "2999-01-01"}]}, "no key is in force yet"),
    "no such file": ({"key_file": "nowhere.key"}, "No such file"),
    "alpha without dual key": ({"key": 1, "alpha": 0.1}, "alpha needs algorithm dual_key_gumbel"),
    "alpha 0": ({"key": 1, "algorithm": "dual_key_gumbel", "alpha": 0}, "alpha must be a number between 0 and 1"),
    "alpha nan": ({"key": 1, "algorithm": "dual_key_gumbel", "alpha": float("nan")}, "alpha must be a number"),
    "unknown prf": ({"key": 1, "prf": "md5"}, "prf must be one of philox"),
    "prf of a wrong kind": ({"key": 1, "prf": ["philox"]}, "prf must be one of philox"),
    "unknown algorithm": ({"key": 1, "algorithm": "green"}, "algorithm must be one of gumbel, dual_key_gumbel"),
    "unknown mode": ({"key": 1, "mode": "on"}, "mode must be one of off, opt-in, default-on, enforced"),
    "width 0": ({"key": 1, "context_width": 0}, "context_width must be an integer from 1"),
    "width true": ({"key": 1, "context_width": True}, "context_width must be an integer from 1"),
    "history 0": ({"key": 1, "deduplicate_contexts_max_history": 0}, "deduplicate_contexts_max_history must be"),
    "unknown deduplication": ({"key": 1, "deduplicate_contexts": "yes"}, "deduplicate_contexts must be one of none"),
    "no streams": ({"key": 1, "streams": 0}, "streams must be an integer from 1 to 64"),
    "unknown field": ({"key": 1, "allow_target_only": True}, "unknown field 'allow_target_only'; known: algorithm"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_configurations_are_refused_by_name(name: str) -> None:
    fields, message = WRONG[name]
    with pytest.raises(ConfigError) as caught:
        EngineConfig(watermark_config=json.dumps(fields))
    assert str(caught.value).startswith("watermark_config: ")
    assert message in str(caught.value)


@pytest.mark.parametrize("text", ["{", "[1]", "null", "{}", "no/such/file.json", "{'key': 1}", '"x"', ""])
def test_what_is_no_configuration_at_all(text: str) -> None:
    with pytest.raises(ConfigError, match="watermark_config: "):
        EngineConfig(watermark_config=text)


@pytest.mark.parametrize(
    "source",
    [
        str(SECRET),
        HEX,
        f'{{"key": {SECRET}, }}',
        f'{{"key": "{SECRET}x"}}',
        f'{{"key": {SECRET}{SECRET}}}',
        f'{{"key": {SECRET}.5}}',
        f'{{"key": [{SECRET}]}}',
        f'{{"key": {SECRET}, "mode": "on"}}',
        f'{{"key": "{HEX}", "prf": "philox"}}',
        f'{{"keys": [{{"id": "a", "key": {SECRET}, "key_file": "x"}}]}}',
        f'{{"key_file": "{SECRET}"}}',
        f'{{"key_file": "{HEX}"}}',
        f'{{"key_file": "{HEX[2:]}"}}',
        f'{{"key_file": "{HEX[2:] * 9}"}}',
        f'{{"key": 1, "{HEX}": 1}}',
        f'{{"keys": [{{"id": "a", "key": 1, "{SECRET}": 1}}]}}',
        f'{{"key": 1, "key_id": "{HEX}"}}',
        f'{{"keys": [{{"id": "a", "key": 1}}], "key_id": "{SECRET}"}}',
        f'{{"keys": [{{"id": "{HEX}"}}]}}',
        f'{{"key": 1, "prf": "{HEX}"}}',
        f'{{"key": 1, "context_width": {SECRET}}}',
    ],
)
def test_no_message_repeats_a_key(source: str) -> None:
    with pytest.raises(ConfigError) as caught:
        EngineConfig(watermark_config=source)
    error: BaseException | None = caught.value
    while error is not None:
        assert str(SECRET) not in str(error)
        assert HEX[2:] not in str(error)
        assert hex(SECRET)[2:] not in str(error)
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def test_keys_stay_out_of_every_repr_and_report(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    source = {"key": SECRET, "algorithm": "dual_key_gumbel", "context_width": 20}
    source["deduplicate_contexts_max_history"] = 10
    config = EngineConfig(watermark_config=json.dumps(source))
    mark = config.watermark
    assert mark is not None
    made = mark.mark(3)
    said = " ".join(map(str, (config, mark, made, mark.describe(), dataclasses.replace(config, seed=3), caplog.text)))
    assert str(SECRET) not in said
    assert not [word for word in made.words.ravel().tolist() if word > 9999 and str(word) in said]
    assert not caplog.text, "options are read several times before an engine starts, which then warns once"
    mark.warn()
    for message in ("context_width 20", "max_history 10"):
        assert caplog.text.count(message) == 1
    assert json.dumps(mark.describe())


def test_keys_come_from_files_beside_the_configuration(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "a.key").write_text(f"{HEX}\n")
    (tmp_path / "a.key").chmod(0o600)
    (tmp_path / "b.key").write_text(f" {SECRET} ")
    (tmp_path / "b.key").chmod(0o644)
    keys = [{"id": "new", "key_file": "a.key", "active_from": "2026-06-01"}, {"id": "old", "key_file": "b.key"}]
    (tmp_path / "mark.json").write_text(json.dumps({"keys": keys, "prf": CHACHA}))
    config = EngineConfig(watermark_config=str(tmp_path / "mark.json")).watermark
    assert config is not None
    assert [(key.id, key.secret) for key in config.keys] == [("old", SECRET), ("new", int(HEX, 16))]
    assert not caplog.text
    config.warn()
    assert caplog.text.count("the file of key old can be read by others") == 1
    assert caplog.text.count("key old is weak") == 1
    assert "key new" not in caplog.text


def test_a_configuration_that_holds_a_key_and_that_others_can_read_is_warned_of(tmp_path: Path) -> None:
    path = tmp_path / "mark.json"
    for text, mode, warned in (('{"key": 5}', 0o644, 1), ('{"key": 5}', 0o600, 0), ('{"key_file": "k"}', 0o644, 0)):
        path.write_text(text)
        path.chmod(mode)
        (tmp_path / "k").write_text("5")
        (tmp_path / "k").chmod(0o600)
        found = WatermarkConfig.read(path).warnings
        assert len(found) == warned
        assert not warned or "the configuration's file holds a key" in found[0]


def test_what_is_no_regular_file_or_too_large_is_refused_at_once(tmp_path: Path) -> None:
    (tmp_path / "large").write_text("1" * (2 << 20))
    os.mkfifo(tmp_path / "pipe")
    for name, message in (("/dev/zero", "no regular file"), (tmp_path / "large", "has more than")):
        for source in (str(name), {"key_file": str(name)}):
            with pytest.raises(WatermarkConfigError, match=message):
                WatermarkConfig.read(source)
    for name, message in (("pipe", "no regular file"), (".", "Is a directory")):
        with pytest.raises(WatermarkConfigError, match=message):
            WatermarkConfig.read({"key_file": str(tmp_path / name)})


ROTATED = {
    "keys": [
        {"id": "old", "key": 5},
        {"id": "older", "key": 6, "active_from": "2020-01-01", "algorithm": "dual_key_gumbel", "context_width": 2},
        {"id": "new", "key": HEX, "active_from": "2021-01-01", "prf": CHACHA, "context_width": 6},
        {"id": "next", "key": 7, "active_from": "2999-01-01"},
    ]
}


def test_a_key_has_its_own_scheme_and_the_one_in_force_marks_by_its_own() -> None:
    config = WatermarkConfig.read(ROTATED)
    assert (config.prf, config.context_width, config.dual) == (CHACHA, 6, False)
    found = {one.name: (one.prf, one.context_width, one.alpha) for one in Scheme.of(config)}
    assert found["old"] == found["next"] == (PHILOX, 4, None)
    assert found["older"] == (PHILOX, 2, 0.1)
    assert found["new"] == (CHACHA, 6, None)
    assert dataclasses.replace(config) == config
    made = config.mark()
    assert made.key_id == "new"
    assert (made.words[0] == prepared(CHACHA, int(HEX, 16), 6)).all()
    pinned = WatermarkConfig.read(ROTATED | {"key_id": "older"})
    assert (pinned.prf, pinned.context_width, pinned.alpha) == (PHILOX, 2, 0.1)


def test_an_engine_marks_in_one_way_as_long_as_it_runs() -> None:
    config = WatermarkConfig.read(ROTATED)
    assert [message for message in config.warnings if "next" in message and "first start after its date" in message]
    for year in (2019, 2022, 3000):
        assert config.mark(now=datetime(year, 1, 2, tzinfo=UTC)).key_id == "new"


@pytest.mark.parametrize(
    ("own", "message"),
    [
        ({"prf": "md5"}, "key a: prf must be one of"),
        ({"prf": None, "context_width": 0}, "key a: context_width must be"),
        ({"alpha": 0.1}, "key a: alpha needs algorithm dual_key_gumbel"),
        ({"algorithm": "green"}, "key a: algorithm must be one of"),
        ({"algorithm": "dual_key_gumbel", "alpha": 2}, "key a: alpha must be a number"),
        ({"key": HEX}, 'needs "prf": "chacha20-threefry-v1"'),
    ],
)
def test_a_wrong_scheme_of_a_key_names_the_key_and_the_field(own: dict[str, Any], message: str) -> None:
    with pytest.raises(WatermarkConfigError, match=message):
        WatermarkConfig.read({"keys": [{"id": "a", "key": 1} | own]})


def test_the_example_of_the_documentation_works_as_written(tmp_path: Path) -> None:
    text = Path("docs/watermark.md").read_text(encoding="utf-8")
    command = re.search(r"^\(umask 077; python (-c '.*') > mark.key\)$", text, re.MULTILINE)
    example = re.search(r"^echo '(.*)' > mark.json$", text, re.MULTILINE)
    assert command
    assert example
    (tmp_path / "mark.json").write_text(example[1])
    made = subprocess.run([sys.executable, *shlex.split(command[1])], capture_output=True, text=True, check=True)
    (tmp_path / "mark.key").write_text(made.stdout)
    (tmp_path / "mark.key").chmod(0o600)
    config = WatermarkConfig.read(tmp_path / "mark.json")
    assert (config.prf, config.warnings) == (CHACHA, ())


def test_the_key_in_force_follows_the_dates() -> None:
    keys = [
        {"id": "second", "key": 2, "active_from": "2026-03-01T00:00:00+01:00"},
        {"id": "first", "key": 1},
        {"id": "third", "key": 3, "active_from": "2999-01-01"},
    ]
    config = WatermarkConfig.read({"keys": keys})
    at = {(2026, 2, 28, 22, 59): "first", (2026, 2, 28, 23, 0): "second", (2999, 1, 2): "third"}
    for date, name in at.items():
        now = datetime(*date, tzinfo=UTC)
        assert config.key_in_force(now).id == name
        assert config.mark(now=now).key_id == name
    pinned = WatermarkConfig.read({"keys": keys, "key_id": "third"})
    assert pinned.mark().key_id == "third"


def test_what_the_peer_writes_means_what_it_means_there() -> None:
    config = WatermarkConfig.read('{"algorithm":"gumbel","key":42}')
    assert (config.prf, config.context_width, config.deduplicate_contexts) == (PHILOX, 4, "single_turn")
    assert (config.deduplicate_contexts_max_history, config.alpha, config.dual) == (8192, None, False)
    assert WatermarkConfig.read({"key": 42, "prf": "philox"}).prf == PHILOX
    assert WatermarkConfig.read({"key": 1, "algorithm": "dual_key_gumbel"}).alpha == 0.1
    assert WatermarkConfig.read({"key": "0x2a"}).keys == config.keys


def test_streams_of_one_request_differ_and_all_are_within_reach_of_a_detector() -> None:
    for streams in (1, 4, 64):
        config = WatermarkConfig.read({"key": 1, "streams": streams})
        for seed in (0, 7, -3, 2**63):
            for n in (1, 3, 8):
                found = [config.stream(seed, index, n) for index in range(n)]
                assert len(set(found)) == n
                assert 0 <= min(found) <= max(found) < max(streams, n)
                assert streams > 1 or found == list(range(n)), "alone, the first is marked by the key itself"
        assert {config.stream(seed, 0, 1) for seed in range(64)} == set(range(streams))


POLICY = {  # wish: None, True, False; then None with greedy choice
    "off": ("not_watermarked", None, "not_watermarked", "not_watermarked"),
    "opt-in": ("not_watermarked", "watermarked", "not_watermarked", "not_watermarked"),
    "default-on": ("watermarked", "watermarked", "not_watermarked", "skipped"),
    "enforced": ("watermarked", "watermarked", None, "skipped"),
}


@pytest.mark.parametrize("mode", POLICY)
def test_who_decides(mode: str) -> None:
    """None where the policy refuses the request."""
    config = WatermarkConfig.read({"key": 1, "mode": mode})
    cases: list[tuple[Any, bool]] = [(None, False), (True, False), (False, False), (None, True)]
    for (wish, greedy), expected in zip(cases, POLICY[mode], strict=True):
        if expected is None:
            with pytest.raises(ValueError, match="watermarking is"):
                config.decide(wish, greedy)
        else:
            found = config.decide(wish, greedy)
            assert found.status == expected
            assert (found.reason is None) == (expected == "watermarked")


def test_greedy_choice_can_be_refused_where_marks_are_enforced() -> None:
    config = WatermarkConfig.read({"key": 1, "mode": "enforced", "unmarkable": "refuse"})
    assert config.decide(None, False).status == "watermarked"
    with pytest.raises(ValueError, match=r"greedy choice \(temperature 0, top_k 1\) has no mark"):
        config.decide(None, True)


@pytest.mark.parametrize(
    "fields",
    [{"min_p": 1.0}, {"top_p": 1e-3}, {"temperature": 9e-3}, {"allowed_token_ids": [5]}, {"allowed_token_ids": [5, 5]}],
)
def test_requests_that_leave_no_choice_can_be_refused_where_marks_are_enforced(fields: dict[str, Any]) -> None:
    params = SamplingParams(**fields)
    assert not params.greedy
    for mode in ("enforced", "default-on"):
        config = WatermarkConfig.read({"key": 1, "mode": mode})
        assert config.decide(None, params.greedy, params.choiceless).status == "watermarked"
    config = WatermarkConfig.read({"key": 1, "mode": "enforced", "unmarkable": "refuse"})
    with pytest.raises(ValueError, match=f"{min(fields)} leaves one token"):
        config.decide(None, params.greedy, params.choiceless)
    ordinary = SamplingParams(min_p=0.9, top_p=0.01, temperature=0.01, allowed_token_ids=[5, 6], top_k=2)
    assert config.decide(None, ordinary.greedy, ordinary.choiceless).status == "watermarked"


@pytest.mark.parametrize("value", [1, 0, "true", [], {}])
def test_watermarking_is_true_or_false(value: Any) -> None:
    with pytest.raises(RequestError, match="watermarking must be true or false") as caught:
        SamplingParams(watermarking=value)
    assert caught.value.param == "watermarking"
