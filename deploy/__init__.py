"""How the platform is installed."""
