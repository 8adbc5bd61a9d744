"""The training process: ``python -m engine.training.runtime RUN.json``. Spec in; checkpoints, metrics and evidence out.

It knows nothing of the platform: every path it touches is in the run file, and it can be run by hand.
"""
