"""The request bodies: what fields there are and what types they have. Ranges are ``SamplingParams``' business.

Types are strict: ``"5"``, ``5.0`` and ``true`` are no integers. A field that is null counts as absent, save
``max_tokens``, where null means "to the end of the context". Unknown fields are refused by name.
"""
