"""Exact and near duplicates: normal forms, MinHash bands, candidate pairs, true Jaccard, clusters."""
