"""Pages for people: self-contained HTML, nothing fetched from elsewhere."""
