"""Who may ask, how much, how slowly: each refusal has its status, a small error object, and harms nobody else."""

import asyncio
import contextlib
import gc
import json
import logging
import re
import socket
import ssl
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import pytest

from serve.options import ServerOptions
from tests.fake_llm import FakeLLM
from tests.serving import Server, chat, complete, events, serving

TEXT = "Hello, wörld! 😀"
GAUGES = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving() as found:
        yield found


def metric(server: Server, name: str, **labels: str) -> float:
    """The value of the first sample of that name and labels."""
    for line in server.send("/metrics")[1].splitlines():
        if line.startswith(name + "{") and all(f'{key}="{value}"' in line for key, value in labels.items()):
            return float(line.rsplit(" ", 1)[1])
    raise AssertionError(f"no sample {name} {labels}")


def check_refusal(server: Server, reply, status: int, code: str) -> None:
    """The four parts: status, a small error object, the next request works, and everything is back at idle."""
    got, answer, headers = reply
    assert got == status, answer
    assert set(answer["error"]) == {"message", "type", "param", "code"}
    assert answer["error"]["code"] == code
    assert len(json.dumps(answer)) < 8192
    assert headers["X-Request-Id"]
    check_unharmed(server)


def check_unharmed(server: Server) -> None:
    assert complete(server)[1]["choices"][0]["text"] == TEXT
    server.llm.wait_idle()
    end = time.monotonic() + 5
    while any(metric(server, f"jaxserve:{name}") for name in GAUGES) and time.monotonic() < end:
        time.sleep(0.01)
    assert [metric(server, f"jaxserve:{name}") for name in GAUGES] == [0, 0, 0]
    assert server.send("/load")[1] == {"server_load": 0, "running": 0, "waiting": 0}
    assert not server.state.channels


def talk(server: Server, raw: bytes, *, pause: float = 0.0, more: bytes = b"", seconds: float = 5.0) -> bytes:
    """Send bytes as they are, and return everything that comes back until the server closes the connection."""
    with socket.create_connection(server.bound.socket.getsockname()[:2]) as sock:
        sock.settimeout(seconds)
        sock.sendall(raw)
        time.sleep(pause)
        got = b""
        with contextlib.suppress(ConnectionError, BrokenPipeError):
            if more:
                sock.sendall(more)
            while piece := sock.recv(65536):
                got += piece
        return got


def error_of(raw: bytes) -> tuple[int, dict]:
    head, _, body = raw.partition(b"\r\n\r\n")
    assert b"application/json" in head
    assert b"X-Request-Id" in head
    assert len(body) < 8192
    return int(head.split()[1]), json.loads(body)["error"]


# Keys.


def test_every_route_but_three_probes_and_the_page_wants_a_key():
    open_paths = {"/health", "/ready", "/ping"}
    with serving(api_key=("one", "two")) as server:
        seen = set()
        for route in server.app.router.routes():
            path = re.sub(r"{[^}]*}", "x", route.resource.canonical)
            status = server.send(path, method=route.method)[0]
            keyed = server.send(path, method=route.method, headers={"Authorization": "Bearer two"})[0]
            static = path == "/" or path.startswith("/web/")
            assert (status == 401) == (path not in open_paths and not static), (route.method, path, status)
            assert keyed != 401
            seen.add(path)
        assert {"/v1/completions", "/tokenize", "/metrics", "/load", *open_paths} <= seen
        assert server.send("/nothing")[0] == 401
        reply = server.send("/v1/models", headers={"Authorization": "Bearer three"})
        assert reply[2]["WWW-Authenticate"] == "Bearer"
        assert "three" not in str(reply)


def test_keys_come_from_a_file_that_may_change(tmp_path):
    file = tmp_path / "keys"
    file.write_text("# ours\n  first \n\nsecond\n")
    with serving(api_key=("zero",), api_key_file=str(file)) as server:

        def status(key: str) -> int:
            return server.send("/v1/models", headers={"Authorization": f"Bearer {key}"})[0]

        assert [status(key) for key in ("zero", "first", "second", "third", "# ours", "")] == [200] * 3 + [401] * 3
        file.write_text("third\n")
        server.state.load_keys()
        assert [status(key) for key in ("zero", "first", "third")] == [200, 401, 200]
        file.write_text("\n")
        with pytest.raises(ValueError, match="api_key_file .* holds no key"):
            server.state.load_keys()
        assert status("third") == 200


