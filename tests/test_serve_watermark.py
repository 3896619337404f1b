"""The server's side of the mark: the request's field, what answers say, and detection over HTTP. No engine."""

import json
import math
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from jaxserve.watermark import Scheme, detect_many
from jaxserve.watermark.config import WatermarkConfig
from tests.fake_llm import FakeLLM
from tests.serving import Server, chat, complete, events, serving
from tests.watermarked import marked

SECRETS = {"old": 8123456789012345, "new": 9123456789012345}
CONFIG = {
    "keys": [
        {"id": "old", "key": SECRETS["old"]},
        {"id": "new", "key": SECRETS["new"], "active_from": "2020-01-01"},
    ]
}


def config(**more) -> WatermarkConfig:
    return WatermarkConfig.read(CONFIG | more)


def text_under(key: str, count: int = 150, *, stream: int = 0, seed: int = 1) -> str:
    """Marked text whose tokens are its bytes."""
    return "".join(map(chr, marked(count, Scheme(key=SECRETS[key]), seed=seed, stream=stream, vocab=range(32, 127))))


@pytest.fixture(scope="module")
def server():
    with serving(FakeLLM(watermark=config())) as made:
        yield made


def detect(server: Server, **body):
    return server.send("/v1/watermark/detect", body)


# -- asking for the mark ----------------------------------------------------------------------------------------------

STATUS = "X-Jaxserve-Watermark"


@pytest.mark.parametrize(
    ("mode", "fields", "status"),
    [
        ("default-on", {}, "watermarked"),
        ("default-on", {"watermarking": None}, "watermarked"),
        ("default-on", {"watermarking": False}, "not_watermarked"),
        ("default-on", {"temperature": 0}, "skipped"),
        ("opt-in", {}, "not_watermarked"),
        ("opt-in", {"watermarking": True}, "watermarked"),
        ("enforced", {}, "watermarked"),
        ("off", {}, "not_watermarked"),
    ],
)
def test_answers_say_what_was_applied_in_the_header_and_in_each_choice(mode, fields, status):
    with serving(FakeLLM(watermark=config(mode=mode))) as server:
        for ask in (complete, chat):
            code, body, headers = ask(server, n=2, **fields)
            assert code == 200
            assert headers[STATUS] == status
            for choice in body["choices"]:
                assert choice["watermark"]["status"] == status
                assert choice["watermark"]["key_id"] == ("new" if status == "watermarked" else None)
                assert choice["watermark"]["stream"] == (0 if status == "watermarked" else None)
                assert (choice["watermark"]["reason"] is None) == (status == "watermarked")
            code, text, headers = ask(server, stream=True, **fields)
            assert headers[STATUS] == status
            told = [c["watermark"]["status"] for e in events(text) for c in e["choices"] if c["finish_reason"]]
            assert told == [status]
            assert text.count('"watermark":') == 1
        code, body, headers = server.send("/v1/responses", {"input": "Hi"} | fields)
        assert (code, headers[STATUS], body["watermark"]["status"]) == (200, status, status)


def test_a_stop_string_that_the_server_finds_loses_nothing(server):
    _, body, _ = chat(server, stop=["w"])
    assert body["choices"][0]["watermark"]["status"] == "watermarked"


@pytest.mark.parametrize(
    ("mode", "fields"),
    [("enforced", {"watermarking": False}), ("off", {"watermarking": True}), ("default-on", {"watermarking": "yes"})],
)
def test_what_policy_forbids_is_a_400_that_names_the_field(mode, fields):
    with serving(FakeLLM(watermark=config(mode=mode))) as server:
        for path, body in (
            ("/v1/completions", {"prompt": "Hi"}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}]}),
            ("/v1/responses", {"input": "Hi"}),
        ):
            code, answer, headers = server.send(path, body | fields)
            assert (code, answer["error"]["param"]) == (400, "watermarking")
            assert STATUS not in headers
        server.llm.wait_idle()


def test_without_a_mark_nothing_is_said_and_a_wish_for_one_is_refused():
    with serving() as server:
        code, body, headers = complete(server)
        assert code == 200
        assert STATUS not in headers
        assert "watermark" not in body["choices"][0]
        assert complete(server, watermarking=False)[0] == 200
        code, body, _ = complete(server, watermarking=True)
        assert (code, body["error"]["param"]) == (400, "watermarking")
        code, body, _ = detect(server, text="Hi")
        assert (code, body["error"]["code"]) == (400, "no_watermark")
        assert server.send("/v1/watermark/keys")[1]["keys"] == []


