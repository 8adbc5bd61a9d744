"""Files as streams of rows: what a container holds, whatever it holds."""
