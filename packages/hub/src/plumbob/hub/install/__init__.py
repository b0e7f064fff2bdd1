"""`vf-install`: from the names that a user types to pinned packages that uv installs."""
