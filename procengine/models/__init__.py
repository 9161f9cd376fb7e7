"""Model implementations and the reading of their weights. Import the modules by name; this one loads nothing."""
