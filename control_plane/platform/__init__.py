"""What every noun builds on: settings, the protocols of outside systems, states and events of jobs, pages, secrets, files."""
