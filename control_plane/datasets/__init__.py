"""Dataset versions: validation, previews, imports, and the evaluation suites they are checked against."""
