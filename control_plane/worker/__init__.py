"""The worker process: everything that the platform does beside requests and Dagster runs."""
