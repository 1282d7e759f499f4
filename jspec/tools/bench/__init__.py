"""`jspec bench`, whose commands `cli` declares."""
