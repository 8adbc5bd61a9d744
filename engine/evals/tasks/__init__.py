"""Definitions of capability suites, in lm-evaluation-harness's own format; one directory each."""
