"""The kernels for Hopper as tests use them: on a GPU as they are (``--gpu``), elsewhere in Pallas' interpreter."""

import jax

from pallas_kernels.dispatch import Kernels

MOSAIC = Kernels.of(jax.devices()[0], "mosaic")
