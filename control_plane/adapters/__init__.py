"""The registry of adapters: approvals, promotions, lineage, exports."""