# -- detection --------------------------------------------------------------------------------------------------------


def test_a_marked_text_is_found_and_its_key_is_named(server):
    text = text_under("old")
    code, body, _ = detect(server, text=text)
    assert code == 200
    [one] = body["data"]
    assert one["is_watermarked"]
    assert (one["key"], one["stream"], one["num_candidates"]) == ("old", 0, 16)
    [alone] = detect_many([list(text.encode())], [Scheme(key=SECRETS["old"])])
    assert one["log10_p_value"] == pytest.approx(alone.log10_p_value + math.log10(16))
    assert one["score"] == pytest.approx(alone.score)


def test_many_documents_as_texts_or_ids_and_their_order(server):
    texts = ["Nothing is marked here, and nothing will be.", text_under("new", stream=3), ""]
    code, by_text, _ = detect(server, text=texts)
    assert code == 200
    assert [one["is_watermarked"] for one in by_text["data"]] == [False, True, False]
    assert [one["index"] for one in by_text["data"]] == [0, 1, 2]
    assert (by_text["data"][1]["key"], by_text["data"][1]["stream"]) == ("new", 3)
    assert by_text["data"][2]["p_value"] == 1.0
    code, by_ids, _ = detect(server, token_ids=[list(text.encode()) for text in texts])
    assert by_ids == by_text


def test_named_keys_and_streams_are_tried_and_no_others(server):
    text = text_under("old", stream=2)
    assert not detect(server, text=text, keys=["new"])[1]["data"][0]["is_watermarked"]
    assert not detect(server, text=text, streams=2)[1]["data"][0]["is_watermarked"]
    [one] = detect(server, text=text, keys=["old"], streams=3)[1]["data"]
    assert (one["is_watermarked"], one["num_candidates"]) == (True, 3)


def test_completions_of_requests_for_several_are_found_and_the_number_of_streams_is_told(server):
    texts = [text_under("new", stream=stream) for stream in (7, 8)]
    known, beyond = detect(server, text=texts)[1]["data"]
    assert (known["is_watermarked"], known["stream"], known["num_streams"]) == (True, 7, 8)
    assert (beyond["is_watermarked"], beyond["num_streams"]) == (False, 8)
    assert detect(server, text=texts[1], streams=9)[1]["data"][0]["is_watermarked"]


def test_the_streams_of_the_configuration_are_tried():
    with serving(FakeLLM(watermark=config(streams=12))) as server:
        [one] = detect(server, text=text_under("old", stream=11))[1]["data"]
        assert (one["is_watermarked"], one["stream"], one["num_candidates"]) == (True, 11, 24)


def test_token_scores_and_spans_come_where_asked_for(server):
    plain = "This sentence was written by a person with a pen, in the evening, for nobody. " * 2
    text = plain + text_under("new", 200) + plain + "ö 😀"
    [one] = detect(server, text=text, return_token_scores=True, return_spans=True)[1]["data"]
    assert "".join(token["text"] for token in one["tokens"]) == text
    assert sum(token["score"] or 0 for token in one["tokens"]) == pytest.approx(one["score"])
    [span] = one["spans"]
    assert text[span["start"] : span["end"]] == span["text"]
    assert abs(span["start"] - len(plain)) < 15
    assert abs(span["end"] - len(plain) - 200) < 15
    assert span["key"] == "new"
    [bare] = detect(server, text=text)[1]["data"]
    assert "tokens" not in bare
    assert "spans" not in bare


