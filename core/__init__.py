"""What every part may import: errors, the layout of keys, typed records, files that survive a crash, the catalogue of bases, telemetry."""
