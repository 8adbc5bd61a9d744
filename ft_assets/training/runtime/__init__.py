"""The process on the GPU: ``python -m ft_assets.training.runtime RUN.json``. Spec in; checkpoints, metrics and evidence out.

It knows no platform: every path it touches is in the run file, and it can be run by hand.
"""
