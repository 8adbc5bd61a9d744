"""Web pages: self-contained HTML that fetches nothing from elsewhere."""
