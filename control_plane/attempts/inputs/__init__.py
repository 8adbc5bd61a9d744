"""Inputs of workloads in the object store: base models, packs and adapters, each file with its digest."""
