"""The embedded inference server: many adapters on one base model, answered together, behind OpenAI's and vLLM's endpoints.

Only :mod:`resources.inference.engine` imports torch.
"""
