"""The data of the demo, which ships with the package: ``ft demo-data`` writes it, ``make demo`` trains on it."""
