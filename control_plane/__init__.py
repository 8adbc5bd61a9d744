"""Who may, when, for how much: pure policy (jobs, quotas, pools, scheduler, billing), then entrances (service, api, cli)."""
