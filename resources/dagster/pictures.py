"""Pictures in asset metadata: SVGs as Markdown images, which Dagster's UI shows inline."""

import base64

import dagster as dg


def picture(svg: str, *, title: str) -> dg.MarkdownMetadataValue:
    """Return `svg` as a Markdown image with a data URI."""
    encoded = base64.b64encode(svg.encode()).decode()
    return dg.MetadataValue.md(f"![{title}](data:image/svg+xml;base64,{encoded})")
