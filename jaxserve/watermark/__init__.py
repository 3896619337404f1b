"""The text watermark: marking where tokens are chosen, and detection, which needs no accelerator. Imports no jax."""

from jaxserve.watermark.detect import Detection, Span, default_streams, detect, detect_many
from jaxserve.watermark.evidence import Scheme

__all__ = ["Detection", "Scheme", "Span", "default_streams", "detect", "detect_many"]
