"""What the Helm chart runs beside the platform's services."""
