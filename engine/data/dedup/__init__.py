"""Exact and near duplicates: normalization, MinHash bands, candidate pairs, exact Jaccard, clusters."""
