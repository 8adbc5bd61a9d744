"""The queue: snapshot, scheduling cycle, reservations."""
