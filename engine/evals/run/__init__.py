"""The evaluation process: runs every suite on every subject."""
