"""Whether the tests notice mistakes: mutants of the core, drawn by a seed, and defects planted by hand elsewhere."""
