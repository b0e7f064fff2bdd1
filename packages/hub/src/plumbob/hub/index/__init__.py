"""Package indexes: locating them, reading them, and writing static ones."""