@pytest.mark.parametrize("value", ["Basic right", "right", "Bearerright", "Bearer", "Bearer Bearer right", " right"])
def test_the_right_key_under_a_wrong_scheme_is_no_key(value):
    with serving(api_key=("right",)) as server:
        assert server.send("/v1/models", headers={"Authorization": value})[0] == 401
        assert server.send("/v1/models", headers={"Authorization": "Bearer right"})[0] == 200


# Sizes.


@pytest.mark.parametrize("declared", [True, False])
def test_health_stays_quick_while_too_large_a_body_is_refused(declared):
    with serving(max_body_bytes=4_000_000) as server:

        async def go():
            async def body():
                for _ in range(80):
                    yield b"x" * 100_000

            headers = {"Content-Length": "8000000"} if declared else {}
            worst = 0.0
            async with aiohttp.ClientSession() as session:
                post = asyncio.create_task(session.post(server.url + "/v1/completions", data=body(), headers=headers))
                while not post.done():
                    start = time.monotonic()
                    async with session.get(server.url + "/health") as reply:
                        assert reply.status == 200
                    worst = max(worst, time.monotonic() - start)
                async with await post as reply:
                    found = reply.status, await reply.json(), reply.headers
            await asyncio.sleep(0.05)  # until the connection, whose body was not wanted, is closed
            return found, worst

        worst = []
        for _ in range(3):  # what stops the loop does so every time; what else the machine does, does not
            reply, seconds = asyncio.run(go())
            check_refusal(server, reply, 413, "request_too_large")
            worst.append(seconds)
        assert min(worst) < 0.5  # 0.1 on a quiet machine
        assert metric(server, "jaxserve:admission_rejections_total", reason="too_large") == 3


def test_a_text_that_cannot_fit_is_refused_without_tokenizing_it():
    with serving() as server:
        server.llm.tokenizer.encode = None
        check = ({"prompt": "x" * 100_000}, {"prompt": ["a", "x" * 100_000]})
        replies = [complete(server, **fields) for fields in check]
        replies.append(chat(server, messages=[{"role": "user", "content": "x" * 100_000}]))
        del server.llm.tokenizer.encode
        for reply in replies:
            check_refusal(server, reply, 400, "context_length_exceeded")
        assert metric(server, "jaxserve:admission_rejections_total", reason="too_long") == 3


@pytest.mark.parametrize("digits", [20, 400, 4000, 5000])
@pytest.mark.parametrize("field", ["max_tokens", "n", "top_k", "seed", "temperature", "priority", "model", "prompt"])
def test_huge_numbers_are_not_echoed(server, field, digits):
    raw = f'{{"prompt": "Hi", "{field}": {"9" * digits}}}'.encode()
    if field == "prompt":
        raw = b'{"prompt": [' + b"9" * digits + b"]}"
    status, answer, _ = server.send("/v1/completions", raw=raw)
    assert status == 400 or (field in ("max_tokens", "top_k") and status == 200)  # as good as no limit
    assert status == 200 or len(answer["error"]["message"]) < 500
    check_unharmed(server)


def test_an_error_body_stays_small_whatever_is_quoted(server):
    for name in ("\\u0001" * 5000, "😀" * 5000, '\\"' * 5000):
        for body in (f'{{"prompt": "Hi", "model": "{name}"}}', f'{{"prompt": "Hi", "{name}": 1}}'):
            status, _, headers = server.send("/v1/completions", raw=body.encode())
            assert status in (400, 404)
            assert int(headers["Content-Length"]) < 8192
    check_unharmed(server)


# What is no proper HTTP.


