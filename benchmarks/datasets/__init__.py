"""The dataset stage against the usual way of doing it and against its peers: rows per CPU second, recall, precision, memory."""
