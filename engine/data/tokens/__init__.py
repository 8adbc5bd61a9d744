"""Examples as token ids with a loss mask, by the base model's own tokenizer and template."""
