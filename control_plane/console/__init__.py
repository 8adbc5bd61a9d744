"""The web console: server-rendered pages, and reports as self-contained HTML. Nothing is fetched from elsewhere."""
