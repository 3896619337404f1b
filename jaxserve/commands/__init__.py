"""The commands of ``jaxserve``, a module each: ``add(parser)`` adds options and sets ``command`` and ``kinds``.

``jaxserve.cli`` imports a module only when it is chosen. ``command(parsed)`` returns the exit status; ``kinds``
are the dataclasses whose fields errors name.
"""
