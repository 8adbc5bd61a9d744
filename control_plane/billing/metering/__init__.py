"""Metering: when workloads ran, and what that costs."""
