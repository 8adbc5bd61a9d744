"""Export and deletion of everything a tenant has stored."""
