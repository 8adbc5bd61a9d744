"""A tenant's scored suites: prompts with references, in versions, which evaluations score."""
