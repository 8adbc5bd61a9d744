"""Signatures over what the platform hands out: DSSE envelopes with an in-toto statement, which anyone verifies offline."""