@pytest.mark.parametrize(
    ("raw", "status", "code"),
    [
        (b"GARBAGE\r\n\r\n", 400, "malformed_request"),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", 400, "malformed_request"),
        (b"GET /health HTTP/9.9\r\n\r\n", 400, "malformed_request"),
        (b"GET /health HTTP/1.1\r\nHost: x\r\nno colon\r\n\r\n", 400, "malformed_request"),
        (b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: -5\r\n\r\n", 400, "malformed_request"),
        (b"GET /health HTTP/1.1\r\nHost: x\r\nX: " + b"y" * 40_000 + b"\r\n\r\n", 431, "headers_too_large"),
        (b"GET /" + b"y" * 40_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n", 431, "headers_too_large"),
        (
            b"GET /health HTTP/1.1\r\nHost: x\r\n" + b"".join(b"X%d: y\r\n" % i for i in range(300)) + b"\r\n",
            431,
            "headers_too_large",
        ),
    ],
    ids=lambda value: value[:20] if isinstance(value, bytes) else None,
)
def test_what_is_no_proper_http_gets_an_error_object_and_one_log_line(server, raw, status, code, caplog):
    with caplog.at_level(logging.INFO):
        found, error = error_of(talk(server, raw))
    assert (found, error["code"], error["type"]) == (status, code, "invalid_request_error")
    assert len([record for record in caplog.records if record.levelno >= logging.INFO]) == 1
    assert not any(record.exc_info for record in caplog.records)
    check_unharmed(server)


def test_an_expectation_that_nobody_meets_is_an_error_object(server):
    raw = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nExpect: miracles\r\nContent-Length: 2\r\n\r\n{}"
    assert error_of(talk(server, raw))[0] == 417
    check_unharmed(server)


def test_broken_chunks_are_an_error_object(server):
    raw = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n"
    assert error_of(talk(server, raw))[0] == 400
    check_unharmed(server)


# Slow clients.


def test_slow_headers_and_bodies_and_idle_connections_are_closed():
    with serving(header_timeout=0.2, body_timeout=0.3, keep_alive_timeout=0.5) as server:
        start = time.monotonic()
        assert talk(server, b"POST /v1/comple", pause=0.1, more=b"tions HTTP/1.1\r\n") == b""
        assert time.monotonic() - start < 1
        head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{"
        status, error = error_of(talk(server, head, seconds=15))
        assert (status, error["code"]) == (408, "body_timeout")
        assert talk(server, b"") == b""
        got = talk(server, b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        assert got.startswith(b"HTTP/1.1 200")
        assert time.monotonic() - start < 15
        check_unharmed(server)


def test_a_request_that_takes_longer_than_its_headers_may_is_not_cut():
    with serving(FakeLLM(step_seconds=0.02), header_timeout=0.1) as server:
        status, text, _ = complete(server, stream=True)
        assert (status, "".join(e["choices"][0]["text"] for e in events(text))) == (200, TEXT)


@contextlib.contextmanager
def unread_stream(server: Server) -> Iterator[socket.socket]:
    """A long stream whose client reads nothing; the buffers between are small."""
    server.bound.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    body = json.dumps({"prompt": "Hi", "max_tokens": 300_000, "ignore_eos": True, "stream": True}).encode()
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.connect(server.bound.socket.getsockname()[:2])
        sock.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        _until(lambda: server.llm.submitted, 5)
        yield sock


def test_a_reader_that_stops_is_cut_off_and_its_request_aborted():
    with serving(FakeLLM(step_seconds=0.0002, max_model_len=400_000), write_timeout=0.3) as server:
        with unread_stream(server):
            server.llm.wait_idle(30)
        assert server.llm.submitted[0].position < 200_000
        assert len(server.llm.aborted) == 1
        check_unharmed(server)


def test_too_long_a_backlog_ends_the_request(monkeypatch):
    monkeypatch.setattr("serve.state.MAX_BACKLOG", 50)
    with serving(FakeLLM(step_seconds=0.0001, max_model_len=400_000)) as server:
        with unread_stream(server) as sock:
            _until(lambda: any(channel._error for channel in server.state.channels), 20)
            assert max(len(channel._items) for channel in server.state.channels) <= 51
            sock.settimeout(5)
            text = b""
            while piece := sock.recv(65536):
                text += piece
                if b"[DONE]" in text:
                    break
            assert b'"code":"slow_client"' in text
        server.llm.wait_idle()
        assert server.llm.submitted[0].position < 200_000
        check_unharmed(server)


def _until(found, seconds: float):
    end = time.monotonic() + seconds
    while not (value := found()):
        assert time.monotonic() < end
        time.sleep(0.01)
    return value


# Time.


@pytest.mark.parametrize("ask", [complete, chat])
def test_a_request_beyond_its_deadline_is_a_504_or_an_event(ask):
    with serving(FakeLLM(step_seconds=0.02), request_timeout=0.2) as server:
        fields = {"max_tokens": 400, "ignore_eos": True}
        status, answer, headers = ask(server, **fields)
        assert (status, answer["error"]["code"], answer["error"]["type"]) == (504, "deadline_exceeded", "timeout_error")
        assert headers["X-Request-Id"]
        status, text, _ = ask(server, **fields, stream=True)
        found = events(text)
        assert (status, found[-1]["error"]["code"]) == (200, "deadline_exceeded")
        assert len(found) > 3
        server.llm.wait_idle(1.0)
        assert len(server.llm.aborted) == 2
        assert metric(server, "jaxserve:admission_rejections_total", reason="deadline") == 2
        status, answer, _ = complete(server, max_tokens=2)
        assert status == 200


def test_silence_in_a_stream_is_filled_with_comments():
    with serving(FakeLLM(step_seconds=0.3), sse_keep_alive=0.1) as server:
        status, text, _ = complete(server, stream=True, max_tokens=2)
        assert status == 200
        assert text.count(": keep-alive\n\n") >= 2
        assert text.startswith(": keep-alive\n\n")
        kept = events("".join(part + "\n\n" for part in text[:-2].split("\n\n") if not part.startswith(":")))
        assert "".join(e["choices"][0]["text"] for e in kept) == "He"
        with server.client() as client:
            stream = client.completions.create(model="tiny", prompt="Hi", max_tokens=2, stream=True)
            assert "".join(chunk.choices[0].text for chunk in stream) == "He"


# Origins, names.


def test_no_origin_is_allowed_unless_told(server):
    headers = {"Origin": "https://evil.example", "Access-Control-Request-Method": "POST"}
    status, _, got = server.send("/v1/completions", method="OPTIONS", headers=headers)
    assert status == 405
    assert not [name for name in got if name.lower().startswith("access-control")]


def test_allowed_origins_get_preflights_without_a_key_and_readable_answers():
    with serving(cors_origin=("https://good.example",), api_key=("k",)) as server:
        ask = {
            "Access-Control-Request-Method": "POST",
            "Access-Control-Request-Headers": "authorization,x-stainless-os",
        }
        good, evil = {"Origin": "https://good.example"}, {"Origin": "https://evil.example"}
        status, _, got = server.send("/v1/completions", method="OPTIONS", headers=ask | good)
        assert (status, got["Access-Control-Allow-Origin"]) == (204, "https://good.example")
        assert got["Access-Control-Allow-Headers"] == "authorization,x-stainless-os"
        assert server.send("/v1/completions", method="OPTIONS", headers=ask | evil)[0] == 401
        status, _, got = server.send("/v1/models", headers=good)
        assert (status, got["Access-Control-Allow-Origin"], got["Vary"]) == (401, "https://good.example", "Origin")
        status, _, got = server.send("/v1/models", headers=evil | {"Authorization": "Bearer k"})
        assert (status, got.get("Access-Control-Allow-Origin")) == (200, None)
    with serving(cors_origin=("*",)) as server:
        assert server.send("/v1/models", headers={"Origin": "null"})[2]["Access-Control-Allow-Origin"] == "*"


def test_request_ids_are_echoed_where_sane_and_never_keys():
    with serving(FakeLLM(step_seconds=0.01)) as server:
        assert server.send("/health", headers={"X-Request-Id": "a-1.b:C_d"})[2]["X-Request-Id"] == "a-1.b:C_d"
        for odd in ("a b", "x" * 129, "ü", "<script>", "", "a;b"):
            assert re.fullmatch(
                "req_[0-9a-f]{32}", server.send("/health", headers={"X-Request-Id": odd})[2]["X-Request-Id"]
            )

        async def twice():
            async with aiohttp.ClientSession() as session:

                async def one():
                    body = {"prompt": "Hi", "max_tokens": 100, "stream": True}
                    async with session.post(
                        server.url + "/v1/completions", json=body, headers={"X-Request-Id": "same"}
                    ) as reply:
                        return reply.headers["X-Request-Id"], await reply.text()

                return await asyncio.gather(one(), one())

        for name, text in asyncio.run(twice()):
            assert name == "same"
            assert "".join(e["choices"][0]["text"] for e in events(text)) == TEXT
        check_unharmed(server)


# Logs.


def test_the_access_log_says_what_happened_and_nothing_of_the_text(capsys):
    with serving(FakeLLM(), access_log="json", api_key=("secret-key",)) as server:
        headers = {"Authorization": "Bearer secret-key", "X-Request-Id": "mine"}
        body = {"prompt": "a private prompt", "max_tokens": 5}
        server.send("/v1/completions?token=hidden", body, headers=headers)
        server.send("/v1/completions", body | {"stream": True}, headers=headers)
        server.send("/v1/completions", body)
        server.send("/no%0Asuch\npath", headers=headers)
    shown = capsys.readouterr().out
    lines = [json.loads(line) for line in shown.splitlines()]
    assert [line["status"] for line in lines] == [200, 200, 401, 404]
    first = lines[0] | {"ms": 0, "time": "", "bytes": 0}
    assert first == {
        **{"time": "", "remote": "127.0.0.1", "method": "POST", "path": "/v1/completions", "status": 200, "ms": 0},
        **{"bytes": 0, "request_id": "mine", "prompt_tokens": 16, "completion_tokens": 5},
        **{"finish_reason": "length", "disconnected": False},
    }
    assert (lines[1]["completion_tokens"], lines[1]["finish_reason"]) == (5, "length")
    assert all(line["bytes"] > 50 for line in lines)
    assert lines[2]["prompt_tokens"] is None
    for secret in ("private", "secret-key", "hidden", "Hello"):
        assert secret not in shown


def test_a_client_that_leaves_is_in_the_log(caplog):
    with serving(FakeLLM(step_seconds=0.02), access_log="text") as server, caplog.at_level(logging.INFO):

        async def leave():
            async with aiohttp.ClientSession() as session:
                body = {"prompt": "Hi", "max_tokens": 400, "ignore_eos": True, "stream": True}
                async with session.post(server.url + "/v1/completions", json=body) as reply:
                    await reply.content.readline()

        asyncio.run(leave())
        server.llm.wait_idle(1.0)
        _until(lambda: [r for r in caplog.records if "abort (client gone)" in r.getMessage()], 5)


# Where it listens.


def test_a_unix_socket(tmp_path):
    path = tmp_path / "s.sock"
    stale = socket.socket(socket.AF_UNIX)
    stale.bind(str(path))
    stale.close()
    with serving(uds=str(path)):

        async def go():
            connector = aiohttp.UnixConnector(str(path))
            async with (
                aiohttp.ClientSession(connector=connector) as session,
                session.post("http://x/v1/completions", json={"prompt": "Hi"}) as reply,
            ):
                return reply.status

        assert asyncio.run(go()) == 200
        with pytest.raises(OSError, match=r"cannot listen on .*s\.sock"), serving(uds=str(path)):
            pass
    assert not path.exists()


@pytest.fixture(scope="module")
def certificate(tmp_path_factory) -> tuple[str, str]:
    folder = tmp_path_factory.mktemp("tls")
    cert, key = str(folder / "cert.pem"), str(folder / "key.pem")
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    command += ["-days", "2", "-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]
    try:
        subprocess.run([*command, "-keyout", key, "-out", cert], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("openssl cannot make a certificate here")
    return cert, key


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # a refused handshake's transport
def test_tls(certificate, tmp_path):
    cert, key = certificate
    with serving(tls_cert=cert, tls_key=key) as server:
        assert server.url.startswith("https://")

        host, port = server.url.removeprefix("https://").split(":")

        def health(context: ssl.SSLContext) -> bytes:
            with (
                socket.create_connection((host, int(port)), timeout=10) as plain,
                context.wrap_socket(plain, server_hostname=host) as secure,
            ):
                secure.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
                return secure.recv(1000)

        assert health(ssl.create_default_context(cafile=cert)).startswith(b"HTTP/1.1 200")
        with pytest.raises(ssl.SSLCertVerificationError):
            health(ssl.create_default_context())
    gc.collect()  # here, where the warning is expected
    no_cert = tmp_path / "no.pem"
    no_cert.write_text("nothing")
    for options, named in [
        ({"tls_cert": cert, "tls_key": str(no_cert)}, "tls_cert .* and tls_key .* cannot be used"),
        ({"tls_cert": "/nonexistent", "tls_key": key}, "tls_cert /nonexistent cannot be read"),
    ]:
        with pytest.raises(ValueError, match=named), serving(**options):
            pass


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"port": 70000}, "port"),
        ({"header_timeout": 0}, "header_timeout"),
        ({"request_timeout": -1}, "request_timeout"),
        ({"watchdog_timeout": float("nan")}, "watchdog_timeout"),
        ({"access_log": "loud"}, "access_log"),
        ({"tls_key": "x"}, "tls_cert and tls_key"),
        ({"cors_origin": ("example.org",)}, "cors_origin"),
        ({"cors_origin": ("https://a/b",)}, "cors_origin"),
        ({"api_key": ("",)}, "api_key"),
        ({"uds": ""}, "uds must not be empty"),
        ({"api_key_file": "/nonexistent"}, "api_key_file /nonexistent"),
        ({"max_header_bytes": 10}, "max_header_bytes"),
    ],
)
def test_options_that_make_no_sense_are_named(fields, named):
    with pytest.raises(ValueError, match=named):
        ServerOptions(**fields)


def test_the_repr_of_options_holds_no_key():
    assert "secret" not in repr(ServerOptions(api_key=("secret",)))


def test_no_file_of_the_server_logs_a_body():
    """Nothing in serve/ hands the text of a request to a logger."""
    for path in (Path(__file__).parent.parent / "serve").rglob("*.py"):
        for line in path.read_text().splitlines():
            assert not re.search(r"log\.\w+\(.*(prompt|messages|body|Authorization)\b", line), (path, line)
