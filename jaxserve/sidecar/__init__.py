"""The sidecar: a process that owns weights and KV pools in memory which outlives the engines that use it.

``owner`` is that process, ``client`` what an engine says to it, ``wire`` how; docs/sidecar.md describes the protocol.
"""

from jaxserve.sidecar.errors import SidecarError

__all__ = ["SidecarError"]
