"""Commands of operators that protect what the platform has: backups, the audit log's chain, keys."""
