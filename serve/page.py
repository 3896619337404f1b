"""The page for people at ``/``: static files without secrets, which load without a key, and nothing from elsewhere.

What the page shows comes from the API, with the key that its user gives it. The files lie in ``web/`` and are served as
they are; ``index.html`` is ``/``, the others are ``/web/NAME``.
"""

import hashlib
from dataclasses import dataclass
from pathlib import Path

from aiohttp import web

from serve.errors import Handler
from serve.openapi import api

FOLDER = Path(__file__).parent / "web"
TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}

HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
        "require-trusted-types-for 'script'; trusted-types 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",
}
"""Only what this server itself sends may run, be shown or be asked; and no text may ever become a program."""


@dataclass(frozen=True)
class _File:
    body: bytes
    content_type: str
    etag: str


def _path(name: str) -> str:
    return "/" if name == "index.html" else f"/web/{name}"


PATHS = frozenset(_path(file.name) for file in FOLDER.iterdir() if file.suffix in TYPES)
"""Where the page's files are served."""


def _load() -> dict[str, _File]:
    """Every file by its path, read once."""
    found = {}
    for file in FOLDER.iterdir():
        if file.suffix in TYPES:
            body = file.read_bytes()
            found[_path(file.name)] = _File(body, TYPES[file.suffix], hashlib.sha256(body).hexdigest()[:20])
    return found


def routes() -> list[web.RouteDef]:
    """A route for each file."""
    return [web.get(path, _handler(file)) for path, file in sorted(_load().items())]


def _handler(file: _File) -> Handler:
    headers = HEADERS | {"ETag": f'"{file.etag}"'}

    @api((file.content_type,), answers={304: None}, errors=(500,), open=True)
    async def answer(request: web.Request) -> web.StreamResponse:
        """A part of the page for people; 304 for a browser that has it already."""
        if any(tag.value in (file.etag, "*") for tag in request.if_none_match or ()):
            return web.Response(status=304, headers=headers)
        return web.Response(body=file.body, content_type=file.content_type, charset="utf-8", headers=headers)

    return answer
