"""The queue's policy under traces: a virtual clock over the real decisions, other policies beside it, and reports."""
