"""Recipes: tested defaults for a base model and a method."""
