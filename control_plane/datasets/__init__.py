"""Dataset versions: validation, previews, imports, and the suites they are checked against."""