def test_keys_never_appear(server, caplog):
    bodies = [
        detect(server, text=text_under("old"), return_token_scores=True, return_spans=True)[1],
        detect(server, text="a", keys=[str(SECRETS["old"])[:6]])[1],
        server.send("/v1/watermark/keys")[1],
        server.send("/openapi.json")[1],
        server.send("/metrics")[1],
        complete(server)[1],
    ]
    told = json.dumps(bodies) + caplog.text
    for secret in SECRETS.values():
        assert str(secret) not in told
        assert f"{secret:x}" not in told
    assert bodies[2]["keys"] == ["old", "new"]
    assert bodies[2]["key_in_force"] == "new"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "text"),
        ({"text": "a", "token_ids": [1]}, "token_ids"),
        ({"text": 5}, "text"),
        ({"text": []}, "text"),
        ({"text": ["a", 5]}, "text"),
        ({"text": ["a"] * 1025}, "text"),
        ({"token_ids": []}, None),
        ({"token_ids": "1"}, "token_ids"),
        ({"token_ids": [1, "2"]}, "token_ids"),
        ({"token_ids": [1, True]}, "token_ids"),
        ({"token_ids": [[1], 2]}, "token_ids"),
        ({"token_ids": [[1], [2.0]]}, "token_ids"),
        ({"token_ids": [[[1]]]}, "token_ids"),
        ({"token_ids": [258]}, "token_ids"),
        ({"token_ids": [-1]}, "token_ids"),
        ({"token_ids": [2**80]}, "token_ids"),
        ({"text": "a", "keys": ["nobody"]}, "keys"),
        ({"text": "a", "keys": []}, "keys"),
        ({"text": "a", "keys": "old"}, "keys"),
        ({"text": "a", "streams": 0}, "streams"),
        ({"text": "a", "streams": 129}, "streams"),
        ({"text": "a", "streams": 2.0}, "streams"),
        ({"text": "a", "threshold": 0}, "threshold"),
        ({"text": "a", "threshold": 2}, "threshold"),
        ({"text": "a", "min_scored_tokens": -1}, "min_scored_tokens"),
        ({"text": "a", "statistic": "mean"}, "statistic"),
        ({"text": "a", "key": 42}, "key"),
        ({"text": "a", "model": "other"}, "model"),
        ({"text": "a" * 600_000}, "text"),
        ({"text": "a" * 8_000_001}, "text"),
    ],
)
def test_bad_bodies_name_their_field(server, body, param):
    code, answer, _ = detect(server, **body)
    if param is None:
        assert code == 200
        return
    assert code == (404 if param == "model" else 400)
    assert answer["error"]["param"].startswith(param)
    assert len(json.dumps(answer)) < 2000


def test_lone_surrogates_are_refused(server):
    code, _, _ = server.send("/v1/watermark/detect", raw=b'{"text": "\\ud800"}')
    assert code == 400


def test_a_server_may_tell_verdicts_only_or_nothing():
    text = text_under("new")
    with serving(FakeLLM(watermark=config()), watermark_detection="verdicts") as server:
        [one] = detect(server, text=text)[1]["data"]
        counts = {"index", "num_tokens", "num_scored_tokens", "num_streams"}
        assert one.keys() == counts | {"is_watermarked", "enough_evidence"}
        assert one["is_watermarked"]
        code, body, _ = detect(server, text=text, return_token_scores=True)
        assert (code, body["error"]["param"]) == (403, "return_token_scores")
        settings = {"threshold": 0.01, "min_scored_tokens": 1, "statistic": "both", "dedup": False, "streams": 1}
        for name, value in settings.items():
            code, body, _ = detect(server, text=text, **{name: value})
            assert (code, body["error"]["param"], body["error"]["code"]) == (403, name, "verdicts_only")
        assert detect(server, text=text, keys=["new"], streams=None)[1]["data"][0]["is_watermarked"]
        assert not detect(server, text=text[:12])[1]["data"][0]["is_watermarked"]
    with serving(FakeLLM(watermark=config()), watermark_detection="off") as server:
        code, body, _ = detect(server, text=text)
        assert (code, body["error"]["code"]) == (403, "detection_off")


def test_detection_needs_the_key_of_the_server():
    with serving(FakeLLM(watermark=config()), api_key=("k",)) as server:
        assert detect(server, text="a")[0] == 401
        assert server.send("/v1/watermark/keys")[0] == 401


def test_long_detections_hold_up_nobody(server):
    ids = [list(b"The quick brown fox jumps over the lazy dog. ") * 400] * 10
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(detect, server, token_ids=ids, dedup=False)
        worst = 0.0
        while not running.done():
            start = time.perf_counter()
            assert server.send("/health")[0] == 200
            worst = max(worst, time.perf_counter() - start)
        assert running.result()[0] == 200
    assert worst < 1.0
