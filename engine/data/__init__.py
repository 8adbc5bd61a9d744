"""From an uploaded file to a tokenized pack: readers, schema, checks, report, split, tokens, packs."""
