"""Why a job waits and when it starts: what tenants and operators see of the queue."""
