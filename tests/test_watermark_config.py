"""What an operator says about the mark: refused by name where it is wrong, and never repeated where it is secret."""

import dataclasses
import json
import logging
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from jaxserve import ConfigError, EngineConfig, RequestError, SamplingParams
from jaxserve.watermark.config import WatermarkConfig
from jaxserve.watermark.prf import CHACHA, PHILOX

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
    assert "context_width 20" in caplog.text
    assert "max_history 10" in caplog.text
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
    assert "the file of key old can be read by others" in caplog.text
    assert "key new" not in caplog.text


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
