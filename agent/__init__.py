"""Runs beside a training process: stages its inputs in, supervises it, uploads its checkpoints, reports to the control plane."""
