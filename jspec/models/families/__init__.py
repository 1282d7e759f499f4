"""Model families: one file each, with its config reader and its weight names."""
