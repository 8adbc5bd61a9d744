"""``ft admin operators`` and ``ft admin signing-keys``."""
