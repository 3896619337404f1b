"""``python -m jaxserve.sidecar``: an owner in the foreground (``jaxserve sidecar start`` is the way for people)."""

import sys

from jaxserve.sidecar.owner import main

sys.exit(main())
