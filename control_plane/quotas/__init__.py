"""GPU-hours of tenants: rules, holds, enforcement of caps."""
