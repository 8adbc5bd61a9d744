"""GPU pools and their nodes, and how a cluster's Kueue enforces them."""
