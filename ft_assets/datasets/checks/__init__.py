"""What can be wrong with an example, or doubtful about a dataset: one small module for each question."""
