"""Reports as HTML: the body that pages of the console include, and the same as one self-contained file."""
