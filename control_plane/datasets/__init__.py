"""Dataset versions: validation, previews, imports, and the contamination lists they are checked against."""
