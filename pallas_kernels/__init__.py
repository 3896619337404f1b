"""GPU kernels, one folder an op: the contract, a jnp reference that is the truth, and the implementations.

A leaf package: it imports nothing of ``jaxserve``. Each op's public function takes the backend by name, picks an
implementation and says why the others declined. No kernel stands here yet; on every device the engine runs plain XLA.
"""
