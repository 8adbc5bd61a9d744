"""Pages for operators of the platform: what `/v1/admin` and `ft admin` say and do, never rows of a tenant's data."""
