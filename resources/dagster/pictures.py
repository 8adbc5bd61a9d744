"""Pictures in asset metadata: an SVG as a Markdown image that Dagster's UI shows in place."""

import base64

import dagster as dg


def picture(svg: str, *, title: str) -> dg.MarkdownMetadataValue:
    """`svg` as a data URI in Markdown."""
    encoded = base64.b64encode(svg.encode()).decode()
    return dg.MetadataValue.md(f"![{title}](data:image/svg+xml;base64,{encoded})")
