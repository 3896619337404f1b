"""From a model's text to parts, one small file a family. Which family a model speaks is chosen in ``choose``."""
