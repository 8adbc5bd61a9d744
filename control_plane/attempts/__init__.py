"""Attempts of training: claims, supervision, endings, health."""
