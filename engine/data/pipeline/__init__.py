"""The two passes over an upload: blocks of rows in worker processes, then what depends on the whole file."""
