"""What a validation found: problems, their causes, lengths, and the report made of them."""
