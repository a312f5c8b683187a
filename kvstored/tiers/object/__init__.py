"""Object storage: one bucket under many nodes."""
