"""The embedded inference server: serves a base model and many adapters in one batch, behind OpenAI's and vLLM's endpoints.

Only :mod:`resources.inference.engine` imports torch.
"""
