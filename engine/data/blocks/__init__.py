"""What is known of a file's rows while it is validated: block by block in pass 1, then as columns of the whole file."""
