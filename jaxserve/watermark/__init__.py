"""The text watermark: marking where tokens are chosen, and detection, which needs no accelerator. Imports no jax."""
