"""Running uv, and reading the pyproject.toml files that uv reads."""
