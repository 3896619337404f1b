"""How the sidecar fails."""

from typing import Any


class SidecarError(ValueError):
    """The sidecar cannot give what was asked of it; the message says why.

    ``code`` is the owner's word for it: ``loading``, ``unknown``, ``busy``, ``memory``, ``invalid``, ``failed``,
    ``refused`` (wrong user or folder); or the client's: ``gone`` (nobody is there), ``silent`` (an owner
    lives and does not answer), ``mismatch``, ``unsupported``.
    ``facts`` came along.
    """

    def __init__(self, message: str, code: str = "failed", facts: dict[str, Any] | None = None):
        super().__init__(message)
        self.code, self.facts = code, facts or {}
