"""The two passes over an upload: blocks of rows in worker processes, then what only the whole can say."""
