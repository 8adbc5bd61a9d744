"""The evaluation process: asks every subject every suite."""
