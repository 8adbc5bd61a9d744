"""The REST API: OpenAI's wire format, so that its client works unchanged, and the platform's own fields beside it.

A route authenticates, parses, calls one function of a noun's service, and renders. Nothing else.
"""
