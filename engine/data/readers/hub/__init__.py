"""Datasets on a Hugging Face Hub."""
