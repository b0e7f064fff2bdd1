"""Results of an experiment as Markdown and SVG."""
