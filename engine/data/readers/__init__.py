"""Readers of files as streams of rows, whatever the content of the rows."""
