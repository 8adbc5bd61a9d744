"""What a tenant has used and what it cost."""
