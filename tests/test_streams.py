"""What is streamed is what is answered whole: text, tokens, log-probabilities and reasons, however slowly it is read.

200 random requests on a real engine whose tokens are bytes, over raw sockets that are read a byte at a time or in
64 KiB pieces, so that a chunk of TCP may hold half an event or many.
"""

import json
import random
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from tiny import idle

from tests.serving import Server, counts, events, serving

REQUESTS = 200
TEXTS = ["Hello", "漢字かな", "😀😀 ab", "é ü\n", "日本 😀", "a b c", "\u2028x", "👩‍👩‍👧"]


@pytest.fixture(scope="module")
def server(llm: Any) -> Iterator[Server]:
    with serving(llm, close_llm=False) as found:
        yield found
    idle(llm)


def request(rng: random.Random) -> tuple[str, dict[str, Any]]:
    """A path and a body. Every other one is made to say emoji and CJK, by allowing only their bytes."""
    text = "".join(rng.choices(TEXTS, k=rng.randrange(1, 4)))
    fields: dict[str, Any] = {
        "max_tokens": rng.choice([1, 3, 12, 24]),
        "temperature": rng.choice([0, 1.0, 2.0]),
        "seed": rng.randrange(2**40),
        "n": rng.choice([1, 1, 2]),
        "ignore_eos": rng.random() < 0.5,
        "include_stop_str_in_output": rng.random() < 0.5,
        "return_token_ids": True,
    }
    if rng.random() < 0.5:
        fields["allowed_token_ids"] = sorted(set("😀漢字é ab\n".encode()))
    if rng.random() < 0.5:
        fields["stop"] = rng.sample(["a", "b ", "ab", "é", "漢", "\n", "字", "\ufffd", "😀", " "], 3)
    if rng.random() < 0.3:
        return "/v1/chat/completions", fields | {
            "messages": [{"role": "user", "content": text}],
            **({"logprobs": True, "top_logprobs": rng.choice([0, 2])} if rng.random() < 0.5 else {}),
        }
    fields |= {"prompt": rng.choice([text, [text, "x"], list(text.encode())]), "echo": rng.random() < 0.3}
    if rng.random() < 0.5:
        fields["logprobs"] = rng.choice([0, 2])
    if rng.random() < 0.3:
        fields["prompt_logprobs"] = 1
    return "/v1/completions", fields


def fetch(server: Server, path: str, body: dict[str, Any], size: int) -> str:
    """The body of the answer, over a socket read ``size`` bytes at a time."""
    raw = json.dumps(body).encode()
    host, port = server.url.removeprefix("http://").split(":")
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(raw)}\r\n\r\n"
    with socket.create_connection((host, int(port)), timeout=30) as link:
        link.sendall(head.encode() + raw)
        pieces = []
        while piece := link.recv(size):
            pieces.append(piece)
    first, _, rest = b"".join(pieces).partition(b"\r\n\r\n")
    assert first.startswith(b"HTTP/1.1 200"), (first, rest)
    return unchunked(rest).decode() if b"Transfer-Encoding: chunked" in first else rest.decode()


def unchunked(data: bytes) -> bytes:
    out = b""
    while True:
        length, _, data = data.partition(b"\r\n")
        if not int(length, 16):
            return out
        out, data = out + data[: int(length, 16)], data[int(length, 16) + 2 :]


def told(pieces: list[dict[str, Any]]) -> dict[str, Any]:
    """All chunks of one choice together, as the whole answer would say it."""
    chat = "delta" in pieces[0]
    found: dict[str, Any] = {
        "text": "".join((p["delta"].get("content") or "") if chat else p["text"] for p in pieces),
        "token_ids": [token for p in pieces for token in p.get("token_ids", ())],
        "finish_reason": pieces[-1]["finish_reason"],
        "stop_reason": pieces[-1]["stop_reason"],
        "prompt_logprobs": pieces[0].get("prompt_logprobs"),
        "logprobs": None,
    }
    assert all(p["finish_reason"] is None for p in pieces[:-1])
    for part in (p["logprobs"] for p in pieces if p["logprobs"]):
        kept = found["logprobs"] = found["logprobs"] or {key: [] for key in part}
        for key, values in part.items():
            kept[key] += values
    return found


def whole(choice: dict[str, Any]) -> dict[str, Any]:
    text = choice["message"]["content"] if "message" in choice else choice["text"]
    keys = ("token_ids", "finish_reason", "stop_reason", "logprobs")
    return {"text": text, "prompt_logprobs": choice.get("prompt_logprobs")} | {key: choice[key] for key in keys}


def near(one: Any, other: Any) -> bool:
    """Equal, but for the last digits of log-probabilities, which depend on who else is in the batch."""
    if isinstance(one, float) and isinstance(other, float):
        return abs(one - other) < 1e-3
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(near(one[key], other[key]) for key in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(near, one, other))
    return one == other


@pytest.mark.parametrize("size", [1, 65536])
def test_streams_say_what_whole_answers_say(server, size):
    rng = random.Random(size)

    def both(sent: tuple[str, dict[str, Any]]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        path, body = sent
        stream = body | {"stream": True, "stream_options": {"include_usage": True}}
        return json.loads(fetch(server, path, body, 65536)), events(fetch(server, path, stream, size))

    requests = [request(rng) for _ in range(REQUESTS // 2)]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(both, requests))
    said = ""
    for (_, body), (answer, chunks) in zip(requests, found, strict=True):
        assert counts(chunks.pop()["usage"]) == counts(answer["usage"])
        assert len({(chunk["id"], chunk["created"], chunk["model"]) for chunk in chunks}) == 1
        assert {chunk["choices"][0]["index"] for chunk in chunks} == {c["index"] for c in answer["choices"]}
        for choice in answer["choices"]:
            pieces = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == choice["index"]]
            assert near(told(pieces), whole(choice)), (body, told(pieces), whole(choice))
            said += whole(choice)["text"]
    assert {"漢", "😀", "é"} <= set(said)
