"""The process on the GPU: ``python -m ft_assets.training.runtime RUN.json``. Reads a spec; writes checkpoints, metrics and exit evidence.

It is independent of the platform: every path that it uses is in the run file, and it can be run by hand.
"""
