"""Where the server listens: an address or a Unix socket, with a certificate or without."""

import os
import socket
import ssl
import stat
from pathlib import Path
from types import TracebackType
from typing import Self

from serve.options import ServerOptions


class Bound:
    """A bound socket, closed (and a Unix socket's path removed) at the end of the context."""

    def __init__(self, socket: socket.socket, options: ServerOptions):
        self.socket, self._options = socket, options
        self.path = options.uds
        self.tls: ssl.SSLContext | None = None
        if options.tls_cert is not None:
            self.tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
            self.load_certificate()

    def load_certificate(self) -> None:
        """Read the certificate, for connections to come. Raises ValueError that names the option."""
        cert, key = self._options.tls_cert, self._options.tls_key
        if self.tls is None or cert is None or key is None:
            return
        for name, path in (("tls_cert", cert), ("tls_key", key)):
            try:
                with open(path, "rb"):
                    pass
            except OSError as error:
                raise ValueError(f"{name} {path} cannot be read: {error.strerror}") from None
        try:
            self.tls.load_cert_chain(cert, key, password=_no_password)
        except (ssl.SSLError, ValueError) as error:
            raise ValueError(f"tls_cert {cert} and tls_key {key} cannot be used: {error}") from None

    @property
    def url(self) -> str:
        if self.path is not None:
            return f"unix:{self.path}"
        host, port = self.socket.getsockname()[:2]
        return f"{'https' if self.tls else 'http'}://{f'[{host}]' if ':' in host else host}:{port}"

    def close(self) -> None:
        self.socket.close()
        if self.path is not None:
            Path(self.path).unlink(missing_ok=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _no_password() -> str:
    raise ValueError("the key is encrypted")


def bind(options: ServerOptions) -> Bound:
    """Bind before a model is loaded: a port in use, or a certificate that is none, is known at once.

    Raises OSError, or ValueError that names an option.
    """
    if options.uds is not None:
        family, address, shown = socket.AF_UNIX, options.uds, options.uds
        _remove_stale(options.uds)
    else:
        family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
        address, shown = (options.host, options.port), f"{options.host}:{options.port}"  # type: ignore[assignment]
    bound = socket.socket(family, socket.SOCK_STREAM)
    try:
        if options.uds is None:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except OSError as error:
        bound.close()
        raise OSError(error.errno, f"cannot listen on {shown}: {error.strerror or error}") from None
    try:
        return Bound(bound, options)
    except ValueError:
        bound.close()
        if options.uds is not None:
            Path(options.uds).unlink(missing_ok=True)
        raise


def _remove_stale(path: str) -> None:
    """Remove a socket that nobody listens on any more; anything else stays, and binding fails."""
    try:
        if not stat.S_ISSOCK(os.stat(path).st_mode):
            return
    except OSError:
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            Path(path).unlink(missing_ok=True)
        except OSError:
            pass
