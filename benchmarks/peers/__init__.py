"""Workers that hold one engine each and run jobs for ``benchmarks.compare``.

They are started by path in the peer's own Python interpreter, so they import nothing of this project but
``protocol`` beside them, and keep to the syntax of Python 3.10.
"""
