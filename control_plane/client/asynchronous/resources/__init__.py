"""What the API offers: one class a resource."""
