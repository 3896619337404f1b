"""The page's files as HTTP serves them: without a key, complete, and with headers that shut everything else out."""

import re

import pytest

from serve import page
from tests.serving import serving

SOURCES = sorted(page.FOLDER.iterdir())


@pytest.fixture(scope="module")
def server():
    with serving(api_key=("secret",)) as server:
        yield server


@pytest.mark.parametrize("path", sorted(page.PATHS))
def test_every_file_loads_without_a_key_and_is_fenced_in(server, path):
    status, body, headers = server.send(path)
    assert status == 200
    assert body
    policy = headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy
    assert "frame-ancestors 'none'" in policy
    assert not re.search(r"https?:|\*|unsafe|data:", policy)
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert headers["Referrer-Policy"] == "no-referrer"
    assert headers["Content-Type"].endswith("charset=utf-8")


def test_the_page_opens_nothing_else(server):
    for path in ("/metrics", "/v1/models", "/web/", "/web/nothing.js", "/web/../routes.py", "/web/%2e%2e/page.py"):
        assert server.send(path)[0] == 401
    known = {"Authorization": "Bearer secret"}
    for path in ("/web/", "/web/nothing.js", "/web/%2e%2e/page.py", "/web//style.css", "/index.html"):
        assert server.send(path, headers=known)[0] == 404
    assert server.send("/", {"a": 1})[0] == 405


def test_what_a_browser_has_is_not_sent_again(server):
    tag = server.send("/")[2]["ETag"]
    assert server.send("/", headers={"If-None-Match": tag})[:2] == (304, "")
    assert server.send("/", headers={"If-None-Match": f'W/"other", W/{tag}'})[0] == 304
    assert server.send("/", headers={"If-None-Match": '"other"'})[0] == 200


@pytest.mark.parametrize("file", SOURCES, ids=lambda file: file.name)
def test_sources_are_short_name_no_other_host_and_never_make_markup_of_text(file):
    text = file.read_text()
    assert len(text.splitlines()) < 500
    assert file.suffix in page.TYPES
    assert not re.search(r"""https?://|["'(]//""", text.replace("http://www.w3.org/2000/svg", ""))
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|new Function", text)
    assert not re.search(r"<script(?![^>]*\bsrc=)|<style|\sstyle=|\son\w+=", text)


def test_all_that_the_page_refers_to_is_served():
    text = "".join(file.read_text() for file in SOURCES)
    names = re.findall(r'(?:src|href)="web/([^"]+)"|from "\./([^"]+)"', text)
    assert {f"/web/{one or other}" for one, other in names} | {"/"} == page.PATHS
